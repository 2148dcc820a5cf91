//! The operations of an engine that a module needs: project, attend, join; and the gradients of the middle one.

use attn_core::backward::{self, Gradients};
use attn_core::element::Real;
use attn_core::engine::{self, Inputs};
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Element, Outputs, Result, View, ViewMut, reference, streaming};

use crate::projection::Linear;

/// Who does the work of a module whose weights and inputs are `T`.
///
/// A crate with kernels implements it for a type that owns its workspace and threads; then every module of this crate
/// runs on them. Only [`attend`](Self::attend) must be written: the two projections have plain defaults.
///
/// ```
/// use attn_layers::module::{Engine, Streaming};
/// use attn_core::{Attention, AttnShape, Outputs, Result, View};
/// use attn_core::score_mod::Mods;
///
/// /// Counts the calls, and leaves the work to another.
/// struct Counting(usize);
///
/// impl Engine<f32> for Counting {
///     type Mid = f32;
///     fn scratch_len(&self, shape: &AttnShape) -> Result<usize> {
///         Engine::<f32>::scratch_len(&Streaming, shape)
///     }
///     fn attend<M: Mods + Sync>(
///         &mut self,
///         attn: &Attention<'_, M>,
///         [q, k, v]: [View<'_, f32>; 3],
///         outputs: Outputs<'_, f32>,
///         scratch: &mut [f32],
///     ) -> Result<()> {
///         self.0 += 1;
///         Engine::<f32>::attend(&mut Streaming, attn, [q, k, v], outputs, scratch)
///     }
/// }
/// ```
pub trait Engine<T: Element> {
    /// What projected queries, keys, values and contexts are held in, and projections summed in.
    type Mid: Real;

    /// Elements of scratch that [`attend`](Self::attend) needs; 0 for an engine that owns its workspace.
    ///
    /// # Errors
    /// [`AttnError::Overflow`](attn_core::AttnError::Overflow).
    fn scratch_len(&self, shape: &AttnShape) -> Result<usize>;

    /// Attention over projected heads: `q` `[batch, q_heads, q_len, head_dim]`, `k` and `v` with their `kv_heads`, all
    /// contiguous in that order. Modules request the output and the lse, never the weights.
    /// Closures must be `Sync`, so that an engine may have threads.
    ///
    /// # Errors
    /// As the engine's own forward call.
    fn attend<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        qkv: [View<'_, Self::Mid>; 3],
        outputs: Outputs<'_, Self::Mid>,
        scratch: &mut [Self::Mid],
    ) -> Result<()>;

    /// From input features to heads: `y = x·W + b`, see [`Linear`].
    ///
    /// # Errors
    /// As [`Linear::forward`].
    fn project(&mut self, layer: &Linear<'_, T>, x: View<'_, T>, y: &mut ViewMut<'_, Self::Mid>) -> Result<()> {
        layer.forward_in::<Self::Mid, _, _>(x, y)
    }

    /// From heads to output features: `y = x·W + b`, see [`Linear`].
    ///
    /// # Errors
    /// As [`Linear::forward`].
    fn join(&mut self, layer: &Linear<'_, T>, x: View<'_, Self::Mid>, y: &mut ViewMut<'_, T>) -> Result<()> {
        layer.forward_in::<Self::Mid, _, _>(x, y)
    }
}

/// An engine that computes gradients too, for `backward` of a module.
///
/// The module goes back through join and projections; the engine goes back through the attention in the middle.
pub trait GradientEngine<T: Element>: Engine<T> {
    /// Elements of scratch that [`gradients`](Self::gradients) needs; 0 for an engine that owns its workspace.
    ///
    /// # Errors
    /// [`AttnError::Overflow`](attn_core::AttnError::Overflow).
    fn gradients_scratch_len(&self, shape: &AttnShape) -> Result<usize>;

    /// The gradients of [`attend`](Engine::attend) by q, k and v, and by bias and sinks if `gradients` has room for
    /// them. Weights are `exp(score − lse)`: `saved` may count keys that the module appends, behind those of `saved.k`.
    ///
    /// # Errors
    /// As the engine's own backward call, before anything is written.
    fn gradients<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        saved: SavedHeads<'_, Self::Mid>,
        gradients: Gradients<'_, Self::Mid>,
        scratch: &mut [Self::Mid],
    ) -> Result<()>;
}

/// What an engine computes gradients from: all of a module's forward pass, contiguous as `[batch, heads, seq, dim]`.
#[derive(Clone, Copy, Debug)]
pub struct SavedHeads<'v, R> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'v, R>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: View<'v, R>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: View<'v, R>,
    /// The context, `[batch, q_heads, q_len, value_dim]`.
    pub out: View<'v, R>,
    /// The log-sum-exp of each row, `batch · q_heads · q_len`.
    pub lse: &'v [R],
    /// The gradient by the context, of its shape.
    pub dy: View<'v, R>,
}

/// Runs a module on the [`reference`](mod@attn_core::reference) engine: everything in `f64`, one rounding at the end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl<T: Element> Engine<T> for Reference {
    type Mid = f64;

    fn scratch_len(&self, shape: &AttnShape) -> Result<usize> {
        Ok(reference::scratch_len(shape))
    }

    fn attend<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        [q, k, v]: [View<'_, f64>; 3],
        outputs: Outputs<'_, f64>,
        scratch: &mut [f64],
    ) -> Result<()> {
        reference::forward(attn, q, k, v, outputs, scratch)
    }
}

impl<T: Element> GradientEngine<T> for Reference {
    fn gradients_scratch_len(&self, shape: &AttnShape) -> Result<usize> {
        backward::scratch_len(shape)
    }

    fn gradients<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        SavedHeads { q, k, v, out, lse, dy }: SavedHeads<'_, f64>,
        gradients: Gradients<'_, f64>,
        scratch: &mut [f64],
    ) -> Result<()> {
        let inputs = Inputs { q, k, v, dy };
        backward::gradients_saved(attn, &inputs, engine::Saved { out, lse }, gradients, scratch)
    }
}

/// Runs a module on the [`streaming`](mod@attn_core::streaming) engine, all in [`Element::Compute`], `f32` for all
/// but `f64`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Streaming;

impl<T: Element> Engine<T> for Streaming {
    type Mid = T::Compute;

    fn scratch_len(&self, shape: &AttnShape) -> Result<usize> {
        Ok(streaming::scratch_len(shape))
    }

    fn attend<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        [q, k, v]: [View<'_, T::Compute>; 3],
        outputs: Outputs<'_, T::Compute>,
        scratch: &mut [T::Compute],
    ) -> Result<()> {
        streaming::forward(attn, q, k, v, outputs, scratch)
    }
}
