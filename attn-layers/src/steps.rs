//! The textbook steps one by one, to learn or to check: scores, scaling and masking, softmax, weighted sum.
//!
//! The engines store no intermediate matrix; here a caller can read each of them. Each step reads and writes
//! tensors of the caller, computes in `f64` and rounds once to the tensor's type, O(q_len · kv_len) memory and all:
//!
//! | step | formula | result |
//! |---|---|---|
//! | [`scores`] | `q·kᵀ` | `[batch, q_heads, q_len, kv_len]` |
//! | [`scaled_scores`] | `scale·q·kᵀ` | same |
//! | [`capped_scores`] | `c·tanh(scale·q·kᵀ/c)`, if a soft-cap is set | same |
//! | [`masked_scores`] | all changes of a score by the options; −∞ where masked | same |
//! | [`softmax`], [`softmax_with_sinks`] | `exp(sⱼ − max)/Σ exp(sⱼ − max)` of each row | same, in place |
//! | [`dropout`] | `w·keep/(1 − p)`, if dropout is set | same, in place |
//! | [`weighted_sum`] | `weights·v` | `[batch, q_heads, q_len, value_dim]` |
//!
//! Together they are [`reference::forward`](attn_core::reference::forward) (Vaswani et al. 2017, arXiv 1706.03762,
//! eq. 1).
//! The [worked example](crate::worked_example), from embeddings to context vectors:
//!
//! ```
//! use attn_layers::worked_example as cat;
//! use attn_core::{Align, Attention, Mask, View, ViewMut};
//! use attn_layers::steps;
//!
//! /// Whether every value agrees with the published one to four decimals.
//! fn agrees<const C: usize>(got: &[f64], published: &[[f64; C]]) -> bool {
//!     got.iter().zip(published.as_flattened()).all(|(g, p)| (g - p).abs() <= 0.5e-4)
//! }
//!
//! // Queries, keys and values: the embeddings times three learned matrices.
//! let (mut q, mut k, mut v) = ([0.0f64; 24], [0.0f64; 24], [0.0f64; 24]);
//! for (out, w) in [(&mut q, cat::W_Q), (&mut k, cat::W_K), (&mut v, cat::W_V)] {
//!     for (i, x) in cat::X.iter().enumerate() {
//!         for column in 0..4 {
//!             out[i * 4 + column] = (0..4).map(|d| f64::from(x[d]) * f64::from(w[d][column])).sum();
//!         }
//!     }
//! }
//! assert!(agrees(&q, &cat::Q) && agrees(&k, &cat::K) && agrees(&v, &cat::V));
//! let (q, k, v) = (View::matrix(&q, 6, 4)?, View::matrix(&k, 6, 4)?, View::matrix(&v, 6, 4)?);
//!
//! // How well does each query fit each key?
//! let mut s = [0.0f64; 36];
//! steps::scores(q, k, &mut ViewMut::matrix(&mut s, 6, 6)?)?;
//! assert!(agrees(&s, &cat::SCORES)); // row "cat": 4.0483 5.9807 6.4800 3.0732 4.2646 4.5313
//!
//! // Divided by √4 and turned into weights, each row summing to 1.
//! let attn = Attention::new();
//! steps::masked_scores(&attn, q, k, &mut ViewMut::matrix(&mut s, 6, 6)?)?;
//! assert!(agrees(&s, &cat::SCALED_SCORES));
//! steps::softmax(&mut ViewMut::matrix(&mut s, 6, 6)?);
//! assert!(agrees(&s, &cat::WEIGHTS)); // row "cat": 0.1000 0.2627 0.3372 0.0614 0.1114 0.1273
//!
//! // Each token's context: the mean of all values, by those weights.
//! let mut context = [0.0f64; 24];
//! steps::weighted_sum(View::matrix(&s, 6, 6)?, v, &mut ViewMut::matrix(&mut context, 6, 4)?)?;
//! assert!(agrees(&context, &cat::CONTEXT)); // row "cat": 0.9056 1.0249 1.0561 1.4822
//!
//! // The same under a causal mask: masked scores are −∞, so that their weights are 0.
//! let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
//! steps::masked_scores(&causal, q, k, &mut ViewMut::matrix(&mut s, 6, 6)?)?;
//! assert_eq!(s[1], f64::NEG_INFINITY);
//! steps::softmax(&mut ViewMut::matrix(&mut s, 6, 6)?);
//! assert!(agrees(&s, &cat::CAUSAL_WEIGHTS)); // row "cat": 0.2756 0.7244 0 0 0 0
//! steps::weighted_sum(View::matrix(&s, 6, 6)?, v, &mut ViewMut::matrix(&mut context, 6, 4)?)?;
//! assert!(agrees(&context, &cat::CAUSAL_CONTEXT)); // row "cat": 0.9104 0.9885 1.0785 1.5295
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use attn_core::element::Real;
use attn_core::score::{At, Problem};
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Element, Result, View, ViewMut};

