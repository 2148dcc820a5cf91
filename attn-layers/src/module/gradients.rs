//! Gradients of the modules with fused projections: back through the join, the attention and the projections.

use attn_core::engine::check_same;
use attn_core::{Element, Result, ViewMut};

use super::sources::Sources;
use crate::projection::LinearGradients;

/// Where the gradients of a module go: whatever is given is computed, written (not added to) and rounded once.
///
/// ```
/// use attn_layers::module::{InputGradients, ModuleGradients, Reference, SelfAttention};
/// use attn_core::{Attention, View, ViewMut};
/// use attn_layers::{Linear, LinearGradients};
/// let w = [0.5f64, -1.0, 0.25, 2.0];
/// let w = Linear::new(&w, 2, 2)?;
/// let layer = SelfAttention::new(w, w, w)?;
/// let (x, dy) = ([1.0f64, 0.0, 0.0, 1.0], [1.0f64, 1.0, 1.0, 1.0]);
/// let (mut dx, mut dw_v, mut scratch) = ([0.0f64; 4], [0.0f64; 4], [0.0f64; 60]);
/// let gradients = ModuleGradients::new()
///     .inputs(InputGradients::Same(ViewMut::matrix(&mut dx, 2, 2)?))
///     .v(LinearGradients::new(&mut dw_v, 2, 2)?);
/// let (x, dy) = (View::matrix(&x, 2, 2)?, View::matrix(&dy, 2, 2)?);
/// layer.backward(&mut Reference, &Attention::new(), x, dy, gradients, &mut scratch)?;
/// assert!((dw_v.iter().sum::<f64>() - 4.0).abs() < 1e-12); // Σ dW_v = Σ weights · x · dy
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Debug)]
pub struct ModuleGradients<'o, O> {
    pub(super) inputs: Option<InputGradients<'o, O>>,
    pub(super) q: Option<LinearGradients<'o, O>>,
    pub(super) k: Option<LinearGradients<'o, O>>,
    pub(super) v: Option<LinearGradients<'o, O>>,
    pub(super) out: Option<LinearGradients<'o, O>>,
    pub(super) bias_kv: Option<(&'o mut [O], &'o mut [O])>,
    pub(super) bias: Option<ViewMut<'o, f64>>,
    pub(super) sinks: Option<&'o mut [f64]>,
}

/// Gradients by the inputs; each tensor has the shape of the input.
#[derive(Debug)]
pub enum InputGradients<'o, O> {
    /// Self-attention: the sum over all three uses of `x`.
    Same(ViewMut<'o, O>),
    /// Cross-attention: the query, and the sum over both uses of the memory.
    Cross {
        /// By the query.
        query: ViewMut<'o, O>,
        /// By the memory.
        memory: ViewMut<'o, O>,
    },
    /// Each input for itself.
    Separate {
        /// By the query.
        query: ViewMut<'o, O>,
        /// By the key.
        key: ViewMut<'o, O>,
        /// By the value.
        value: ViewMut<'o, O>,
    },
}

impl<'o, O: Element> ModuleGradients<'o, O> {
    /// None yet.
    pub const fn new() -> Self {
        Self { inputs: None, q: None, k: None, v: None, out: None, bias_kv: None, bias: None, sinks: None }
    }

    /// Those of the inputs.
    pub fn inputs(mut self, inputs: InputGradients<'o, O>) -> Self {
        self.inputs = Some(inputs);
        self
    }

    /// Those of the query projection.
    pub fn q(mut self, gradients: LinearGradients<'o, O>) -> Self {
        self.q = Some(gradients);
        self
    }

    /// Those of the key projection.
    pub fn k(mut self, gradients: LinearGradients<'o, O>) -> Self {
        self.k = Some(gradients);
        self
    }

    /// Those of the value projection.
    pub fn v(mut self, gradients: LinearGradients<'o, O>) -> Self {
        self.v = Some(gradients);
        self
    }

    /// Those of the output projection; an error for a module without one.
    pub fn out(mut self, gradients: LinearGradients<'o, O>) -> Self {
        self.out = Some(gradients);
        self
    }

    /// Those of the appended key `[kv_heads·head_dim]` and value `[kv_heads·value_dim]`; an error for a module without.
    pub fn bias_kv(mut self, bias_k: &'o mut [O], bias_v: &'o mut [O]) -> Self {
        self.bias_kv = Some((bias_k, bias_v));
        self
    }

    /// That of an additive bias on the scores, see [`Gradients::bias`](attn_core::backward::Gradients::bias).
    pub fn score_bias(mut self, bias: ViewMut<'o, f64>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// That of the sinks, `[q_heads]`.
    pub fn sinks(mut self, sinks: &'o mut [f64]) -> Self {
        self.sinks = Some(sinks);
        self
    }
}

impl<O: Element> Default for ModuleGradients<'_, O> {
    fn default() -> Self {
        Self::new()
    }
}

impl<O: Element> InputGradients<'_, O> {
    pub(super) fn check<T: Element>(&self, x: &Sources<'_, T>) -> Result<()> {
        match self {
            Self::Same(dx) => {
                check_same("gradient by x against the query", x.query.sizes(), dx.sizes())?;
                check_same("gradient by x against the key", x.key.sizes(), dx.sizes())?;
                check_same("gradient by x against the value", x.value.sizes(), dx.sizes())
            }
            Self::Cross { query, memory } => {
                check_same("gradient by the query", x.query.sizes(), query.sizes())?;
                check_same("gradient by the memory against the key", x.key.sizes(), memory.sizes())?;
                check_same("gradient by the memory against the value", x.value.sizes(), memory.sizes())
            }
            Self::Separate { query, key, value } => {
                check_same("gradient by the query", x.query.sizes(), query.sizes())?;
                check_same("gradient by the key", x.key.sizes(), key.sizes())?;
                check_same("gradient by the value", x.value.sizes(), value.sizes())
            }
        }
    }
}
