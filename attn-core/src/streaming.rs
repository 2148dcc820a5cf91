//! The same result with O(value_dim) state and no row of scores: the engine for microcontrollers.
//!
//! The engine takes keys one by one. Each gives a score; the running maximum and sum ([`RowState`]) give the factors of
//! the output so far and of the key's value (Rabe & Staats 2021, arXiv 2112.05682; FlashAttention, arXiv 2205.14135, is
//! the tiled form). Computes in [`Element::Compute`]: `f32` for `f32`, `f16` and `bf16`, `f64` for `f64`, with plain
//! multiplications and additions, so that the bits are the same on every IEEE machine.
//!
//! All keys of a row are one chain of additions: `eta` (see [`Precision`](crate::Precision)) grows with their number
//! `n`, by up to `n/4` units of roundoff if all terms are alike. The kernels of `attn-simd` do not have this term.
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

pub(crate) mod cache;

pub use cache::{cache_scratch_len, forward_cache, forward_stored, stored_scratch_len};

use core::ops::Range;

use crate::dot::dot;
use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::resume::{self, Budget, Progress, Rows};
use crate::row::Row;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::softmax::RowState;
use crate::view::View;

/// Elements of scratch that [`forward`] needs: one output row.
pub const fn scratch_len(shape: &AttnShape) -> usize {
    shape.value_dim
}

/// Computes attention by streaming over the keys of each query.
///
/// Arguments as for [`reference::forward`](crate::reference::forward); `scratch` holds [`scratch_len`] elements of the
/// type that is computed in.
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Unsupported`] if the full weights are requested,
/// which this engine never has ([`weights`](crate::weights) recomputes any row of them).
pub fn forward<'o, T: Element, O: Element<Compute = T::Compute>, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [T::Compute],
) -> Result<()> {
    let problem = Problem::new(attn, q.sizes(), k.sizes(), v.sizes())?;
    let mut outputs = outputs.into();
    let acc = check(problem.shape(), &outputs, scratch)?;
    let mut rows = Streaming { problem: &problem, q: &q, k: &k, v: &v, outputs: &mut outputs, acc };
    resume::run_all(problem.shape(), &mut rows)
}

/// As [`forward`], for some keys: goes on at the position of a [`Cursor`](resume::Cursor); says whether all rows are
/// done. Until then the caller hands over the same tensors, options and scratch, which holds the row that has begun.
/// See [`crate::resume`].
///
/// # Errors
/// As [`forward`], before anything is written; [`AttnError::Index`] for a cursor of a call of another shape.
pub fn resume<'o, T: Element, O: Element<Compute = T::Compute>, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [T::Compute],
    budget: Budget<'_, RowState<T::Compute>>,
) -> Result<Progress> {
    let problem = Problem::new(attn, q.sizes(), k.sizes(), v.sizes())?;
    let mut outputs = outputs.into();
    let acc = check(problem.shape(), &outputs, scratch)?;
    let mut rows = Streaming { problem: &problem, q: &q, k: &k, v: &v, outputs: &mut outputs, acc };
    resume::run(problem.shape(), &mut rows, budget)
}

/// Checks outputs and scratch. Returns the part of the scratch that is used.
fn check<'x, O: Element>(
    shape: &AttnShape,
    outputs: &Outputs<'_, O>,
    scratch: &'x mut [O::Compute],
) -> Result<&'x mut [O::Compute]> {
    outputs.check(shape)?;
    if outputs.weights.is_some() {
        return Err(AttnError::Unsupported {
            what: "weights of the streaming engine (attn_core::weights::head with the lse)",
        });
    }
    AttnError::check_len("streaming scratch", scratch_len(shape), scratch.len())?;
    Ok(scratch.get_mut(..shape.value_dim).unwrap_or_default())
}

/// One call, checked. All by reference: copies would take stack, of which firmware has little.
struct Streaming<'x, 'p, 'a, 'o, T, O: Element, M> {
    problem: &'x Problem<'p, 'a, M>,
    q: &'x View<'x, T>,
    k: &'x View<'x, T>,
    v: &'x View<'x, T>,
    outputs: &'x mut Outputs<'o, O>,
    /// The output row, before it is divided by the sum.
    acc: &'x mut [O::Compute],
}

impl<T: Element, O: Element<Compute = T::Compute>, M: Mods> Rows for Streaming<'_, '_, '_, '_, T, O, M> {
    type State = RowState<T::Compute>;

    fn range(&self, [batch, head, query]: [usize; 3]) -> Range<usize> {
        self.problem.row_range(batch, head, query)
    }

    fn begin(&mut self) {
        self.acc.fill(T::Compute::ZERO);
    }

    #[inline]
    fn take(&mut self, row: [usize; 3], keys: Range<usize>, state: &mut Self::State) {
        let [batch, head, query] = row;
        let kv_head = self.problem.shape().kv_head(head);
        let q_row = self.q.row(batch, head, query);
        let (problem, acc) = (self.problem, &mut *self.acc);
        let (factors, mut local) = (problem.factors(), *state); // in registers for the length of the loop
        problem.for_each_visible_in(keys, row, |at| {
            let step = local.push(problem.score_by(&factors, dot(q_row, self.k.row(batch, kv_head, at.key)), at));
            rescale(acc, step.rescale);
            // A dropped weight still meets its value (as 0 times it), so that a NaN there shows in every engine.
            let kept = problem.attn().dropout.keeps(at);
            let weight = if kept { step.weight } else { step.weight * T::Compute::ZERO };
            add_scaled(acc, weight, self.v.row(batch, kv_head, at.key));
        });
        *state = local;
    }

    fn finish(&mut self, [batch, head, query]: [usize; 3], state: &Self::State) {
        let mut state = *state;
        if let Some(sink) = self.problem.sink(head) {
            let step = state.push(T::Compute::of(f64::from(sink)));
            rescale(self.acc, step.rescale);
        }
        let factor = state.finish() * self.problem.attn().dropout.factor_in::<T::Compute>();
        for (d, &x) in self.acc.iter().enumerate() {
            self.outputs.out.set(batch, head, query, d, O::narrow(x * factor));
        }
        self.outputs.set_lse(self.problem.shape().row(batch, head, query), state.lse());
    }
}

/// `acc += weight · row`.
#[inline]
pub(crate) fn add_scaled<T: Element>(acc: &mut [T::Compute], weight: T::Compute, row: Row<'_, T>) {
    if let Some(values) = row.as_slice() {
        add_slice(acc, weight, values);
    } else {
        for (a, value) in acc.iter_mut().zip(row.iter()) {
            *a += weight * value.widen();
        }
    }
}

/// `acc += weight · values`.
#[inline]
pub(crate) fn add_slice<T: Element>(acc: &mut [T::Compute], weight: T::Compute, values: &[T]) {
    for (a, value) in acc.iter_mut().zip(values) {
        *a += weight * value.widen();
    }
}

/// Multiplies an output row by a factor, which is 1 for most keys: they do not change the maximum.
#[inline]
pub(crate) fn rescale<R: Real>(acc: &mut [R], factor: R) {
    if factor != R::ONE {
        for a in acc {
            *a *= factor;
        }
    }
}