/// Raw scores `q·kᵀ`: no scale, no mask.
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, `k`: `[batch, kv_heads, kv_len, head_dim]`, `out`:
/// `[batch, q_heads, q_len, kv_len]`.
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn scores<T: Element, O: Element>(q: View<'_, T>, k: View<'_, T>, out: &mut ViewMut<'_, O>) -> Result<()> {
    each_score(&Attention::new(), q, k, out, |_, dot, _| dot)
}

/// Scores times the scale in force: the option's, or `1/√head_dim`. Shapes and errors as for [`scores`].
///
/// # Errors
/// As [`scores`].
pub fn scaled_scores<T: Element, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    out: &mut ViewMut<'_, O>,
) -> Result<()> {
    each_score(attn, q, k, out, |problem, dot, _| dot * problem.scale())
}

/// Scaled scores after the soft-cap; the scaled scores themselves if none is set. Shapes and errors as for
/// [`scores`].
///
/// # Errors
/// As [`scores`].
pub fn capped_scores<T: Element, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    out: &mut ViewMut<'_, O>,
) -> Result<()> {
    each_score(attn, q, k, out, |problem, dot, _| {
        let scaled = dot * problem.scale();
        problem.attn().get_softcap().map_or(scaled, |cap| cap * Real::tanh(scaled / cap))
    })
}

/// Scores as the softmax takes them: scaled, capped, with bias, ALiBi, mods and temperature, and −∞ for every key
/// that the query does not see. Shapes and errors as for [`scores`].
///
/// # Errors
/// As [`scores`].
///
/// ```
/// use attn_core::{Align, Attention, Mask, View, ViewMut};
/// use attn_layers::steps;
/// let x = [1.0f32, 2.0];
/// let x = View::matrix(&x, 2, 1)?; // two tokens of dim 1
/// let mut s = [0.0f32; 4];
/// let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
/// steps::masked_scores(&causal, x, x, &mut ViewMut::matrix(&mut s, 2, 2)?)?;
/// assert_eq!(s, [1.0, f32::NEG_INFINITY, 2.0, 4.0]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn masked_scores<T: Element, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    out: &mut ViewMut<'_, O>,
) -> Result<()> {
    each_score(
        attn,
        q,
        k,
        out,
        |problem, dot, at| {
            if problem.visible(at) { problem.score(dot, at) } else { f64::NEG_INFINITY }
        },
    )
}

/// Checks, then writes `f(problem, q·k, position)` for every query and key.
fn each_score<T: Element, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    out: &mut ViewMut<'_, O>,
    f: impl Fn(&Problem<'_, '_, M>, f64, At) -> f64,
) -> Result<()> {
    let [batch, kv_heads, kv_len, _] = k.sizes();
    let problem = Problem::new(attn, q.sizes(), k.sizes(), [batch, kv_heads, kv_len, 1])?;
    let shape = *problem.shape();
    check_sizes(SCORES, [shape.batch, shape.q_heads, shape.q_len, shape.kv_len], out.sizes())?;
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                let q_row = q.row(batch, head, query);
                for key in 0..shape.kv_len {
                    let k_row = k.row(batch, shape.kv_head(head), key);
                    let dot = q_row.iter().zip(k_row.iter()).map(|(q, k)| q.to_f64() * k.to_f64()).sum();
                    let score = f(&problem, dot, At { batch, head, query, key });
                    out.set(batch, head, query, key, O::from_f64(score));
                }
            }
        }
    }
    Ok(())
}

