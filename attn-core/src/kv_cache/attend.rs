//! Streaming attention, one row over the keys of a cache.
//!
//! The same arithmetic in the same order as [`streaming`](crate::streaming), so that a cache gives the bits of a plain
//! call over the same keys. A closure of each cache finds the place of a key.

use crate::dot::dot;
use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::mask::{Align, Mask};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::position::rope::RopeTables;
use crate::row::Row;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::softmax::RowState;
use crate::streaming::{add_scaled, rescale};
use crate::view::View;

/// The same options, and causal at the bottom right.
pub(crate) fn causal<'a, 'm, M: Mods>(attn: &'m Attention<'a, M>) -> Attention<'a, &'m M> {
    let mask = attn.get_mask().and(Mask::causal(Align::BottomRight));
    attn.by_ref().mask(mask)
}

/// Elements of scratch over a cache of such keys and values: one output row, and with RoPE a query.
pub(crate) fn scratch_len([.., head_dim]: [usize; 4], [.., value_dim]: [usize; 4], rope: bool) -> usize {
    if rope { value_dim.saturating_add(head_dim) } else { value_dim }
}

/// What every call over a cache checks first: dropout, outputs, scratch.
pub(crate) fn check<O: Element, M>(
    attn: &Attention<'_, M>,
    shape: &AttnShape,
    outputs: &Outputs<'_, O>,
    (needed, found): (usize, usize),
) -> Result<()> {
    if !attn.dropout.is_none() {
        return Err(AttnError::Unsupported { what: "dropout over a cache" });
    }
    if outputs.weights.is_some() {
        return Err(AttnError::Unsupported { what: "weights as an output over a cache" });
    }
    outputs.check(shape)?;
    AttnError::check_len("kv cache scratch", needed, found)
}

/// One row: all visible keys, the sink, the division and dropout. Leaves the output in `acc`.
#[inline]
pub fn row<'r, T: Element, M: Mods>(
    problem: &Problem<'_, '_, M>,
    at: (usize, usize, usize),
    dot: impl Fn(usize) -> T::Compute,
    value: impl Fn(usize) -> Row<'r, T>,
    acc: &mut [T::Compute],
) -> RowState<T::Compute> {
    row_with(problem, at, Some, dot, |acc, weight, key| add_scaled(acc, weight, value(key)), acc)
}

/// As [`row`]. `find` gives the place of a key, `None` if it is not here; `dot` and `add` read the key's numbers there.
#[inline]
pub(crate) fn row_with<R: Real, M: Mods, P: Copy>(
    problem: &Problem<'_, '_, M>,
    (batch, head, query): (usize, usize, usize),
    find: impl Fn(usize) -> Option<P>,
    mut dot: impl FnMut(P) -> R,
    add: impl Fn(&mut [R], R, P),
    acc: &mut [R],
) -> RowState<R> {
    acc.fill(R::ZERO);
    let (factors, mut state) = (problem.factors(), RowState::new());
    problem.for_each_visible(batch, head, query, |at| {
        let Some(place) = find(at.key) else { return };
        let step = state.push(problem.score_by(&factors, dot(place), at));
        rescale(acc, step.rescale);
        // A dropped weight still meets its value (as 0 times it), so that a NaN there shows in every engine.
        let kept = problem.attn().dropout.keeps(at);
        let weight = if kept { step.weight } else { step.weight * R::ZERO };
        add(acc, weight, place);
    });
    if let Some(sink) = problem.sink(head) {
        let step = state.push(R::of(f64::from(sink)));
        rescale(acc, step.rescale);
    }
    let factor = state.finish() * problem.attn().dropout.factor_in::<R>();
    for a in acc {
        *a *= factor;
    }
    state
}

/// Writes one row of the output and its lse.
#[inline]
pub(crate) fn write<O: Element>(
    outputs: &mut Outputs<'_, O>,
    shape: &AttnShape,
    (batch, head, query): (usize, usize, usize),
    row: &[O::Compute],
    state: &RowState<O::Compute>,
) {
    for (d, &x) in row.iter().enumerate() {
        outputs.out.set(batch, head, query, d, O::narrow(x));
    }
    outputs.set_lse(shape.row(batch, head, query), state.lse());
}

/// Keys and values of a cache, and the RoPE tables that are applied to the keys as they are read.
pub(crate) struct Tensors<'x, T: Element> {
    pub(crate) k: View<'x, T>,
    pub(crate) v: View<'x, T>,
    pub(crate) rope: Option<&'x RopeTables<'x, T::Compute>>,
}

impl<T: Element> Tensors<'_, T> {
    /// One row over the keys that `find` finds, by their token: row and slot of k and v. `position` is that of the
    /// query in the cache. Leaves the output in `acc`; `query` has room for a query if there is RoPE.
    #[inline]
    pub(crate) fn row<M: Mods>(
        &self,
        problem: &Problem<'_, '_, M>,
        at: (usize, usize, usize),
        (q_row, position): (Row<'_, T>, usize),
        find: impl Fn(usize) -> Option<(usize, usize)>,
        (acc, query): (&mut [T::Compute], &mut [T::Compute]),
    ) -> RowState<T::Compute> {
        let kv_head = problem.shape().kv_head(at.1);
        let key = |(row, slot)| self.k.row(row, kv_head, slot);
        match self.rope {
            None => {
                let add = |acc: &mut [T::Compute], weight, (row, slot)| {
                    add_scaled(acc, weight, self.v.row(row, kv_head, slot));
                };
                row_with(problem, at, find, |place| dot(q_row, key(place)), add, acc)
            }
            Some(tables) => {
                let query = query.get_mut(..q_row.len()).unwrap_or_default();
                tables.apply_to_row(q_row, position, query);
                let find = |token| find(token).map(|place| (token, place));
                let dot = |(token, place)| tables.dot_with_rope(query, key(place), token);
                let add = |acc: &mut [T::Compute], weight, (_, (row, slot)): (usize, (usize, usize))| {
                    add_scaled(acc, weight, self.v.row(row, kv_head, slot));
                };
                row_with(problem, at, find, dot, add, acc)
            }
        }
    }
}

/// The shape that one sequence's options are checked against.
pub(crate) fn own_shape(shape: &AttnShape, q_len: usize, kv_len: usize) -> AttnShape {
    AttnShape { q_len, kv_len, ..*shape }
}
