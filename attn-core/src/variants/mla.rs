//! Multi-head latent attention: one small vector per token is cached, and every head reads its keys and values out of it.
//!
//! DeepSeek-V2 (arXiv 2405.04434, §2.1), in the convention `x·W`; `r` is the latent's size, `dn` and `dr` the dims of a head
//! without and with rotary position, `dv` those of a value:
//!
//! ```text
//! c_kv   = rms(x·w_dkv) [r]        the latent: cached
//! k_rope = RoPE(x·w_kr) [dr]       one rotary key for all heads: cached
//! q      = x·w_q, or rms(x·w_dq)·w_uq           per head [q_nope | RoPE(q_rope)]
//!
//! Expanded: k = [c_kv·w_uk | k_rope], v = c_kv·w_uv per head; attention; y = heads·w_o
//! Absorbed: score = (q_nope·w_ukᵀ)·c_kv + q_rope·k_rope, context = (weights·c_kv)·w_uv
//! ```
//!
//! Both forms are the same by associativity. The expanded one spends `kv_len·r·(dn + dv)` a head before it attends and suits
//! prefill; the absorbed one never makes keys and values, but attends in `r + dr` dims as one key head for all query heads:
//! it suits decoding. The cache is one tensor `[batch, 1, capacity, r + dr]` that holds `c_kv | k_rope`, so that the absorbed
//! form reads it as it is.

use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::kv_cache::attend;
use crate::mask::{Align, Mask};
use crate::options::Attention;
use crate::position::{Positions, Rope};
use crate::score::{Problem, default_scale};
use crate::shape::{AttnShape, product};
use crate::view::{Row, View, ViewMut};

/// Which of the two equal forms to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MlaForm {
    /// Keys and values of every head are made from the latents.
    Expanded,
    /// The up-projections are moved to the query and the output.
    Absorbed,
}

/// Where queries come from.
#[derive(Clone, Copy, Debug)]
pub enum MlaQuery<'a, T> {
    /// `x·w_q`: [`View::matrix`] `[d_model, heads·(dn + dr)]`.
    Full(View<'a, T>),
    /// `rms(x·w_dq)·w_uq`.
    LowRank {
        /// Down-projection, `[d_model, q_rank]`.
        w_dq: View<'a, T>,
        /// Weight of the latent's RMS norm, `[q_rank]`; without it there is no norm.
        norm: Option<&'a [T]>,
        /// Up-projection, `[q_rank, heads·(dn + dr)]`.
        w_uq: View<'a, T>,
    },
}

/// The weights of a layer, `x·W`; all sizes follow from theirs. Views have any strides, so that transposed weights need no
/// copy.
#[derive(Clone, Copy, Debug)]
pub struct Mla<'a, T> {
    /// Queries.
    pub query: MlaQuery<'a, T>,
    /// Down-projection to the latent, `[d_model, r]`.
    pub w_dkv: View<'a, T>,
    /// Weight of the latent's RMS norm, `[r]`; without it there is no norm.
    pub kv_norm: Option<&'a [T]>,
    /// Projection to the rotary key, `[d_model, dr]`.
    pub w_kr: View<'a, T>,
    /// Up-projection to keys, sizes `[1, heads, r, dn]`.
    pub w_uk: View<'a, T>,
    /// Up-projection to values, sizes `[1, heads, r, dv]`.
    pub w_uv: View<'a, T>,
    /// Output projection, `[heads·dv, d_out]`.
    pub w_o: View<'a, T>,
    /// Added to the mean square in both norms.
    pub norm_eps: f64,
    /// Rotation of the rotary dims. DeepSeek pairs them interleaved.
    pub rope: Rope<'a>,
    /// Scale of the scores; `1/√(dn + dr)` by default.
    pub scale: Option<f64>,
}

/// The sizes that follow from the weights and a call.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: usize,
    /// New tokens.
    tokens: usize,
    /// Tokens cached before.
    past: usize,
    latent: usize,
    nope: usize,
    rotary: usize,
    value: usize,
    q_rank: usize,
    out: usize,
}

impl Sizes {
    fn query(&self) -> usize {
        self.nope.saturating_add(self.rotary)
    }

    fn cached(&self) -> usize {
        self.latent.saturating_add(self.rotary)
    }

