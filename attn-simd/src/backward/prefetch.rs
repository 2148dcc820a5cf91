//! Prefetches what the next block reads first: its rows of q, dy and out, and the first keys and values of the next
//! head.
//!
//! A block of a short sequence lasts for some microseconds, and a whole head for some tens of them: without requests a
//! thread would wait for a good part of that time. They are made from within the products of the last tiles, a few at a
//! time, because a core tracks only some dozens of misses.

use super::job::Job;
use crate::isa::{Isa, hint};
use crate::pack;
use crate::prefill::prefetch::Lines;
use crate::queue::Rows;

/// Lines to prefetch during the last tiles of a block, in steps.
pub(super) struct Prefetch {
    /// Of q, dy, out, k and v.
    lines: [Lines; 5],
    /// Lines of each in a step.
    of_step: [usize; 5],
}

impl Prefetch {
    /// Tiles at the end of a block over which the requests are spread.
    const TILES: usize = 2;

    /// Nothing.
    pub(super) fn nothing() -> Self {
        Self { lines: [Lines::NONE; 5], of_step: [0; 5] }
    }

    /// Whether requests are made while so many tiles are left.
    pub(super) fn is_time(tiles: usize) -> bool {
        tiles <= Self::TILES
    }

    /// What `next` reads after a block of `now`, over the `steps` of each of the tiles that are left.
    #[inline(never)]
    pub(super) fn of(call: &Job<'_>, now: Rows, next: Option<Rows>, steps: usize) -> Self {
        let Some(next) = next else { return Self::nothing() };
        let (job, queries) = (&call.forward, [next.batch, next.head, next.first]);
        let of = |input, row, count| match pack::place(input, row) {
            Some((start, stride, of_row)) => Lines::of_bytes(start, stride, count, of_row),
            None => Lines::NONE,
        };
        let [kv_head, this] = [next.head, now.head].map(|head| job.shape.kv_head(head));
        let keys = if (next.batch, kv_head) == (now.batch, this) {
            0
        } else {
            job.shape.kv_len.min(Self::TILES * job.tiles.kv_tile)
        };
        let lines = [
            of(&job.q, queries, next.count),
            of(&call.dy, queries, next.count),
            of(&call.out, queries, next.count),
            of(&job.k, [next.batch, kv_head, 0], keys),
            of(&job.v, [next.batch, kv_head, 0], keys),
        ];
        Self { of_step: lines.each_ref().map(|lines| lines.left().div_ceil(steps.max(1))), lines }
    }

    /// Prefetches the next few lines.
    #[inline(always)]
    pub(super) fn step<I: Isa>(&mut self, isa: I) {
        for (lines, count) in self.lines.iter_mut().zip(self.of_step) {
            lines.prefetch::<I, { hint::SECOND }>(isa, count);
        }
    }
}
