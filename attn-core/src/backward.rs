//! Gradients of attention, reference form: `f64` throughout, O(head_dim) state per row, nothing n×n.
//!
//! With `s` the finished score, `p = softmax(s)` over the visible keys, `m` the dropout factor (0 or `1/(1 − p_drop)`,
//! 1 without dropout), `y = Σ pⱼ·mⱼ·vⱼ` and a loss whose gradient by `y` is `dy`, each row contributes
//!
//! ```text
//! δ    = Σⱼ pⱼ·mⱼ·(dy·vⱼ) = dy·y
//! dsⱼ  = pⱼ·(mⱼ·(dy·vⱼ) − δ)            gradient by the finished score
//! gⱼ   = dsⱼ · ∂s/∂(q·k)                 scale, soft-cap 1 − tanh², mods, temperature
//! dq  += gⱼ·kⱼ     dkⱼ += gⱼ·q     dvⱼ += pⱼ·mⱼ·dy
//! dbias += dsⱼ · ∂s/∂bias          dsink −= p_sink·δ
//! ```
//!
//! (FlashAttention, Dao et al. 2022, arXiv 2205.14135, appendix B.2, derives `δ`. With it the row's gradient is a sum
//! over keys in any order, so that no weight has to be kept.) One sweep over a row's keys gives its maximum, sum and
//! `δ`, a second one its contributions. With grouped heads `dk` and `dv` sum over the group. A row without visible keys
//! contributes 0.
//!
//! Gradients of projections are `attn_layers::Linear::backward`, and those of the modules in `attn_layers::module`.
//! Kernels are in other crates: their tests compare them with this.
//!
//! ```
//! use attn_core::{Attention, View, ViewMut, backward};
//! let (q, k, v, dy) = ([0.0f64], [0.0f64, 0.0], [1.0f64, 3.0], [1.0f64]); // one query, two keys, all dims 1
//! let (mut dq, mut dk, mut dv) = ([0.0f64; 1], [0.0f64; 2], [0.0f64; 2]);
//! let gradients = backward::Gradients::new(
//!     ViewMut::matrix(&mut dq, 1, 1)?,
//!     ViewMut::matrix(&mut dk, 2, 1)?,
//!     ViewMut::matrix(&mut dv, 2, 1)?,
//! );
//! let (q, dy) = (View::matrix(&q, 1, 1)?, View::matrix(&dy, 1, 1)?);
//! let (k, v) = (View::matrix(&k, 2, 1)?, View::matrix(&v, 2, 1)?);
//! backward::gradients(&Attention::new(), q, k, v, dy, gradients, &mut [0.0; 5])?;
//! assert_eq!(dv, [0.5, 0.5]); // both keys have weight ½
//! # Ok::<(), attn_core::AttnError>(())
//! ```

pub(crate) mod accumulate;
pub(crate) mod appended;
pub(crate) mod inputs;
pub(crate) mod outputs;
mod row;
mod slopes;

use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::options::Attention;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::{At, AttnShape, check_axes};
use crate::view::View;

use accumulate::Saved;
use inputs::Inputs;
pub use outputs::Gradients;
use outputs::{DY, OUT};

/// Elements of scratch that [`gradients`] needs: one row of `dq`, and `dk` and `dv` of one key/value head.
///
/// # Errors
/// [`AttnError::Overflow`] if the number does not fit in `usize`.
pub const fn scratch_len(shape: &AttnShape) -> Result<usize> {
    if let Some(dims) = shape.head_dim.checked_add(shape.value_dim)
        && let Some(heads) = shape.kv_len.checked_mul(dims)
        && let Some(total) = heads.checked_add(shape.head_dim)
    {
        return Ok(total);
    }
    Err(AttnError::Overflow { what: "kv_len · (head_dim + value_dim)" })
}

/// The gradients of `Σ y·dy` by everything that [`reference::forward`](crate::reference::forward) makes `y` of, with
/// the same options: masks, bias, ALiBi, soft-cap, temperature, mods, sinks, dropout.
///
/// Shapes as in the forward call, `dy` as its output; element types of inputs, `dy` and gradients may differ. `scratch`
/// holds [`scratch_len`] elements.
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Unsupported`] if a `score_mod` has no
/// derivative (see [`Attention::score_mod_with`]).
pub fn gradients<T: Element, G: Element, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    dy: View<'_, G>,
    mut gradients: Gradients<'_, O>,
    scratch: &mut [f64],
) -> Result<()> {
    let problem = Problem::new(attn, q.sizes(), k.sizes(), v.sizes())?;
    let shape = *problem.shape();
    check_axes(DY, shape.output(), dy.sizes())?;
    gradients.check(&shape)?;
    AttnError::check_len("backward scratch", scratch_len(&shape)?, scratch.len())?;
    let inputs = Inputs { q, k, v, dy };
    check_derivatives(&problem, &inputs)?;
    accumulate::all(&problem, &inputs, &mut gradients, scratch);
    Ok(())
}

/// As [`gradients`], from the output and the log-sum-exps of the forward call. These may count keys that a module has
/// appended.
///
/// # Errors
/// As [`gradients`].
#[doc(hidden)]
pub fn gradients_saved<T: Element, G: Element, R: Real, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    inputs: &Inputs<'_, T, G>,
    saved: Saved<'_, R>,
    mut gradients: Gradients<'_, O>,
    scratch: &mut [f64],
) -> Result<()> {
    let problem = Problem::new(attn, inputs.q.sizes(), inputs.k.sizes(), inputs.v.sizes())?;
    let shape = *problem.shape();
    check_axes(DY, shape.output(), inputs.dy.sizes())?;
    check_axes(OUT, shape.output(), saved.out.sizes())?;
    AttnError::check_size("lse against the rows", shape.rows(), saved.lse.len())?;
    gradients.check(&shape)?;
    AttnError::check_len("backward scratch", scratch_len(&shape)?, scratch.len())?;
    check_derivatives(&problem, inputs)?;
    accumulate::saved(&problem, inputs, saved, &mut gradients, scratch);
    Ok(())
}

/// Refuses a `score_mod` whose derivative is not known at every visible score, before anything is written.
fn check_derivatives<T: Element, G: Element, M: Mods>(
    problem: &Problem<'_, '_, M>,
    inputs: &Inputs<'_, T, G>,
) -> Result<()> {
    if !M::SCORE_MOD {
        return Ok(());
    }
    let shape = problem.shape();
    let mut known = true;
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                problem.for_each_visible(batch, head, query, |at: At| {
                    known = known && slopes::of(problem, inputs.dot(shape, at), at).is_some();
                });
            }
        }
    }
    if known {
        Ok(())
    } else {
        Err(AttnError::Unsupported { what: "the gradient of a score function without a derivative" })
    }
}
