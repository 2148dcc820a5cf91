//! The outputs of an engine: the result, and on request the log-sum-exp and the weights.

use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::shape::AttnShape;
use crate::view::ViewMut;

/// The outputs of a call. A [`ViewMut`] converts into one without any other output.
///
/// ```
/// use attn_core::{Outputs, ViewMut};
/// let (mut out, mut lse) = ([0.0f32; 12], [0.0f32; 3]);
/// let outputs = Outputs::new(ViewMut::matrix(&mut out, 3, 4)?).lse(&mut lse);
/// # let _ = outputs;
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Debug)]
pub struct Outputs<'o, O: Element> {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: ViewMut<'o, O>,
    /// `[batch, q_heads, q_len]`, row-major: the natural logarithm of the softmax's denominator; −∞ for a row without
    /// visible keys. [`Precision`](crate::Precision) says how exact it is.
    pub lse: Option<&'o mut [O::Compute]>,
    /// `[batch, q_heads, q_len, kv_len]`, row-major: the weights after softmax and dropout. The reference engine
    /// has them; the kernels' `forward` recomputes them from the lse. From any other engine, take the lse and
    /// [`weights::head`](crate::weights::head).
    pub weights: Option<&'o mut [O::Compute]>,
}

impl<'o, O: Element> Outputs<'o, O> {
    /// Only the output.
    pub const fn new(out: ViewMut<'o, O>) -> Self {
        Self { out, lse: None, weights: None }
    }

    /// Also the log-sum-exp of each row.
    pub const fn lse(mut self, lse: &'o mut [O::Compute]) -> Self {
        self.lse = Some(lse);
        self
    }

    /// Also the weights.
    pub const fn weights(mut self, weights: &'o mut [O::Compute]) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Checks all sizes.
    ///
    /// # Errors
    /// [`AttnError::Size`] naming the output that does not fit.
    pub fn check(&self, shape: &AttnShape) -> Result<()> {
        shape.check_output(self.out.sizes())?;
        if let Some(lse) = &self.lse {
            AttnError::check_size("lse (batch · q_heads · q_len)", shape.rows(), lse.len())?;
        }
        if let Some(weights) = &self.weights {
            let wanted = shape.weights_len()?;
            AttnError::check_size("weights (batch · q_heads · q_len · kv_len)", wanted, weights.len())?;
        }
        Ok(())
    }

    /// Writes the lse of one row, if it was requested.
    #[inline]
    pub(crate) fn set_lse(&mut self, row: usize, value: O::Compute) {
        if let Some(slot) = self.lse.as_deref_mut().and_then(|lse| lse.get_mut(row)) {
            *slot = value;
        }
    }
}

impl<'o, O: Element> From<ViewMut<'o, O>> for Outputs<'o, O> {
    fn from(out: ViewMut<'o, O>) -> Self {
        Self::new(out)
    }
}
