//! The textbook algorithm in double precision: the oracle with which all other engines are compared.
//!
//! For each query: all scores, their maximum, their exponentials, the division, the weighted sum of values. It needs a
//! row of scores as scratch, O(kv_len), and reads keys and values in their own precision but computes in `f64`
//! throughout. It is written to be read, not to be fast; [`streaming`](crate::streaming) is the form to embed.
//!
//! ```
//! use attn_core::{Attention, View, ViewMut, reference};
//! let q = [1.0f32, 0.0];
//! let k = [1.0f32, 0.0, 0.0, 1.0];
//! let v = [10.0f32, 20.0];
//! let mut out = [0.0f32; 1];
//! reference::forward(
//!     &Attention::new(),
//!     View::matrix(&q, 1, 2)?, // one query of dim 2
//!     View::matrix(&k, 2, 2)?, // two keys
//!     View::matrix(&v, 2, 1)?, // two values of dim 1
//!     ViewMut::matrix(&mut out, 1, 1)?,
//!     &mut [0.0; 2], // one score per key
//! )?;
//! let w = 1.0 / (1.0 + (-1.0 / 2f64.sqrt()).exp()); // softmax of (1/√2, 0)
//! assert!((f64::from(out[0]) - (w * 10.0 + (1.0 - w) * 20.0)).abs() < 1e-6);
//! # Ok::<(), attn_core::AttnError>(())
//! ```

mod cache;

pub use cache::{forward_stored, stored_scratch_len};

use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::{At, AttnShape};
use crate::view::View;

/// Elements of scratch that [`forward`] needs: one score per key.
pub const fn scratch_len(shape: &AttnShape) -> usize {
    shape.kv_len
}

/// Computes attention in `f64` and rounds once to the output's type.
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, `k`: `[batch, kv_heads, kv_len, head_dim]`, `v`:
/// `[batch, kv_heads, kv_len, value_dim]`. `outputs` is a [`ViewMut`](crate::ViewMut) or [`Outputs`]. `scratch` holds
/// [`scratch_len`] elements.
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<'o, T: Element, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [f64],
) -> Result<()> {
    let problem = Problem::new(attn, q.sizes(), k.sizes(), v.sizes())?;
    let mut outputs = outputs.into();
    let shape = *problem.shape();
    outputs.check(&shape)?;
    AttnError::check_len("reference scratch", scratch_len(&shape), scratch.len())?;
    let Some(weights) = scratch.get_mut(..shape.kv_len) else {
        return Ok(());
    };
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                let lse = row_weights(&problem, q, k, batch, head, query, weights);
                let row = shape.row(batch, head, query);
                outputs.set_lse(row, O::Compute::of(lse));
                if let Some(all) = outputs.weights.as_deref_mut() {
                    let rows = all.chunks_exact_mut(shape.kv_len.max(1));
                    for (slot, &w) in rows.skip(row).take(1).flatten().zip(weights.iter()) {
                        *slot = O::Compute::of(w);
                    }
                }
                for d in 0..shape.value_dim {
                    let mut sum = 0.0;
                    problem.for_each_visible(batch, head, query, |at| {
                        let weight = weights.get(at.key).copied().unwrap_or(0.0);
                        sum += weight * v.at(batch, shape.kv_head(head), at.key, d).to_f64();
                    });
                    outputs.out.set(batch, head, query, d, O::from_f64(sum));
                }
            }
        }
    }
    Ok(())
}

/// The weights of one row, after softmax and dropout, into `weights` (`[kv_len]`; hidden keys get 0). Returns the row's
/// lse.
pub(crate) fn row_weights<T: Element, M: Mods>(
    problem: &Problem<'_, '_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    batch: usize,
    head: usize,
    query: usize,
    weights: &mut [f64],
) -> f64 {
    let kv_head = problem.shape().kv_head(head);
    let q_row = q.row(batch, head, query);
    let dot = |key| {
        let k_row = k.row(batch, kv_head, key);
        q_row.iter().zip(k_row.iter()).map(|(q, k)| q.to_f64() * k.to_f64()).sum()
    };
    row_weights_by(problem, [batch, head, query], |_| true, dot, weights)
}

/// As [`row_weights`], of the keys that `is_there` by their products with the query.
#[inline]
fn row_weights_by<M: Mods>(
    problem: &Problem<'_, '_, M>,
    [batch, head, query]: [usize; 3],
    is_there: impl Fn(usize) -> bool,
    mut dot: impl FnMut(usize) -> f64,
    weights: &mut [f64],
) -> f64 {
    weights.fill(0.0);

    // Scores and their maximum; a sink takes part as a score without a value.
    let sink = problem.sink(head).map(f64::from);
    let mut max = sink.unwrap_or(f64::NEG_INFINITY);
    problem.for_each_visible(batch, head, query, |at| {
        if is_there(at.key) {
            let score = problem.score(dot(at.key), at);
            max = max.max_nan(score);
            set(weights, at, score);
        }
    });
    if max == f64::NEG_INFINITY {
        weights.fill(0.0); // nothing visible, or nothing with a weight
        return max;
    }

    // Exponentials and their sum, then the division.
    let mut sum = sink.map_or(0.0, |sink| Real::exp(sink - max));
    problem.for_each_visible(batch, head, query, |at| {
        if is_there(at.key) {
            let e = Real::exp(get(weights, at) - max);
            sum += e;
            set(weights, at, e);
        }
    });
    problem.for_each_visible(batch, head, query, |at| {
        let weight = get(weights, at) / sum;
        // A dropped weight is multiplied by 0, so that a NaN stays one.
        let factor = if problem.attn().dropout.is_none() { 1.0 } else { problem.dropout_factor(at) };
        set(weights, at, weight * factor);
    });
    max + Real::ln(sum)
}

fn get(weights: &[f64], at: At) -> f64 {
    weights.get(at.key).copied().unwrap_or(0.0)
}

fn set(weights: &mut [f64], at: At, value: f64) {
    if let Some(slot) = weights.get_mut(at.key) {
        *slot = value;
    }
}
