//! How every module runs: project, attend, merge appended positions, join; over the caller's scratch.

use attn_core::element::Real;
use attn_core::engine::{Appended, product};
use attn_core::score::{At, Problem};
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Element, Layout, Outputs, Result, View, ViewMut};

use super::engine::Engine;
use super::outputs::{LayerOutputs, WeightsOut};
use super::sources::Sources;
use crate::projection::{Linear, features, for_each_feature};

/// Sizes of the heads that a module makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
}

/// Which of the three projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Query,
    Key,
    Value,
}

/// Where projected heads come from: one fused matrix, or a list of single heads.
pub(super) trait Project<T: Element> {
    fn heads(&self) -> Heads;
    /// Features of the input of a part.
    fn d_in(&self, part: Part) -> usize;
    /// Fills `[batch, heads, seq, dim]`.
    fn project<E: Engine<T>>(
        &self,
        engine: &mut E,
        part: Part,
        x: View<'_, T>,
        to: &mut ViewMut<'_, E::Mid>,
    ) -> Result<()>;
}

/// A module: projections, appended positions, and perhaps an output projection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer<'a, T, P> {
    pub(super) projections: P,
    pub(super) appended: Appended<'a, T>,
    pub(super) out: Option<Linear<'a, T>>,
}

/// The buffers of a call, all contiguous as `[batch, heads, seq, dim]`.
pub(super) struct Buffers<'s, R> {
    pub(super) q: &'s mut [R],
    pub(super) k: &'s mut [R],
    pub(super) v: &'s mut [R],
    pub(super) context: &'s mut [R],
    pub(super) lse: &'s mut [R],
}

/// Takes the first `n` elements off a slice.
pub(super) fn take<'s, R>(scratch: &mut &'s mut [R], n: usize) -> Result<&'s mut [R]> {
    let found = scratch.len();
    match core::mem::take(scratch).split_at_mut_checked(n) {
        Some((head, rest)) => {
            *scratch = rest;
            Ok(head)
        }
        None => Err(AttnError::TooShort { what: "module scratch", needed: n, found }),
    }
}

/// The sum of some lengths.
pub(super) fn total(lens: &[usize]) -> Result<usize> {
    let sum = lens.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    sum.ok_or(AttnError::Overflow { what: "module scratch" })
}

/// Shapes of q, k, v and the context.
pub(super) fn tensors(shape: &AttnShape) -> [[usize; 4]; 4] {
    let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    [
        [batch, q_heads, q_len, head_dim],
        [batch, kv_heads, kv_len, head_dim],
        [batch, kv_heads, kv_len, value_dim],
        [batch, q_heads, q_len, value_dim],
    ]
}

/// Lengths of the buffers of a call.
pub(super) fn lens(shape: &AttnShape) -> Result<[usize; 5]> {
    let len = |sizes: [usize; 4]| product(&sizes).ok_or(AttnError::Overflow { what: "projected heads" });
    let [q, k, v, context] = tensors(shape);
    Ok([len(q)?, len(k)?, len(v)?, len(context)?, shape.rows()])
}

impl<'s, R> Buffers<'s, R> {
    pub(super) fn take(scratch: &mut &'s mut [R], shape: &AttnShape) -> Result<Self> {
        let [q, k, v, context, lse] = lens(shape)?;
        Ok(Self {
            q: take(scratch, q)?,
            k: take(scratch, k)?,
            v: take(scratch, v)?,
            context: take(scratch, context)?,
            lse: take(scratch, lse)?,
        })
    }
}

impl<'s, R: Real> Buffers<'s, R> {
    /// q, k, v and the context as views.
    pub(super) fn views(&self, shape: &AttnShape) -> Result<[View<'_, R>; 4]> {
        let [q, k, v, context] = tensors(shape);
        Ok([
            View::new(self.q, Layout::Bhsd, q)?,
            View::new(self.k, Layout::Bhsd, k)?,
            View::new(self.v, Layout::Bhsd, v)?,
            View::new(self.context, Layout::Bhsd, context)?,
        ])
    }
}

