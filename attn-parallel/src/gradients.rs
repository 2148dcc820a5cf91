//! Gradients on the threads of the current rayon pool: each takes parts of the call until none is left.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Element, Result};
use attn_simd::backward::{Call, Inputs, Plan, Sweep};
use attn_simd::{KernelElement, Level, Line, Workspace};

use crate::scratch::{self, Round, Scratch};
use crate::threads::on_threads;
use crate::worth;

/// Computes the gradients at a level, on at most `threads` threads, unless `stop` is set.
pub(crate) fn run<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
    (level, threads, stop, mut scratch): (Level, usize, Option<&AtomicBool>, Scratch<'_>),
    attn: &Attention<'_, M>,
    inputs: Inputs<'_, T, G>,
    gradients: Gradients<'_, O>,
) -> Result<()> {
    let shape = AttnShape::new(inputs.q.sizes(), inputs.k.sizes(), inputs.v.sizes())?;
    let mut plan = Plan::new(attn, shape, level)?;
    if let Some(stop) = stop {
        plan = plan.stop_when(stop);
    }
    plan.check(&inputs, &gradients)?;
    let useful = |count: usize| worth::in_pool(threads.min(count).min(worth::computing(&shape)));
    scratch::with_sums(plan.sums_lines(), |sums| {
        plan.run_with(inputs, gradients, sums, |sweep| {
            let scratch = scratch.round();
            match sweep {
                Sweep::Heads(heads) => on_threads(useful(heads.count()), &|| {
                    scratch.with(heads.scratch_lines(), |lines| heads.work(lines))
                }),
                Sweep::Parts(call, dq, sums) => parts(useful(call.parts()), &scratch, call, (dq, sums)),
                Sweep::Bias(bias, to) => {
                    let to = Mutex::new(to);
                    each(useful(bias.pieces()), (&scratch, bias.scratch_lines()), 0..bias.pieces(), |piece, lines| {
                        let piece = bias.compute(piece, lines)?;
                        piece.write(&mut lock(&to));
                        Ok(())
                    })
                }
                Sweep::Sinks(sinks, to) => {
                    let bytes = shape.rows() as f64 * shape.value_dim as f64 * 2.0 * size_of::<G>() as f64;
                    let threads = worth::in_pool(threads.min(to.len()).min(worth::reading_bytes(bytes)));
                    each(threads, (&scratch, sinks.scratch_lines()), to.iter_mut().enumerate(), |(head, to), lines| {
                        *to = sinks.compute(head, lines)?;
                        Ok(())
                    })
                }
                Sweep::Write(writing) => on_threads(useful(usize::MAX), &|| {
                    writing.work();
                    Ok(())
                }),
            }
        })
    })
}

/// Computes all parts of a call, and adds up their sums.
fn parts(threads: usize, scratch: &Round<'_>, call: &Call<'_>, (dq, sums): (&mut [f32], &mut [Line])) -> Result<()> {
    let heads = Heads::new(call, sums);
    let left = Mutex::new((0..call.parts(), dq));
    on_threads(threads, &|| {
        scratch.with(call.scratch_lines(), |lines| {
            let mut own = Workspace::new();
            while !heads.failed.load(Ordering::Relaxed) {
                let (part, dq) = {
                    let mut left = lock(&left);
                    let Some(part) = left.0.next() else { break };
                    let (dq, rest) = std::mem::take(&mut left.1).split_at_mut(call.dq_len(part));
                    left.1 = rest;
                    (part, dq)
                };
                // If this part panics, the others end, too.
                let ended = Ended(&heads.failed);
                heads.part(call, part, dq, &mut own, lines)?;
                std::mem::forget(ended);
            }
            Ok(())
        })
    })
}

