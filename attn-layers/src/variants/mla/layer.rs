//! The steps of one latent-attention call, over scratch of the caller: latents, queries, keys and values of a head,
//! attention, and the arrays of the scratch.

use attn_core::element::Real;
use attn_core::engine::{attend_row, product};
use attn_core::position::Positions;
use attn_core::position::rope::Rope;
use attn_core::row::Row;
use attn_core::score::Problem;
use attn_core::{Element, Result, View, ViewMut};

use super::weights::{Mla, MlaForm, MlaQuery, Sizes};

/// The scratch of a call, cut into its parts.
pub(super) struct Parts<'s, R> {
    /// A row on its way into the cache: `[r + dr]`.
    pub(super) cached: &'s mut [R],
    /// Low-rank latents of all new tokens: `[tokens, q_rank]`.
    pub(super) q_latent: &'s mut [R],
    /// Query of one head: `[dn + dr]`.
    pub(super) query: &'s mut [R],
    /// What the query is compared with, absorbed: `[r + dr]`.
    pub(super) absorbed: &'s mut [R],
    /// Keys of one head, expanded: `[past + tokens, dn]` (the rotary dims stay in the cache).
    pub(super) keys: &'s mut [R],
    /// Values of one head, expanded: `[past + tokens, dv]`.
    pub(super) values: &'s mut [R],
    /// Weighted sum of values or latents.
    pub(super) acc: &'s mut [R],
    /// Outputs of all heads: `[tokens, heads·dv]`.
    pub(super) context: &'s mut [R],
}

impl<'s, R> Parts<'s, R> {
    pub(super) fn lens(form: MlaForm, s: &Sizes) -> [Option<usize>; 8] {
        let expanded = form == MlaForm::Expanded;
        let only = |when: bool, len: Option<usize>| if when { len } else { Some(0) };
        [
            Some(s.cached()),
            product(&[s.tokens, s.q_rank]),
            Some(s.query()),
            only(!expanded, Some(s.cached())),
            only(expanded, product(&[s.total(), s.nope])),
            only(expanded, product(&[s.total(), s.value])),
            Some(if expanded { s.value } else { s.latent }),
            product(&[s.tokens, s.heads, s.value]),
        ]
    }

    /// Cuts a scratch that is long enough.
    pub(super) fn of(form: MlaForm, s: &Sizes, mut scratch: &'s mut [R]) -> Self {
        let [cached, q_latent, query, absorbed, keys, values, acc, context] = Self::lens(form, s).map(|len| {
            let (part, rest) = core::mem::take(&mut scratch).split_at_mut_checked(len.unwrap_or(0)).unwrap_or_default();
            scratch = rest;
            part
        });
        Self { cached, q_latent, query, absorbed, keys, values, acc, context }
    }
}

/// The steps of a call.
pub(super) struct Layer<'l, 'a, T> {
    pub(super) mla: &'l Mla<'a, T>,
    pub(super) s: Sizes,
    pub(super) rope: Rope<'a>,
}

impl<T: Element> Layer<'_, '_, T> {
    /// Latent and rotary key of one token, into its row of the cache.
    pub(super) fn cache_token<C: Element<Compute = T::Compute>>(
        &self,
        x: Row<'_, T>,
        cache: &mut ViewMut<'_, C>,
        (batch, position): (usize, usize),
        row: &mut [T::Compute],
    ) -> Result<()> {
        let Some((latent, rotary)) = row.split_at_mut_checked(self.s.latent) else {
            return Ok(());
        };
        for (column, c) in latent.iter_mut().enumerate() {
            *c = project(x.iter().map(T::widen), self.mla.w_dkv, 0, column);
        }
        rms(latent, self.mla.kv_norm, self.mla.norm_eps);
        for (column, k) in rotary.iter_mut().enumerate() {
            *k = project(x.iter().map(T::widen), self.mla.w_kr, 0, column);
        }
        self.rotate(rotary, position)?;
        for (d, &value) in row.iter().enumerate() {
            cache.set(batch, 0, position, d, C::narrow(value));
        }
        Ok(())
    }

    fn rotate(&self, x: &mut [T::Compute], position: usize) -> Result<()> {
        let (dim, position) = (x.len(), isize::try_from(position).unwrap_or(isize::MAX));
        self.rope.apply_in_place(&mut ViewMut::matrix(x, 1, dim)?, Positions::Offset(position))
    }

    /// Low-rank latents of the queries of a sequence, if there are any.
    pub(super) fn query_latents(&self, x: View<'_, T>, batch: usize, out: &mut [T::Compute]) {
        if let MlaQuery::LowRank { w_dq, norm, .. } = self.mla.query {
            for (token, row) in out.chunks_exact_mut(self.s.q_rank.max(1)).enumerate() {
                for (column, c) in row.iter_mut().enumerate() {
                    *c = project(x.row(batch, 0, token).iter().map(T::widen), w_dq, 0, column);
                }
                rms(row, norm, self.mla.norm_eps);
            }
        }
    }

