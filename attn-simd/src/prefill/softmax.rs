//! The streaming softmax of one tile: new maximum, factor of the earlier sums, scores become weights, sums grow.
//!
//! Weights are relative to a reference: the largest score of the first tile that a row sees. If a later score is
//! larger, the reference grows to it, or by as much as halves all weights if that is more. So it grows once per factor
//! 2 at most, and scores that rise a little with every tile do not rescale, and round, the sums at every tile.
//!
//! Each lane is a row, so everything is vertical. A row that has seen nothing yet has the maximum −∞; 0 stands in for
//! it in the exponent, so that weights and factor are 0, and there is nothing to multiply. The difference is taken
//! before it is multiplied by the scale, so that the largest score of the first tile has the weight 1 exactly, however
//! large it is.

use crate::gemm::{Reach, with_vectors};
use crate::isa::Isa;
use crate::math::exp2;

/// Running state of a block: one lane per row.
pub(crate) struct State<'w> {
    /// The reference that weights are relative to: the largest score so far, or more.
    pub(crate) max: &'w mut [f32],
    /// Sum of the weights so far, relative to `max`.
    pub(crate) sum: &'w mut [f32],
    /// The factor of the last tile on earlier outputs.
    pub(crate) factor: &'w mut [f32],
}

impl State<'_> {
    /// No score yet.
    pub(crate) fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }

    /// Takes the scores of one tile, `s[key][query]`, which become weights as far as each vector reaches. The first key
    /// is the `phase`-th of its tile.
    #[inline(never)]
    pub(crate) fn push<I: Isa, const NQ: usize>(
        &mut self,
        isa: I,
        log2_scale: f32,
        reach: (usize, &Reach<NQ>),
        scores: &mut [f32],
    ) {
        isa.vectorize(
            #[inline(always)]
            || self.push_inlined(isa, log2_scale, reach, scores),
        );
    }

    #[inline(always)]
    fn push_inlined<I: Isa, const NQ: usize>(
        &mut self,
        isa: I,
        log2_scale: f32,
        (phase, reach): (usize, &Reach<NQ>),
        scores: &mut [f32],
    ) {
        let (c, none, zero) = (isa.splat(log2_scale), isa.splat(f32::NEG_INFINITY), isa.splat(0.0));
        let width = NQ * I::LANES;
        let old: [I::F; NQ] = core::array::from_fn(|n| isa.load(&self.max[n * I::LANES..]));

        let mut maxima = [old, old];
        reach.runs(
            #[inline(always)]
            |keys, front, back| {
                let rows = &scores[keys.start * width..keys.end.max(keys.start) * width];
                with_vectors!(front, back, NQ, FRONT, BACK => largest::<I, NQ, FRONT, BACK>(isa, rows, &mut maxima));
            },
        );
        let mut base = [zero; NQ];
        let ahead = isa.splat(ahead(log2_scale));
        for n in 0..NQ {
            let largest = isa.max(maxima[0][n], maxima[1][n]);
            let max = isa.select(isa.eq(largest, old[n]), old[n], isa.max(largest, isa.add(old[n], ahead)));
            isa.store(max, &mut self.max[n * I::LANES..]);
            base[n] = isa.select(isa.eq(max, none), zero, max);
            let factor = exp2(isa, isa.mul(isa.sub(old[n], base[n]), c));
            isa.store(factor, &mut self.factor[n * I::LANES..]);
        }

        let mut sums = Sums { levels: [[zero; NQ]; 3] };
        reach.runs(
            #[inline(always)]
            |keys, front, back| {
                let rows = &mut scores[keys.start * width..keys.end.max(keys.start) * width];
                with_vectors!(front, back, NQ, FRONT, BACK =>
                    weigh_all::<I, NQ, FRONT, BACK>(isa, rows, phase + keys.start, &base, c, &mut sums));
            },
        );
        sums.carry(isa, 0);
        for n in 0..NQ {
            let (at, sum) = (n * I::LANES, sums.levels[2][n]);
            let sum = isa.mul_add(isa.load(&self.sum[at..]), isa.load(&self.factor[at..]), sum);
            isa.store(sum, &mut self.sum[at..]);
        }
    }
}

/// By how much a reference grows at least: a factor 2 of all weights.
#[inline(always)]
fn ahead(log2_scale: f32) -> f32 {
    let ahead = 1.0 / log2_scale;
    // 2¹⁰⁰ is less than a rounding of the largest scores, so that no reference overflows. Beyond, scores differ so
    // little that references need not go ahead.
    if ahead <= f32::from_bits((127 + 100) << 23) { ahead } else { 0.0 }
}

/// Terms of a sum of weights.
const EACH: usize = 4;

/// Sums of weights of a tile: of four keys, of four such sums, and of all. Four equal numbers are added up without an
/// error, so that a row's sum is off by less than its outputs.
struct Sums<F, const NQ: usize> {
    levels: [[F; NQ]; 3],
}

impl<F: Copy, const NQ: usize> Sums<F, NQ> {
    /// Hands on the sums that end before the `key`-th key of the tile.
    #[inline(always)]
    fn carry<I: Isa<F = F>>(&mut self, isa: I, key: usize) {
        let [one, four, all] = &mut self.levels;
        if key.is_multiple_of(EACH) {
            add_and_clear(isa, one, four);
        }
        if key.is_multiple_of(EACH * EACH) {
            add_and_clear(isa, four, all);
        }
    }
}