/// Hands each item to one of the threads, with `lines` of scratch.
fn each<I>(
    threads: usize,
    (scratch, lines): (&Round<'_>, usize),
    items: impl Iterator<Item = I> + Send,
    work: impl Fn(I, &mut [Line]) -> Result<()> + Sync,
) -> Result<()> {
    let left = Mutex::new(items);
    on_threads(threads, &|| {
        scratch.with(lines, |lines| {
            loop {
                let next = lock(&left).next();
                let Some(item) = next else { return Ok(()) };
                work(item, lines)?;
            }
        })
    })
}

/// The sums of `dk` and `dv` of all key/value heads.
struct Heads<'s> {
    all: Vec<Mutex<Head<'s>>>,
    /// Memory of sums that were early.
    spare: Mutex<Vec<Workspace>>,
    /// Whether a part has failed or panicked: no other need be begun.
    failed: AtomicBool,
}

/// The sums of a head.
struct Head<'s> {
    /// Its first part.
    first: usize,
    /// Which part is added next.
    next: usize,
    /// `None` while the first part is computed into them.
    sums: Option<&'s mut [Line]>,
    /// Sums of later parts that have ended before an earlier one.
    early: Vec<(usize, Workspace)>,
}

impl<'s> Heads<'s> {
    fn new(call: &Call<'_>, sums: &'s mut [Line]) -> Self {
        // Heads without keys have no lines.
        let mut sums = sums.chunks_mut(call.sum_lines().max(1));
        let head = |first| {
            let sums = Some(sums.next().unwrap_or_default());
            Mutex::new(Head { first, next: 0, sums, early: Vec::new() })
        };
        let all = (0..call.parts()).step_by(call.parts_of_head()).map(head).collect();
        Self { all, spare: Mutex::new(Vec::new()), failed: AtomicBool::new(false) }
    }

    /// Computes a part, and adds its sums if it is their turn; else they are left to the thread whose sums come before.
    /// No thread waits for another: a `score_mod` may attend itself, and then this thread takes parts of the outer call
    /// while one of them is unfinished on its own stack.
    ///
    /// `own` keeps the sums of a part. Parts of a head have about as many keys as each other and are begun in order, so
    /// that few sums are early.
    fn part(
        &self,
        call: &Call<'_>,
        part: usize,
        dq: &mut [f32],
        own: &mut Workspace,
        scratch: &mut [Line],
    ) -> Result<()> {
        let (head, place) = (&self.all[part / call.parts_of_head()], part % call.parts_of_head());
        if place == 0 {
            let Some(sums) = lock(head).sums.take() else { return Ok(()) };
            call.compute(part, dq, sums, scratch)?;
            let mut head = lock(head);
            (head.sums, head.next) = (Some(sums), 1);
            return head.add_early(call, &self.spare);
        }
        if own.bytes() == 0
            && let Some(spare) = lock(&self.spare).pop()
        {
            *own = spare;
        }
        call.compute(part, dq, own.try_lines(call.sum_lines())?, scratch)?;
        let mut head = lock(head);
        if head.next == place {
            head.add(call, own)?;
            head.add_early(call, &self.spare)
        } else {
            head.early.push((place, std::mem::take(own)));
            Ok(())
        }
    }
}

impl Head<'_> {
    /// Adds the sums of the next part.
    fn add(&mut self, call: &Call<'_>, sums: &mut Workspace) -> Result<()> {
        if let Some(all) = &mut self.sums {
            call.add(self.first + self.next, all, sums.try_lines(call.sum_lines())?)?;
        }
        self.next += 1;
        Ok(())
    }

    /// Adds sums that were early, as long as the next ones are there, and leaves their memory to other parts.
    fn add_early(&mut self, call: &Call<'_>, spare: &Mutex<Vec<Workspace>>) -> Result<()> {
        while let Some(n) = self.early.iter().position(|(place, _)| *place == self.next) {
            let (_, mut sums) = self.early.swap_remove(n);
            self.add(call, &mut sums)?;
            lock(spare).push(sums);
        }
        Ok(())
    }
}

/// Sets its flag when it is dropped.
struct Ended<'f>(&'f AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
