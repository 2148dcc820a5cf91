//! Few queries over many keys: the pieces of a decode call on the threads of the current rayon pool.
//!
//! Each thread takes pieces one by one and writes a state for each. The caller's thread merges the states in a fixed
//! tree and writes the output. The number of pieces, and the thread that computes a piece, change no bit. The caller's
//! thread keeps the memory of the states for its next call, so that a step of decoding allocates nothing. A
//! call with many queries runs in rounds, so that the states of a long prompt do not all exist at once.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use attn_core::{AttnError, Result};
use attn_simd::decode::{DecodeCall, Piece, Pieces};

use crate::scratch::Scratch;
use crate::threads::on_threads;

/// Floats in the states of a round: some thousands of rows, which keep many threads busy until the round ends.
const ROUND_FLOATS: usize = 1 << 21;

/// Runs a decode call on at most `threads` threads.
pub(crate) fn run(mut call: DecodeCall<'_>, threads: usize, mut scratch: Scratch<'_>) -> Result<()> {
    let lines = call.workspace_lines();
    if threads <= 1 {
        return scratch.round().with(lines, |lines| call.run(lines));
    }
    let mut next = Some(call.first_round(threads, ROUND_FLOATS));
    while let Some(round) = next {
        with_states(call.states_len(round), |states| {
            let queue = Mutex::new(Queue { pieces: call.pieces(round), states: &mut *states });
            let scratch = scratch.round();
            on_threads(threads, &|| {
                scratch.with(lines, |lines| {
                    while let Some((piece, state)) = next_piece(&queue) {
                        call.compute(&piece, state, lines)?;
                    }
                    Ok(())
                })
            })?;
            call.finish(round, states)
        })?;
        next = call.next_round(round);
    }
    Ok(())
}

/// Pieces that no thread has taken, and memory for their states.
struct Queue<'q, 's, 'w> {
    pieces: Pieces<'q, 'w>,
    states: &'s mut [f32],
}

fn next_piece<'s>(queue: &Mutex<Queue<'_, 's, '_>>) -> Option<(Piece, &'s mut [f32])> {
    let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    let piece = queue.pieces.next()?;
    let (state, later) = std::mem::take(&mut queue.states).split_at_mut_checked(piece.state_len())?;
    queue.states = later;
    Some((piece, state))
}

/// Calls `f` with this thread's memory for states. A closure of the caller that attends itself gets fresh memory.
fn with_states(len: usize, f: impl FnOnce(&mut [f32]) -> Result<()>) -> Result<()> {
    thread_local! {
        static STATES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    STATES.with(|states| match states.try_borrow_mut() {
        Ok(mut states) => f(grown(&mut states, len)?),
        Err(_) => f(grown(&mut Vec::new(), len)?),
    })
}

/// So many floats, or an error if they cannot be allocated.
fn grown(states: &mut Vec<f32>, len: usize) -> Result<&mut [f32]> {
    let more = len.saturating_sub(states.len());
    if states.try_reserve_exact(more).is_err() {
        return Err(AttnError::Memory { what: "workspace", bytes: len.saturating_mul(size_of::<f32>()) });
    }
    states.resize(len.max(states.len()), 0.0);
    Ok(&mut states[..len])
}
