//! The streaming softmax of one chunk of 32 keys by 32 queries, whose weights become tiles.
//!
//! The exponent of a weight is its score minus the row's base, and the base may stay below the largest score. Only when
//! a weight would exceed 2⁸ does the base become the maximum, and outputs are rescaled (FlashAttention-4's conditional
//! rescaling, here per row, so that no row depends on its neighbours). Weights up to 2⁸ lose nothing, because their
//! precision is relative.
//!
//! A weight in one bfloat16 does lose something: the largest one would be exactly 1, and its neighbours just below it,
//! where they are rounded best. In the root mean square that is 1.31 against 1.40 of correct rounding. So there the
//! base follows twice per octave of keys, at chunks 1, 2, 3, 4, 6, 8, 12, …: often enough to have seen most of
//! a row's keys, and seldom enough to cost nothing.
//!
//! Weights and their sums are 2²⁴ times as large as they are called ([`RAISE`](crate::math::RAISE)): the parts of the
//! smallest weight that is not 0 are normal numbers then, and what the tile unit drops of a product is as much smaller.

use super::product::Operand;
use crate::isa::Isa;
use crate::math::{exp2, exp2_raised};
use crate::prefill::softmax::State;

/// Most that a weight may grow to before the base follows, as a power of 2, at a chunk of keys (its number from
/// the first key on).
pub(crate) const fn threshold(parts: usize, chunk: usize) -> f32 {
    // All bits below the two highest are 0.
    let follows = chunk & (chunk.next_power_of_two() >> 2).wrapping_sub(1) == 0 || chunk < 4;
    if parts == 1 && follows { 0.0 } else { 8.0 }
}

/// Takes the scores `s[key][query]` of a chunk into account: the base of each row follows where a weight would exceed
/// the threshold. Returns whether any has, and so whether outputs are to be multiplied by `state.factor`; the sums
/// already are.
#[inline(always)]
pub(crate) fn rescale<I: Isa, const NQ: usize>(
    isa: I,
    (log2_scale, threshold): (f32, f32),
    scores: &[f32],
    state: &mut State<'_>,
) -> bool {
    let (c, threshold) = (isa.splat(log2_scale), isa.splat(threshold));
    let (none, least, one) = (isa.splat(f32::NEG_INFINITY), isa.splat(f32::MIN), isa.splat(1.0));
    let old: [I::F; NQ] = core::array::from_fn(|n| isa.load(&state.max[n * I::LANES..]));
    let mut maxima = [old, old];
    for rows in scores.chunks_exact(2 * NQ * I::LANES) {
        for (max, row) in maxima.iter_mut().zip(rows.chunks_exact(NQ * I::LANES)) {
            for n in 0..NQ {
                max[n] = isa.max(max[n], isa.load(&row[n * I::LANES..]));
            }
        }
    }
    for n in 0..NQ {
        let new = isa.max(maxima[0][n], maxima[1][n]);
        // −∞ − −∞ would be an invalid operation, and compilers make one of a difference to a number that was selected.
        let growth = isa.mul(isa.sub(isa.max(least, new), old[n]), c);
        let keeps = isa.eq(isa.max(growth, threshold), threshold);
        let max = isa.select(keeps, old[n], new);
        let base = isa.max(least, max);
        // A row that has seen nothing has nothing to be multiplied.
        let fresh = isa.select(isa.eq(old[n], none), one, exp2(isa, isa.mul(isa.sub(old[n], base), c)));
        isa.store(isa.select(keeps, one, fresh), &mut state.factor[n * I::LANES..]);
        isa.store(max, &mut state.max[n * I::LANES..]);
    }
    let width = NQ * I::LANES;
    let changed = state.factor[..width].iter().fold(0, |any, f| any | (f.to_bits() ^ 1.0f32.to_bits()));
    if changed != 0 {
        multiply::<I, NQ>(isa, state.sum, state.factor);
    }
    changed != 0
}

/// Multiplies rows of `NQ` vectors by one factor per lane.
#[inline(always)]
pub(crate) fn multiply<I: Isa, const NQ: usize>(isa: I, rows: &mut [f32], factor: &[f32]) {
    let factors: [I::F; NQ] = core::array::from_fn(|n| isa.load(&factor[n * I::LANES..]));
    for row in rows.chunks_exact_mut(NQ * I::LANES) {
        for (n, f) in factors.iter().enumerate() {
            let x = &mut row[n * I::LANES..][..I::LANES];
            isa.store(isa.mul(isa.load(x), *f), x);
        }
    }
}

