//! The outputs of a module: its result, and the attention weights on request.

use attn_core::engine::product;
use attn_core::{AttnError, AttnShape, Element, Result, ViewMut};

use crate::projection::features;

/// The outputs of a module call. A [`ViewMut`] converts into one without any other output.
///
/// `out` and `context` are `[batch, heads, q_len, dim]` with any split of their features into `heads·dim`:
/// `[batch, 1, q_len, d_out]` for the usual dense layouts.
#[derive(Debug)]
pub struct LayerOutputs<'o, T: Element> {
    /// The result, with the features of the output projection (or of the context, without one).
    pub out: ViewMut<'o, T>,
    /// The heads before the output projection, `q_heads·value_dim` features.
    pub context: Option<ViewMut<'o, T>>,
    /// The attention weights.
    pub weights: Option<WeightsOut<'o, T::Compute>>,
}

/// Attention weights that a module gives beside its result, after softmax and dropout. `kv_total` is `kv_len` and the
/// positions that the module appends.
#[derive(Debug)]
pub enum WeightsOut<'o, R> {
    /// `[batch, q_heads, q_len, kv_total]`, row-major.
    PerHead(&'o mut [R]),
    /// `[batch, q_len, kv_total]`, row-major: the mean over the heads.
    Average(&'o mut [R]),
}

impl<'o, T: Element> LayerOutputs<'o, T> {
    /// Only the result.
    pub fn new(out: ViewMut<'o, T>) -> Self {
        Self { out, context: None, weights: None }
    }

    /// Also the heads before the output projection.
    pub fn context(mut self, context: ViewMut<'o, T>) -> Self {
        self.context = Some(context);
        self
    }

    /// Also the weights of each head, `[batch, q_heads, q_len, kv_total]`.
    pub fn weights(mut self, weights: &'o mut [T::Compute]) -> Self {
        self.weights = Some(WeightsOut::PerHead(weights));
        self
    }

    /// Also the weights averaged over the heads, `[batch, q_len, kv_total]`. Replaces a request for those of each head.
    pub fn average_weights(mut self, weights: &'o mut [T::Compute]) -> Self {
        self.weights = Some(WeightsOut::Average(weights));
        self
    }

    /// Checks all sizes; `d_out` are the features of the result, `kv_total` the keys with the appended ones.
    pub(super) fn check(&self, shape: &AttnShape, d_out: usize, kv_total: usize) -> Result<()> {
        check_rows("module output", shape, d_out, self.out.sizes())?;
        if let Some(context) = &self.context {
            check_rows("context", shape, shape.q_heads * shape.value_dim, context.sizes())?;
        }
        let (what, found, sizes) = match &self.weights {
            None => return Ok(()),
            Some(WeightsOut::PerHead(w)) => (
                "weights (batch · q_heads · q_len · kv_total)",
                w.len(),
                [shape.batch, shape.q_heads, shape.q_len, kv_total],
            ),
            Some(WeightsOut::Average(w)) => {
                ("averaged weights (batch · q_len · kv_total)", w.len(), [shape.batch, 1, shape.q_len, kv_total])
            }
        };
        let Some(expected) = product(&sizes) else {
            return Err(AttnError::Overflow { what });
        };
        AttnError::check_size(what, expected, found)
    }
}

impl<'o, T: Element> From<ViewMut<'o, T>> for LayerOutputs<'o, T> {
    fn from(out: ViewMut<'o, T>) -> Self {
        Self::new(out)
    }
}

/// Checks that a tensor has the queries' batch and length, and so many features.
pub(super) fn check_rows(what: &'static str, shape: &AttnShape, d: usize, sizes: [usize; 4]) -> Result<()> {
    let [batch, _, seq, _] = sizes;
    AttnError::check_size(what, shape.batch, batch)?;
    AttnError::check_size(what, shape.q_len, seq)?;
    AttnError::check_size(what, d, features(sizes)?)
}
