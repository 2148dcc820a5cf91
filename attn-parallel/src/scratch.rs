//! Scratch for the threads of a call: each thread's own, or the caller's workspaces.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};
use std::thread::LocalKey;

use attn_core::Result;
use attn_simd::{Line, Workspace};

/// Whose scratch a call uses.
pub(crate) enum Scratch<'s> {
    /// Each thread's own, kept for its next call.
    Own,
    /// The caller's, one workspace for each thread.
    Given(&'s mut [Workspace]),
}

impl Scratch<'_> {
    /// The scratch for one round of threads. Each round may use all workspaces again.
    pub(crate) fn round(&mut self) -> Round<'_> {
        match self {
            Self::Own => Round::Own,
            Self::Given(workspaces) => Round::Given(Mutex::new(workspaces.iter_mut())),
        }
    }
}

/// Scratch that the threads of one round share.
pub(crate) enum Round<'s> {
    Own,
    Given(Mutex<std::slice::IterMut<'s, Workspace>>),
}

impl Round<'_> {
    /// Calls `f` with so many lines, once per thread. Does nothing if every workspace is taken.
    pub(crate) fn with(&self, lines: usize, f: impl FnOnce(&mut [Line]) -> Result<()>) -> Result<()> {
        match self {
            Self::Own => with_own(lines, f),
            Self::Given(left) => {
                let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
                next.map_or(Ok(()), |workspace| f(workspace.try_lines(lines)?))
            }
        }
    }
}

/// Most bytes that a thread keeps for its next call. A larger call computes so long that new memory costs it next to
/// nothing.
const KEPT: usize = 32 << 20;

/// Calls `f` with this thread's scratch.
fn with_own(lines: usize, f: impl FnOnce(&mut [Line]) -> Result<()>) -> Result<()> {
    thread_local! {
        static SCRATCH: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
    }
    with_kept(&SCRATCH, lines, f)
}

/// Calls `f` with so many lines for sums that all threads of a call share.
pub(crate) fn with_sums(lines: usize, f: impl FnOnce(&mut [Line]) -> Result<()>) -> Result<()> {
    thread_local! {
        static SUMS: RefCell<Workspace> = const { RefCell::new(Workspace::new()) };
    }
    with_kept(&SUMS, lines, f)
}

/// Calls `f` with scratch of this thread that is kept for its next call. A closure of the caller that attends itself
/// gets fresh scratch, and so does a call that needs very much.
fn with_kept(
    kept: &'static LocalKey<RefCell<Workspace>>,
    lines: usize,
    f: impl FnOnce(&mut [Line]) -> Result<()>,
) -> Result<()> {
    if lines > KEPT / size_of::<Line>() {
        return f(Workspace::new().try_lines(lines)?);
    }
    kept.with(|scratch| match scratch.try_borrow_mut() {
        Ok(mut scratch) => f(scratch.try_lines(lines)?),
        Err(_) => f(Workspace::new().try_lines(lines)?),
    })
}
