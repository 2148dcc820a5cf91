//! The weights of a layer, and the sizes that follow from them.

use attn_core::engine::product;
use attn_core::position::rope::Rope;
use attn_core::{AttnError, Element, Result, View};

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

/// The weights of a layer, `x·W`; all sizes follow from theirs. Views have any strides, so that transposed weights need
/// no copy.
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
pub(super) struct Sizes {
    pub(super) heads: usize,
    /// New tokens.
    pub(super) tokens: usize,
    /// Tokens cached before.
    pub(super) past: usize,
    pub(super) latent: usize,
    pub(super) nope: usize,
    pub(super) rotary: usize,
    pub(super) value: usize,
    pub(super) q_rank: usize,
    pub(super) out: usize,
}

impl Sizes {
    pub(super) fn query(&self) -> usize {
        self.nope.saturating_add(self.rotary)
    }

    pub(super) fn cached(&self) -> usize {
        self.latent.saturating_add(self.rotary)
    }

    pub(super) fn total(&self) -> usize {
        self.past.saturating_add(self.tokens)
    }
}

impl<'a, T: Element> Mla<'a, T> {
    pub(super) fn sizes(&self, tokens: usize, past: usize) -> Result<Sizes> {
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
}

fn matrix<T: Copy>(what: &'static str, w: View<'_, T>, [heads, rows, columns]: [usize; 3]) -> Result<()> {
    [1, heads, rows, columns]
        .into_iter()
        .zip(w.sizes())
        .try_for_each(|(expected, found)| AttnError::check_size(what, expected, found))
}
