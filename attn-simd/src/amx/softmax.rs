//! The streaming softmax of one tile of 32 keys by 32 queries, whose weights become operands.
//!
//! The exponent of a weight is its score minus the row's base, and the base may stay below the largest score. Only when
//! a weight would exceed 2⁸ does the base become the maximum, and outputs are rescaled (FlashAttention-4's conditional
//! rescaling, here per row, so that no row depends on its neighbours). Weights up to 2⁸ lose nothing, because their
//! precision is relative.
//!
//! A weight in one bfloat16 does lose something: the largest one would be exactly 1, and its neighbours just below it,
//! at the best place for rounding. The root mean square is 1.31 there, against 1.40 of correct rounding. So the
//! base follows twice per octave of keys, at tiles 1, 2, 3, 4, 6, 8, 12, …: often enough to have seen most of
//! a row's keys, and seldom enough to cost nothing.
//!
//! Weights and their sums are stored times 2²⁴ ([`RAISE`](crate::math::RAISE)). AMX flushes subnormals; the parts of
//! the smallest weight above 0 are normal numbers, and AMX drops 2²⁴ times less of a product.

use super::product::Operand;
use crate::isa::Isa;
use crate::math::{exp2, exp2_raised};
use crate::prefill::softmax::State;

/// Most that a weight may grow to before the base follows, as a power of 2, at a tile of keys (its number from
/// the first key on).
pub(crate) const fn threshold(parts: usize, tile: usize) -> f32 {
    // All bits below the two highest are 0.
    let follows = tile & (tile.next_power_of_two() >> 2).wrapping_sub(1) == 0 || tile < 4;
    if parts == 1 && follows { 0.0 } else { 8.0 }
}

/// Takes the scores `s[key][query]` of a tile into account: the base of each row follows if a weight would exceed the
/// threshold. Returns whether any base has followed: then the caller multiplies outputs by `state.factor`; the sums are
/// multiplied here.
#[inline(always)]
pub(crate) fn rescale<I: Isa, const NQ: usize>(
    isa: I,
    (log2_scale, threshold): (f32, f32),
    scores: &[f32],
    state: &mut State<'_>,
) -> bool {
    let (c, threshold) = (isa.splat(log2_scale), isa.splat(threshold));
    let (zero, one) = (isa.splat(0.0), isa.splat(1.0));
    let (none, least) = (isa.splat(f32::NEG_INFINITY), isa.splat(f32::MIN));
    let old = vectors::<I, NQ>(isa, state.max);
    let mut maxima = [old, old];
    for rows in scores.chunks_exact(2 * NQ * I::LANES) {
        for (max, row) in maxima.iter_mut().zip(rows.chunks_exact(NQ * I::LANES)) {
            for n in 0..NQ {
                max[n] = isa.max(max[n], isa.load(&row[n * I::LANES..]));
            }
        }
    }
    let (mut new, mut keeps, mut follows) = (old, [isa.eq(zero, zero); NQ], zero);
    for n in 0..NQ {
        new[n] = isa.max(maxima[0][n], maxima[1][n]);
        // −∞ − −∞ would be an invalid operation, and compilers make one of a difference to a number that was selected.
        let growth = isa.mul(isa.sub(isa.max(least, new[n]), old[n]), c);
        keeps[n] = isa.eq(isa.max(growth, threshold), threshold);
        follows = isa.max(follows, isa.select(keeps[n], zero, one));
    }
    // Nearly always no base follows, and nothing waits for an exponential.
    if isa.max_across(follows) == 0.0 {
        return false;
    }
    for n in 0..NQ {
        let max = isa.select(keeps[n], old[n], new[n]);
        let base = isa.max(least, max);
        // A row that has seen nothing has nothing to multiply.
        let fresh = isa.select(isa.eq(old[n], none), one, exp2(isa, isa.mul(isa.sub(old[n], base), c)));
        isa.store(isa.select(keeps[n], one, fresh), &mut state.factor[n * I::LANES..]);
        isa.store(max, &mut state.max[n * I::LANES..]);
    }
    let width = NQ * I::LANES;
    let changed = state.factor[..width].iter().fold(0, |any, f| any | (f.to_bits() ^ 1.0f32.to_bits()));
    if changed != 0 {
        multiply::<I, NQ>(isa, state.sum, state.factor);
    }
    changed != 0
}

/// The first `NQ` vectors of a row. A loop: compilers leave the closure of `array::from_fn` out of line, where it is
/// compiled without the lanes' instructions.
#[inline(always)]
fn vectors<I: Isa, const NQ: usize>(isa: I, row: &[f32]) -> [I::F; NQ] {
    let mut all = [isa.splat(0.0); NQ];
    for (n, x) in all.iter_mut().enumerate() {
        *x = isa.load(&row[n * I::LANES..]);
    }
    all
}

/// Multiplies rows of `NQ` vectors by one factor per lane.
#[inline(always)]
pub(crate) fn multiply<I: Isa, const NQ: usize>(isa: I, rows: &mut [f32], factor: &[f32]) {
    let factors = vectors::<I, NQ>(isa, factor);
    for row in rows.chunks_exact_mut(NQ * I::LANES) {
        for (n, f) in factors.iter().enumerate() {
            let x = &mut row[n * I::LANES..][..I::LANES];
            isa.store(isa.mul(isa.load(x), *f), x);
        }
    }
}

