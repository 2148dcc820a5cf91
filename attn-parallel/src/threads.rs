//! Runs the same work on several threads of the current rayon pool, without allocating.

use attn_core::Result;

/// Calls `work` on this thread and on free threads of the pool, on at most `threads` in all. The calls share one list
/// of work, and a late call finds it empty. Returns the first error.
///
/// A tree of joins, because rayon keeps both halves of a join on the stack; a scope would box each of its tasks.
pub(crate) fn on_threads(threads: usize, work: &(impl Fn() -> Result<()> + Sync)) -> Result<()> {
    if threads <= 1 {
        return work(); // a pool is not even started
    }
    if pool_was_lost() {
        return std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads.min(available())).map(|_| scope.spawn(work)).collect();
            others
                .into_iter()
                .fold(work(), |all, one| all.and(one.join().unwrap_or_else(|e| std::panic::resume_unwind(e))))
        });
    }
    join(threads.min(rayon::current_num_threads()), work)
}

fn join(threads: usize, work: &(impl Fn() -> Result<()> + Sync)) -> Result<()> {
    if threads <= 1 {
        return work();
    }
    let half = threads / 2;
    let (a, b) = rayon::join(|| join(threads - half, work), || join(half, work));
    a.and(b)
}

/// The number of threads that a call from here can use: those of the current rayon pool, or one per core in a forked
/// process, which has no threads of its parent's pool.
///
/// ```
/// assert!(attn_parallel::threads() >= 1);
/// ```
pub fn threads() -> usize {
    if pool_was_lost() { available() } else { rayon::current_num_threads() }
}

fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Whether rayon's global pool belongs to the parent of this process: `fork` copies the pool's memory, not its threads,
/// and waiting for them never ends. Noticed if this crate used the pool before the fork.
#[cfg(unix)]
fn pool_was_lost() -> bool {
    use std::sync::atomic::{AtomicU32, Ordering};
    static OWNER: AtomicU32 = AtomicU32::new(0);
    if rayon::current_thread_index().is_some() {
        return false; // this is a worker, so its pool is alive
    }
    let this = std::process::id();
    OWNER.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed).is_err_and(|owner| owner != this)
}

#[cfg(not(unix))]
fn pool_was_lost() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use attn_core::AttnError;

    use super::*;

    #[test]
    fn as_many_calls_as_threads_and_the_first_error() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
        for threads in 1..=9 {
            let count = AtomicUsize::new(0);
            let work = || {
                count.fetch_add(1, Relaxed);
                Ok(())
            };
            pool.install(|| on_threads(threads, &work)).unwrap();
            assert_eq!(count.load(Relaxed), threads.min(5));
            let error = AttnError::Unsupported { what: "this" };
            assert_eq!(pool.install(|| on_threads(threads, &|| Err(error))), Err(error));
        }
    }
}
