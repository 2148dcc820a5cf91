//! The threads of short calls: their number, and a pool to which the thread that imported the package belongs.
//!
//! A thread outside of rayon's pool hands its call over and sleeps: for a call on two threads, two threads of the pool
//! wake up, and then the caller. A member of a pool computes at once, and takes back the work that no other thread has
//! begun. So it loses nothing if the others wake late, as they do while the threads of torch's own pool spin on their
//! cores. The thread that imported the package makes most calls, so it becomes a member of a pool of its own. Other
//! threads use rayon's global pool.

use std::cell::Cell;
use std::sync::OnceLock;
use std::thread::{self, ThreadId};

use attn_core::{AttnShape, Result};

/// Operations that pay for another thread: 100 to 200 µs. The crates take a fifth of that, which is right if
/// threads wake at once. Here they share the cores with those of torch's or NumPy's pool, which spin for
/// milliseconds after each product of matrices.
const OPERATIONS: f64 = 1e7;

/// Bytes of keys and values that do, where a call does little more than to read them.
const BYTES: f64 = 4e6;

/// How much a call has to do, as if nothing were masked.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    /// Multiplications and additions.
    pub(crate) operations: f64,
    /// Bytes of keys and values.
    pub(crate) bytes: f64,
}

impl Work {
    /// That of a forward call on numbers of so many bytes.
    pub(crate) fn of(shape: &AttnShape, bytes: usize) -> Self {
        let dims = shape.head_dim as f64 + shape.value_dim as f64;
        let keys = shape.batch as f64 * shape.kv_heads as f64 * shape.kv_len as f64;
        Self { operations: 2.0 * shape.rows() as f64 * shape.kv_len as f64 * dims, bytes: keys * dims * bytes as f64 }
    }

    /// The same with more operations.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { operations: self.operations * factor, ..self }
    }

    /// How many threads it is worth.
    pub(crate) fn threads(&self) -> usize {
        ((self.operations / OPERATIONS).max(self.bytes / BYTES) as usize).max(1) // a cast from float saturates
    }
}

/// The thread that imported the package.
static HOME: OnceLock<ThreadId> = OnceLock::new();

thread_local! {
    /// The process in which this thread has become a member of a pool: a forked one lacks the other members.
    static MEMBER_IN: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Remembers the thread that imports the package.
pub(crate) fn imported() {
    HOME.get_or_init(|| thread::current().id());
}

/// Runs a call on this thread, with the help of others if it pays.
pub(crate) fn run(work: Work, call: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    if work.threads() == 1 {
        return call();
    }
    match MEMBER_IN.get() {
        Some(process) if process != std::process::id() => {
            // A thread that is no member gets threads of this process.
            return thread::scope(|scope| {
                scope.spawn(call).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
        }
        None if HOME.get() == Some(&thread::current().id()) => {
            MEMBER_IN.set(Some(std::process::id()));
            // If threads are not to be had, the call goes to the global pool, which says so or has some.
            if let Ok(pool) = rayon::ThreadPoolBuilder::new().use_current_thread().build() {
                std::mem::forget(pool); // it would end its threads
            }
        }
        _ => {}
    }
    call()
}
