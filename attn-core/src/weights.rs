//! Rows and heads of the attention weights, recomputed from the log-sum-exp of any engine.
//!
//! No streaming engine ever has the weight matrix; it has one number per row, `lse = ln Σⱼ exp(sⱼ)`. That is enough: a
//! weight is `wⱼ = exp(sⱼ − lse)`, so that any row costs one dot product per key and no second pass (FlashAttention's
//! backward uses the same identity, arXiv 2205.14135, §3.1). Masks, bias, soft-cap, mods, sinks and dropout are
//! those of the options; a hidden key has weight exactly 0, and a row that saw nothing (`lse = −∞`) is all zeros.
//!
//! The score is computed in `f64`. The given lse limits the accuracy of the weights: its absolute error is their
//! relative error. With sinks a row sums to less than 1; the sink has the rest.
//!
//! ```
//! use attn_core::weights::{self, RowAt};
//! use attn_core::{Attention, Outputs, View, ViewMut, streaming};
//! let (q, k, v) = ([1.0f32, 0.0], [1.0f32, 0.0, 0.0, 1.0], [10.0f32, 20.0]);
//! let (q, k, v) = (View::matrix(&q, 1, 2)?, View::matrix(&k, 2, 2)?, View::matrix(&v, 2, 1)?);
//! let (mut out, mut lse) = ([0.0f32; 1], [0.0f32; 1]);
//! let outputs = Outputs::new(ViewMut::matrix(&mut out, 1, 1)?).lse(&mut lse);
//! streaming::forward(&Attention::new(), q, k, v, outputs, &mut [0.0])?;
//!
//! let mut w = [0.0f32; 2];
//! weights::row(&Attention::new(), q, k, RowAt { batch: 0, head: 0, query: 0 }, &lse, &mut w)?;
//! assert!((w[0] + w[1] - 1.0).abs() < 1e-6);
//! assert!((w[0] * 10.0 + w[1] * 20.0 - out[0]).abs() < 1e-5); // the weights explain the output
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::options::Attention;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::view::View;

/// Which row of the weight matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RowAt {
    /// Index of the sequence in the batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query.
    pub query: usize,
}

/// One row of the weights after softmax and dropout, as [`Outputs::weights`](crate::Outputs) holds it.
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, `k`: `[batch, kv_heads, kv_len, head_dim]`, `lse`: what an engine wrote
/// for the same options, `[batch, q_heads, q_len]`. Writes `out`, `[kv_len]`.
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Index`] if `at` is outside.
pub fn row<T: Element, R: Real, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    at: RowAt,
    lse: &[R],
    out: &mut [R],
) -> Result<()> {
    Call::new(attn, q, k, lse, Dropping::Applied)?.row(at, out)
}

/// As [`row`], but before dropout: the softmax's own weights.
///
/// # Errors
/// As [`row`].
pub fn row_before_dropout<T: Element, R: Real, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    at: RowAt,
    lse: &[R],
    out: &mut [R],
) -> Result<()> {
    Call::new(attn, q, k, lse, Dropping::Ignored)?.row(at, out)
}

/// All rows of one head, after softmax and dropout. `at.query` is not read; `out` is `[q_len, kv_len]`, row-major.
///
/// # Errors
/// As [`row`].
///
/// ```
/// use attn_core::weights::{self, RowAt};
/// use attn_core::{Attention, View};
/// let x = [0.0f32; 6]; // three tokens of dim 2, all alike: every score is 0, every lse ln 3
/// let x = View::matrix(&x, 3, 2)?;
/// let mut out = [0.0f64; 9];
/// weights::head(&Attention::new(), x, x, RowAt::default(), &[3f64.ln(); 3], &mut out)?;
/// assert!(out.iter().all(|w| (w - 1.0 / 3.0).abs() < 1e-15));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn head<T: Element, R: Real, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    at: RowAt,
    lse: &[R],
    out: &mut [R],
) -> Result<()> {
    Call::new(attn, q, k, lse, Dropping::Applied)?.head(at, out)
}

/// As [`head`], but before dropout.
///
/// # Errors
/// As [`row`].
pub fn head_before_dropout<T: Element, R: Real, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    at: RowAt,
    lse: &[R],
    out: &mut [R],
) -> Result<()> {
    Call::new(attn, q, k, lse, Dropping::Ignored)?.head(at, out)
}

/// Whether the options' dropout takes part.
#[derive(Clone, Copy, PartialEq)]
enum Dropping {
    Applied,
    Ignored,
}