/// The bases of the weights of one tile, and their sums.
pub(crate) struct Weigher<I: Isa, const NQ: usize> {
    base: [I::F; NQ],
    c: I::F,
    /// Of each quarter of the tile.
    sums: [[I::F; NQ]; 4],
}

impl<I: Isa, const NQ: usize> Weigher<I, NQ> {
    #[inline(always)]
    pub(crate) fn new(isa: I, log2_scale: f32, state: &State<'_>) -> Self {
        let none = isa.splat(f32::NEG_INFINITY);
        let mut base = vectors::<I, NQ>(isa, state.max);
        for max in &mut base {
            *max = isa.select(isa.eq(*max, none), isa.splat(0.0), *max);
        }
        Self { base, c: isa.splat(log2_scale), sums: [[isa.splat(0.0); NQ]; 4] }
    }

    /// Writes the weights of the pairs of keys `pairs` into the operands `[part][16 queries]`. The exponential has a
    /// polynomial of `DEGREE`.
    ///
    /// A function of its own, so that its loop has all registers.
    #[inline(never)]
    pub(crate) fn weigh<const PARTS: usize, const DEGREE: usize>(
        &mut self,
        isa: I,
        scores: &[f32],
        pairs: core::ops::Range<usize>,
        operands: &mut [Operand],
    ) {
        isa.vectorize(
            #[inline(always)]
            || self.weigh_inlined::<PARTS, DEGREE>(isa, scores, pairs, operands),
        );
    }

    #[inline(always)]
    fn weigh_inlined<const PARTS: usize, const DEGREE: usize>(
        &mut self,
        isa: I,
        scores: &[f32],
        pairs: core::ops::Range<usize>,
        operands: &mut [Operand],
    ) {
        let operands = &mut operands[..2 * PARTS];
        let (base, c) = (self.base, self.c);
        let mut start = pairs.start;
        while start < pairs.end {
            // The sums of a quarter stay in registers.
            let end = pairs.end.min(start / 4 * 4 + 4);
            let quarter = &mut self.sums[start / 4 % 4];
            let mut sums = *quarter;
            let rows = &scores[2 * start * NQ * I::LANES..2 * end * NQ * I::LANES];
            for (pair, rows) in (start..end).zip(rows.chunks_exact(2 * NQ * I::LANES)) {
                let mut weights = [[isa.splat(0.0); NQ]; 2];
                for (key, weights) in weights.iter_mut().enumerate() {
                    for (n, weight) in weights.iter_mut().enumerate() {
                        let score = isa.load(&rows[(key * NQ + n) * I::LANES..]);
                        *weight = exp2_raised::<I, DEGREE>(isa, isa.mul(isa.sub(score, base[n]), c));
                    }
                }
                for n in 0..NQ {
                    let mut rest = [weights[0][n], weights[1][n]];
                    if PARTS == 1 {
                        // The sum of what is multiplied, so that the weights of a row add up to 1 exactly however
                        // coarse they are.
                        rest = [isa.round_bf16(rest[0]), isa.round_bf16(rest[1])];
                    }
                    sums[n] = isa.add(sums[n], isa.add(rest[0], rest[1]));
                    let (column, lane) = (n * I::LANES / 16, n * I::LANES % 16);
                    for part in 0..PARTS {
                        let rounded = match PARTS {
                            1 => rest,
                            _ => [isa.round_bf16(rest[0]), isa.round_bf16(rest[1])],
                        };
                        let words = isa.pair_bf16(rounded[0], rounded[1]);
                        isa.store(words, &mut operands[part * 2 + column].0[pair % 16 * 16 + lane..][..I::LANES]);
                        if part + 1 < PARTS {
                            rest = [isa.sub(rest[0], rounded[0]), isa.sub(rest[1], rounded[1])];
                        }
                    }
                }
            }
            *quarter = sums;
            start = end;
        }
    }

    /// Adds the tile's sums to those of the rows.
    #[inline(always)]
    pub(crate) fn finish(self, isa: I, state: &mut State<'_>) {
        let [a, b, c, d] = self.sums;
        for (n, all) in state.sum.chunks_exact_mut(I::LANES).enumerate().take(NQ) {
            let sum = isa.add(isa.add(a[n], b[n]), isa.add(c[n], d[n]));
            isa.store(isa.add(isa.load(all), sum), all);
        }
    }
}

/// Sets the weights of the pairs of keys `pairs` that dropout does not keep to 0, in all parts. `kept` has a bit per
/// query for each key. The sums already contain all weights.
#[inline(always)]
pub(crate) fn dropout(kept: &[u64], pairs: core::ops::Range<usize>, operands: &mut [Operand]) {
    let ones = |bits: u64, query: usize| 0u32.wrapping_sub((bits >> query & 1) as u32);
    for (n, operand) in operands.iter_mut().enumerate() {
        for pair in pairs.clone() {
            let [even, odd] = [kept[2 * pair], kept[2 * pair + 1]].map(|bits| bits >> (n % 2 * 16));
            for (query, word) in operand.0[pair * 16..][..16].iter_mut().enumerate() {
                let keeps = ones(even, query) & 0xffff | ones(odd, query) & 0xffff_0000;
                *word = f32::from_bits(word.to_bits() & keeps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[test]
    fn the_base_follows_twice_per_octave() {
        let rescaled: Vec<usize> = (0..70).filter(|&tile| threshold(1, tile) == 0.0).collect();
        assert_eq!(rescaled, [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
        assert!((0..70).all(|tile| threshold(2, tile) == 8.0));
    }
}
