//! The streaming softmax of one tile: new maximum, factor on what came before, scores become weights, sums grow.
//!
//! Each lane is a row, so everything is vertical. A row that has seen nothing yet has the maximum −∞ and is exponentiated
//! against 0 instead, which gives weights of 0; its factor is 0 as well, and there is nothing to multiply by it. The
//! difference is taken before it is multiplied by the scale, so that the largest score has the weight 1 exactly however large
//! it is.

use crate::isa::Isa;
use crate::isa::product::{Reach, with_vectors};
use crate::math::exp2;

/// Running state of a block: one lane per row.
pub(crate) struct State<'w> {
    /// Largest score so far.
    pub(crate) max: &'w mut [f32],
    /// Sum of the weights so far, relative to `max`.
    pub(crate) sum: &'w mut [f32],
    /// What the last tile multiplied earlier outputs by.
    pub(crate) factor: &'w mut [f32],
}

impl State<'_> {
    /// No score yet.
    pub(crate) fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }

    /// Takes the scores of one tile, `s[key][query]`, which become weights as far as each vector reaches.
    #[inline(never)]
    pub(crate) fn push<I: Isa, const NQ: usize>(
        &mut self,
        isa: I,
        to_log2: f32,
        reach: &Reach<NQ>,
        scores: &mut [f32],
    ) {
        isa.vectorize(
            #[inline(always)]
            || self.push_inlined(isa, to_log2, reach, scores),
        );
    }

    #[inline(always)]
    fn push_inlined<I: Isa, const NQ: usize>(&mut self, isa: I, to_log2: f32, reach: &Reach<NQ>, scores: &mut [f32]) {
        let (c, none, zero) = (isa.splat(to_log2), isa.splat(f32::NEG_INFINITY), isa.splat(0.0));
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
        let mut against = [zero; NQ];
        for n in 0..NQ {
            let max = isa.max(maxima[0][n], maxima[1][n]);
            isa.store(max, &mut self.max[n * I::LANES..]);
            against[n] = isa.select(isa.eq(max, none), zero, max);
            let factor = exp2(isa, isa.mul(isa.sub(old[n], against[n]), c));
            isa.store(factor, &mut self.factor[n * I::LANES..]);
        }

        let mut sums = [zero; NQ];
        reach.runs(
            #[inline(always)]
            |keys, front, back| {
                let rows = &mut scores[keys.start * width..keys.end.max(keys.start) * width];
                with_vectors!(front, back, NQ, FRONT, BACK =>
                    weigh::<I, NQ, FRONT, BACK>(isa, rows, &against, c, &mut sums));
            },
        );
        for n in 0..NQ {
            let at = n * I::LANES;
            let sum = isa.mul_add(isa.load(&self.sum[at..]), isa.load(&self.factor[at..]), sums[n]);
            isa.store(sum, &mut self.sum[at..]);
        }
    }
}

/// Largest scores of some keys, for all vectors but FRONT at the front and BACK at the back, in two chains (even and odd keys): one would wait for itself.
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
#[inline(always)]
fn weigh<I: Isa, const NQ: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    scores: &mut [f32],
    against: &[I::F; NQ],
    c: I::F,
    sums: &mut [I::F; NQ],
) {
    for row in scores.chunks_exact_mut(NQ * I::LANES) {
        let mut y = [isa.splat(0.0); NQ];
        for n in FRONT..NQ - BACK {
            y[n] = isa.mul(isa.sub(isa.load(&row[n * I::LANES..]), against[n]), c);
        }
        let p = crate::math::exp2_each(isa, y);
        for n in FRONT..NQ - BACK {
            isa.store(p[n], &mut row[n * I::LANES..]);
            sums[n] = isa.add(sums[n], p[n]);
        }
    }
}
