//! Heads in a list, each with its own parameters; their outputs are side by side.

use attn_core::engine::Appended;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, Element, Result, View, ViewMut};

use super::engine::Engine;
use super::outputs::LayerOutputs;
use super::run::{Heads, Layer, Part, Project};
use super::self_attention::SelfAttention;
use super::sources::Sources;
use crate::projection::Linear;

/// `concat(head_1, …, head_h)`: multi-head attention as a textbook first writes it, without output projection.
///
/// All heads have the same `d_model`, `d_k` and `d_v`. Each projects with its own matrices; the attention itself is one
/// call over all heads, so that an engine can share them out, and masks, slopes, sinks and dropout know which head they
/// are in. It is the same function as [`MultiHeadAttention`](super::MultiHeadAttention) whose fused matrices hold the
/// heads' side by side.
///
/// ```
/// use attn_layers::module::{ConcatHeads, SelfAttention, Streaming};
/// use attn_core::{Align, Attention, Mask, View, ViewMut};
/// use attn_layers::Linear;
/// let (eye, flip) = ([1.0f32, 0.0, 0.0, 1.0], [0.0f32, 1.0, 1.0, 0.0]);
/// let (eye, flip) = (Linear::new(&eye, 2, 2)?, Linear::new(&flip, 2, 2)?);
/// let heads = [SelfAttention::new(eye, eye, eye)?, SelfAttention::new(eye, eye, flip)?];
/// let layer = ConcatHeads::new(&heads)?;
/// let (x, mut y, mut scratch) = ([1.0f32, 2.0, 3.0, 4.0], [0.0f32; 8], [0.0f32; 64]);
/// layer.forward(
///     &mut Streaming,
///     &Attention::new().mask(Mask::causal(Align::TopLeft)),
///     View::matrix(&x, 2, 2)?,
///     ViewMut::matrix(&mut y, 2, 4)?,
///     &mut scratch,
/// )?;
/// assert_eq!(y[..4], [1.0, 2.0, 2.0, 1.0]); // the first token sees itself: as is, and flipped
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ConcatHeads<'a, T> {
    layer: Layer<'a, T, List<'a, T>>,
}

/// The projections of single heads.
#[derive(Clone, Copy, Debug)]
struct List<'a, T> {
    heads: &'a [SelfAttention<'a, T>],
    d_model: usize,
    d_k: usize,
    d_v: usize,
}

impl<T: Element> Project<T> for List<'_, T> {
    fn heads(&self) -> Heads {
        let count = self.heads.len();
        Heads { q_heads: count, kv_heads: count, head_dim: self.d_k, value_dim: self.d_v }
    }

    fn d_in(&self, _: Part) -> usize {
        self.d_model
    }

    fn project<E: Engine<T>>(
        &self,
        engine: &mut E,
        part: Part,
        x: View<'_, T>,
        to: &mut ViewMut<'_, E::Mid>,
    ) -> Result<()> {
        let ([batch, _, seq, dim], strides, offset) = (to.sizes(), to.strides(), to.offset());
        let [_, by_head, ..] = strides;
        for (n, head) in self.heads.iter().enumerate() {
            let layer: &Linear<'_, T> = match part {
                Part::Query => &head.w_q,
                Part::Key => &head.w_k,
                Part::Value => &head.w_v,
            };
            let start = offset.wrapping_add_signed(by_head.wrapping_mul(n as isize)); // inside: `to` has that head
            let data = to.reborrow().into_data();
            let mut one = ViewMut::strided(data, [batch, 1, seq, dim], strides, start)?;
            engine.project(layer, x, &mut one)?;
        }
        Ok(())
    }
}

impl<'a, T: Element> ConcatHeads<'a, T> {
    /// From single heads of equal sizes, without output projections.
    ///
    /// # Errors
    /// [`AttnError::Size`] if two heads differ, [`AttnError::Unsupported`] if one has an output projection,
    /// [`AttnError::Overflow`] if their features side by side overflow.
    pub fn new(heads: &'a [SelfAttention<'a, T>]) -> Result<Self> {
        let (d_model, d_k, d_v) = heads.first().map_or((0, 0, 0), |head| (head.d_model(), head.d_k(), head.d_v()));
        for head in heads {
            AttnError::check_size("d_model of the heads", d_model, head.d_model())?;
            AttnError::check_size("d_k of the heads", d_k, head.d_k())?;
            AttnError::check_size("d_v of the heads", d_v, head.d_v())?;
            if head.w_o.is_some() {
                return Err(AttnError::Unsupported { what: "an output projection in one of several heads" });
            }
        }
        if heads.len().checked_mul(d_k.max(d_v)).is_none() {
            return Err(AttnError::Overflow { what: "heads · d_v" });
        }
        let projections = List { heads, d_model, d_k, d_v };
        Ok(Self { layer: Layer { projections, appended: Appended::none(), out: None } })
    }

    /// Features of the result: `heads·d_v`.
    pub fn d_out(&self) -> usize {
        self.layer.d_out()
    }

    /// Elements of scratch that [`forward`](Self::forward) needs.
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub fn scratch_len<E: Engine<T>>(&self, engine: &E, batch: usize, seq: usize) -> Result<usize> {
        self.layer.scratch_len(engine, &self.layer.shape(batch, seq, seq)?)
    }

    /// Runs all heads on `x` `[batch, 1, seq, d_model]`; the result is `[batch, 1, seq, heads·d_v]`, the weights (if
    /// requested) `[batch, heads, seq, seq]`.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written to the outputs.
    pub fn forward<'o, E: Engine<T>, M: Mods + Sync>(
        &self,
        engine: &mut E,
        attn: &Attention<'_, M>,
        x: View<'_, T>,
        outputs: impl Into<LayerOutputs<'o, T>>,
        scratch: &mut [E::Mid],
    ) -> Result<()> {
        self.layer.forward(engine, attn, &Sources::same(x), outputs.into(), scratch)
    }
}
