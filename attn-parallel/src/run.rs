//! Runs a plan on the threads of the current rayon pool.

use std::cell::RefCell;

use attn_core::{Attention, AttnShape, Modifier, Outputs, Result, View};
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
    let work = plan.work(q, k, v, outputs)?;
    let threads = rayon::current_num_threads().min(work.blocks()).min(worth_waking(plan.shape()));
    if threads <= 1 {
        return with_scratch(&work, plan.workspace_lines());
    }
    let results = std::sync::Mutex::new(Ok(()));
    rayon::scope(|scope| {
        // This thread works too: in a pool it is one of the workers.
        for _ in 1..threads {
            scope.spawn(|_| {
                if let Err(e) = with_scratch(&work, plan.workspace_lines())
                    && let Ok(mut results) = results.lock()
                {
                    *results = Err(e);
                }
            });
        }
        with_scratch(&work, plan.workspace_lines())
    })?;
    results.into_inner().unwrap_or(Ok(()))
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
        Ok(mut scratch) => work.run(scratch.lines(lines)),
        Err(_) => work.run(Workspace::new().lines(lines)),
    })
}
