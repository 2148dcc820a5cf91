//! A running call of the prefill and amx kernels: blocks of queries that threads take from a queue.

use core::fmt;
use core::sync::atomic::AtomicBool;

use attn_core::{AttnError, Result};

use super::job::Job;
use super::layout::{Scratch, Tiles};
use super::sweep;
use crate::amx;
use crate::amx::layout::Layout;
use crate::caches::Caches;
use crate::level::Level;
use crate::pack;
use crate::queue::{Queue, Target};
use crate::workspace::Line;

/// Fewest strips for each thread, so that none waits long for the last one.
const STRIPS_PER_THREAD: usize = 4;

/// The same where the blocks of a strip share no work, only reads from beyond the second cache: sharing gains less than
/// waiting could lose.
const FAR_STRIPS_PER_THREAD: usize = 24;

/// One call, cut into blocks. Any number of threads may [`run`](Self::run) it at once: one of them computes each block,
/// and no bit depends on which.
pub struct Blocks<'w> {
    level: Level,
    job: Job<'w>,
    queue: Queue<'w>,
    /// If the amx kernel runs.
    layout: Option<Layout>,
    scratch: Scratch,
    /// Most blocks of a strip.
    strip: usize,
    /// Whether a head's keys and values are read from beyond the caches.
    far: bool,
    lines: Lines,
}

/// Lines of scratch of one thread.
pub(crate) struct Lines {
    /// Of the prefill kernel.
    pub(crate) prefill: usize,
    /// In all.
    pub(crate) all: usize,
}

impl fmt::Debug for Blocks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("level", &self.level).field("count", &self.count()).finish_non_exhaustive()
    }
}

impl<'w> Blocks<'w> {
    /// A call with outputs that were checked against its shape.
    pub(crate) fn new(
        level: Level,
        job: Job<'w>,
        (out, lse): (Target<'w>, Option<&'w mut [f32]>),
        layout: Option<Layout>,
        caches: Caches,
        lines: Lines,
    ) -> Self {
        let (tiles, shape) = (job.tiles, job.shape);
        let rows = layout.map_or(tiles.q_tile(), |layout| layout.rows_for(&shape, usize::MAX));
        let scratch = tiles.scratch(&shape, caches, job.bias.is_some(), !pack::is_direct(&job.k));
        Self {
            level,
            job,
            queue: Queue::new(out, lse, shape, rows),
            layout,
            scratch: Scratch { strip: 1, ..scratch },
            strip: tiles.strip(&shape, caches),
            far: Tiles::is_far(&shape, caches),
            lines,
        }
    }

    /// Blocks in all.
    pub fn count(&self) -> usize {
        self.queue.len()
    }

    /// Says how many threads will [`run`](Self::run) it, at most. If keys or values are to be packed, widened or made
    /// contiguous, or are too many for the caches, a thread then takes several blocks at once, which share that work
    /// and what is read: as many as leave enough for all threads. Changes no bit.
    #[must_use]
    pub fn shared_by(mut self, threads: usize) -> Self {
        let packs = !pack::is_direct(&self.job.k) || !pack::is_direct(&self.job.v);
        let strips = |of_a_thread: usize| if threads <= 1 { 1 } else { threads.saturating_mul(of_a_thread) };
        if let Some(layout) = &self.layout {
            self.queue.cut(layout.rows_for(&self.job.shape, strips(STRIPS_PER_THREAD)));
        } else if packs || self.far {
            let fair = self.count() / strips(if packs { STRIPS_PER_THREAD } else { FAR_STRIPS_PER_THREAD });
            self.scratch.strip = self.strip.min(fair).max(1);
            self.queue.cut(self.job.tiles.q_tile() * self.scratch.strip);
        }
        self
    }

    /// Ends the call soon after the flag is set, which must then stay set: each [`run`](Self::run) gives
    /// [`AttnError::Stopped`].
    #[must_use]
    pub fn stop_when(mut self, flag: &'w AtomicBool) -> Self {
        self.job.scoring.stop = Some(flag);
        self
    }

    /// Works on blocks until none is left. Each thread brings scratch of its own.
    ///
    /// # Errors
    /// [`AttnError::TooShort`] where the scratch is; nothing has been done then. [`AttnError::Stopped`] as
    /// [`stop_when`](Self::stop_when) says; rows that were not computed are as they were.
    pub fn run(&self, workspace: &mut [Line]) -> Result<()> {
        AttnError::check_len("workspace lines", self.lines.all, workspace.len())?;
        match &self.layout {
            None => sweep::work(&self.job, &self.queue, workspace, self.scratch),
            Some(layout) => {
                let (prefill, rest) = workspace.split_at_mut(self.lines.prefill);
                amx::sweep::work(self.level, &self.job, layout, &self.queue, rest, (prefill, self.scratch));
            }
        }
        self.job.unless_stopped()
    }
}
