//! The streaming softmax of one tile, where lanes are keys: new maxima, factors of earlier sums, weights from scores.
//!
//! The steps are those of the [prefill kernel](crate::prefill::softmax), row by row. Only the maximum needs an
//! operation across lanes, once per row and tile. Sums stay in lanes until a chunk ends.

use crate::gemv::TILE;
use crate::isa::{Isa, MAX_LANES};
use crate::math::{add_compensated, exp2, finite_or_zero};

/// The running state of some rows.
pub(super) struct State<'w> {
    /// Largest score so far: `[rows]`.
    pub(super) max: &'w mut [f32],
    /// Sums of the weights so far, relative to `max`: `[rows][LANES]`.
    pub(super) sums: &'w mut [f32],
    /// What rounding took from the sums.
    pub(super) rest: &'w mut [f32],
}

impl State<'_> {
    /// Forgets all scores.
    pub(super) fn reset(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sums.fill(0.0);
        self.rest.fill(0.0);
    }

    /// Turns the scores of one tile, `s[row][key]`, into weights, and adds them up. Hidden scores are −∞; `keys` is the
    /// number of keys, rounded up to whole vectors. Writes the factors of earlier sums and outputs: `[rows]`, rounded
    /// up to whole vectors.
    #[inline(always)]
    pub(super) fn push<I: Isa>(
        &mut self,
        isa: I,
        log2_scale: f32,
        (rows, keys): (usize, usize),
        factor: &mut [f32],
        s: &mut [f32],
    ) {
        let lanes = I::LANES;
        let mut base = [0.0f32; super::MAX_ROWS];
        for r in 0..rows {
            let row = &s[r * TILE..][..keys];
            let mut top = isa.splat(f32::NEG_INFINITY);
            for x in row.chunks_exact(lanes) {
                top = isa.max(isa.load(x), top);
            }
            let (top, old) = (isa.max_across(top), self.max[r]);
            // Not `f32::max`: a NaN score must not change the maximum. Its weight becomes NaN.
            let max = if top > old { top } else { old };
            self.max[r] = max;
            base[r] = if max == f32::NEG_INFINITY { 0.0 } else { max };
            factor[r] = old - base[r];
        }
        let c = isa.splat(log2_scale);
        let padded = rows.next_multiple_of(lanes);
        // Without this, each tile would take the power of the factors in these lanes again, until they are infinite.
        factor[rows..padded].fill(0.0);
        for x in factor[..padded].chunks_exact_mut(lanes) {
            isa.store(exp2(isa, isa.mul(isa.load(x), c)), x);
        }
        for r in 0..rows {
            let (row, top) = (&mut s[r * TILE..][..keys], isa.splat(base[r]));
            let mut sum = isa.splat(0.0);
            // Adding up to four equal numbers has no rounding error.
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
            let factor = Some(isa.splat(factor[r]));
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