/// What the weights of one chunk are computed against, and their sums.
pub(crate) struct Weigher<I: Isa, const NQ: usize> {
    base: [I::F; NQ],
    c: I::F,
    /// Of each quarter of the chunk.
    sums: [[I::F; NQ]; 4],
}

impl<I: Isa, const NQ: usize> Weigher<I, NQ> {
    #[inline(always)]
    pub(crate) fn new(isa: I, log2_scale: f32, state: &State<'_>) -> Self {
        let none = isa.splat(f32::NEG_INFINITY);
        Self {
            base: core::array::from_fn(|n| {
                let max = isa.load(&state.max[n * I::LANES..]);
                isa.select(isa.eq(max, none), isa.splat(0.0), max)
            }),
            c: isa.splat(log2_scale),
            sums: [[isa.splat(0.0); NQ]; 4],
        }
    }

    /// Weights of the pairs of keys `pairs`, into the tiles `[part][16 queries]`. `kept` has a bit per query for each
    /// key whose weight dropout keeps; the sums count them all. The exponential has a polynomial of `DEGREE`.
    #[inline(always)]
    pub(crate) fn weigh<const PARTS: usize, const DEGREE: usize>(
        &mut self,
        isa: I,
        scores: &[f32],
        pairs: core::ops::Range<usize>,
        kept: Option<&[u64]>,
        tiles: &mut [Operand],
    ) {
        let width = NQ * I::LANES;
        let tiles = &mut tiles[..2 * PARTS];
        for pair in pairs {
            let rows = &scores[2 * pair * width..][..2 * width];
            let quarter = pair / 4 % 4;
            for n in 0..NQ {
                let (even, odd) = (&rows[n * I::LANES..], &rows[width + n * I::LANES..]);
                let mut rest =
                    [self.weight::<DEGREE>(isa, isa.load(even), n), self.weight::<DEGREE>(isa, isa.load(odd), n)];
                if PARTS == 1 {
                    // The sum of what is multiplied, so that the weights of a row add up to 1 exactly however coarse
                    // they are.
                    rest = [isa.round_bf16(rest[0]), isa.round_bf16(rest[1])];
                }
                self.sums[quarter][n] = isa.add(self.sums[quarter][n], isa.add(rest[0], rest[1]));
                if let Some(kept) = kept {
                    for (x, bits) in rest.iter_mut().zip(&kept[2 * pair..]) {
                        *x = isa.select(isa.mask_from_bits(bits >> (n * I::LANES)), *x, isa.splat(0.0));
                    }
                }
                let (column, lane) = (n * I::LANES / 16, n * I::LANES % 16);
                for part in 0..PARTS {
                    let rounded = match PARTS {
                        1 => rest,
                        _ => [isa.round_bf16(rest[0]), isa.round_bf16(rest[1])],
                    };
                    let words = isa.pair_bf16(rounded[0], rounded[1]);
                    isa.store(words, &mut tiles[part * 2 + column].0[pair * 16 + lane..]);
                    if part + 1 < PARTS {
                        rest = [isa.sub(rest[0], rounded[0]), isa.sub(rest[1], rounded[1])];
                    }
                }
            }
        }
    }

    /// Scores of the `n`-th vector of queries become weights.
    #[inline(always)]
    fn weight<const DEGREE: usize>(&self, isa: I, scores: I::F, n: usize) -> I::F {
        exp2_raised::<I, DEGREE>(isa, isa.mul(isa.sub(scores, self.base[n]), self.c))
    }

    /// Adds the chunk's sums to those of the rows.
    #[inline(always)]
    pub(crate) fn finish(self, isa: I, state: &mut State<'_>) {
        let [a, b, c, d] = self.sums;
        for (n, all) in state.sum.chunks_exact_mut(I::LANES).enumerate().take(NQ) {
            let sum = isa.add(isa.add(a[n], b[n]), isa.add(c[n], d[n]));
            isa.store(isa.add(isa.load(all), sum), all);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn the_base_follows_twice_per_octave() {
        let rescaled: Vec<usize> = (0..70).filter(|&chunk| threshold(1, chunk) == 0.0).collect();
        assert_eq!(rescaled, [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
        assert!((0..70).all(|chunk| threshold(2, chunk) == 8.0));
    }
}
