//! Streaming attention over rows that a cache finds for itself.
//!
//! The same arithmetic in the same order as [`streaming`](crate::streaming), so that a cache gives the bits of a plain
//! call over the same keys. What differs is where a key's row lies, which each cache answers by a closure.

use super::checks::check_at_most;
use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::mask::{Align, Mask};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score::{Problem, dot};
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::softmax::RowState;
use crate::streaming::{add_scaled, rescale};
use crate::view::{Row, View};

/// The same options, causal at the bottom right besides.
pub(super) fn causal<'a, 'm, M: Mods>(attn: &'m Attention<'a, M>) -> Attention<'a, &'m M> {
    let mask = attn.get_mask().and(Mask::causal(Align::BottomRight));
    attn.by_ref().mask(mask)
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
    row_with(problem, at, dot, |acc, weight, key| add_scaled(acc, weight, value(key)), acc)
}

/// As [`row`], where `add` knows how to add a key's value times a weight.
#[inline]
pub(crate) fn row_with<R: Real, M: Mods>(
    problem: &Problem<'_, '_, M>,
    (batch, head, query): (usize, usize, usize),
    dot: impl Fn(usize) -> R,
    add: impl Fn(&mut [R], R, usize),
    acc: &mut [R],
) -> RowState<R> {
    acc.fill(R::ZERO);
    let (factors, mut state) = (problem.factors(), RowState::new());
    problem.for_each_visible(batch, head, query, |at| {
        let step = state.push(problem.score_by(&factors, dot(at.key), at));
        rescale(acc, step.rescale);
        // A dropped weight still meets its value (as 0 times it), so that a NaN there shows in every engine.
        let kept = problem.attn().dropout.keeps(at);
        let weight = if kept { step.weight } else { step.weight * R::ZERO };
        add(acc, weight, at.key);
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

/// One sequence of a cache: the first `q_lens` of its queries are its last tokens; the other rows of the output are
/// padding and become 0.
pub(super) struct Sequence<'s, T: Element, K, V> {
    /// Index in the batch.
    pub(super) batch: usize,
    /// Sizes of the whole call.
    pub(super) shape: &'s AttnShape,
    /// Queries of this sequence.
    pub(super) q_len: usize,
    /// Cached keys of this sequence.
    pub(super) kv_len: usize,
    /// All queries.
    pub(super) q: View<'s, T>,
    /// Row of a key, by head and position.
    pub(super) key: K,
    /// Row of a value, by head and position.
    pub(super) value: V,
}

impl<'s, T, K, V> Sequence<'s, T, K, V>
where
    T: Element,
    K: Fn(usize, usize) -> Row<'s, T>,
    V: Fn(usize, usize) -> Row<'s, T>,
{
    pub(super) fn attend<O: Element<Compute = T::Compute>, M: Mods>(
        &self,
        attn: &Attention<'_, M>,
        outputs: &mut Outputs<'_, O>,
        acc: &mut [T::Compute],
    ) -> Result<()> {
        let (batch, shape) = (self.batch, self.shape);
        let problem = Problem::of_shape(attn, own_shape(shape, self.q_len, self.kv_len))?;
        for head in 0..shape.q_heads {
            let kv_head = shape.kv_head(head);
            for query in 0..shape.q_len {
                let at = (batch, head, query);
                if query >= self.q_len {
                    acc.fill(T::Compute::ZERO);
                    write(outputs, shape, at, acc, &RowState::new());
                    continue;
                }
                let q_row = self.q.row(batch, head, query);
                let dot = |key| dot(q_row, (self.key)(kv_head, key));
                let state = row(&problem, at, dot, |key| (self.value)(kv_head, key), acc);
                write(outputs, shape, at, acc, &state);
            }
        }
        Ok(())
    }
}

/// The shape that one sequence's options are checked against.
pub(crate) fn own_shape(shape: &AttnShape, q_len: usize, kv_len: usize) -> AttnShape {
    AttnShape { q_len, kv_len, ..*shape }
}

/// Checks, before anything is written, the number of queries of every sequence and the options for its shape.
pub(super) fn check_sequences<M: Mods>(
    attn: &Attention<'_, M>,
    shape: &AttnShape,
    q_lens: Option<&[usize]>,
    lens: &[usize],
) -> Result<()> {
    if let Some(q_lens) = q_lens {
        AttnError::check_size("q_lens against batch", shape.batch, q_lens.len())?;
    }
    for (batch, &kv_len) in lens.iter().enumerate() {
        let q_len = q_len_of(q_lens, shape, batch);
        check_at_most("q_lens", batch, q_len, shape.q_len)?;
        check_at_most("queries of a sequence against its cached tokens", batch, q_len, kv_len)?;
        Problem::of_shape(attn, own_shape(shape, q_len, kv_len))?;
    }
    Ok(())
}

/// The number of queries of one sequence.
pub(super) fn q_len_of(q_lens: Option<&[usize]>, shape: &AttnShape, batch: usize) -> usize {
    match q_lens {
        Some(q_lens) => q_lens.get(batch).copied().unwrap_or(0),
        None => shape.q_len,
    }
}

#[cfg(test)]
pub(super) mod tests {
    //! A stream of tokens and what a plain call makes of it: what every cache is compared with.

    use super::*;
    use crate::{Layout, ViewMut, streaming};
    use std::vec;
    use std::vec::Vec;

    /// `batch` streams of `len` tokens.
    pub(in crate::kv_cache) struct Stream {
        sizes: [[usize; 4]; 3],
        data: [Vec<f32>; 3],
    }

    /// Output and lse of a plain call.
    pub(in crate::kv_cache) struct Plain {
        out: Vec<f32>,
        lse: Vec<f32>,
        shape: AttnShape,
    }

    impl Stream {
        pub(in crate::kv_cache) fn new(
            batch: usize,
            q_heads: usize,
            kv_heads: usize,
            len: usize,
            head_dim: usize,
            value_dim: usize,
        ) -> Self {
            let sizes =
                [[batch, q_heads, len, head_dim], [batch, kv_heads, len, head_dim], [batch, kv_heads, len, value_dim]];
            let data = [0.1, 0.2, 0.3].map(|seed: f64| seed);
            let mut n = 0;
            let data = data.map(|seed| {
                let count = sizes[n].iter().product();
                n += 1;
                (0..count).map(|i| (2.0 * libm::sin(seed + i as f64 * 1.7)) as f32).collect()
            });
            Self { sizes, data }
        }

        pub(in crate::kv_cache) fn views(&self) -> (View<'_, f32>, View<'_, f32>, View<'_, f32>) {
            let view = |n: usize| View::new(&self.data[n], Layout::Bhsd, self.sizes[n]).unwrap();
            (view(0), view(1), view(2))
        }

        /// `n` tokens of every sequence, from a start of its own on; NaN beyond the end.
        pub(in crate::kv_cache) fn chunk(&self, starts: [usize; 2], n: usize) -> Self {
            let mut part = 0;
            let (q, k, v) = self.views();
            let views = [q, k, v];
            let data = [(); 3].map(|()| {
                let [batch, heads, len, dim] = self.sizes[part];
                let mut out = Vec::new();
                for b in 0..batch {
                    for h in 0..heads {
                        for t in starts[b]..starts[b] + n {
                            for d in 0..dim {
                                out.push(if t < len { views[part].at(b, h, t, d) } else { f32::NAN });
                            }
                        }
                    }
                }
                part += 1;
                out
            });
            Self { sizes: self.sizes.map(|[b, h, _, d]| [b, h, n, d]), data }
        }

        pub(in crate::kv_cache) fn plain<M: Mods>(&self, attn: &Attention<'_, M>) -> Plain {
            let (q, k, v) = self.views();
            let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes()).unwrap();
            let (mut out, mut lse) = (vec![0.0; shape.rows() * shape.value_dim], vec![0.0; shape.rows()]);
            let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
            streaming::forward(attn, q, k, v, outputs, &mut vec![0.0; shape.value_dim]).unwrap();
            Plain { out, lse, shape }
        }
    }

    /// Compares rows `0..counts[b]` of a chunk of `n` queries with those from `starts[b]` on; the others must be
    /// padding.
    pub(in crate::kv_cache) fn assert_same_bits(
        want: &Plain,
        out: &[f32],
        lse: &[f32],
        starts: [usize; 2],
        counts: [usize; 2],
        n: usize,
    ) {
        let shape = want.shape;
        for batch in 0..shape.batch {
            for head in 0..shape.q_heads {
                for i in 0..n {
                    let got = (batch * shape.q_heads + head) * n + i;
                    let row = &out[got * shape.value_dim..][..shape.value_dim];
                    if i < counts[batch] {
                        let at = shape.row(batch, head, starts[batch] + i);
                        assert_eq!(row, &want.out[at * shape.value_dim..][..shape.value_dim], "{batch} {head} {i}");
                        assert_eq!(lse[got], want.lse[at]);
                    } else {
                        assert!(row.iter().all(|&x| x == 0.0) && lse[got] == f32::NEG_INFINITY);
                    }
                }
            }
        }
    }
}
