//! The softmax of a row as a running state, in integers.
//!
//! [`RowState`](crate::softmax::RowState) keeps weights relative to the largest score: a larger one rescales those
//! before it by `exp(old − new)`. Here scores are in log2 units, and weights are relative to a **whole** power of two
//! that is at least the largest, so that rescaling is a shift. Nothing is multiplied, and at most one unit in the last
//! place is lost however often it happens (each shift halves what the ones before it lost). The same shift keeps the
//! accumulators inside 32 bits: if the weights add up to more than `2²³`, the reference is raised by one.
//!
//! ```text
//! score       t  = log2(e)·scale·s_q·s_k · Σ(q − z_q)(k − z_k)        units of 2⁻¹⁶
//! reference   e  ≥ max t, a whole number
//! weight      w  = 2^(t − e)                                          units of 2⁻²²
//! sum         Σw ≤ 2²³;     acc_d = Σ w·v_d ≤ 2⁷·2²³ = 2³⁰
//! output      o_d = s_v·(acc_d − z_v·Σw)/Σw
//! ```

use super::exp2::{FRACTION_BITS, ONE_BITS, exp2_neg};
use super::rescale::Rescale;

/// Scores are clipped to this on either side, `2¹⁴` in log2 units (11 356 in natural ones), so that no difference of
/// two overflows.
const LARGEST_SCORE: i32 = 1 << 30;

/// The weights of a row may add up to this.
const LARGEST_SUM: u32 = 1 << (ONE_BITS + 1);

/// Reference exponent and sum of a row so far.
///
/// ```
/// use attn_core::int8::IntState;
/// let mut state = IntState::new();
/// let mut output = 0; // Σ weight · value, values being 30, −50, 70
/// for (score, value) in [1 << 16, 2 << 16, 0].into_iter().zip([30, -50, 70]) {
///     let step = state.push(score); // 2¹, 2², 2⁰
///     output = step.rescaled(output) + step.weight as i32 * value;
/// }
/// let mean = output / state.sum() as i32;
/// assert_eq!(mean, (2 * 30 - 4 * 50 + 70) / (2 + 4 + 1));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct IntState {
    exponent: i32,
    sum: u32,
}

/// What one score does to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IntPush {
    /// Bits by which what was accumulated before this score goes down; see [`IntPush::rescaled`].
    pub shift: u32,
    /// Factor on this score's value, at most `2²²`.
    pub weight: u32,
}

impl IntPush {
    /// An accumulated number after the shift, rounded to nearest.
    #[inline]
    pub const fn rescaled(&self, x: i32) -> i32 {
        match self.shift {
            0 => x,
            1..32 => (x >> self.shift) + (x >> (self.shift - 1) & 1),
            _ => 0,
        }
    }
}

impl IntState {
    /// No score yet.
    pub const fn new() -> Self {
        Self { exponent: 0, sum: 0 }
    }

    /// The sum of the weights so far, at most `2²³`; 0 only before the first score.
    pub const fn sum(&self) -> u32 {
        self.sum
    }

    /// The power of two that a weight of `2²²` means.
    pub const fn exponent(&self) -> i32 {
        self.exponent
    }

    /// Takes one score, in log2 units of `2⁻¹⁶`; beyond ±2³⁰ it is clipped.
    #[inline]
    pub fn push(&mut self, score: i32) -> IntPush {
        let score = score.clamp(-LARGEST_SCORE, LARGEST_SCORE);
        let needed = (score + 0xffff) >> FRACTION_BITS; // rounded up
        let mut shift = 0;
        if self.sum == 0 {
            self.exponent = needed;
        } else if needed > self.exponent {
            shift = needed.abs_diff(self.exponent);
            self.exponent = needed;
            self.sum = shifted(self.sum, shift);
        }
        // Not negative, and below 2³²: the exponent exceeds the largest score by the number of keys' logarithm at most.
        let below = ((self.exponent << FRACTION_BITS) as u32).wrapping_sub(score as u32);
        let mut weight = exp2_neg(below);
        if self.sum + weight > LARGEST_SUM {
            shift += 1;
            self.exponent += 1;
            self.sum = shifted(self.sum, 1);
            weight = exp2_neg(below.saturating_add(1 << FRACTION_BITS));
        }
        self.sum += weight;
        IntPush { shift, weight }
    }

