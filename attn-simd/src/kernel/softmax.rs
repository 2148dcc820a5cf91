//! The streaming softmax of one tile: new maximum, factor on what came before, scores become weights, sums grow.
//!
//! Weights are relative to a reference: the largest score of the first tile that a row sees. Where a later score is larger, the reference
//! goes to it, or as far as halves all weights if that is farther. So it moves once per factor 2 at most, and scores that rise a little
//! with every tile do not round what has been summed up as often as there are tiles.
//!
//! Each lane is a row, so everything is vertical. A row that has seen nothing yet has the maximum −∞ and is exponentiated
//! against 0 instead, which gives weights of 0; its factor is 0 as well, and there is nothing to multiply by it. The
//! difference is taken before it is multiplied by the scale, so that the largest score of the first tile has the weight 1 exactly
//! however large it is.

use crate::isa::Isa;
use crate::isa::product::{HALF, PART, Reach, with_vectors};
use crate::math::exp2;

/// Running state of a block: one lane per row.
pub(crate) struct State<'w> {
    /// What weights are relative to: the largest score so far, or more.
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

    /// Takes the scores of one tile, `s[key][query]`, which become weights as far as each vector reaches. The first key is the `phase`-th
    /// of its tile.
    #[inline(never)]
    pub(crate) fn push<I: Isa, const NQ: usize>(
        &mut self,
        isa: I,
        to_log2: f32,
        reach: (usize, &Reach<NQ>),
        scores: &mut [f32],
    ) {
        isa.vectorize(
            #[inline(always)]
            || self.push_inlined(isa, to_log2, reach, scores),
        );
    }

    #[inline(always)]
    fn push_inlined<I: Isa, const NQ: usize>(
        &mut self,
        isa: I,
        to_log2: f32,
        (phase, reach): (usize, &Reach<NQ>),
        scores: &mut [f32],
    ) {
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
        let ahead = isa.splat(ahead(to_log2));
        for n in 0..NQ {
            let largest = isa.max(maxima[0][n], maxima[1][n]);
            let max = isa.select(isa.eq(largest, old[n]), old[n], isa.max(largest, isa.add(old[n], ahead)));
            isa.store(max, &mut self.max[n * I::LANES..]);
            against[n] = isa.select(isa.eq(max, none), zero, max);
            let factor = exp2(isa, isa.mul(isa.sub(old[n], against[n]), c));
            isa.store(factor, &mut self.factor[n * I::LANES..]);
        }

        let mut sums = Sums { part: [zero; NQ], halves: [[zero; NQ]; 2] };
        reach.runs(
            #[inline(always)]
            |keys, front, back| {
                let mut from = keys.start;
                while from < keys.end {
                    let to = keys.end.min(from + PART - (phase + from) % PART);
                    let rows = &mut scores[from * width..to * width];
                    with_vectors!(front, back, NQ, FRONT, BACK =>
                        weigh::<I, NQ, FRONT, BACK>(isa, rows, &against, c, &mut sums.part));
                    if (phase + to).is_multiple_of(PART) {
                        sums.end_part(isa, (phase + to - 1) / (PART * HALF));
                    }
                    from = to;
                }
            },
        );
        sums.end_part(isa, (phase + scores.len() / width).saturating_sub(1) / (PART * HALF));
        for n in 0..NQ {
            let (at, sum) = (n * I::LANES, isa.add(sums.halves[0][n], sums.halves[1][n]));
            let sum = isa.mul_add(isa.load(&self.sum[at..]), isa.load(&self.factor[at..]), sum);
            isa.store(sum, &mut self.sum[at..]);
        }
    }
}

/// How far a reference that has to follow the scores goes ahead of where it was, at least: a factor 2 of all weights.
#[inline(always)]
fn ahead(to_log2: f32) -> f32 {
    let ahead = 1.0 / to_log2;
    if ahead.is_finite() { ahead } else { 0.0 }
}

/// Sums of weights of a tile, in the order of the [products](crate::isa::product::PART): parts, halves, both.
struct Sums<F, const NQ: usize> {
    part: [F; NQ],
    halves: [[F; NQ]; 2],
}

impl<F: Copy, const NQ: usize> Sums<F, NQ> {
    /// Adds a part to its half.
    #[inline(always)]
    fn end_part<I: Isa<F = F>>(&mut self, isa: I, half: usize) {
        for (sum, part) in self.halves[half.min(1)].iter_mut().zip(&mut self.part) {
            *sum = isa.add(*sum, *part);
            *part = isa.splat(0.0);
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
