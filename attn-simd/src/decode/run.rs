//! One decode call: any threads compute its pieces in any order, then one thread merges and writes them.
//!
//! The rows of a group of heads share a pass over keys and values. The pass is cut into chunks, and a piece takes some
//! of them. Their number depends on the number of threads and changes no bit: the state of a piece is a node of the
//! fixed [tree](super::tree). [`rounds`](super::rounds) says which queries are computed together,
//! [`pieces`](super::pieces) lists their pieces.
//!
//! The keys that all sequences share come first: the rows of all sequences pass over them together. Then each row's
//! state is merged with its state over its own sequence.

use core::fmt;
use core::sync::atomic::AtomicBool;

use attn_core::kv_cache::Queries;
use attn_core::{AttnError, Result};

use super::call::{Call, MAX_ROWS, PREFIX_FLOATS, RowAt, Sizes, state_lines};
use super::kernel::{Buffers, compute};
use super::output::Write;
use super::pieces::{Piece, Pieces};
use super::rounds::Round;
use super::tree::Fold;
use crate::dtype::RowTarget;
use crate::scoring::finish_row;
use crate::workspace::{Cutter, Line};

/// One decode call, ready to be computed: [`run`](Self::run) on one thread, or in [pieces](Self::pieces) on several.
///
/// ```
/// use attn_core::{Attention, AttnShape, Layout, View, ViewMut};
/// use attn_simd::{Level, Line, Plan, Work};
/// let shape = AttnShape::new([1, 8, 1, 64], [1, 2, 3000, 64], [1, 2, 3000, 64])?;
/// let (q, kv) = (vec![0.5f32; 8 * 64], vec![0.25f32; 2 * 3000 * 64]);
/// let (q, kv) = (View::new(&q, Layout::Bhsd, [1, 8, 1, 64])?, View::new(&kv, Layout::Bhsd, [1, 2, 3000, 64])?);
/// let (attn, mut out) = (Attention::new(), vec![0.0f32; 8 * 64]);
/// let plan = Plan::new(&attn, shape, Level::detect())?;
/// let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output())?;
/// let Work::Split(mut call) = plan.work(q, kv, kv, to)? else { unreachable!("one query is decoded") };
///
/// // Pieces for four threads; which thread takes which, and when, changes no bit.
/// let round = call.cut(4);
/// let (mut states, mut lines) = (vec![0.0; call.states_len(round)], vec![Line::ZERO; call.workspace_lines()]);
/// let mut rest = states.as_mut_slice();
/// for piece in call.pieces(round) {
///     let (state, later) = rest.split_at_mut(piece.state_len());
///     call.compute(&piece, state, &mut lines)?;
///     rest = later;
/// }
/// call.finish(round, &mut states)?;
/// assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub struct DecodeCall<'w> {
    call: Call<'w>,
    target: RowTarget<'w>,
    lse: Option<&'w mut [f32]>,
}

impl fmt::Debug for DecodeCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = &self.call;
        f.debug_struct("DecodeCall")
            .field("level", &call.scoring.level)
            .field("sequences", &call.sequences.count())
            .finish_non_exhaustive()
    }
}

impl<'w> DecodeCall<'w> {
    /// A call that writes the output and, if wanted, one lse per row.
    pub(super) fn new(call: Call<'w>, target: RowTarget<'w>, lse: Option<&'w mut [f32]>) -> Self {
        Self { call, target, lse }
    }

    /// Ends the call soon after the flag is set, which must then stay set: [`compute`](Self::compute) and
    /// [`run`](Self::run) return [`AttnError::Stopped`], and write no incomplete row.
    #[must_use]
    pub fn stop_when(mut self, flag: &'w AtomicBool) -> Self {
        self.call.scoring.stop = Some(flag);
        self
    }

    /// Lines of scratch of one thread, however the call is cut.
    pub fn workspace_lines(&self) -> usize {
        self.call.lines()
    }

    /// Row groups times chunks of keys: the largest number of pieces.
    pub fn pieces_at_most(&self) -> usize {
        self.call.work()
    }

    /// All queries, in pieces for a number of threads: several for each, so that none waits long for the last.
    pub fn cut(&self, threads: usize) -> Round {
        Round::all(&self.call, threads)
    }