/// A checked request.
struct Call<'c, 'p, 'a, T, R, M> {
    problem: Problem<'p, 'a, M>,
    q: View<'c, T>,
    k: View<'c, T>,
    lse: &'c [R],
    dropping: Dropping,
}

impl<'c, 'p, 'a, T: Element, R: Real, M: Mods> Call<'c, 'p, 'a, T, R, M> {
    fn new(
        attn: &'p Attention<'a, M>,
        q: View<'c, T>,
        k: View<'c, T>,
        lse: &'c [R],
        dropping: Dropping,
    ) -> Result<Self> {
        // Weights do not depend on the values; those of one element a key have every shape that fits.
        let [batch, kv_heads, kv_len, _] = k.sizes();
        let problem = Problem::new(attn, q.sizes(), k.sizes(), [batch, kv_heads, kv_len, 1])?;
        AttnError::check_size("lse (batch · q_heads · q_len)", problem.shape().rows(), lse.len())?;
        Ok(Self { problem, q, k, lse, dropping })
    }

    fn check_head(&self, at: RowAt) -> Result<AttnShape> {
        let shape = *self.problem.shape();
        for (what, value, limit) in [("row batch", at.batch, shape.batch), ("row head", at.head, shape.q_heads)] {
            if value >= limit {
                return Err(AttnError::Index { what, at: 0, value, limit });
            }
        }
        Ok(shape)
    }

    fn row(&self, at: RowAt, out: &mut [R]) -> Result<()> {
        let shape = self.check_head(at)?;
        if at.query >= shape.q_len {
            return Err(AttnError::Index { what: "row query", at: 0, value: at.query, limit: shape.q_len });
        }
        AttnError::check_size("weights row (kv_len)", shape.kv_len, out.len())?;
        self.write(at, out);
        Ok(())
    }

    fn head(&self, at: RowAt, out: &mut [R]) -> Result<()> {
        let shape = self.check_head(at)?;
        let Some(len) = shape.q_len.checked_mul(shape.kv_len) else {
            return Err(AttnError::Overflow { what: "q_len · kv_len" });
        };
        AttnError::check_size("weights of a head (q_len · kv_len)", len, out.len())?;
        for (query, row) in out.chunks_exact_mut(shape.kv_len.max(1)).enumerate() {
            self.write(RowAt { query, ..at }, row);
        }
        Ok(())
    }