    fn total(&self) -> usize {
        self.past.saturating_add(self.tokens)
    }
}

impl<'a, T: Element> Mla<'a, T> {
    fn sizes(&self, tokens: usize, past: usize) -> Result<Sizes> {
        let ([_, _, d_model, latent], [_, heads, _, nope]) = (self.w_dkv.sizes(), self.w_uk.sizes());
        let ([.., rotary], [.., value], [.., out]) = (self.w_kr.sizes(), self.w_uv.sizes(), self.w_o.sizes());
        let overflow = AttnError::Overflow { what: "heads · dims" };
        let width = |dim: usize| product(&[heads, dim]).ok_or(overflow);
        let queries = width(nope.checked_add(rotary).ok_or(overflow)?)?;
        matrix("w_dkv", self.w_dkv, [1, d_model, latent])?;
        matrix("w_kr", self.w_kr, [1, d_model, rotary])?;
        matrix("w_uk", self.w_uk, [heads, latent, nope])?;
        matrix("w_uv", self.w_uv, [heads, latent, value])?;
        matrix("w_o", self.w_o, [1, width(value)?, out])?;
        let norm = |what, norm: Option<&[T]>, len| norm.map_or(Ok(()), |w| AttnError::check_size(what, len, w.len()));
        norm("kv_norm", self.kv_norm, latent)?;
        let q_rank = match self.query {
            MlaQuery::Full(w_q) => {
                matrix("w_q", w_q, [1, d_model, queries])?;
                0
            }
            MlaQuery::LowRank { w_dq, norm: weight, w_uq } => {
                let [.., rank] = w_dq.sizes();
                matrix("w_dq", w_dq, [1, d_model, rank])?;
                matrix("w_uq", w_uq, [1, rank, queries])?;
                norm("q_norm", weight, rank)?;
                rank
            }
        };
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(AttnError::Option { name: "norm_eps", must: "finite and not negative" });
        }
        self.rope.dims(rotary)?;
        Ok(Sizes { heads, tokens, past, latent, nope, rotary, value, q_rank, out })
    }

    /// Elements of scratch that [`forward`](Self::forward) needs for `tokens` new tokens after `past` cached ones, whatever
    /// the batch.
    ///
    /// # Errors
    /// The weight that does not fit the others; [`AttnError::Overflow`].
    pub fn scratch_len(&self, form: MlaForm, tokens: usize, past: usize) -> Result<usize> {
        let s = self.sizes(tokens, past)?;
        let overflow = AttnError::Overflow { what: "mla scratch" };
        let mut total = 0usize;
        for part in Parts::<T::Compute>::lens(form, &s) {
            total = total.checked_add(part.ok_or(overflow)?).ok_or(overflow)?;
        }
        Ok(total)
    }

    /// Caches the latents of new tokens and attends with them, causally: `x` `[batch, 1, tokens, d_model]`, `out`
    /// `[batch, 1, tokens, d_out]`. The first `past` rows of `cache`, `[batch, 1, at least past + tokens, r + dr]`, hold
    /// `c_kv | k_rope` of the tokens before, normed and rotated; the next `tokens` rows are written. Computes in
    /// [`Element::Compute`].
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written.
    ///
    /// ```
    /// use attn_core::position::{Pairing, Rope};
    /// use attn_core::variants::{Mla, MlaForm, MlaQuery};
    /// use attn_core::{View, ViewMut};
    /// let w: Vec<f32> = (0..64).map(|i| (i as f32 * 1.3).sin()).collect();
    /// let (heads, d_model, r, dn, dr, dv) = (2, 4, 3, 2, 2, 2);
    /// let weights = |rows, columns| View::matrix(&w, rows, columns);
    /// let up = |columns| View::strided(&w, [1, heads, r, columns], [0, (r * columns) as isize, columns as isize, 1], 0);
    /// let mla = Mla {
    ///     query: MlaQuery::Full(weights(d_model, heads * (dn + dr))?),
    ///     w_dkv: weights(d_model, r)?,
    ///     kv_norm: None,
    ///     w_kr: weights(d_model, dr)?,
    ///     w_uk: up(dn)?,
    ///     w_uv: up(dv)?,
    ///     w_o: weights(heads * dv, d_model)?,
    ///     norm_eps: 1e-6,
    ///     rope: Rope::new(Pairing::Interleaved),
    ///     scale: None,
    /// };
    /// let x = View::matrix(&w, 5, d_model)?; // five tokens
    /// let (mut expanded, mut absorbed) = ([0.0f32; 20], [0.0f32; 20]);
    /// for (form, out) in [(MlaForm::Expanded, &mut expanded), (MlaForm::Absorbed, &mut absorbed)] {
    ///     let mut latents = vec![0.0f32; 5 * (r + dr)];
    ///     let mut scratch = vec![0.0; mla.scratch_len(form, 5, 0)?];
    ///     let mut cache = ViewMut::matrix(&mut latents, 5, r + dr)?;
    ///     mla.forward(form, x, &mut cache, 0, &mut ViewMut::matrix(out, 5, d_model)?, &mut scratch)?;
    /// }
    /// assert!(expanded.iter().zip(absorbed).all(|(a, b)| (a - b).abs() < 1e-5));
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn forward<C, O>(
        &self,
        form: MlaForm,
        x: View<'_, T>,
        cache: &mut ViewMut<'_, C>,
        past: usize,
        out: &mut ViewMut<'_, O>,
        scratch: &mut [T::Compute],
    ) -> Result<()>
    where
        C: Element<Compute = T::Compute>,
        O: Element<Compute = T::Compute>,
    {
        let ([batch, one, tokens, width], [.., capacity, _]) = (x.sizes(), cache.sizes());
        let s = self.sizes(tokens, past)?;
        let [_, _, d_model, _] = self.w_dkv.sizes();
        AttnError::check_size("x heads", 1, one)?;
        AttnError::check_size("x d_model against the weights", d_model, width)?;
        let total = past.checked_add(tokens).ok_or(AttnError::Overflow { what: "past + tokens" })?;
        AttnError::check_len("mla cache (past + tokens)", total, capacity)?;
        for (expected, found) in [batch, 1, capacity, s.cached()].into_iter().zip(cache.sizes()) {
            AttnError::check_size("mla cache against batch, 1, capacity, r + dr", expected, found)?;
        }
        for (expected, found) in [batch, 1, tokens, s.out].into_iter().zip(out.sizes()) {
            AttnError::check_size("mla output against batch, 1, tokens, d_out", expected, found)?;
        }
        let attn = Attention::new()
            .scale(self.scale.unwrap_or_else(|| default_scale(s.query())))
            .mask(Mask::causal(Align::BottomRight));
        let (kv_heads, head_dim, value_dim) = match form {
            MlaForm::Expanded => (s.heads, s.query(), s.value),
            MlaForm::Absorbed => (s.heads.min(1), s.cached(), s.latent),
        };
        let shape = AttnShape::new(
            [batch, s.heads, tokens, head_dim],
            [batch, kv_heads, total, head_dim],
            [batch, kv_heads, total, value_dim],
        )?;
        let problem = Problem::of_shape(&attn, shape)?;
        AttnError::check_len("mla scratch", self.scratch_len(form, tokens, past)?, scratch.len())?;

        let layer = Layer { mla: self, s, rope: self.rope.seq_len_or(total) };
        let mut parts = Parts::of(form, &s, scratch);
        for b in 0..batch {
            for token in 0..tokens {
                layer.cache_token(x.row(b, 0, token), cache, (b, past + token), parts.cached)?;
            }
            let latents = cache.as_view();
            layer.query_latents(x, b, parts.q_latent);
            for head in 0..s.heads {
                if form == MlaForm::Expanded {
                    layer.expand(latents, b, head, &mut parts);
                }
                for token in 0..tokens {
                    layer.query(x.row(b, 0, token), token, head, &mut parts)?;
                    layer.attend(form, &problem, latents, (b, head, token), &mut parts);
                }
            }
            for token in 0..tokens {
                let width = s.heads * s.value;
                let context = parts.context.get(token * width..).unwrap_or_default();
                for d in 0..s.out {
                    let y = project(context.iter().copied().take(width), self.w_o, 0, d);
                    out.set(b, 0, token, d, O::narrow(y));
                }
            }
        }
        Ok(())
    }
}