/// The softmax of every row, in place: `exp(sⱼ − max)/Σ exp(sⱼ − max)`. A row of −∞ only becomes zeros, a row with a
/// NaN or +∞ becomes NaN if it is not −∞.
///
/// ```
/// use attn_core::ViewMut;
/// use attn_layers::steps;
/// let mut rows = [0.0f64, 0.0, 1000.0, f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY];
/// steps::softmax(&mut ViewMut::matrix(&mut rows, 3, 2)?);
/// assert_eq!(rows, [0.5, 0.5, 1.0, 0.0, 0.0, 0.0]); // 1000 does not overflow: the maximum is subtracted first
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn softmax<T: Element>(rows: &mut ViewMut<'_, T>) {
    softmax_rows(rows, |_| f64::NEG_INFINITY);
}

/// The softmax of every row with one more logit per head in the denominator, in place. `sinks` are `[q_heads]`.
///
/// # Errors
/// [`AttnError::Size`] if there is not one sink per head.
pub fn softmax_with_sinks<T: Element>(rows: &mut ViewMut<'_, T>, sinks: &[f32]) -> Result<()> {
    let [_, heads, _, _] = rows.sizes();
    AttnError::check_size("sinks against q_heads", heads, sinks.len())?;
    softmax_rows(rows, |head| sinks.get(head).map_or(f64::NEG_INFINITY, |&sink| f64::from(sink)));
    Ok(())
}

fn softmax_rows<T: Element>(rows: &mut ViewMut<'_, T>, sink: impl Fn(usize) -> f64) {
    let [batch, heads, q_len, kv_len] = rows.sizes();
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..q_len {
                let row = || rows.as_view().row(b, h, i).iter().map(T::to_f64);
                let max = row().fold(sink(h), Real::max_nan);
                let e = |s: f64| if s == f64::NEG_INFINITY { 0.0 } else { Real::exp(s - max) };
                let sum = row().map(e).sum::<f64>() + e(sink(h));
                for j in 0..kv_len {
                    let e = e(rows.as_view().at(b, h, i, j).to_f64());
                    // A hidden key has no weight even beside a NaN, and an empty row has no weights.
                    let weight = if e == 0.0 { 0.0 } else { e / sum };
                    rows.set(b, h, i, j, T::from_f64(weight));
                }
            }
        }
    }
}

/// Applies the options' dropout to the weights, in place: kept weights times `1/(1 − p)`, dropped ones 0. Does nothing
/// where none is set. `weights` are `[batch, q_heads, q_len, kv_len]`.
///
/// # Errors
/// [`AttnError`] if the dropout does not fit the weights.
pub fn dropout<T: Element, M: Mods>(attn: &Attention<'_, M>, weights: &mut ViewMut<'_, T>) -> Result<()> {
    let [batch, q_heads, q_len, kv_len] = weights.sizes();
    let dropout = attn.get_dropout();
    dropout.check(&AttnShape::new(
        [batch, q_heads, q_len, 1],
        [batch, q_heads, kv_len, 1],
        [batch, q_heads, kv_len, 1],
    )?)?;
    if dropout.is_none() {
        return Ok(());
    }
    for batch in 0..batch {
        for head in 0..q_heads {
            for query in 0..q_len {
                for key in 0..kv_len {
                    let kept = dropout.keeps(At { batch, head, query, key });
                    let factor = if kept { dropout.factor() } else { 0.0 };
                    let weight = weights.as_view().at(batch, head, query, key).to_f64();
                    weights.set(batch, head, query, key, T::from_f64(weight * factor));
                }
            }
        }
    }
    Ok(())
}

/// The weighted sum of values, `weights·v`.
///
/// `weights`: `[batch, q_heads, q_len, kv_len]`, `v`: `[batch, kv_heads, kv_len, value_dim]`, `out`:
/// `[batch, q_heads, q_len, value_dim]`. A weight of exactly 0 takes nothing, not even from a NaN.
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn weighted_sum<W: Element, T: Element, O: Element>(
    weights: View<'_, W>,
    v: View<'_, T>,
    out: &mut ViewMut<'_, O>,
) -> Result<()> {
    let [batch, q_heads, q_len, kv_len] = weights.sizes();
    let [v_batch, kv_heads, v_len, _] = v.sizes();
    AttnError::check_size("v kv_len against the weights' kv_len", kv_len, v_len)?;
    let shape = AttnShape::new([batch, q_heads, q_len, 1], [v_batch, kv_heads, v_len, 1], v.sizes())?;
    shape.check_output(out.sizes())?;
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                for d in 0..shape.value_dim {
                    let mut sum = 0.0;
                    for (key, weight) in weights.row(batch, head, query).iter().map(W::to_f64).enumerate() {
                        if weight != 0.0 {
                            sum += weight * v.at(batch, shape.kv_head(head), key, d).to_f64();
                        }
                    }
                    out.set(batch, head, query, d, O::from_f64(sum));
                }
            }
        }
    }
    Ok(())
}

