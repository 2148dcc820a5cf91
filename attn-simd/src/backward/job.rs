//! The options and inputs of a backward call, and its cut into parts.

use core::ops::Range;

use super::layout::Layout;
use crate::dtype::Input;
use crate::isa::Isa;
use crate::level::Level;
use crate::pack;
use crate::prefill;
use crate::prefill::layout::MAX_Q_TILE;
use crate::prefill::mask::Ranges;
use crate::queue::Rows;

/// Options and inputs of a backward call.
pub(super) struct Job<'c> {
    /// Those that the forward call had as well.
    pub(super) forward: prefill::job::Job<'c>,
    pub(super) layout: Layout,
    /// The level that multiplies: one of vectors, or of pairs or AMX if all of q, k, v and `dy` are bfloat16.
    pub(super) level: Level,
    /// Whether weights and gradients of scores are rounded to pairs, too.
    pub(super) fast: bool,
    /// Parts of a weight on AMX.
    pub(super) parts: usize,
    pub(super) out: Input<'c>,
    pub(super) dy: Input<'c>,
    pub(super) lse: &'c [f32],
    /// The derivative of a score by its product, but for the soft-cap.
    pub(super) factor: f64,
    /// The derivative of a score by its bias, but for a `score_mod`.
    pub(super) by_bias: f64,
    /// Whether a `score_mod` changes scores.
    pub(super) score_mod: bool,
}

impl Job<'_> {
    /// The blocks of a part, in order. Parts of a head have about equally many tiles of keys to visit, as far as the
    /// mask's ranges tell: under a causal mask the first parts have the most blocks.
    pub(super) fn blocks(&self, part: usize) -> impl Iterator<Item = Rows> + use<'_> {
        let [batch, kv_head, place] = self.layout.place(part);
        let (all, parts) = (self.layout.blocks_of_group(), self.layout.parts);
        let tiles = move |n: usize| {
            let Rows { batch, head, first, count } = self.layout.block_of_group([batch, kv_head], n);
            let job = &self.forward;
            let keys = if job.mask.is_none() {
                job.shape.kv_len
            } else {
                job.mask.row_range(&job.shape, batch, head, first + count / 2).len()
            };
            // One for what a block costs without keys.
            (keys / job.tiles.kv_tile) as u64 + 1
        };
        let total: u64 = if parts == 1 { 0 } else { (0..all).map(tiles).sum() };
        let mut before = 0u64;
        (0..all)
            .filter(move |&n| {
                if parts == 1 {
                    return true;
                }
                // The middle of the block, on a line from 0 to `parts`.
                let tiles = tiles(n);
                let middle = 2 * before + tiles;
                before += tiles;
                (u128::from(middle) * parts as u128 / (2 * u128::from(total))) as usize == place
            })
            .map(move |n| self.layout.block_of_group([batch, kv_head], n))
    }

    /// Keys that a part adds anything to: all of a whole head, else those between the first and the last that a row of
    /// the part sees.
    pub(super) fn keys(&self, part: usize) -> Range<usize> {
        let all = 0..self.forward.shape.kv_len;
        if self.layout.parts == 1 || self.forward.mask.is_none() {
            return all;
        }
        let blocks = self.blocks(part).flat_map(|rows| rows.pieces(MAX_Q_TILE));
        let seen = blocks.map(|rows| self.keys_of(&Ranges::of(&self.forward, rows)));
        let seen = seen.filter(|keys| !keys.is_empty());
        seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// Keys that a block visits. Pairs of keys are the same in every block: they start at even keys.
    pub(super) fn keys_of(&self, ranges: &Ranges) -> Range<usize> {
        let start = if self.fast { ranges.any.start & !1 } else { ranges.any.start };
        start..ranges.any.end
    }

    /// Floats of `dq` of a part.
    pub(super) fn dq_len(&self, part: usize) -> usize {
        self.blocks(part).map(|rows| rows.count).sum::<usize>() * self.forward.shape.head_dim
    }

    /// `δ = dy·y` of a row. `scratch` holds a row of values.
    #[inline(always)]
    pub(super) fn delta<I: Isa>(&self, isa: I, row: [usize; 3], dy: &[f32], scratch: &mut [f32]) -> f64 {
        let out = &mut scratch[..dy.len()];
        pack::read_row(isa, &self.out, row, 0, out);
        // Eight sums side by side, then in order: in a single chain each addition would wait for the one before.
        let mut sums = [0.0; 8];
        let ((y, last_y), (dy, last_dy)) = (out.as_chunks::<8>(), dy.as_chunks::<8>());
        for (y, dy) in y.iter().zip(dy) {
            for (sum, (&y, &dy)) in sums.iter_mut().zip(y.iter().zip(dy)) {
                *sum += product(y, dy);
            }
        }
        let last: f64 = last_y.iter().zip(last_dy).map(|(&y, &dy)| product(y, dy)).sum();
        sums.iter().sum::<f64>() + last
    }
}

/// An output times its gradient. An output of 0 gives 0: a row that sees nothing has no gradient, whatever `dy` holds.
/// The choice is made before the product, where it is no branch.
#[inline]
pub(super) fn product(y: f32, dy: f32) -> f64 {
    let dy = if y == 0.0 { 0.0 } else { dy };
    f64::from(y) * f64::from(dy)
}