impl<'a, T: Element, P: Project<T>> Layer<'a, T, P> {
    /// The sizes of the attention between given inputs, without the appended positions.
    pub(super) fn shape(&self, batch: usize, q_len: usize, kv_len: usize) -> Result<AttnShape> {
        let Heads { q_heads, kv_heads, head_dim, value_dim } = self.projections.heads();
        AttnShape::new(
            [batch, q_heads, q_len, head_dim],
            [batch, kv_heads, kv_len, head_dim],
            [batch, kv_heads, kv_len, value_dim],
        )
    }

    /// As [`shape`](Self::shape), having checked the inputs.
    pub(super) fn shape_of(&self, x: &Sources<'_, T>) -> Result<AttnShape> {
        let ([batch, _, q_len, _], [k_batch, _, kv_len, _], [v_batch, _, v_len, _]) =
            (x.query.sizes(), x.key.sizes(), x.value.sizes());
        for (what, part, view) in [
            ("query features", Part::Query, &x.query),
            ("key features", Part::Key, &x.key),
            ("value features", Part::Value, &x.value),
        ] {
            AttnError::check_size(what, self.projections.d_in(part), features(view.sizes())?)?;
        }
        AttnError::check_size("key batch against query batch", batch, k_batch)?;
        AttnError::check_size("value batch against query batch", batch, v_batch)?;
        AttnError::check_size("value length against key length", kv_len, v_len)?;
        self.shape(batch, q_len, kv_len)
    }

    /// Features of the result.
    pub(super) fn d_out(&self) -> usize {
        let Heads { q_heads, value_dim, .. } = self.projections.heads();
        self.out.map_or(q_heads.saturating_mul(value_dim), |out| out.d_out())
    }

    pub(super) fn scratch_len<E: Engine<T>>(&self, engine: &E, shape: &AttnShape) -> Result<usize> {
        total(&[total(&lens(shape)?)?, engine.scratch_len(shape)?])
    }

    /// Projects, attends and merges into `buffers`; `scratch` is the engine's.
    pub(super) fn attend<E: Engine<T>, M: Mods + Sync>(
        &self,
        engine: &mut E,
        problem: &Problem<'_, '_, M>,
        x: &Sources<'_, T>,
        buffers: &mut Buffers<'_, E::Mid>,
        scratch: &mut [E::Mid],
    ) -> Result<()> {
        let shape = problem.shape();
        let [q, k, v, context] = tensors(shape);
        let mut fill = |part, x, to: &mut [E::Mid], sizes| {
            let mut to = ViewMut::new(to, Layout::Bhsd, sizes)?;
            self.projections.project(engine, part, x, &mut to)
        };
        fill(Part::Query, x.query, buffers.q, q)?;
        fill(Part::Key, x.key, buffers.k, k)?;
        fill(Part::Value, x.value, buffers.v, v)?;
        let q = View::new(&*buffers.q, Layout::Bhsd, q)?;
        let k = View::new(&*buffers.k, Layout::Bhsd, k)?;
        let v = View::new(&*buffers.v, Layout::Bhsd, v)?;
        let outputs = Outputs::new(ViewMut::new(buffers.context, Layout::Bhsd, context)?).lse(buffers.lse);
        engine.attend(problem.attn(), [q, k, v], outputs, scratch)?;
        self.appended.merge(problem, q, buffers.context, buffers.lse);
        Ok(())
    }

