//! All heads in three fused projections, then the output projection.

use attn_core::engine::Appended;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, Element, Result, View, ViewMut};

use super::engine::{Engine, GradientEngine};
use super::gradients::ModuleGradients;
use super::outputs::LayerOutputs;
use super::run::{Heads, Layer, Part, Project};
use super::sources::Sources;
use crate::projection::Linear;

/// Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762, §3.2.2): `concat(head_1, …, head_h)·W_o`, head `h`
/// being columns `h·head_dim..(h + 1)·head_dim` of the projections.
///
/// Fewer key/value heads than query heads are grouped-query attention (arXiv 2305.13245), one is multi-query attention
/// (arXiv 1911.02150). Without [`output`](Self::output) the heads side by side are the result.
///
/// Masks in the terms of torch's `nn.MultiheadAttention` (where `true` means *blocked*):
///
/// | torch | here |
/// |---|---|
/// | `key_padding_mask` bool `[batch, seq]` | `Mask::drop(View::new(m, Layout::Bhsd, [batch, 1, 1, seq])?)` |
/// | `attn_mask` bool `[l, s]` | `Mask::drop(View::broadcast(m, &[l, s])?)` |
/// | `attn_mask` bool `[batch·heads, l, s]` | `Mask::drop(View::new(m, Layout::Bhsd, [batch, heads, l, s])?)` |
/// | `attn_mask` float | the same views, as [`Attention::bias`] |
/// | both | `Mask::drop(a).and(Mask::drop(b))` |
/// | `add_bias_kv`, `add_zero_attn` | [`bias_kv`](Self::bias_kv), [`zero_attn`](Self::zero_attn); masks cover the given keys |
/// | `average_attn_weights` | [`LayerOutputs::average_weights`] or [`LayerOutputs::weights`] |
///
/// ```
/// use attn_layers::module::{MultiHeadAttention, Reference, Sources};
/// use attn_core::{Attention, Layout, View, ViewMut};
/// // torch's packed weights: embed_dim 4, 2 heads; here the identity three times, so that q = k = v = x.
/// let mut in_proj = [0.0f32; 3 * 4 * 4];
/// for n in 0..12 {
///     in_proj[n * 4 + n % 4] = 1.0;
/// }
/// let mha = MultiHeadAttention::packed(4, 2, &in_proj, None)?;
/// let x = [0.0f32; 2 * 3 * 4]; // 2 sequences of 3 tokens
/// let mut y = [1.0f32; 2 * 3 * 4];
/// let mut scratch = [0.0f64; 200];
/// assert!(mha.scratch_len(&Reference, 2, 3, 3)? <= scratch.len());
/// mha.forward(
///     &mut Reference,
///     &Attention::new(),
///     Sources::same(View::new(&x, Layout::Bhsd, [2, 1, 3, 4])?),
///     ViewMut::new(&mut y, Layout::Bhsd, [2, 1, 3, 4])?,
///     &mut scratch,
/// )?;
/// assert_eq!(y, x);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MultiHeadAttention<'a, T> {
    pub(super) layer: Layer<'a, T, Fused<'a, T>>,
}

/// The three fused projections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused<'a, T> {
    pub(super) q: Linear<'a, T>,
    pub(super) k: Linear<'a, T>,
    pub(super) v: Linear<'a, T>,
    pub(super) heads: Heads,
}

impl<T: Element> Project<T> for Fused<'_, T> {
    fn heads(&self) -> Heads {
        self.heads
    }

    fn d_in(&self, part: Part) -> usize {
        self.of(part).d_in()
    }

    fn project<E: Engine<T>>(
        &self,
        engine: &mut E,
        part: Part,
        x: View<'_, T>,
        to: &mut ViewMut<'_, E::Mid>,
    ) -> Result<()> {
        engine.project(self.of(part), x, to)
    }
}

impl<'a, T> Fused<'a, T> {
    fn of(&self, part: Part) -> &Linear<'a, T> {
        match part {
            Part::Query => &self.q,
            Part::Key => &self.k,
            Part::Value => &self.v,
        }
    }
}