    /// The factor of the accumulated output: `factor/sum`, and 0 for a row that sees nothing.
    pub(super) fn finish(&self, factor: Rescale) -> Rescale {
        factor.over(self.sum)
    }
}

/// A sum of weights after a shift, rounded to nearest.
#[inline]
const fn shifted(sum: u32, shift: u32) -> u32 {
    if shift > 31 { 0 } else { (sum >> shift) + (sum >> (shift - 1) & 1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Weights and sum by the definition, in f64, relative to the state's own exponent.
    fn check(scores: &[i32], bound: f64) {
        let mut state = IntState::new();
        let mut acc = 0;
        let values: Vec<i32> = (0..scores.len()).map(|i| (i as i32 * 37) % 256 - 128).collect();
        for (&score, &value) in scores.iter().zip(&values) {
            let step = state.push(score);
            acc = step.rescaled(acc) + step.weight as i32 * value;
            assert!(state.sum() <= LARGEST_SUM && step.weight <= 1 << ONE_BITS);
            assert!(acc.unsigned_abs() <= 128 * state.sum() + 256, "acc {acc}, sum {}", state.sum());
        }
        let max = scores.iter().max().copied().map_or(0.0, f64::from);
        let weight = |s: &i32| ((f64::from(*s) - max) / 65536.0).exp2();
        let sum: f64 = scores.iter().map(weight).sum();
        let exact = scores.iter().zip(&values).map(|(s, &v)| weight(s) * f64::from(v)).sum::<f64>() / sum;
        let got = f64::from(acc) / f64::from(state.sum());
        assert!((got - exact).abs() <= 255.0 * bound, "{} scores: {got} against {exact}", scores.len());
        // The sum itself, by its logarithm.
        let log = f64::from(state.sum()).log2() - f64::from(ONE_BITS) + f64::from(state.exponent());
        assert!((log - (sum.log2() + max / 65536.0)).abs() <= 2.0 * bound + 1e-6, "{log}");
    }

    #[test]
    fn sums_and_means_are_those_of_the_definition() {
        let wave = |n: usize, size: f64| (0..n).map(|i| ((i as f64 * 0.7).sin() * size) as i32).collect::<Vec<_>>();
        // Miri takes hundreds of times as long, and looks for something else.
        let most = if cfg!(miri) { 10 } else { 1000 };
        for n in [1, 2, 3, 10, 100, 1000].into_iter().filter(|&n| n <= most) {
            for size in [0.0, 1e3, 1e5, 1e6, 1e9] {
                let bound = 2e-6 + n as f64 / f64::from(LARGEST_SUM);
                let scores = wave(n, size);
                check(&scores, bound);
                let mut sorted = scores;
                sorted.sort_unstable();
                check(&sorted, bound); // the reference rises all the way
                sorted.reverse();
                check(&sorted, bound);
            }
        }
    }

    #[test]
    fn the_ends_of_the_range_are_met() {
        let mut state = IntState::new();
        assert_eq!(state.push(i32::MIN), IntPush { shift: 0, weight: 1 << 22 });
        let step = state.push(i32::MAX);
        assert_eq!((step.weight, step.rescaled(i32::MAX), state.sum()), (1 << 22, 0, 1 << 22));
        assert_eq!(state.push(i32::MIN), IntPush { shift: 0, weight: 0 });
        // Many equal scores at the upper end: the reference rises beyond it.
        for _ in 0..100 {
            state.push(i32::MAX);
        }
        assert!(state.exponent() > LARGEST_SCORE >> FRACTION_BITS);
        assert_eq!(state.push(i32::MIN).weight, 0);
    }
}
