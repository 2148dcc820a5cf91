//! The outputs of a backward call, and their checks.

use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::shape::{AttnShape, check_axes};
use crate::view::ViewMut;

/// What is compared, axis by axis.
macro_rules! axes {
    ($name:literal, $with:literal) => {
        [
            concat!($name, " batch against ", $with),
            concat!($name, " heads against ", $with),
            concat!($name, " seq against ", $with),
            concat!($name, " dim against ", $with),
        ]
    };
}

/// An output that was saved against that of the shape, for [`check_axes`].
pub const OUT: [&str; 4] = axes!("out", "the output");
/// The gradient by the output, which C calls `dout` and Python `grad_out`.
pub const DY: [&str; 4] = axes!("output gradient", "the output");

/// Where the gradients go. All are written, not added to.
#[derive(Debug)]
pub struct Gradients<'o, O> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub dq: ViewMut<'o, O>,
    /// `[batch, kv_heads, kv_len, head_dim]`, summed over the query heads of a group.
    pub dk: ViewMut<'o, O>,
    /// `[batch, kv_heads, kv_len, value_dim]`, summed over the query heads of a group.
    pub dv: ViewMut<'o, O>,
    /// Any shape that broadcasts to `[batch, q_heads, q_len, kv_len]`: the gradient of an additive bias of that shape,
    /// summed over the axes of size 1. Double, because it is accumulated in place.
    pub bias: Option<ViewMut<'o, f64>>,
    /// `[q_heads]`: the gradient of the sinks. Double, because it is accumulated in place.
    pub sinks: Option<&'o mut [f64]>,
}

impl<'o, O: Element> Gradients<'o, O> {
    /// The gradients of q, k and v.
    pub fn new(dq: ViewMut<'o, O>, dk: ViewMut<'o, O>, dv: ViewMut<'o, O>) -> Self {
        Self { dq, dk, dv, bias: None, sinks: None }
    }

    /// Also that of the bias. It is defined (and given) whether or not the options have a bias.
    pub fn bias(mut self, bias: ViewMut<'o, f64>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Also that of the sinks; zero where the options have none.
    pub fn sinks(mut self, sinks: &'o mut [f64]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Checks their sizes against those of the inputs.
    ///
    /// # Errors
    /// [`AttnError::Size`] if two sizes disagree, or a gradient of a bias does not broadcast.
    pub fn check(&self, shape: &AttnShape) -> Result<()> {
        let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
        check_axes(axes!("dq", "q"), [batch, q_heads, q_len, head_dim], self.dq.sizes())?;
        check_axes(axes!("dk", "k"), [batch, kv_heads, kv_len, head_dim], self.dk.sizes())?;
        check_axes(axes!("dv", "v"), [batch, kv_heads, kv_len, value_dim], self.dv.sizes())?;
        check_options(shape, self.bias.as_ref(), self.sinks.as_deref())
    }
}

/// Checks where the gradients of the options go.
pub fn check_options(shape: &AttnShape, bias: Option<&ViewMut<'_, f64>>, sinks: Option<&[f64]>) -> Result<()> {
    if let Some(bias) = bias {
        let to = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
        bias.as_view().check_broadcast("bias gradient", to)?;
    }
    match sinks {
        Some(sinks) => AttnError::check_size("sink gradient against q_heads", shape.q_heads, sinks.len()),
        None => Ok(()),
    }
}

/// Gradients of the appended bias key and value, `[kv_heads, head_dim]` and `[kv_heads, value_dim]`.
#[derive(Debug)]
pub struct AppendedGradients<'s, R> {
    /// By the key.
    pub k: &'s mut [R],
    /// By the value.
    pub v: &'s mut [R],
}