    pub(super) fn forward<E: Engine<T>, M: Mods + Sync>(
        &self,
        engine: &mut E,
        attn: &Attention<'_, M>,
        x: &Sources<'_, T>,
        mut outputs: LayerOutputs<'_, T>,
        mut scratch: &mut [E::Mid],
    ) -> Result<()> {
        let shape = self.shape_of(x)?;
        let problem = Problem::of_shape(attn, shape)?;
        self.appended.check(&problem)?;
        let kv_total = shape.kv_len.checked_add(self.appended.count()).ok_or(AttnError::Overflow { what: "kv_len" })?;
        outputs.check(&shape, self.d_out(), kv_total)?;
        AttnError::check_len("module scratch", self.scratch_len(engine, &shape)?, scratch.len())?;
        let mut buffers = Buffers::take(&mut scratch, &shape)?;
        self.attend(engine, &problem, x, &mut buffers, scratch)?;
        let [q, k, _, context] = buffers.views(&shape)?;
        if let Some(out) = outputs.weights {
            self.write_weights(&problem, q, k, buffers.lse, out, kv_total);
        }
        if let Some(to) = &mut outputs.context {
            copy(context, to);
        }
        match &self.out {
            Some(layer) => engine.join(layer, context, &mut outputs.out),
            None => {
                copy(context, &mut outputs.out);
                Ok(())
            }
        }
    }

    /// The weights from the lse: `exp(s − lse)`, of any engine (FlashAttention, arXiv 2205.14135, §3.1).
    fn write_weights<R: Real, M: Mods>(
        &self,
        problem: &Problem<'_, '_, M>,
        q: View<'_, R>,
        k: View<'_, R>,
        lse: &[R],
        out: WeightsOut<'_, T::Compute>,
        kv_total: usize,
    ) {
        let shape = problem.shape();
        let (out, average) = match out {
            WeightsOut::PerHead(out) => (out, false),
            WeightsOut::Average(out) => (out, true),
        };
        let share = if average { 1.0 / shape.q_heads as f64 } else { 1.0 };
        out.fill(T::Compute::ZERO);
        for batch in 0..shape.batch {
            for head in 0..shape.q_heads {
                for query in 0..shape.q_len {
                    let row = shape.row(batch, head, query);
                    let lse = lse.get(row).map_or(f64::NEG_INFINITY, |lse| lse.to_f64());
                    if lse == f64::NEG_INFINITY {
                        continue; // saw nothing: zeros
                    }
                    let at_row = if average { batch * shape.q_len + query } else { row };
                    let Some(out) = out.get_mut(at_row * kv_total..(at_row + 1) * kv_total) else {
                        return; // the length has been checked
                    };
                    let mut add = |at: At, score: f64| {
                        if let Some(slot) = out.get_mut(at.key) {
                            let factor =
                                if problem.attn().get_dropout().is_none() { 1.0 } else { problem.dropout_factor(at) };
                            *slot += T::Compute::of(share * factor * Real::exp(score - lse));
                        }
                    };
                    let q_row = q.row(batch, head, query);
                    problem.for_each_visible(batch, head, query, |at| {
                        let k_row = k.row(batch, shape.kv_head(head), at.key);
                        let dot: f64 = q_row.iter().zip(k_row.iter()).map(|(q, k)| q.to_f64() * k.to_f64()).sum();
                        add(at, problem.score(dot, at));
                    });
                    for n in 0..self.appended.count() {
                        let at = At { batch, head, query, key: shape.kv_len + n };
                        let dot = self.appended.dot(q_row, shape.kv_head(head), n).to_f64();
                        add(at, self.appended.score(problem, dot));
                    }
                }
            }
        }
    }
}

/// Copies features, rounding them; both tensors have the same batch, length and number of features.
pub(super) fn copy<R: Element, O: Element>(from: View<'_, R>, to: &mut ViewMut<'_, O>) {
    let ([batch, ..], [_, _, _, dim]) = (to.sizes(), from.sizes());
    for b in 0..batch {
        for_each_feature(to.sizes(), |feature, head, d, seq| {
            let (Some(from_head), Some(from_d)) = (feature.checked_div(dim), feature.checked_rem(dim)) else {
                return;
            };
            to.set(b, head, seq, d, O::from_f64(from.at(b, from_head, seq, from_d).to_f64()));
        });
    }
}
