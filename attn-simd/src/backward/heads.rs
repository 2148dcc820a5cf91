//! Calls of many heads: one thread computes a key/value head and writes its gradients at once, so that no sums of other
//! heads wait in memory.
//!
//! It is the way of calls whose heads have one part each ([`layout`](super::layout)). Sums of `dk` and `dv` of one head
//! stay in the thread's scratch, and rows of `dq` are written block by block. So a call of short sequences, whose sums
//! are as large as its inputs, writes and reads none of them outside of the caches.

use core::fmt;

use attn_core::{AttnError, Element, Result};

use super::buffers::{Buffers, Sums, of_keys};
use super::job::Job;
use super::{output, sweep};
use crate::queue::Rows;
use crate::queue::heads::HeadQueue;
use crate::workspace::Line;

/// The key/value heads of a call that are still to be computed.
pub struct Heads<'h> {
    pub(super) work: &'h (dyn Fn(&mut [Line]) -> Result<()> + Sync),
    pub(super) count: usize,
    pub(super) lines: usize,
}

impl fmt::Debug for Heads<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heads").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Heads<'_> {
    /// Heads in all.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Lines of scratch of one thread: its own, and the sums of `dk` and `dv` of a head.
    pub fn scratch_lines(&self) -> usize {
        self.lines
    }

    /// Computes heads and writes their gradients until none is left, in scratch that may hold anything.
    ///
    /// # Errors
    /// [`AttnError::TooShort`], [`AttnError::Stopped`] as [`Plan::stop_when`](super::Plan::stop_when) says.
    pub fn work(&self, scratch: &mut [Line]) -> Result<()> {
        AttnError::check_len("workspace lines", self.lines, scratch.len())?;
        (self.work)(scratch)
    }
}

/// Computes heads until none is left.
pub(super) fn work<O: Element>(job: &Job<'_>, queue: &HeadQueue<'_, O>, scratch: &mut [Line]) -> Result<()> {
    let layout = &job.layout;
    let (sums, scratch) = scratch.split_at_mut(layout.sum_lines());
    let [dk, dv] = of_keys(sums, layout);
    let mut buffers = Buffers::new(scratch, &layout.scratch);
    while let Some(mut head) = queue.claim() {
        let part = head.number();
        let mut write = |rows: Rows, from: &[f32]| {
            output::write(job.level, &mut head.queries(rows), from, layout.columns[0], job.factor);
        };
        sweep::part(job, part, &mut Sums { dq: &mut write, dk, dv }, &mut buffers);
        job.forward.unless_stopped()?;
        output::write(job.level, &mut head.keys(0), dk, layout.columns[0], job.factor);
        output::write(job.level, &mut head.keys(1), dv, layout.columns[1], 1.0);
    }
    Ok(())
}
