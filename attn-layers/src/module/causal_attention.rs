//! One causal head with dropout: the building block of a decoder.

use attn_core::dropout::Dropout;
use attn_core::{Align, Attention, Element, Mask, Result, View};

use super::engine::Engine;
use super::outputs::LayerOutputs;
use super::self_attention::SelfAttention;

/// [`SelfAttention`] under a causal mask: token `i` sees tokens `j ≤ i`. Weights may be dropped (in training), and a
/// further mask may hide padding.
///
/// Inputs and outputs as there. For other options (a scale, a bias, mods) give `SelfAttention` a causal mask
/// yourself: [`options`](Self::options) is all that this type adds.
///
/// ```
/// use attn_layers::module::{CausalAttention, LayerOutputs, Reference, SelfAttention};
/// use attn_core::{View, ViewMut};
/// use attn_core::dropout::Dropout;
/// use attn_layers::Linear;
/// let eye = [1.0f32, 0.0, 0.0, 1.0];
/// let w = Linear::new(&eye, 2, 2)?;
/// let layer = CausalAttention::new(SelfAttention::new(w, w, w)?);
/// let x = View::matrix(&[1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0], 3, 2)?;
/// let (mut y, mut weights, mut scratch) = ([0.0f32; 6], [0.0f32; 9], [0.0f64; 30]);
/// let outputs = LayerOutputs::new(ViewMut::matrix(&mut y, 3, 2)?).weights(&mut weights);
/// layer.forward(&mut Reference, x, outputs, &mut scratch)?;
/// assert_eq!((weights[0], weights[1], weights[2], weights[5]), (1.0, 0.0, 0.0, 0.0));
///
/// let training = layer.dropout(Dropout::Seeded { p: 0.5, seed: 123 }); // half of the weights, the others doubled
/// training.forward(&mut Reference, x, ViewMut::matrix(&mut y, 3, 2)?, &mut scratch)?;
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CausalAttention<'a, T> {
    inner: SelfAttention<'a, T>,
    dropout: Dropout<'a>,
    mask: Mask<'a>,
}

impl<'a, T: Element> CausalAttention<'a, T> {
    /// Without dropout.
    pub const fn new(inner: SelfAttention<'a, T>) -> Self {
        Self { inner, dropout: Dropout::None, mask: Mask::none() }
    }

    /// Drops weights after the softmax.
    pub const fn dropout(mut self, dropout: Dropout<'a>) -> Self {
        self.dropout = dropout;
        self
    }

    /// Hides keys beyond the causal mask, for example [`Mask::padding`].
    pub const fn mask(mut self, mask: Mask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// The head without its mask.
    pub const fn inner(&self) -> &SelfAttention<'a, T> {
        &self.inner
    }

    /// The options that the head runs with.
    pub fn options(&self) -> Attention<'a> {
        Attention::new().mask(Mask::causal(Align::TopLeft).and(self.mask)).dropout(self.dropout)
    }

    /// Elements of scratch that [`forward`](Self::forward) needs.
    ///
    /// # Errors
    /// [`AttnError::Overflow`](attn_core::AttnError::Overflow).
    pub fn scratch_len<E: Engine<T>>(&self, engine: &E, batch: usize, seq: usize) -> Result<usize> {
        self.inner.scratch_len(engine, batch, seq)
    }

    /// Attention of `x` to its own past; as [`SelfAttention::forward`].
    ///
    /// # Errors
    /// As there.
    pub fn forward<'o, E: Engine<T>>(
        &self,
        engine: &mut E,
        x: View<'_, T>,
        outputs: impl Into<LayerOutputs<'o, T>>,
        scratch: &mut [E::Mid],
    ) -> Result<()> {
        self.inner.forward(engine, &self.options(), x, outputs, scratch)
    }
}