    /// As [`cut`](Self::cut), but takes only the first queries: as many as leave states of about `floats`, and at least
    /// one. A call with many queries is computed in rounds. Each is [finished](Self::finish) before the
    /// [next](Self::next_round) begins.
    pub fn first_round(&self, threads: usize, floats: usize) -> Round {
        Round::first_round(&self.call, threads, floats)
    }

    /// The queries after those of a round; `None` if there are no more.
    pub fn next_round(&self, round: Round) -> Option<Round> {
        round.next_round(&self.call)
    }

    /// The pieces, in a fixed order.
    pub fn pieces(&self, round: Round) -> Pieces<'_, 'w> {
        Pieces::new(&self.call, round)
    }

    /// Floats of the states of all pieces.
    pub fn states_len(&self, round: Round) -> usize {
        self.pieces(round).map(|piece| piece.state_len()).sum()
    }

    /// Computes one piece. Threads may compute pieces at once, each with scratch of its own.
    ///
    /// # Errors
    /// [`AttnError`] if the piece belongs to another call, the state has another length or the scratch is too short;
    /// then nothing was written. [`AttnError::Stopped`] as [`stop_when`](Self::stop_when) says; then the state must not
    /// be used.
    pub fn compute(&self, piece: &Piece, state: &mut [f32], workspace: &mut [Line]) -> Result<()> {
        if !self.call.has(piece.group()) {
            return Err(AttnError::Unsupported { what: "a piece that belongs to another call" });
        }
        AttnError::check_size("state of a piece", piece.state_len(), state.len())?;
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
        compute(&self.call, piece, state, &mut Buffers::new(workspace, &self.call.sizes));
        self.call.scoring.unless_stopped()
    }

    /// Merges the states of all pieces, in the order of the pieces, and writes the output: of all queries, or of those
    /// of one [round](Self::first_round).
    ///
    /// # Errors
    /// [`AttnError::Size`] if the states have another length; then nothing was written.
    pub fn finish(&mut self, round: Round, states: &mut [f32]) -> Result<()> {
        AttnError::check_size("states of all pieces", self.states_len(round), states.len())?;
        let Self { call, target, lse } = self;
        let mut pieces = Pieces::new(call, round).peekable();
        // The states of all pieces of shared keys come first. Their merged states are moved to the front, row by row.
        let (mut shared, mut from) = (0, 0);
        while let Some(piece) = pieces.next_if(|piece| piece.group().shared) {
            let count = count_of(&piece, &mut pieces);
            let (len, end) = (piece.state_len(), from + count * piece.state_len());
            fold(call, &piece, count, &mut states[from..end]);
            states.copy_within(from..from + len, shared);
            (shared, from) = (shared + len, end);
        }
        let (before, mut rest) = states.split_at_mut(from);
        while let Some(piece) = pieces.next() {
            let count = count_of(&piece, &mut pieces);
            let (states, later) = rest.split_at_mut(count * piece.state_len());
            rest = later;
            fold(call, &piece, count, states);
            let state = with_prefix(call, &piece, round, before, &mut states[..piece.state_len()]);
            write_group(call, target, lse.as_deref_mut(), &piece, state);
        }
        if round.is_last() {
            self.clear_padding();
        }
        Ok(())
    }

    /// Computes everything on this thread.
    ///
    /// # Errors
    /// [`AttnError::TooShort`] if the scratch is; then nothing was written. [`AttnError::Stopped`] as
    /// [`stop_when`](Self::stop_when) says.
    pub fn run(mut self, workspace: &mut [Line]) -> Result<()> {
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
        if self.call.sizes == Sizes::default() {
            self.clear_padding(); // no sequence has a query, but rows may have been given
            return Ok(());
        }
        let (state, lines) = workspace.split_at_mut(state_lines(self.call.sequences.shape.value_dim));
        let state = Cutter::new(state).floats(self.call.state_len(MAX_ROWS));
        let (before, lines) = lines.split_at_mut(self.call.prefix_lines());
        let prefix_floats = size_of_val(before) / size_of::<f32>();
        let before = Cutter::new(before).floats(prefix_floats);
        let mut buffers = Buffers::new(lines, &self.call.sizes);
        let floats = if self.call.prefix.is_some() { PREFIX_FLOATS } else { usize::MAX };
        let mut round = Some(self.first_round(1, floats));
        while let Some(now) = round {
            let (call, mut shared) = (&self.call, 0);
            for piece in Pieces::new(call, now) {
                if piece.group().shared {
                    let end = shared + piece.state_len();
                    compute(call, &piece, &mut before[shared..end], &mut buffers);
                    shared = end;
                    continue;
                }
                let state = &mut state[..piece.state_len()];
                compute(call, &piece, state, &mut buffers);
                call.scoring.unless_stopped()?;
                let state = with_prefix(call, &piece, now, before, state);
                write_group(call, &mut self.target, self.lse.as_deref_mut(), &piece, state);
            }
            round = self.next_round(now);
        }
        self.clear_padding();
        Ok(())
    }

