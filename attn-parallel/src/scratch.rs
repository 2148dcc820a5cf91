//! Scratch for the threads of a call: each thread's own, or the caller's workspaces.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use attn_core::Result;
use attn_simd::{Line, Workspace};

/// Scratch for whichever thread asks.
pub(crate) trait Scratch: Sync {
    /// Calls `f` with so many lines; does nothing if no scratch is left.
    fn with(&self, lines: usize, f: &mut dyn FnMut(&mut [Line]) -> Result<()>) -> Result<()>;
}

/// Each thread's own, kept for its next call. A closure of the caller that attends itself gets fresh scratch.
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
pub(crate) struct Given<'s>(Mutex<std::slice::IterMut<'s, Workspace>>);

impl<'s> Given<'s> {
    pub(crate) fn new(workspaces: &'s mut [Workspace]) -> Self {
        Self(Mutex::new(workspaces.iter_mut()))
    }
}

impl Scratch for Given<'_> {
    fn with(&self, lines: usize, f: &mut dyn FnMut(&mut [Line]) -> Result<()>) -> Result<()> {
        let next = self.0.lock().unwrap_or_else(PoisonError::into_inner).next();
        next.map_or(Ok(()), |workspace| f(workspace.try_lines(lines)?))
    }
}