/// One query of a longer sequence, all batches and heads of it: `[batch, q_heads, 1, head_dim]`.
///
/// Where a mask counts positions, give it [`Align::Offset(query)`](attn_core::Align::Offset): the view has only one
/// row, which keeps its place.
///
/// # Errors
/// [`AttnError::Index`] if there is no such query.
///
/// ```
/// use attn_core::{Align, Attention, Mask, View, ViewMut};
/// use attn_layers::steps;
/// let x = [1.0f32, 2.0, 3.0];
/// let x = View::matrix(&x, 3, 1)?; // three tokens of dim 1
/// let second = steps::single_query(x, 1)?;
/// let causal = Attention::new().mask(Mask::causal(Align::Offset(1)));
/// let mut s = [0.0f32; 3];
/// steps::masked_scores(&causal, second, x, &mut ViewMut::matrix(&mut s, 1, 3)?)?;
/// assert_eq!(s, [2.0, 4.0, f32::NEG_INFINITY]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn single_query<T: Copy>(q: View<'_, T>, query: usize) -> Result<View<'_, T>> {
    let ([batch, heads, q_len, dim], [_, _, step, _]) = (q.sizes(), q.strides());
    if query >= q_len {
        return Err(AttnError::Index { what: "query", at: 0, value: query, limit: q_len });
    }
    let offset = q.offset().wrapping_add_signed((query as isize).wrapping_mul(step));
    View::strided(q.data(), [batch, heads, 1, dim], q.strides(), offset)
}

