//! The same result with O(value_dim) state and no row of scores: what a microcontroller runs.
//!
//! Keys are taken one by one. Each gives a score; the running maximum and sum ([`RowState`]) say how much of the output so
//! far remains and how much of the key's value to add (Rabe & Staats 2021, arXiv 2112.05682; FlashAttention, arXiv
//! 2205.14135, is the tiled form). Computes in [`Element::Compute`]: `f32` for `f32`, `f16` and `bf16`, `f64` for `f64`,
//! with plain multiplications and additions, so that the bits are the same on every IEEE machine.
//!
//! ```
//! use attn_core::{Align, Attention, Mask, View, ViewMut, streaming};
//! let x = [1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0]; // three tokens of dim 2: q = k = v
//! let mut out = [0.0f32; 6];
//! let x = View::matrix(&x, 3, 2)?;
//! let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
//! streaming::forward(&attn, x, x, x, ViewMut::matrix(&mut out, 3, 2)?, &mut [0.0; 2])?;
//! assert_eq!(out[..2], [1.0, 0.0]); // the first token sees only itself
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::modifier::Modifier;
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score::{Problem, dot};
use crate::shape::AttnShape;
use crate::softmax::RowState;
use crate::view::View;

/// Elements of scratch that [`forward`] needs: one output row.
pub const fn scratch_len(shape: &AttnShape) -> usize {
    shape.value_dim
}

/// Computes attention by streaming over the keys of each query.
///
/// Arguments as for [`reference::forward`](crate::reference::forward); `scratch` holds [`scratch_len`] elements of the type
/// that is computed in.
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Unsupported`] where the full weights are asked for,
/// which this engine never has ([`weights`](crate::weights) recomputes any row of them).
pub fn forward<'o, T: Element, O: Element<Compute = T::Compute>, M: Modifier>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [T::Compute],
) -> Result<()> {
    let problem = Problem::new(attn, q.sizes(), k.sizes(), v.sizes())?;
    let mut outputs = outputs.into();
    let shape = *problem.shape();
    outputs.check(&shape)?;
    if outputs.weights.is_some() {
        return Err(AttnError::Unsupported { what: "the full weights from the streaming engine" });
    }
    AttnError::check_len("streaming scratch", scratch_len(&shape), scratch.len())?;
    let Some(acc) = scratch.get_mut(..shape.value_dim) else {
        return Ok(());
    };
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                acc.fill(T::Compute::ZERO);
                let mut state = RowState::new();
                accumulate(&problem, q, k, v, (batch, head, query), &mut state, acc);
                if let Some(sink) = problem.sink(head) {
                    let step = state.push(T::Compute::of(f64::from(sink)));
                    rescale(acc, step.rescale);
                }
                let factor = state.finish() * T::Compute::of(attn.dropout.factor());
                for (d, &x) in acc.iter().enumerate() {
                    outputs.out.set(batch, head, query, d, O::narrow(x * factor));
                }
                outputs.set_lse(shape.row(batch, head, query), state.lse());
            }
        }
    }
    Ok(())
}

/// Takes all visible keys of one row into its state and output.
#[inline]
fn accumulate<T: Element, M: Modifier>(
    problem: &Problem<'_, '_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    (batch, head, query): (usize, usize, usize),
    state: &mut RowState<T::Compute>,
    acc: &mut [T::Compute],
) {
    let kv_head = problem.shape().kv_head(head);
    let q_row = q.row(batch, head, query);
    problem.for_each_visible(batch, head, query, |at| {
        let step = state.push(problem.score(dot(q_row, k.row(batch, kv_head, at.key)), at));
        rescale(acc, step.rescale);
        // A dropped weight still meets its value (as 0 times it), so that a NaN there shows in every engine.
        let kept = problem.attn().dropout.keeps(at);
        let weight = if kept { step.weight } else { step.weight * T::Compute::ZERO };
        let v_row = v.row(batch, kv_head, at.key);
        if let Some(values) = v_row.as_slice() {
            for (a, value) in acc.iter_mut().zip(values) {
                *a += weight * value.widen();
            }
        } else {
            for (a, value) in acc.iter_mut().zip(v_row.iter()) {
                *a += weight * value.widen();
            }
        }
    });
}

/// Multiplies an output row by a factor; most keys do not raise the maximum and leave it alone.
#[inline]
fn rescale<R: Real>(acc: &mut [R], factor: R) {
    if factor != R::ONE {
        for a in acc {
            *a *= factor;
        }
    }
}
