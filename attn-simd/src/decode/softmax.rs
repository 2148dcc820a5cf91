//! The streaming softmax of one tile where lanes are keys: new maxima, factors on what came before, scores become
//! weights.
//!
//! The same steps as in the [prefill kernel](crate::prefill::softmax), row by row: only the maximum is needed across
//! lanes, once per row and tile. Sums stay in lanes until a chunk of keys ends.

use crate::gemv::TILE;
use crate::isa::{Isa, MAX_LANES};
use crate::math::{add_compensated, exp2, finite_or_zero};

/// Running state of some rows.
pub(super) struct State<'w> {
    /// Largest score so far: `[rows]`.
    pub(super) max: &'w mut [f32],
    /// What the last tile multiplied earlier sums and outputs by: `[rows]`, rounded up to whole vectors.
    pub(super) factor: &'w mut [f32],
    /// Sums of the weights so far, relative to `max`: `[rows][LANES]`.
    pub(super) sums: &'w mut [f32],
    /// What the sums have lost to rounding.
    pub(super) rest: &'w mut [f32],
}

impl State<'_> {
    /// No score yet.
    pub(super) fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sums.fill(0.0);
        self.rest.fill(0.0);
    }

    /// Takes the scores of one tile, `s[row][key]`, which become weights. Hidden scores are −∞; `keys` is the number of
    /// keys rounded up to whole vectors.
    #[inline(always)]
    pub(super) fn push<I: Isa>(&mut self, isa: I, log2_scale: f32, rows: usize, keys: usize, s: &mut [f32]) {
        let lanes = I::LANES;
        let mut base = [0.0f32; super::MAX_ROWS];
        for r in 0..rows {
            let row = &s[r * TILE..][..keys];
            let mut top = isa.splat(f32::NEG_INFINITY);
            for x in row.chunks_exact(lanes) {
                top = isa.max(isa.load(x), top);
            }
            let (top, old) = (isa.max_across(top), self.max[r]);
            // Not `f32::max`: a NaN is left to the weights, which become NaN by it.
            let max = if top > old { top } else { old };
            self.max[r] = max;
            base[r] = if max == f32::NEG_INFINITY { 0.0 } else { max };
            self.factor[r] = old - base[r];
        }
        let c = isa.splat(log2_scale);
        let padded = rows.next_multiple_of(lanes);
        // Else these lanes would be raised to powers of themselves, until they are infinite.
        self.factor[rows..padded].fill(0.0);
        for x in self.factor[..padded].chunks_exact_mut(lanes) {
            isa.store(exp2(isa, isa.mul(isa.load(x), c)), x);
        }
        for r in 0..rows {
            let (row, top) = (&mut s[r * TILE..][..keys], isa.splat(base[r]));
            let mut sum = isa.splat(0.0);
            // Four equal numbers are added up without an error.
            for vectors in row.chunks_mut(4 * lanes) {
                let mut part = isa.splat(0.0);
                for x in vectors.chunks_exact_mut(lanes) {
                    let p = exp2(isa, isa.mul(isa.sub(isa.load(x), top), c));
                    isa.store(p, x);
                    part = isa.add(part, p);
                }
                sum = isa.add(sum, part);
            }
            let (sums, rest) = (&mut self.sums[r * lanes..][..lanes], &mut self.rest[r * lanes..][..lanes]);
            let factor = Some(isa.splat(self.factor[r]));
            let (sum, missing) = add_compensated(isa, (isa.load(sums), isa.load(rest)), factor, sum);
            isa.store(sum, sums);
            isa.store(finite_or_zero(isa, missing), rest);
        }
    }

    /// Maximum and sum of one row.
    #[inline(always)]
    pub(super) fn of_row<I: Isa>(&self, r: usize) -> (f32, f32) {
        let mut lanes = [0.0f32; MAX_LANES];
        lanes[..I::LANES].copy_from_slice(&self.sums[r * I::LANES..][..I::LANES]);
        lanes.iter_mut().zip(&self.rest[r * I::LANES..][..I::LANES]).for_each(|(x, rest)| *x += rest);
        let mut half = I::LANES / 2;
        while half > 0 {
            for n in 0..half {
                lanes[n] += lanes[n + half];
            }
            half /= 2;
        }
        (self.max[r], lanes[0])
    }
}
