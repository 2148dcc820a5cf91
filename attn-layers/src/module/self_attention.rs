//! One head with its projections: a textbook's self-attention.

use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, Element, Result, View};

use super::engine::{Engine, GradientEngine};
use super::gradients::ModuleGradients;
use super::multi_head::MultiHeadAttention;
use super::outputs::LayerOutputs;
use crate::projection::Linear;

/// `y = softmax(x·W_q·(x·W_k)ᵀ/√d_k)·x·W_v·W_o` (Vaswani et al. 2017, arXiv 1706.03762, §3.2.1), `W_o` only if
/// [`output`](Self::output) gives it, biases only if the [`Linear`]s have them.
///
/// `x`: `[batch, 1, seq, d_model]`, `W_q`, `W_k`: `[d_model, d_k]`, `W_v`: `[d_model, d_v]`, `W_o`: `[d_v, d_out]`.
///
/// ```
/// use attn_layers::module::{SelfAttention, Streaming};
/// use attn_core::{Attention, View, ViewMut};
/// use attn_layers::Linear;
/// let eye = [1.0f32, 0.0, 0.0, 1.0];
/// let w = Linear::new(&eye, 2, 2)?;
/// let layer = SelfAttention::new(w, w, w)?; // d_model = d_k = d_v = 2
/// let x = [1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0]; // three tokens
/// let (mut y, mut scratch) = ([0.0f32; 6], [0.0f32; 29]);
/// assert_eq!(layer.scratch_len(&Streaming, 1, 3)?, 29);
/// let (x, y_view) = (View::matrix(&x, 3, 2)?, ViewMut::matrix(&mut y, 3, 2)?);
/// layer.forward(&mut Streaming, &Attention::new(), x, y_view, &mut scratch)?;
/// assert!((y[4] - y[5]).abs() < 1e-6); // the third token is drawn to both others alike
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SelfAttention<'a, T> {
    pub(super) w_q: Linear<'a, T>,
    pub(super) w_k: Linear<'a, T>,
    pub(super) w_v: Linear<'a, T>,
    pub(super) w_o: Option<Linear<'a, T>>,
}

impl<'a, T: Element> SelfAttention<'a, T> {
    /// Three projections of the same `d_model`; those of queries and keys to the same `d_k`.
    ///
    /// # Errors
    /// [`AttnError::Size`].
    pub const fn new(w_q: Linear<'a, T>, w_k: Linear<'a, T>, w_v: Linear<'a, T>) -> Result<Self> {
        if let Err(error) = AttnError::check_size("w_k d_in against w_q d_in", w_q.d_in(), w_k.d_in()) {
            return Err(error);
        }
        if let Err(error) = AttnError::check_size("w_v d_in against w_q d_in", w_q.d_in(), w_v.d_in()) {
            return Err(error);
        }
        if let Err(error) = AttnError::check_size("w_k d_out against w_q d_out", w_q.d_out(), w_k.d_out()) {
            return Err(error);
        }
        Ok(Self { w_q, w_k, w_v, w_o: None })
    }

    /// The output projection, from `d_v` features.
    ///
    /// # Errors
    /// [`AttnError::Size`].
    pub const fn output(mut self, w_o: Linear<'a, T>) -> Result<Self> {
        match AttnError::check_size("w_o d_in against d_v", self.d_v(), w_o.d_in()) {
            Ok(()) => {
                self.w_o = Some(w_o);
                Ok(self)
            }
            Err(error) => Err(error),
        }
    }

    /// Features of a token.
    pub const fn d_model(&self) -> usize {
        self.w_q.d_in()
    }

    /// Size of a query and of a key.
    pub const fn d_k(&self) -> usize {
        self.w_q.d_out()
    }

    /// Size of a value.
    pub const fn d_v(&self) -> usize {
        self.w_v.d_out()
    }

    /// Features of the result.
    pub fn d_out(&self) -> usize {
        self.w_o.map_or(self.d_v(), |w_o| w_o.d_out())
    }