    /// Writes 0 to the rows after a sequence's last query, and −∞ to their lse.
    fn clear_padding(&mut self) {
        let sequences = self.call.sequences;
        if sequences.queries == Queries::All {
            return;
        }
        let [_, heads, q_len, _] = self.target.sizes();
        for sequence in 0..sequences.count() {
            let [batch, first] = sequences.queries.start(sequence);
            for query in sequences.queries.padding(sequence, sequences.count(), sequences.shape.q_len) {
                for head in 0..heads {
                    self.call.scoring.level.run(Write {
                        target: &mut self.target,
                        at: [batch, head, first + query],
                        values: None,
                    });
                    if let Some(lse) = self.lse.as_deref_mut() {
                        lse[(batch * heads + head) * q_len + first + query] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// The number of pieces of the row group of `piece`. They follow each other, and `piece` is the first.
fn count_of<'s, 'w: 's>(piece: &Piece, pieces: &mut core::iter::Peekable<Pieces<'s, 'w>>) -> usize {
    let mut count = 1;
    while pieces.next_if(|next| next.group() == piece.group()).is_some() {
        count += 1;
    }
    count
}

/// Merges the pieces of a row group into the first.
fn fold(call: &Call<'_>, piece: &Piece, count: usize, states: &mut [f32]) {
    let ((level, number), mut fold) =
        (piece.node(), Fold::new(states, piece.state_len(), call.sequences.shape.value_dim));
    for n in 0..count {
        fold.take(n);
        fold.push(level, number + n);
    }
    fold.finish();
}

/// Divides the rows of a row group by their sums, and writes them.
fn write_group(call: &Call<'_>, target: &mut RowTarget<'_>, mut lse: Option<&mut [f32]>, piece: &Piece, state: &[f32]) {
    let [_, heads, q_len, _] = target.sizes();
    let (scoring, mut places) = (&call.scoring, [RowAt::default(); MAX_ROWS]);
    let rows = call.rows_of(piece.group(), &mut places);
    let kept = scoring.dropout.factor();
    for (n, (row, &at)) in state.chunks_exact(call.state_len(1)).zip(rows.at).enumerate() {
        if n > 0 && rows.at[n - 1] == at {
            continue; // the same row again
        }
        let RowAt { head, place: [batch, query], .. } = at;
        let sink = scoring.sinks.map(|sinks| f64::from(sinks[head]));
        let (factor, row_lse) = finish_row(f64::from(row[0]), f64::from(row[1]), sink, kept);
        let values = (row[1] != 0.0).then_some((&row[2..], factor));
        scoring.level.run(Write { target: &mut *target, at: [batch, head, query], values });
        if let Some(lse) = lse.as_deref_mut() {
            lse[(batch * heads + head) * q_len + query] = row_lse;
        }
    }
}

/// Merges the state of a row group with the states of its rows over shared keys, which `before` holds for the whole
/// round.
fn with_prefix<'s>(
    call: &Call<'_>,
    piece: &Piece,
    round: Round,
    before: &'s mut [f32],
    state: &'s mut [f32],
) -> &'s [f32] {
    if call.prefix.is_none() {
        return state;
    }
    let first = piece.group().kv_head * call.heads()[1] * round.queries() + piece.before();
    let before = &mut before[call.state_len(first)..][..state.len()];
    let merged = attn_core::state::merge_states(before, state, call.sequences.shape.value_dim);
    debug_assert!(merged.is_ok(), "as many whole rows of both");
    before
}