/// One head of one sequence, as the matrix `[1, 1, seq, dim]` that a textbook draws.
///
/// # Errors
/// [`AttnError::Index`] if there is no such sequence or head.
pub fn single_head<T: Copy>(x: View<'_, T>, batch: usize, head: usize) -> Result<View<'_, T>> {
    let ([batches, heads, seq, dim], [batch_step, head_step, ..]) = (x.sizes(), x.strides());
    if batch >= batches {
        return Err(AttnError::Index { what: "batch", at: 0, value: batch, limit: batches });
    }
    if head >= heads {
        return Err(AttnError::Index { what: "head", at: 0, value: head, limit: heads });
    }
    let step = (batch as isize).wrapping_mul(batch_step).wrapping_add((head as isize).wrapping_mul(head_step));
    View::strided(x.data(), [1, 1, seq, dim], x.strides(), x.offset().wrapping_add_signed(step))
}

const SCORES: [&str; 4] = ["scores batch", "scores heads", "scores q_len", "scores kv_len"];

/// Checks four sizes, axis by axis.
fn check_sizes(what: [&'static str; 4], expected: [usize; 4], found: [usize; 4]) -> Result<()> {
    for ((what, expected), found) in what.into_iter().zip(expected).zip(found) {
        AttnError::check_size(what, expected, found)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::dropout::Dropout;
    use attn_core::{Align, Layout, Mask, Outputs, reference};
    use std::vec;
    use std::vec::Vec;

    fn numbers(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| libm::sin(seed + i as f64 * 1.3)).collect()
    }

    #[test]
    fn the_steps_together_are_the_reference() {
        let (q, k, v) = (numbers(2 * 4 * 3 * 5, 0.1), numbers(2 * 2 * 6 * 5, 0.2), numbers(2 * 2 * 6 * 2, 0.3));
        let q = View::new(&q, Layout::Sbhd, [2, 4, 3, 5]).unwrap();
        let k = View::new(&k, Layout::Bshd, [2, 2, 6, 5]).unwrap();
        let v = View::new(&v, Layout::Bhsd, [2, 2, 6, 2]).unwrap();
        let sinks = [0.5f32, -1.0, 0.0, 2.0];
        let attn = Attention::new()
            .softcap(2.0)
            .sinks(&sinks)
            .mask(Mask::window(2, 0, Align::Offset(-1))) // the first row sees nothing
            .dropout(Dropout::Seeded { p: 0.3, seed: 9 });
        let (mut want, mut want_weights) = (vec![0.0f64; 48], vec![0.0f64; 144]);
        let outputs = Outputs::new(ViewMut::new(&mut want, Layout::Bhsd, [2, 4, 3, 2]).unwrap());
        reference::forward(&attn, q, k, v, outputs.weights(&mut want_weights), &mut [0.0; 6]).unwrap();

        let (mut weights, mut got) = (vec![0.0f64; 144], vec![0.0f64; 48]);
        let mut rows = ViewMut::new(&mut weights, Layout::Bhsd, [2, 4, 3, 6]).unwrap();
        masked_scores(&attn, q, k, &mut rows).unwrap();
        softmax_with_sinks(&mut rows, &sinks).unwrap();
        dropout(&attn, &mut rows).unwrap();
        weighted_sum(rows.as_view(), v, &mut ViewMut::new(&mut got, Layout::Bhsd, [2, 4, 3, 2]).unwrap()).unwrap();
        for (got, want) in got.iter().chain(&weights).zip(want.iter().chain(&want_weights)) {
            assert!((got - want).abs() < 1e-14, "{got} {want}");
        }
        assert!(got[..2] == [0.0; 2] && got[4] != 0.0);
    }

    #[test]
    fn scaled_and_capped_scores_follow_the_options() {
        let (q, k) = ([2.0f64], [3.0f64]);
        let (q, k) = (View::matrix(&q, 1, 1).unwrap(), View::matrix(&k, 1, 1).unwrap());
        let attn = Attention::new().scale(0.5).softcap(4.0).mask(Mask::kv_lens(&[0]));
        let mut s = [0.0f64; 1];
        scores(q, k, &mut ViewMut::matrix(&mut s, 1, 1).unwrap()).unwrap();
        assert_eq!(s, [6.0]);
        scaled_scores(&attn, q, k, &mut ViewMut::matrix(&mut s, 1, 1).unwrap()).unwrap();
        assert_eq!(s, [3.0]);
        capped_scores(&attn, q, k, &mut ViewMut::matrix(&mut s, 1, 1).unwrap()).unwrap();
        assert_eq!(s, [4.0 * libm::tanh(0.75)]);
        masked_scores(&attn, q, k, &mut ViewMut::matrix(&mut s, 1, 1).unwrap()).unwrap();
        assert_eq!(s, [f64::NEG_INFINITY]);
    }

    #[test]
    fn softmax_keeps_hidden_keys_at_zero_beside_a_nan() {
        let mut rows = [f32::NAN, f32::NEG_INFINITY, 1.0];
        softmax(&mut ViewMut::matrix(&mut rows, 1, 3).unwrap());
        assert!(rows[0].is_nan() && rows[1] == 0.0 && rows[2].is_nan());
        let mut rows = [f32::INFINITY, 1.0];
        softmax(&mut ViewMut::matrix(&mut rows, 1, 2).unwrap());
        assert!(rows[0].is_nan());
    }

    #[test]
    fn single_views_are_the_same_memory() {
        let x = numbers(2 * 3 * 4 * 5, 0.0);
        let x = View::new(&x, Layout::Bshd, [2, 3, 4, 5]).unwrap();
        let (query, head) = (single_query(x, 2).unwrap(), single_head(x, 1, 2).unwrap());
        assert_eq!((query.sizes(), head.sizes()), ([2, 3, 1, 5], [1, 1, 4, 5]));
        assert_eq!(query.at(1, 2, 0, 3), x.at(1, 2, 2, 3));
        assert_eq!(head.at(0, 0, 3, 4), x.at(1, 2, 3, 4));
        assert!(single_query(x, 4).is_err() && single_head(x, 2, 0).is_err() && single_head(x, 0, 3).is_err());
    }

    #[test]
    fn sizes_are_checked() {
        let x = [0.0f32; 6];
        let x = View::matrix(&x, 3, 2).unwrap();
        let mut out = [7.0f32; 9];
        assert!(scores(x, x, &mut ViewMut::matrix(&mut out, 3, 2).unwrap()).is_err());
        assert!(weighted_sum(x, x, &mut ViewMut::matrix(&mut out, 3, 2).unwrap()).is_err());
        assert!(softmax_with_sinks(&mut ViewMut::matrix(&mut out, 3, 3).unwrap(), &[0.0; 2]).is_err());
        assert_eq!(out, [7.0; 9]);
    }
}