    /// The same as multi-head attention with one head, which is how it runs.
    ///
    /// # Errors
    /// None in fact: the sizes have been checked.
    pub fn as_multi_head(&self) -> Result<MultiHeadAttention<'a, T>> {
        let one = MultiHeadAttention::new(1, 1, self.w_q, self.w_k, self.w_v)?;
        match self.w_o {
            Some(w_o) => one.output(w_o),
            None => Ok(one),
        }
    }

    /// Elements of scratch that [`forward`](Self::forward) needs.
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub fn scratch_len<E: Engine<T>>(&self, engine: &E, batch: usize, seq: usize) -> Result<usize> {
        self.as_multi_head()?.scratch_len(engine, batch, seq, seq)
    }

    /// [`scratch_len`](Self::scratch_len) for [`Streaming`](super::Streaming), in a constant: the length of a static
    /// buffer.
    ///
    /// ```
    /// use attn_layers::Linear;
    /// use attn_layers::module::SelfAttention;
    /// const fn layer(w: &[f32; 4]) -> SelfAttention<'_, f32> {
    ///     let Ok(w) = Linear::new(w, 2, 2) else { panic!("not 2×2") };
    ///     let Ok(layer) = SelfAttention::new(w, w, w) else { panic!("sizes that do not fit") };
    ///     layer
    /// }
    /// const LEN: usize = match layer(&[0.0; 4]).streaming_scratch_len(1, 3) {
    ///     Ok(len) => len,
    ///     Err(_) => panic!("too large"),
    /// };
    /// static SCRATCH: [f32; LEN] = [0.0; LEN];
    /// assert_eq!(SCRATCH.len(), 29);
    /// ```
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub const fn streaming_scratch_len(&self, batch: usize, seq: usize) -> Result<usize> {
        // A token's query, key, value, context and lse; then the engine's own, one output row.
        let Some(len) = self.floats(batch, seq) else {
            return Err(AttnError::Overflow { what: "module scratch" });
        };
        Ok(len)
    }

    const fn floats(&self, batch: usize, seq: usize) -> Option<usize> {
        let Some(features) = self.d_k().checked_add(self.d_v()) else { return None };
        let Some(features) = features.checked_mul(2) else { return None };
        let Some(features) = features.checked_add(1) else { return None };
        let Some(tokens) = batch.checked_mul(seq) else { return None };
        let Some(len) = tokens.checked_mul(features) else { return None };
        len.checked_add(self.d_v())
    }

    /// Attention of `x` to itself. `attn` are the options (scale `1/√d_k` unless given); the weights, if requested, are
    /// `[batch, 1, seq, seq]`.
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
        self.as_multi_head()?.layer.forward(engine, attn, &x.into(), outputs.into(), scratch)
    }

    /// Elements of scratch that [`backward`](Self::backward) needs.
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub fn backward_scratch_len<E: GradientEngine<T>>(&self, engine: &E, batch: usize, seq: usize) -> Result<usize> {
        self.as_multi_head()?.backward_scratch_len(engine, batch, seq, seq)
    }

    /// The gradients of `Σ y·dy`; as [`MultiHeadAttention::backward`].
    ///
    /// # Errors
    /// As there.
    pub fn backward<E: GradientEngine<T>, G: Element, O: Element, M: Mods + Sync>(
        &self,
        engine: &mut E,
        attn: &Attention<'_, M>,
        x: View<'_, T>,
        dy: View<'_, G>,
        gradients: ModuleGradients<'_, O>,
        scratch: &mut [E::Mid],
    ) -> Result<()> {
        self.as_multi_head()?.backward(engine, attn, x, dy, gradients, scratch)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Streaming;
    use super::*;

    #[test]
    fn the_constant_length_of_scratch_is_the_engines() {
        for (d_model, d_k, d_v) in [(4, 3, 5), (2, 2, 2), (1, 7, 1), (3, 0, 0)] {
            let w = [0.0f32; 21];
            let linear = |d_out| Linear::new(&w[..d_model * d_out], d_model, d_out).unwrap();
            let layer = SelfAttention::new(linear(d_k), linear(d_k), linear(d_v)).unwrap();
            for (batch, seq) in [(1, 3), (2, 9), (0, 1), (1, 0)] {
                assert_eq!(layer.streaming_scratch_len(batch, seq), layer.scratch_len(&Streaming, batch, seq));
            }
            assert!(layer.streaming_scratch_len(usize::MAX, 2).is_err());
        }
    }
}