    /// Query of one token and head, rotated.
    pub(super) fn query(
        &self,
        x: Row<'_, T>,
        token: usize,
        head: usize,
        parts: &mut Parts<'_, T::Compute>,
    ) -> Result<()> {
        let s = &self.s;
        let first = head * s.query();
        for (n, q) in parts.query.iter_mut().enumerate() {
            *q = match self.mla.query {
                MlaQuery::Full(w_q) => project(x.iter().map(T::widen), w_q, 0, first + n),
                MlaQuery::LowRank { w_uq, .. } => {
                    let latent = parts.q_latent.get(token * s.q_rank..).unwrap_or_default();
                    project(latent.iter().copied().take(s.q_rank), w_uq, 0, first + n)
                }
            };
        }
        let rotary = parts.query.get_mut(s.nope..).unwrap_or_default();
        self.rotate(rotary, s.past + token)
    }

    /// Keys and values of one head, from all latents.
    pub(super) fn expand<C: Element<Compute = T::Compute>>(
        &self,
        cache: View<'_, C>,
        batch: usize,
        head: usize,
        parts: &mut Parts<'_, T::Compute>,
    ) {
        let s = &self.s;
        for (out, w, width) in [(&mut *parts.keys, self.mla.w_uk, s.nope), (&mut *parts.values, self.mla.w_uv, s.value)]
        {
            for (position, row) in out.chunks_exact_mut(width.max(1)).enumerate() {
                for (column, out) in row.iter_mut().enumerate() {
                    let latent = cache.row(batch, 0, position).iter().take(s.latent);
                    *out = project(latent.map(C::widen), w, head, column);
                }
            }
        }
    }

    /// One row of attention, into its place in the context.
    pub(super) fn attend<C: Element<Compute = T::Compute>>(
        &self,
        form: MlaForm,
        problem: &Problem<'_, '_>,
        cache: View<'_, C>,
        at: (usize, usize, usize),
        parts: &mut Parts<'_, T::Compute>,
    ) {
        let (s, (batch, head, token)) = (&self.s, at);
        let context = parts.context.get_mut((token * s.heads + head) * s.value..).unwrap_or_default();
        let context = context.get_mut(..s.value).unwrap_or_default();
        let latent_row = |position| cache.row(batch, 0, position);
        let (nope, rotary) = parts.query.split_at_checked(s.nope).unwrap_or_default();
        match form {
            MlaForm::Expanded => {
                let (keys, values) = (&*parts.keys, &*parts.values);
                let dot = |position: usize| {
                    let key = keys.get(position * s.nope..).unwrap_or_default();
                    let rotary_key = latent_row(position).iter().skip(s.latent).map(C::widen);
                    sum(nope, key.iter().copied()) + sum(rotary, rotary_key)
                };
                let Ok(values) = View::matrix(values, s.total(), s.value) else {
                    return; // it was cut to this size
                };
                let value = |position| values.row(0, 0, position);
                attend_row::<T::Compute, _>(problem, at, dot, value, parts.acc);
                for (c, &x) in context.iter_mut().zip(parts.acc.iter()) {
                    *c = x;
                }
            }
            MlaForm::Absorbed => {
                // q_nope·w_ukᵀ: a row of w_uk for each latent dim. Behind it the rotary query.
                let w_uk = self.mla.w_uk;
                for (d, out) in parts.absorbed.iter_mut().enumerate() {
                    *out = match d.checked_sub(s.latent) {
                        None => sum(nope, w_uk.row(0, head, d).iter().map(T::widen)),
                        Some(d) => rotary.get(d).copied().unwrap_or_default(),
                    };
                }
                let absorbed = &*parts.absorbed;
                let dot = |position| sum(absorbed, latent_row(position).iter().map(C::widen));
                attend_row::<C, _>(problem, at, dot, latent_row, parts.acc);
                for (column, c) in context.iter_mut().enumerate() {
                    *c = project(parts.acc.iter().copied(), self.mla.w_uv, head, column);
                }
            }
        }
    }
}

/// One entry of `x·W` for the matrix of one head.
pub(super) fn project<T: Element>(
    x: impl Iterator<Item = T::Compute>,
    w: View<'_, T>,
    head: usize,
    column: usize,
) -> T::Compute {
    let mut sum = T::Compute::ZERO;
    for (row, x) in x.enumerate() {
        sum += x * w.at(0, head, row, column).widen();
    }
    sum
}

fn sum<R: Real>(x: &[R], y: impl Iterator<Item = R>) -> R {
    let mut sum = R::ZERO;
    for (x, y) in x.iter().zip(y) {
        sum += *x * y;
    }
    sum
}

/// `t/√(mean(t²) + eps)·weight`, in place; nothing without a weight (Zhang & Sennrich 2019, arXiv 1910.07467).
fn rms<T: Element>(t: &mut [T::Compute], weight: Option<&[T]>, eps: f64) {
    let Some(weight) = weight else {
        return;
    };
    let squares = sum(t, t.iter().copied());
    let root = (squares / T::Compute::of(t.len() as f64) + T::Compute::of(eps)).sqrt();
    let factor = if root == T::Compute::ZERO { root } else { T::Compute::ONE / root };
    for (t, w) in t.iter_mut().zip(weight) {
        *t = *t * factor * w.widen();
    }
}
