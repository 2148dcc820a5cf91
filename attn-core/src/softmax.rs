//! The softmax of a row as a running state: take scores one by one or tile by tile, merge parts, finish.
//!
//! Numerators and denominator are relative to the largest score so far, `sum = Σ exp(sⱼ − max)`, so that nothing
//! overflows; a larger score rescales them (Milakov & Gimelshein 2018, arXiv 1805.02867). States of disjoint keys merge
//! in any grouping (the monoid behind split-KV decoding).

use crate::element::Real;

/// Maximum and sum of the scores of a row so far.
///
/// ```
/// use attn_core::softmax::RowState;
/// let scores = [0.5f64, 2.0, -1.0];
/// let mut state = RowState::new();
/// let mut output = 0.0; // Σ weight · value, values being 10, 20, 30
/// for (score, value) in scores.into_iter().zip([10.0, 20.0, 30.0]) {
///     let step = state.push(score);
///     output = output * step.rescale + step.weight * value;
/// }
/// output *= state.finish();
/// let sum: f64 = scores.iter().map(|s| s.exp()).sum();
/// let expected = (0.5f64.exp() * 10.0 + 2f64.exp() * 20.0 + (-1f64).exp() * 30.0) / sum;
/// assert!((output - expected).abs() < 1e-12 && (state.lse() - sum.ln()).abs() < 1e-12);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowState<R> {
    /// The largest score seen; −∞ before the first.
    pub max: R,
    /// `Σ exp(sⱼ − max)`.
    pub sum: R,
}

/// What one score does to a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Push<R> {
    /// Factor on the outputs accumulated before this score.
    pub rescale: R,
    /// Factor on this score's value.
    pub weight: R,
}

impl<R: Real> RowState<R> {
    /// No score yet.
    pub const fn new() -> Self {
        Self { max: R::NEG_INFINITY, sum: R::ZERO }
    }

    /// Takes one score. A score of −∞ has weight 0, one of +∞ or NaN makes the row NaN.
    #[inline]
    pub fn push(&mut self, score: R) -> Push<R> {
        if score == R::NEG_INFINITY {
            return Push { rescale: R::ONE, weight: R::ZERO };
        }
        let mut rescale = R::ONE;
        if score <= self.max {
            // The usual case: nothing to rescale.
        } else {
            let max = self.max.max_nan(score);
            rescale = if self.max == R::NEG_INFINITY { R::ZERO } else { (self.max - max).exp() };
            self.sum *= rescale;
            self.max = max;
        }
        let weight = (score - self.max).exp();
        self.sum += weight;
        Push { rescale, weight }
    }

    /// Joins the state of other keys of the same row. Returns the factors on this state's and on the other's
    /// accumulated outputs; their weighted sum belongs to the joined state.
    #[inline]
    pub fn merge(&mut self, other: Self) -> (R, R) {
        if other.sum == R::ZERO {
            return (R::ONE, R::ZERO);
        }
        if self.sum == R::ZERO {
            *self = other;
            return (R::ZERO, R::ONE);
        }
        let max = self.max.max_nan(other.max);
        let (a, b) = ((self.max - max).exp(), (other.max - max).exp());
        self.sum = self.sum * a + other.sum * b;
        self.max = max;
        (a, b)
    }

    /// The factor of the accumulated output: `1/sum`, and 0 for a row that sees nothing.
    #[inline]
    pub fn finish(&self) -> R {
        if self.sum == R::ZERO { R::ZERO } else { R::ONE / self.sum }
    }

    /// `ln Σ exp(sⱼ)`; −∞ for a row that saw nothing.
    #[inline]
    pub fn lse(&self) -> R {
        if self.sum == R::ZERO { R::NEG_INFINITY } else { self.max + self.sum.ln() }
    }
}

impl<R: Real> Default for RowState<R> {
    fn default() -> Self {
        Self::new()
    }
}
