//! Multi-head latent attention: the cache holds one small vector per token, and every head computes its keys and values
//! from it.
//!
//! DeepSeek-V2 (arXiv 2405.04434, §2.1), in the convention `x·W`; `r` is the latent's size, `dn` and `dr` the dims of a
//! head without and with rotary position, `dv` those of a value:
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
//! Both forms are the same by associativity. The expanded one spends `kv_len·r·(dn + dv)` a head before it attends: it
//! suits prefill. The absorbed one never makes keys and values, and attends in `r + dr` dims with one key head for all
//! query heads: it suits decoding. The cache is one tensor `[batch, 1, capacity, r + dr]` that holds `c_kv | k_rope`,
//! and the absorbed form reads it as it is.

mod layer;
#[cfg(test)]
mod tests;
mod weights;

use attn_core::score::{Problem, default_scale};
use attn_core::{Align, Attention, AttnError, AttnShape, Element, Mask, Result, View, ViewMut};

use layer::{Layer, Parts, project};

pub use weights::{Mla, MlaForm, MlaQuery};

impl<T: Element> Mla<'_, T> {
    /// Elements of scratch that [`forward`](Self::forward) needs for `tokens` new tokens after `past` cached ones,
    /// whatever the batch.
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
    /// `[batch, 1, tokens, d_out]`. The first `past` rows of `cache`, `[batch, 1, at least past + tokens, r + dr]`,
    /// hold `c_kv | k_rope` of the tokens before, normed and rotated; the next `tokens` rows are written. Computes in
    /// [`Element::Compute`].
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written.
    ///
    /// ```
    /// use attn_core::position::rope::{Pairing, Rope};
    /// use attn_layers::variants::mla::{Mla, MlaForm, MlaQuery};
    /// use attn_core::{View, ViewMut};
    /// let w: Vec<f32> = (0..64).map(|i| (i as f32 * 1.3).sin()).collect();
    /// let (heads, d_model, r, dn, dr, dv) = (2, 4, 3, 2, 2, 2);
    /// let weights = |rows, columns| View::matrix(&w, rows, columns);
    /// let up = |columns| {
    ///     View::strided(&w, [1, heads, r, columns], [0, (r * columns) as isize, columns as isize, 1], 0)
    /// };
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