impl<'a, T: Element> MultiHeadAttention<'a, T> {
    /// From separate projections: `q` to `q_heads·head_dim` features, `k` to `kv_heads·head_dim`, `v` to
    /// `kv_heads·value_dim`. Their inputs may have three different numbers of features (torch's `kdim`, `vdim`).
    ///
    /// # Errors
    /// [`AttnError::Heads`] if the heads do not group, [`AttnError::Size`] if features do not divide into heads.
    pub fn new(q_heads: usize, kv_heads: usize, q: Linear<'a, T>, k: Linear<'a, T>, v: Linear<'a, T>) -> Result<Self> {
        let grouped = q_heads.checked_rem(kv_heads).map_or(q_heads == 0, |rest| rest == 0);
        if !grouped {
            return Err(AttnError::Heads { q_heads, kv_heads });
        }
        let head_dim = per_head("q features against q_heads · head_dim", q.d_out(), q_heads)?;
        let value_dim = per_head("v features against kv_heads · value_dim", v.d_out(), kv_heads)?;
        // Products of sizes that `q` and `v` hold already, or less: they fit.
        AttnError::check_size("k features against kv_heads · head_dim", kv_heads * head_dim, k.d_out())?;
        let Some(_) = q_heads.checked_mul(value_dim) else {
            return Err(AttnError::Overflow { what: "q_heads · value_dim" });
        };
        let heads = Heads { q_heads, kv_heads, head_dim, value_dim };
        let projections = Fused { q, k, v, heads };
        Ok(Self { layer: Layer { projections, appended: Appended::none(), out: None } })
    }

    /// From torch's packed `in_proj_weight` `[3·embed_dim, embed_dim]` (rows for q, then k, then v) and `in_proj_bias`
    /// `[3·embed_dim]`.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`AttnError::Size`] if a slice has another length.
    pub fn packed(
        embed_dim: usize,
        heads: usize,
        in_proj_weight: &'a [T],
        in_proj_bias: Option<&'a [T]>,
    ) -> Result<Self> {
        let third = embed_dim.checked_mul(embed_dim).filter(|n| n.checked_mul(3).is_some());
        let Some(third) = third else {
            return Err(AttnError::Overflow { what: "3 · embed_dim²" });
        };
        AttnError::check_size("in_proj_weight (3 · embed_dim²)", 3 * third, in_proj_weight.len())?;
        if let Some(bias) = in_proj_bias {
            // 3·embed_dim fits, because 3·embed_dim² does (or embed_dim is 0).
            AttnError::check_size("in_proj_bias (3 · embed_dim)", 3 * embed_dim, bias.len())?;
        }
        let part = |n: usize| {
            let rows = in_proj_weight.get(n * third..(n + 1) * third).unwrap_or_default();
            let layer = Linear::transposed(rows, embed_dim, embed_dim)?;
            match in_proj_bias.and_then(|bias| bias.get(n * embed_dim..(n + 1) * embed_dim)) {
                Some(bias) => layer.bias(bias),
                None => Ok(layer),
            }
        };
        Self::new(heads, heads, part(0)?, part(1)?, part(2)?)
    }

    /// The output projection, from `q_heads·value_dim` features.
    ///
    /// # Errors
    /// [`AttnError::Size`].
    pub fn output(mut self, out: Linear<'a, T>) -> Result<Self> {
        let Heads { q_heads, value_dim, .. } = self.layer.projections.heads;
        AttnError::check_size("output projection d_in (q_heads · value_dim)", q_heads * value_dim, out.d_in())?;
        self.layer.out = Some(out);
        Ok(self)
    }

    /// Appends a learned key and value, `[kv_heads·head_dim]` and `[kv_heads·value_dim]`, after the projections
    /// (torch's `add_bias_kv`). No mask and no bias reaches it.
    ///
    /// # Errors
    /// [`AttnError::Size`].
    pub fn bias_kv(mut self, bias_k: &'a [T], bias_v: &'a [T]) -> Result<Self> {
        let Heads { kv_heads, head_dim, value_dim, .. } = self.layer.projections.heads;
        AttnError::check_size("bias_k (kv_heads · head_dim)", kv_heads * head_dim, bias_k.len())?;
        AttnError::check_size("bias_v (kv_heads · value_dim)", kv_heads * value_dim, bias_v.len())?;
        let view = |data, dim: usize| View::strided(data, [1, kv_heads, 1, dim], [0, dim as isize, 0, 1], 0);
        self.layer.appended.bias = Some((view(bias_k, head_dim)?, view(bias_v, value_dim)?));
        Ok(self)
    }