    fn write(&self, RowAt { batch, head, query }: RowAt, out: &mut [R]) {
        out.fill(R::ZERO);
        let shape = self.problem.shape();
        let lse = self.lse.get(shape.row(batch, head, query)).map_or(f64::NEG_INFINITY, |lse| lse.to_f64());
        if lse == f64::NEG_INFINITY {
            return; // nothing visible, or nothing with a weight
        }
        let q_row = self.q.row(batch, head, query);
        let dropout = &self.problem.attn().dropout;
        self.problem.for_each_visible(batch, head, query, |at| {
            let k_row = self.k.row(batch, shape.kv_head(head), at.key);
            let dot: f64 = q_row.iter().zip(k_row.iter()).map(|(q, k)| q.to_f64() * k.to_f64()).sum();
            let weight = Real::exp(self.problem.score(dot, at) - lse);
            let applied = self.dropping == Dropping::Applied && !dropout.is_none();
            let factor = if applied { self.problem.dropout_factor(at) } else { 1.0 };
            if let Some(slot) = out.get_mut(at.key) {
                *slot = R::of(weight * factor);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dropout::Dropout;
    use crate::position::alibi::Alibi;
    use crate::score::At;
    use crate::{Align, Mask, Outputs, ViewMut, reference, streaming};
    use std::vec;
    use std::vec::Vec;

    fn numbers(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| libm::sin(seed + i as f64 * 1.7)).collect()
    }

    /// Weights of every row and head against those that the reference gives, under every option at once.
    #[test]
    fn rows_are_the_references_weights() {
        let (q, k, v) = (numbers(2 * 4 * 3 * 5, 0.1), numbers(2 * 2 * 6 * 5, 0.2), numbers(2 * 2 * 6 * 2, 0.3));
        let q = View::new(&q, crate::Layout::Bhsd, [2, 4, 3, 5]).unwrap();
        let k = View::new(&k, crate::Layout::Bhsd, [2, 2, 6, 5]).unwrap();
        let v = View::new(&v, crate::Layout::Bhsd, [2, 2, 6, 2]).unwrap();
        let bias = numbers(6, 0.7);
        let (sinks, slopes) = ([0.5f32, -1.0, 0.0, 2.0], [0.5f32, 0.25, 0.125, 0.0625]);
        let attn = Attention::new()
            .softcap(2.0)
            .temperature(1.5)
            .bias(View::broadcast(&bias, &[6]).unwrap())
            .alibi(Alibi { slopes: &slopes, align: Align::BottomRight })
            .sinks(&sinks)
            .mask(Mask::causal(Align::BottomRight))
            .mask_mod(|at: At| at.key != 1)
            .dropout(Dropout::Seeded { p: 0.4, seed: 3 });
        let (mut out, mut lse, mut weights) = (vec![0.0f64; 48], vec![0.0f64; 24], vec![0.0f64; 144]);
        let outputs = Outputs::new(ViewMut::new(&mut out, crate::Layout::Bhsd, [2, 4, 3, 2]).unwrap());
        let outputs = outputs.lse(&mut lse).weights(&mut weights);
        reference::forward(&attn, q, k, v, outputs, &mut [0.0; 6]).unwrap();

        let undropped = Attention { dropout: Dropout::None, ..attn };
        for batch in 0..2 {
            for head in 0..4 {
                let at = RowAt { batch, head, query: 0 };
                let mut whole = [0.0f64; 18];
                super::head(&attn, q, k, at, &lse, &mut whole).unwrap();
                for query in 0..3 {
                    let (mut row, mut kept, mut other) = ([9.0f64; 6], [9.0f64; 6], [9.0f64; 6]);
                    let at = RowAt { query, ..at };
                    super::row(&attn, q, k, at, &lse, &mut row).unwrap();
                    row_before_dropout(&attn, q, k, at, &lse, &mut kept).unwrap();
                    super::row(&undropped, q, k, at, &lse, &mut other).unwrap();
                    assert_eq!(kept, other);
                    assert_eq!(row[..], whole[query * 6..][..6]);
                    let start = ((batch * 4 + head) * 3 + query) * 6;
                    for (got, want) in row.iter().zip(&weights[start..]) {
                        assert!((got - want).abs() < 1e-14, "{got} {want}");
                    }
                    assert_eq!(row[1], 0.0); // hidden by the closure
                }
            }
        }
        assert!(weights.contains(&0.0) && weights.iter().any(|&w| w > 0.0));
    }

    #[test]
    fn a_row_that_saw_nothing_is_zero() {
        let x = [f32::NAN, 1.0];
        let x = View::matrix(&x, 2, 1).unwrap();
        let (mut out, mut lse) = ([0.0f32; 2], [0.0f32; 2]);
        let attn = Attention::new().mask(Mask::kv_lens(&[0]));
        let outputs = Outputs::new(ViewMut::matrix(&mut out, 2, 1).unwrap()).lse(&mut lse);
        streaming::forward(&attn, x, x, x, outputs, &mut [0.0]).unwrap();
        let mut row = [5.0f32; 2];
        super::row(&attn, x, x, RowAt::default(), &lse, &mut row).unwrap();
        assert_eq!((lse, row), ([f32::NEG_INFINITY; 2], [0.0; 2]));
        // Visible keys whose scores are all −∞ say the same.
        let attn = Attention::new().score_mod(|_, _| f64::NEG_INFINITY);
        super::row(&attn, x, x, RowAt::default(), &lse, &mut row).unwrap();
        assert_eq!(row, [0.0; 2]);
    }

    #[test]
    fn what_does_not_fit_is_refused_before_writing() {
        let x = [0.0f32; 4];
        let x = View::matrix(&x, 2, 2).unwrap();
        let attn = Attention::new();
        let mut out = [7.0f32; 2];
        let at = |batch, head, query| RowAt { batch, head, query };
        let mut refused = |at, lse: &[f32]| row(&attn, x, x, at, lse, &mut out).unwrap_err();
        assert_eq!(refused(at(0, 0, 2), &[0.0; 2]), AttnError::Index { what: "row query", at: 0, value: 2, limit: 2 });
        assert_eq!(refused(at(0, 1, 0), &[0.0; 2]), AttnError::Index { what: "row head", at: 0, value: 1, limit: 1 });
        assert_eq!(refused(at(1, 0, 0), &[0.0; 2]), AttnError::Index { what: "row batch", at: 0, value: 1, limit: 1 });
        assert!(matches!(refused(at(0, 0, 0), &[0.0; 3]), AttnError::Size { .. }));
        assert!(row(&attn, x, x, at(0, 0, 0), &[0.0; 2], &mut [0.0f32; 3]).is_err());
        assert!(head(&attn, x, x, at(0, 0, 0), &[0.0; 2], &mut [0.0f32; 3]).is_err());
        assert_eq!(out, [7.0; 2]);
    }
}
