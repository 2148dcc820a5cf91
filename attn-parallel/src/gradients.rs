//! Gradients on the threads of the current rayon pool: each takes parts of the call until none is left.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Element, Result};
use attn_simd::backward::{Call, Inputs, Plan, Sweep};
use attn_simd::{KernelElement, Level, Line, Workspace};

use crate::scratch::Scratch;
use crate::threads::on_threads;
use crate::worth;

/// Computes the gradients at a level, on at most `threads` threads.
pub(crate) fn run<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
    (level, threads, mut scratch): (Level, usize, Scratch<'_>),
    attn: &Attention<'_, M>,
    inputs: Inputs<'_, T, G>,
    gradients: Gradients<'_, O>,
) -> Result<()> {
    let shape = AttnShape::new(inputs.q.sizes(), inputs.k.sizes(), inputs.v.sizes())?;
    let plan = Plan::new(attn, shape, level)?;
    plan.check(&inputs, &gradients)?;
    let mut sums = Workspace::new();
    let sums = sums.try_lines(plan.sums_lines())?;
    let useful = |count: usize| worth::in_pool(threads.min(count).min(worth::computing(&shape)));
    plan.run_with(inputs, gradients, sums, |sweep| {
        let scratch = scratch.round();
        match sweep {
            Sweep::Parts(call, dq, sums) => {
                let heads = Heads::new(call, sums);
                let left = Mutex::new((0..call.parts(), dq));
                on_threads(useful(call.parts()), &|| {
                    scratch.with(call.scratch_lines(), |lines| {
                        let (stopping, mut own) = (Stopping(&heads), Workspace::new());
                        loop {
                            let (part, dq) = {
                                let mut left = lock(&left);
                                let Some(part) = left.0.next() else { break };
                                let (dq, rest) = std::mem::take(&mut left.1).split_at_mut(call.dq_len(part));
                                left.1 = rest;
                                (part, dq)
                            };
                            heads.part(call, part, dq, &mut own, lines)?;
                        }
                        std::mem::forget(stopping);
                        Ok(())
                    })
                })
            }
            Sweep::Bias(bias, to) => {
                let (left, to) = (Mutex::new(0..bias.pieces()), Mutex::new(to));
                on_threads(useful(bias.pieces()), &|| {
                    scratch.with(bias.scratch_lines(), |lines| {
                        loop {
                            let next = lock(&left).next();
                            let Some(piece) = next else { return Ok(()) };
                            let piece = bias.compute(piece, lines)?;
                            piece.write(&mut lock(&to));
                        }
                    })
                })
            }
            Sweep::Write(writing) => on_threads(useful(usize::MAX), &|| {
                writing.work();
                Ok(())
            }),
        }
    })
}

/// The sums of `dk` and `dv` of all key/value heads.
struct Heads<'s> {
    all: Vec<(Mutex<Head<'s>>, Condvar)>,
    /// Whether a thread has stopped before its part was added, so that nobody may wait for it.
    stopped: AtomicBool,
}

/// The sums of a head.
struct Head<'s> {
    /// Which part is added next.
    next: usize,
    sums: &'s mut [Line],
}

impl<'s> Heads<'s> {
    fn new(call: &Call<'_>, sums: &'s mut [Line]) -> Self {
        let heads = sums.chunks_mut(call.sum_lines().max(1)).map(|sums| Head { next: 0, sums });
        let mut all: Vec<_> = heads.map(|head| (Mutex::new(head), Condvar::new())).collect();
        // Heads without keys have no lines.
        all.resize_with(call.parts() / call.parts_of_head(), || {
            (Mutex::new(Head { next: 0, sums: &mut [] }), Condvar::new())
        });
        Self { all, stopped: AtomicBool::new(false) }
    }

    /// Computes a part and adds its sums when it is its turn. Parts of a head take about as long as each other and are
    /// begun in order, so that nobody waits for long. `own` keeps the sums of a part.
    fn part(
        &self,
        call: &Call<'_>,
        part: usize,
        dq: &mut [f32],
        own: &mut Workspace,
        scratch: &mut [Line],
    ) -> Result<()> {
        let ((head, turn), place) = (&self.all[part / call.parts_of_head()], part % call.parts_of_head());
        if place == 0 {
            let mut head = lock(head);
            call.compute(part, dq, head.sums, scratch)?;
            head.next = 1;
        } else {
            let own = own.try_lines(call.sum_lines())?;
            call.compute(part, dq, own, scratch)?;
            let mut head = lock(head);
            while head.next != place {
                if self.stopped.load(Ordering::Relaxed) {
                    return Ok(()); // the other thread has the error, or its panic goes on
                }
                head = turn.wait(head).unwrap_or_else(PoisonError::into_inner);
            }
            call.add(head.sums, own)?;
            head.next += 1;
        }
        turn.notify_all();
        Ok(())
    }
}

/// Wakes all threads that wait for a turn if its own ends early, by an error or a panic.
struct Stopping<'h, 's>(&'h Heads<'s>);

impl Drop for Stopping<'_, '_> {
    fn drop(&mut self) {
        self.0.stopped.store(true, Ordering::Relaxed);
        for (head, turn) in &self.0.all {
            // Whoever has looked at `stopped` and not yet begun to wait holds the lock.
            drop(lock(head));
            turn.notify_all();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