    /// Appends a key and a value of zeros, after those of [`bias_kv`](Self::bias_kv) (torch's `add_zero_attn`). No mask
    /// and no bias reaches it.
    pub fn zero_attn(mut self) -> Self {
        self.layer.appended.zero = true;
        self
    }

    /// Query heads.
    pub fn q_heads(&self) -> usize {
        self.layer.projections.heads.q_heads
    }

    /// Key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.layer.projections.heads.kv_heads
    }

    /// Size of a query and of a key.
    pub fn head_dim(&self) -> usize {
        self.layer.projections.heads.head_dim
    }

    /// Size of a value.
    pub fn value_dim(&self) -> usize {
        self.layer.projections.heads.value_dim
    }

    /// Features of the result.
    pub fn d_out(&self) -> usize {
        self.layer.d_out()
    }

    /// Keys that the module adds behind those given: 0 to 2. The weights have that many more columns.
    pub fn appended(&self) -> usize {
        self.layer.appended.count()
    }

    /// Elements of scratch that [`forward`](Self::forward) needs: q, k, v, the context, a number per row, and the
    /// engine's.
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub fn scratch_len<E: Engine<T>>(&self, engine: &E, batch: usize, q_len: usize, kv_len: usize) -> Result<usize> {
        self.layer.scratch_len(engine, &self.layer.shape(batch, q_len, kv_len)?)
    }

    /// Projects, attends, joins. `attn` are the options of the attention in the middle (scale `1/√head_dim` unless
    /// given); masks and biases broadcast to `[batch, q_heads, q_len, kv_len]`, the appended keys not counted.
    ///
    /// `outputs` is a [`ViewMut`] or [`LayerOutputs`]; `scratch` holds [`scratch_len`](Self::scratch_len) elements.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written to the outputs.
    pub fn forward<'o, E: Engine<T>, M: Mods + Sync>(
        &self,
        engine: &mut E,
        attn: &Attention<'_, M>,
        inputs: impl Into<Sources<'o, T>>,
        outputs: impl Into<LayerOutputs<'o, T>>,
        scratch: &mut [E::Mid],
    ) -> Result<()> {
        self.layer.forward(engine, attn, &inputs.into(), outputs.into(), scratch)
    }

    /// Elements of scratch that [`backward`](Self::backward) needs.
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub fn backward_scratch_len<E: GradientEngine<T>>(
        &self,
        engine: &E,
        batch: usize,
        q_len: usize,
        kv_len: usize,
    ) -> Result<usize> {
        self.layer.backward_scratch_len(engine, &self.layer.shape(batch, q_len, kv_len)?)
    }

    /// The gradients of `Σ y·dy` by inputs, weights, biases, appended key and value: see [`ModuleGradients`] for what
    /// can be requested. The engine runs the forward pass again and goes back through the attention: [`Reference`]
    /// in `f64`, an engine of kernels on them. `dy` has the shape of the result; `scratch` holds
    /// [`backward_scratch_len`](Self::backward_scratch_len) elements.
    ///
    /// [`Reference`]: super::Reference
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written; see [`backward::gradients`](attn_core::backward::gradients).
    pub fn backward<'i, E: GradientEngine<T>, G: Element, O: Element, M: Mods + Sync>(
        &self,
        engine: &mut E,
        attn: &Attention<'_, M>,
        inputs: impl Into<Sources<'i, T>>,
        dy: View<'_, G>,
        gradients: ModuleGradients<'_, O>,
        scratch: &mut [E::Mid],
    ) -> Result<()> {
        self.layer.backward(engine, attn, &inputs.into(), dy, gradients, scratch)
    }
}

/// Features per head, if they divide.
fn per_head(what: &'static str, features: usize, heads: usize) -> Result<usize> {
    let dim = features.checked_div(heads).unwrap_or(0);
    AttnError::check_size(what, dim * heads, features)?;
    Ok(dim)
}