/// `to += from`, which begins anew.
#[inline(always)]
fn add_and_clear<I: Isa, const NQ: usize>(isa: I, from: &mut [I::F; NQ], to: &mut [I::F; NQ]) {
    for (from, to) in from.iter_mut().zip(to) {
        *to = isa.add(*to, *from);
        *from = isa.splat(0.0);
    }
}

/// Largest scores of some keys, for all vectors but FRONT at the front and BACK at the back, in two chains (even and
/// odd keys): one would wait for itself.
#[inline(always)]
fn largest<I: Isa, const NQ: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    scores: &[f32],
    maxima: &mut [[I::F; NQ]; 2],
) {
    let width = NQ * I::LANES;
    for rows in scores.chunks(2 * width) {
        for (max, row) in maxima.iter_mut().zip(rows.chunks_exact(width)) {
            for n in FRONT..NQ - BACK {
                max[n] = isa.max(max[n], isa.load(&row[n * I::LANES..]));
            }
        }
    }
}

/// Scores of some keys become weights, for all vectors but FRONT at the front and BACK at the back, and are added up.
/// The first is the `key`-th of its tile.
///
/// Measured on Zen 4, this function alone: loops over 16 keys, whose length is known and whose sums begin with a weight
/// instead of 0, take 5 % off with AVX-512 and 2 % with AVX2.
#[inline(always)]
fn weigh_all<I: Isa, const NQ: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    mut scores: &mut [f32],
    mut key: usize,
    base: &[I::F; NQ],
    c: I::F,
    sums: &mut Sums<I::F, NQ>,
) {
    const MANY: usize = EACH * EACH;
    let width = NQ * I::LANES;
    while !scores.is_empty() {
        let left = scores.len() / width;
        let few = if key.is_multiple_of(MANY) && left >= MANY { MANY } else { left.min(EACH - key % EACH) };
        let (rows, rest) = core::mem::take(&mut scores).split_at_mut(few * width);
        key += few;
        if few == MANY {
            let mut sum = [isa.splat(0.0); NQ];
            for (n, rows) in rows.chunks_exact_mut(EACH * width).enumerate() {
                let four = weigh_each::<I, NQ, FRONT, BACK>(isa, rows, base, c);
                sum = if n == 0 { four } else { add(isa, &sum, &four) };
            }
            sums.levels[2] = add(isa, &sums.levels[2], &sum);
        } else if few == EACH {
            let four = weigh_each::<I, NQ, FRONT, BACK>(isa, rows, base, c);
            sums.levels[1] = add(isa, &sums.levels[1], &four);
            if key.is_multiple_of(MANY) {
                let [_, four, all] = &mut sums.levels;
                add_and_clear(isa, four, all);
            }
        } else {
            for row in rows.chunks_exact_mut(width) {
                let [one] = weigh::<I, NQ, 1, FRONT, BACK>(isa, row, base, c);
                sums.levels[0] = add(isa, &sums.levels[0], &one);
            }
            sums.carry(isa, key);
        }
        scores = rest;
    }
}

/// Scores of [`EACH`] keys become weights, and their sum, for all vectors but FRONT at the front and BACK at the back.
#[inline(always)]
fn weigh_each<I: Isa, const NQ: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    rows: &mut [f32],
    base: &[I::F; NQ],
    c: I::F,
) -> [I::F; NQ] {
    let width = NQ * I::LANES;
    let mut sum = [isa.splat(0.0); NQ];
    // Two keys at a time take 10 % off this function with AVX2, and nothing off with AVX-512.
    if I::LANES == 8 {
        for (n, rows) in rows[..EACH * width].chunks_exact_mut(2 * width).enumerate() {
            let [a, b] = weigh::<I, NQ, 2, FRONT, BACK>(isa, rows, base, c);
            sum = if n == 0 { a } else { add(isa, &sum, &a) };
            sum = add(isa, &sum, &b);
        }
    } else {
        for (n, row) in rows[..EACH * width].chunks_exact_mut(width).enumerate() {
            let [one] = weigh::<I, NQ, 1, FRONT, BACK>(isa, row, base, c);
            sum = if n == 0 { one } else { add(isa, &sum, &one) };
        }
    }
    sum
}

/// Scores of `ROWS` keys become weights, for all vectors but FRONT at the front and BACK at the back; of those it
/// returns 0.
#[inline(always)]
fn weigh<I: Isa, const NQ: usize, const ROWS: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    rows: &mut [f32],
    base: &[I::F; NQ],
    c: I::F,
) -> [[I::F; NQ]; ROWS] {
    let rows = &mut rows[..ROWS * NQ * I::LANES];
    let mut y = [[isa.splat(0.0); NQ]; ROWS];
    for row in 0..ROWS {
        for n in FRONT..NQ - BACK {
            let scores = isa.load(&rows[(row * NQ + n) * I::LANES..]);
            y[row][n] = isa.mul(isa.sub(scores, base[n]), c);
        }
    }
    let mut p = crate::math::exp2_each(isa, y);
    for row in 0..ROWS {
        for n in 0..NQ {
            if n < FRONT || n >= NQ - BACK {
                p[row][n] = isa.splat(0.0);
            } else {
                isa.store(p[row][n], &mut rows[(row * NQ + n) * I::LANES..]);
            }
        }
    }
    p
}

/// Sums, vector by vector.
#[inline(always)]
fn add<I: Isa, const NQ: usize>(isa: I, a: &[I::F; NQ], b: &[I::F; NQ]) -> [I::F; NQ] {
    let mut sum = *a;
    for n in 0..NQ {
        sum[n] = isa.add(a[n], b[n]);
    }
    sum
}
