//! Prefetches what a strip reads and writes soon: during the last tiles of a block the lines of its output, which are
//! written when it ends, and of the queries of the next block; during every tile the keys and values of the next one,
//! and before its scores are there the bias that they get.
//!
//! Output and queries are beyond the near caches. Requests for all at once would stall the core, which tracks only some
//! dozens of misses; so each group of the two products makes a few.

use super::job::Job;
use super::score;
use crate::isa::{Isa, hint};
use crate::pack;
use crate::queue::Claim;
use crate::scoring::TileAt;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows of lines to prefetch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    /// The next one. Never read: an address for a hint.
    next: *const u8,
    /// Bytes from a row to the next.
    stride: isize,
    /// Lines of a row.
    of_row: usize,
    /// Lines that are left of this row.
    row_left: usize,
    /// Lines that are left in all.
    left: usize,
}

impl Lines {
    /// None.
    pub(crate) const NONE: Self = Self { next: core::ptr::null(), stride: 0, of_row: 0, row_left: 0, left: 0 };

    /// `count` rows of `columns` floats, `stride` floats apart.
    #[inline(always)]
    fn new(start: *const f32, stride: isize, count: usize, columns: usize) -> Self {
        let bytes = size_of::<f32>();
        Self::of_bytes(start.cast(), stride.wrapping_mul(bytes as isize), count, columns * bytes)
    }

    /// `count` rows of so many bytes, `stride` bytes apart.
    #[inline(always)]
    pub(crate) fn of_bytes(start: *const u8, stride: isize, count: usize, bytes: usize) -> Self {
        let of_row = bytes.div_ceil(LINE);
        Self { next: start, stride, of_row, row_left: of_row, left: of_row * count }
    }

    /// The part of a bias that a tile adds, if its rows lie in the caller's memory as in the tensor.
    pub(crate) fn of_bias(job: &Job<'_>, tile: TileAt) -> Self {
        let place = score::rows_of(job, tile).and_then(|(input, row)| {
            let (start, stride, bytes) = pack::place(&input, row)?;
            let size = bytes / input.columns();
            let start = start.wrapping_add(tile.key * size);
            let rows = if stride == 0 { 1 } else { tile.rows };
            Some(Self::of_bytes(start, stride, rows, start.addr() % LINE + tile.keys * size))
        });
        place.unwrap_or(Self::NONE)
    }

    /// Lines that are left in all.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// Prefetches the next `count` lines.
    #[inline(always)]
    pub(crate) fn prefetch<I: Isa, const HINT: u8>(&mut self, isa: I, count: usize) {
        for _ in 0..count.min(self.left) {
            isa.prefetch::<HINT>(self.next);
            self.next = self.next.wrapping_add(LINE);
            self.left -= 1;
            self.row_left -= 1;
            if self.row_left == 0 {
                self.row_left = self.of_row;
                self.next = self.next.wrapping_sub(self.of_row * LINE).wrapping_offset(self.stride);
            }
        }
    }
}

/// Lines to prefetch during the last tiles of a block, in steps.
#[derive(Debug)]
pub(crate) struct Prefetch {
    read: Lines,
    write: Lines,
    /// Lines of each kind in a step.
    budget: [usize; 2],
}

impl Prefetch {
    /// Tiles at the end of a block over which the requests are spread.
    pub(crate) const TILES: usize = 3;

    /// Nothing.
    #[inline(always)]
    pub(crate) fn nothing() -> Self {
        Self { read: Lines::NONE, write: Lines::NONE, budget: [0; 2] }
    }

    /// Whether there was never anything to prefetch.
    #[inline(always)]
    pub(crate) fn is_nothing(&self) -> bool {
        self.budget == [0; 2]
    }

    /// The queries of the next block and the outputs of this one, if they are plain rows of `f32`, in so many steps.
    #[inline(always)]
    pub(crate) fn of(job: &Job<'_>, claim: &Claim<'_, '_>, steps: usize) -> Self {
        let (mut read, mut write) = (Lines::NONE, Lines::NONE);
        if let Some(next) = claim.likely_next()
            && let Some((start, stride)) = pack::start(&job.q, [next.batch, next.head, next.first])
        {
            read = Lines::new(start, stride, next.count, job.shape.head_dim);
        }
        if let Some((start, stride)) = claim.plain_rows() {
            write = Lines::new(start, stride, claim.rows().count, job.shape.value_dim);
        }
        Self { read, write, budget: [read.left.div_ceil(steps), write.left.div_ceil(steps)] }
    }

    /// Prefetches the next few lines.
    #[inline(always)]
    pub(crate) fn step<I: Isa>(&mut self, isa: I) {
        self.read.prefetch::<I, { hint::READ }>(isa, self.budget[0]);
        self.write.prefetch::<I, { hint::WRITE }>(isa, self.budget[1]);
    }
}

/// Keys and values of the next tile, which are requested into the second cache while the blocks of a strip pass over
/// the tile before.
///
/// The sweeps of the blocks hide the latency of memory. If there are few blocks the requests cost a few percent of a
/// block's time, hence only long strips make them. Measured on Zen 4, strips of eight, 2 to 8 MiB of keys and values:
/// AVX-512 ×1.01 to 1.05, AVX2 ×1.0 to 1.08; on Zen 3, 4 to 16 MiB: ×1.03 to 1.1, but 1 MiB, twice its second cache:
/// ×0.985. Requests from within the products, as above, are no faster, and cost AVX2 2 % where there is nothing to
/// request.
#[derive(Debug)]
pub(crate) struct NextTile {
    lines: [Lines; 2],
    /// Lines of each that a block requests.
    of_block: [usize; 2],
}

impl NextTile {
    /// Fewest blocks of a strip that requests.
    const BLOCKS: usize = 4;

    /// Rows of keys and values from `key` on, if they are plain rows of `f32`, spread over so many blocks.
    #[inline(always)]
    pub(crate) fn of(job: &Job<'_>, [batch, head, key]: [usize; 3], keys: usize, blocks: usize) -> Self {
        let of = |input, columns| match pack::start(input, [batch, head, key]) {
            Some((start, stride)) if keys > 0 && blocks >= Self::BLOCKS => Lines::new(start, stride, keys, columns),
            _ => Lines::NONE,
        };
        let lines = [of(&job.k, job.shape.head_dim), of(&job.v, job.shape.value_dim)];
        Self { lines, of_block: lines.map(|lines| lines.left.div_ceil(blocks)) }
    }

    /// Requests a block's share.
    #[inline(always)]
    pub(crate) fn request<I: Isa>(&mut self, isa: I) {
        for (lines, count) in self.lines.iter_mut().zip(self.of_block) {
            lines.prefetch::<I, { hint::SECOND }>(isa, count);
        }
    }
}
