//! Runs a plan on the threads of the current rayon pool.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use attn_core::{Attention, AttnError, AttnShape, Modifier, Outputs, Result, View};
use attn_simd::{KernelElement, Level, Line, Plan, Work, Workspace};

use crate::split;
use crate::threads::on_threads;

/// Computes attention on the threads of the current rayon pool, at the best level of this machine (or the one that
/// `ATTN_LEVEL` names).
///
/// Arguments as for [`attn_simd::forward`].
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    forward_at(Level::detect(), attn, q, k, v, outputs)
}

/// As [`forward`], at a given level.
///
/// # Errors
/// As [`forward`].
pub fn forward_at<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    level: Level,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    let plan = Plan::new(attn, AttnShape::new(q.sizes(), k.sizes(), v.sizes())?, level)?;
    run_plan(&plan, q, k, v, outputs)
}

/// Runs a plan that was made before. The scratch of a thread is kept for its next call.
///
/// # Errors
/// As [`Plan::run`].
pub fn run_plan<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    plan: &Plan<'_, '_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    run_plan_on(usize::MAX, plan, q, k, v, outputs)
}

/// As [`run_plan`], on no more than `threads` threads of the pool (and on one where `threads` is 0). The result is the
/// same bits for any number.
///
/// ```
/// use attn_core::{Attention, AttnShape, Layout, View, ViewMut};
/// use attn_simd::{Level, Plan};
/// let sizes = [1, 2, 100, 64];
/// let attn = Attention::new();
/// let plan = Plan::new(&attn, AttnShape::new(sizes, sizes, sizes)?, Level::detect())?;
/// let (x, mut out) = (vec![0.5f32; 12_800], vec![0.0f32; 12_800]);
/// let x = View::new(&x, Layout::Bhsd, sizes)?;
/// attn_parallel::run_plan_on(1, &plan, x, x, x, ViewMut::new(&mut out, Layout::Bhsd, sizes)?)?; // this thread only
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// # Errors
/// As [`Plan::run`].
pub fn run_plan_on<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    threads: usize,
    plan: &Plan<'_, '_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    run_with(&Own, threads, plan, plan.work(q, k, v, outputs)?, size_of::<T>())
}

/// As [`run_plan`], with scratch of the caller's, one for each thread that may work (none: an error). Scratch that is
/// large enough already is not allocated again: with one, or after a first call, nothing is allocated but what the pool
/// takes to wake its threads.
///
/// # Errors
/// As [`Plan::run`]; [`AttnError::TooShort`] without scratch.
pub fn run_plan_in<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    scratch: &mut [Workspace],
    plan: &Plan<'_, '_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    AttnError::check_len("workspaces", 1, scratch.len())?;
    let threads = scratch.len();
    run_with(&Given(Mutex::new(scratch.iter_mut())), threads, plan, plan.work(q, k, v, outputs)?, size_of::<T>())
}

/// Runs what a plan has cut, on at most `threads` threads. A pool is asked for (and started) only where it pays.
fn run_with<M: Modifier + Sync>(
    scratch: &impl Scratch,
    threads: usize,
    plan: &Plan<'_, '_, M>,
    work: Work<'_>,
    element: usize,
) -> Result<()> {
    let lines = plan.workspace_lines();
    match work {
        Work::Blocks(blocks) => {
            let useful = there(threads.min(blocks.count()).min(worth_computing(plan.shape())));
            let blocks = blocks.shared_by(useful);
            on_threads(useful, &|| scratch.with(lines, &mut |lines| blocks.run(lines)))
        }
        Work::Split(call) => {
            let useful = threads.min(call.parts_at_most()).min(worth_reading(plan.shape(), element));
            split::run(call, useful, scratch)
        }
    }
}

/// Of so many threads that could work, those that are there: how long strips are follows from them. A pool is not
/// started to be asked where one is enough.
fn there(useful: usize) -> usize {
    if useful > 1 { useful.min(crate::threads::threads()) } else { useful }
}

/// Scratch for whichever thread asks.
pub(crate) trait Scratch: Sync {
    /// Calls `f` with so many lines; does nothing where no scratch is left.
    fn with(&self, lines: usize, f: &mut dyn FnMut(&mut [Line]) -> Result<()>) -> Result<()>;
}

/// Each thread's own, kept for its next call; fresh where a closure of the caller has come back here.
pub(crate) struct Own;

impl Scratch for Own {
    fn with(&self, lines: usize, f: &mut dyn FnMut(&mut [Line]) -> Result<()>) -> Result<()> {
        thread_local! {
            static SCRATCH: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
        }
        SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
            Ok(mut scratch) => f(scratch.try_lines(lines)?),
            Err(_) => f(Workspace::new().try_lines(lines)?),
        })
    }
}

/// The caller's, one for each thread.
struct Given<'s>(Mutex<std::slice::IterMut<'s, Workspace>>);

impl Scratch for Given<'_> {
    fn with(&self, lines: usize, f: &mut dyn FnMut(&mut [Line]) -> Result<()>) -> Result<()> {
        let next = self.0.lock().unwrap_or_else(PoisonError::into_inner).next();
        next.map_or(Ok(()), |workspace| f(workspace.try_lines(lines)?))
    }
}

/// Work that pays for waking another thread, in FLOPs: some ten microseconds of it.
const FLOPS_PER_THREAD: f64 = 2e6;

/// How many threads a call of this size is worth, if nothing were masked. The result does not depend on it.
fn worth_computing(shape: &AttnShape) -> usize {
    let pairs = shape.rows() as f64 * shape.kv_len as f64;
    let flops = 2.0 * pairs * (shape.head_dim as f64 + shape.value_dim as f64);
    (flops / FLOPS_PER_THREAD) as usize + 1 // a cast from float saturates
}

/// Keys and values that pay for waking another thread, in bytes: some ten microseconds of reading.
pub(crate) const BYTES_PER_THREAD: f64 = 256e3;

/// How many threads a call is worth that does little more than read keys and values, if nothing were masked.
fn worth_reading(shape: &AttnShape, element: usize) -> usize {
    let rows = shape.batch as f64 * shape.kv_heads as f64 * shape.kv_len as f64;
    let bytes = rows * (shape.head_dim as f64 + shape.value_dim as f64) * element as f64;
    (bytes / BYTES_PER_THREAD) as usize + 1
}

#[cfg(test)]
mod tests {
    use super::there;

    #[test]
    fn no_more_threads_are_counted_on_than_the_pool_has() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(pool.install(|| [usize::MAX, 4, 3, 2, 1, 0].map(there)), [3, 3, 3, 2, 1, 0]);
    }
}