/// The scratch of a call, cut into its parts.
struct Parts<'s, R> {
    /// A row on its way into the cache: `[r + dr]`.
    cached: &'s mut [R],
    /// Low-rank latents of all new tokens: `[tokens, q_rank]`.
    q_latent: &'s mut [R],
    /// Query of one head: `[dn + dr]`.
    query: &'s mut [R],
    /// What the query is compared with, absorbed: `[r + dr]`.
    absorbed: &'s mut [R],
    /// Keys of one head, expanded: `[past + tokens, dn]` (the rotary dims stay in the cache).
    keys: &'s mut [R],
    /// Values of one head, expanded: `[past + tokens, dv]`.
    values: &'s mut [R],
    /// Weighted sum of values or latents.
    acc: &'s mut [R],
    /// Outputs of all heads: `[tokens, heads·dv]`.
    context: &'s mut [R],
}

impl<'s, R> Parts<'s, R> {
    fn lens(form: MlaForm, s: &Sizes) -> [Option<usize>; 8] {
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
    fn of(form: MlaForm, s: &Sizes, mut scratch: &'s mut [R]) -> Self {
        let [cached, q_latent, query, absorbed, keys, values, acc, context] = Self::lens(form, s).map(|len| {
            let (part, rest) = core::mem::take(&mut scratch).split_at_mut_checked(len.unwrap_or(0)).unwrap_or_default();
            scratch = rest;
            part
        });
        Self { cached, q_latent, query, absorbed, keys, values, acc, context }
    }
}

/// The steps of a call.
struct Layer<'l, 'a, T> {
    mla: &'l Mla<'a, T>,
    s: Sizes,
    rope: Rope<'a>,
}

impl<T: Element> Layer<'_, '_, T> {
    /// Latent and rotary key of one token, into its row of the cache.
    fn cache_token<C: Element<Compute = T::Compute>>(
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
    fn query_latents(&self, x: View<'_, T>, batch: usize, out: &mut [T::Compute]) {
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
    fn query(&self, x: Row<'_, T>, token: usize, head: usize, parts: &mut Parts<'_, T::Compute>) -> Result<()> {
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
    fn expand<C: Element<Compute = T::Compute>>(
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
    fn attend<C: Element<Compute = T::Compute>>(
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
                attend::row::<T::Compute, _>(problem, at, dot, value, parts.acc);
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
                attend::row::<C, _>(problem, at, dot, latent_row, parts.acc);
                for (column, c) in context.iter_mut().enumerate() {
                    *c = project(parts.acc.iter().copied(), self.mla.w_uv, head, column);
                }
            }
        }
    }
}

/// One entry of `x·W` for the matrix of one head.
fn project<T: Element>(x: impl Iterator<Item = T::Compute>, w: View<'_, T>, head: usize, column: usize) -> T::Compute {
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

fn matrix<T: Copy>(what: &'static str, w: View<'_, T>, [heads, rows, columns]: [usize; 3]) -> Result<()> {
    [1, heads, rows, columns]
        .into_iter()
        .zip(w.sizes())
        .try_for_each(|(expected, found)| AttnError::check_size(what, expected, found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;
    use crate::position::Pairing;
    use crate::reference;
    use std::vec;
    use std::vec::Vec;

    const HEADS: usize = 3;
    const MODEL: usize = 5;
    const LATENT: usize = 4;
    const NOPE: usize = 3;
    const ROTARY: usize = 2;
    const VALUE: usize = 2;
    const RANK: usize = 6;

    struct Weights(Vec<f64>);

    impl Weights {
        fn new() -> Self {
            Self((0..400).map(|i| libm::sin(0.7 + i as f64 * 2.3)).collect())
        }

        fn matrix(&self, seed: usize, rows: usize, columns: usize) -> View<'_, f64> {
            View::strided(&self.0, [1, 1, rows, columns], [0, 0, columns as isize, 1], seed).unwrap()
        }

        fn up(&self, seed: usize, columns: usize) -> View<'_, f64> {
            let strides = [0, (LATENT * columns) as isize, columns as isize, 1];
            View::strided(&self.0, [1, HEADS, LATENT, columns], strides, seed).unwrap()
        }

        fn mla(&self, low_rank: bool) -> Mla<'_, f64> {
            let queries = HEADS * (NOPE + ROTARY);
            let query = if low_rank {
                MlaQuery::LowRank {
                    w_dq: self.matrix(1, MODEL, RANK),
                    norm: Some(&self.0[9..9 + RANK]),
                    w_uq: self.matrix(2, RANK, queries),
                }
            } else {
                MlaQuery::Full(self.matrix(3, MODEL, queries))
            };
            Mla {
                query,
                w_dkv: self.matrix(4, MODEL, LATENT),
                kv_norm: low_rank.then(|| &self.0[5..5 + LATENT]),
                w_kr: self.matrix(6, MODEL, ROTARY),
                w_uk: self.up(7, NOPE),
                w_uv: self.up(8, VALUE),
                w_o: self.matrix(10, HEADS * VALUE, MODEL),
                norm_eps: 1e-3,
                rope: Rope::new(Pairing::Interleaved).base(100.0),
                scale: None,
            }
        }
    }

    /// `x·W` for rows of `x`.
    fn times(x: &[f64], w: View<'_, f64>, head: usize) -> Vec<f64> {
        let [_, _, rows, columns] = w.sizes();
        let entry = |x: &[f64], c| (0..rows).map(|r| x[r] * w.at(0, head, r, c)).sum::<f64>();
        x.chunks(rows).flat_map(|x| (0..columns).map(move |c| entry(x, c))).collect()
    }

    fn normed(x: &[f64], weight: Option<&[f64]>, len: usize) -> Vec<f64> {
        let Some(weight) = weight else { return x.to_vec() };
        let root = |x: &[f64]| libm::sqrt(x.iter().map(|t| t * t).sum::<f64>() / len as f64 + 1e-3);
        x.chunks(len).flat_map(|x| x.iter().zip(weight).map(move |(t, w)| t / root(x) * w)).collect()
    }

    /// The definition, head by head with the reference engine, for one sequence.
    fn definition(mla: &Mla<'_, f64>, x: &[f64]) -> Vec<f64> {
        let n = x.len() / MODEL;
        let rotate = |x: &mut [f64]| {
            mla.rope.apply_in_place(&mut ViewMut::matrix(x, n, ROTARY).unwrap(), Positions::Offset(0)).unwrap();
        };
        let q = match mla.query {
            MlaQuery::Full(w_q) => times(x, w_q, 0),
            MlaQuery::LowRank { w_dq, norm, w_uq } => times(&normed(&times(x, w_dq, 0), norm, RANK), w_uq, 0),
        };
        let latents = normed(&times(x, mla.w_dkv, 0), mla.kv_norm, LATENT);
        let mut rotary_key = times(x, mla.w_kr, 0);
        rotate(&mut rotary_key);
        let mut context = vec![0.0; n * HEADS * VALUE];
        for head in 0..HEADS {
            let of_head = |range: std::ops::Range<usize>| {
                let width = HEADS * (NOPE + ROTARY);
                let start = head * (NOPE + ROTARY);
                q.chunks(width).flat_map(|q| q[start..][range.clone()].to_vec()).collect::<Vec<f64>>()
            };
            let mut rotary_query = of_head(NOPE..NOPE + ROTARY);
            rotate(&mut rotary_query);
            let join = |a: &[f64], b: &[f64]| {
                a.chunks(NOPE).zip(b.chunks(ROTARY)).flat_map(|(a, b)| [a, b].concat()).collect::<Vec<f64>>()
            };
            let queries = join(&of_head(0..NOPE), &rotary_query);
            let keys = join(&times(&latents, mla.w_uk, head), &rotary_key);
            let values = times(&latents, mla.w_uv, head);
            let out =
                ViewMut::strided(&mut context, [1, 1, n, VALUE], [0, 0, (HEADS * VALUE) as isize, 1], head * VALUE);
            reference::forward(
                &Attention::new().mask(Mask::causal(Align::TopLeft)),
                View::matrix(&queries, n, NOPE + ROTARY).unwrap(),
                View::matrix(&keys, n, NOPE + ROTARY).unwrap(),
                View::matrix(&values, n, VALUE).unwrap(),
                out.unwrap(),
                &mut vec![0.0; n],
            )
            .unwrap();
        }
        times(&context, mla.w_o, 0)
    }

    #[test]
    fn both_forms_are_the_definition_whole_or_in_chunks() {
        let weights = Weights::new();
        let x: Vec<f64> = (0..2 * 7 * MODEL).map(|i| libm::cos(i as f64 * 1.1)).collect();
        for low_rank in [false, true] {
            let mla = weights.mla(low_rank);
            let want = x.chunks(7 * MODEL).flat_map(|x| definition(&mla, x)).collect::<Vec<f64>>();
            let mut caches = Vec::new();
            for (form, chunks) in [
                (MlaForm::Expanded, &[7usize][..]),
                (MlaForm::Absorbed, &[7]),
                (MlaForm::Expanded, &[3, 1, 3]),
                (MlaForm::Absorbed, &[5, 1, 1]),
            ] {
                // A longer cache than needed, with junk behind.
                let (mut cache, mut out) = (vec![f64::NAN; 2 * 9 * (LATENT + ROTARY)], vec![0.0; x.len()]);
                let mut past = 0;
                for &n in chunks {
                    let sizes = |n| [2, 1, n, MODEL];
                    let strides = [7 * MODEL as isize, 0, MODEL as isize, 1];
                    let tokens = View::strided(&x, sizes(n), strides, past * MODEL).unwrap();
                    let mut y = ViewMut::strided(&mut out, sizes(n), strides, past * MODEL).unwrap();
                    let mut scratch = vec![0.0; mla.scratch_len(form, n, past).unwrap()];
                    let mut cache = ViewMut::new(&mut cache, Layout::Bhsd, [2, 1, 9, LATENT + ROTARY]).unwrap();
                    mla.forward(form, tokens, &mut cache, past, &mut y, &mut scratch).unwrap();
                    past += n;
                }
                for (got, want) in out.iter().zip(&want) {
                    assert!((got - want).abs() < 1e-12, "{form:?} {chunks:?}: {got} {want}");
                }
                caches.push(cache[..7 * (LATENT + ROTARY)].to_vec());
            }
            assert!(caches.iter().all(|cache| cache == &caches[0]));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_before_writing() {
        let weights = Weights::new();
        let mla = weights.mla(true);
        let x = vec![0.5; 2 * MODEL];
        let x = View::matrix(&x, 2, MODEL).unwrap();
        let (mut cache, mut out) = (vec![7.0; 4 * (LATENT + ROTARY)], vec![7.0; 2 * MODEL]);
        let mut refused = |mla: &Mla<'_, f64>, past: usize, rows: usize, less: usize| {
            let needed = mla.scratch_len(MlaForm::Absorbed, 2, past.min(9)).unwrap_or(100);
            let mut cache = ViewMut::matrix(&mut cache, rows, LATENT + ROTARY).unwrap();
            let mut out = ViewMut::matrix(&mut out, 2, MODEL).unwrap();
            mla.forward(MlaForm::Absorbed, x, &mut cache, past, &mut out, &mut vec![0.0; needed - less]).is_err()
        };
        assert!(refused(&mla, 3, 4, 0) && refused(&mla, usize::MAX, 4, 0) && refused(&mla, 0, 4, 1));
        assert!(refused(&Mla { w_kr: weights.matrix(0, MODEL, ROTARY + 1), ..mla }, 0, 4, 0));
        assert!(refused(&Mla { w_uk: weights.up(0, NOPE + 1), ..mla }, 0, 4, 0));
        let uneven = View::strided(&weights.0, [1, HEADS, LATENT + 1, NOPE], [0, 1, 1, 1], 0).unwrap();
        assert!(refused(&Mla { w_uk: uneven, ..mla }, 0, 4, 0));
        assert!(refused(&Mla { w_o: weights.matrix(0, HEADS, MODEL), ..mla }, 0, 4, 0));
        assert!(refused(&Mla { kv_norm: Some(&[1.0]), ..mla }, 0, 4, 0));
        assert!(refused(&Mla { norm_eps: f64::NAN, ..mla }, 0, 4, 0));
        assert!(refused(&Mla { scale: Some(f64::NAN), ..mla }, 0, 4, 0));
        assert!(out.iter().chain(&cache).all(|&x| x == 7.0));
    }
}
