//! Runs a plan on the threads of the current rayon pool.

use std::cell::RefCell;
use std::sync::Mutex;

use attn_core::{Attention, AttnError, AttnShape, Modifier, Outputs, Result, View};
use attn_simd::{KernelElement, Level, Plan, Work, Workspace};

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

/// As [`run_plan`], on no more than `threads` threads of the pool (and on one where `threads` is 0). The result is the same
/// bits for any number.
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
    let work = plan.work(q, k, v, outputs)?;
    let task = || with_scratch(&work, plan.workspace_lines());
    let others = useful_threads(plan, &work, threads) - 1;
    spread((0..others).map(|_| task), task)
}

/// As [`run_plan`], with scratch of the caller's, one for each thread that may work (none: an error). Scratch that is large
/// enough already is not allocated again: with one, or after a first call, nothing is allocated but what the pool takes to
/// wake its threads.
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
    let most = scratch.len();
    let Some((mine, others)) = scratch.split_first_mut() else {
        return Err(AttnError::TooShort { what: "workspaces", needed: 1, found: 0 });
    };
    let (work, lines) = (plan.work(q, k, v, outputs)?, plan.workspace_lines());
    let others = others.iter_mut().take(useful_threads(plan, &work, most) - 1);
    let work = &work;
    spread(others.map(|scratch| move || work.run(scratch.lines(lines))), || work.run(mine.lines(lines)))
}

/// How many threads of the current pool to use, at least 1. A pool is asked for (and started) only where it pays.
fn useful_threads<M: Modifier + Sync>(plan: &Plan<'_, '_, M>, work: &Work<'_>, most: usize) -> usize {
    let useful = most.min(work.blocks()).min(worth_waking(plan.shape()));
    if useful <= 1 { 1 } else { useful.min(rayon::current_num_threads()).max(1) }
}

/// Runs each task on a thread of its own, and `mine` here.
fn spread<F: FnOnce() -> Result<()> + Send>(
    others: impl ExactSizeIterator<Item = F> + Send,
    mine: impl FnOnce() -> Result<()> + Send,
) -> Result<()> {
    if others.len() == 0 {
        return mine();
    }
    let failed = Mutex::new(Ok(()));
    let run = |task: F| {
        if let Err(e) = task()
            && let Ok(mut failed) = failed.lock()
        {
            *failed = Err(e);
        }
    };
    let run = &run;
    if pool_was_lost() {
        std::thread::scope(|scope| {
            others.for_each(|task| {
                scope.spawn(move || run(task));
            });
            mine()
        })?;
    } else {
        rayon::scope(|scope| {
            // This thread works too: in a pool it is one of the workers.
            others.for_each(|task| scope.spawn(move |_| run(task)));
            mine()
        })?;
    }
    failed.into_inner().unwrap_or(Ok(()))
}

/// Whether the pool that would be used is the global one of another process: `fork` copies its memory, not its threads, and
/// whoever waits for them waits for ever. Known where this crate used the pool before the fork.
#[cfg(unix)]
fn pool_was_lost() -> bool {
    use std::sync::atomic::{AtomicU32, Ordering};
    static OWNER: AtomicU32 = AtomicU32::new(0);
    if rayon::current_thread_index().is_some() {
        return false; // a worker asks, so its pool is alive
    }
    let this = std::process::id();
    OWNER.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed).is_err_and(|owner| owner != this)
}

#[cfg(not(unix))]
fn pool_was_lost() -> bool {
    false
}

/// Work that pays for waking another thread, in FLOPs: some ten microseconds of it.
const FLOPS_PER_THREAD: f64 = 2e6;

/// How many threads a call of this size is worth, if nothing were masked. The result does not depend on it.
fn worth_waking(shape: &AttnShape) -> usize {
    let pairs = shape.rows() as f64 * shape.kv_len as f64;
    let flops = 2.0 * pairs * (shape.head_dim as f64 + shape.value_dim as f64);
    (flops / FLOPS_PER_THREAD) as usize + 1 // a cast from float saturates
}

/// Works with this thread's own scratch, or with fresh scratch where a closure of the caller has come back here.
fn with_scratch(work: &Work<'_>, lines: usize) -> Result<()> {
    thread_local! {
        static SCRATCH: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
    }
    SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
        Ok(mut scratch) => work.run(scratch.try_lines(lines)?),
        Err(_) => work.run(Workspace::new().try_lines(lines)?),
    })
}
