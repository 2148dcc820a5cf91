//! Gradients of attention on the kernels: what [`attn_core::backward`] computes in `f64`, tile by tile in `f32`.
//!
//! Weights are recomputed from the log-sum-exp of the forward call (FlashAttention-2, Dao 2023, arXiv 2307.08691): five
//! products for each tile of keys that a block of queries sees. Memory grows with the sequence, not with its square:
//! sums of `dk` and `dv` of one head for each thread, and the gradients in `f32` if there are fewer heads than 16.
//! [`attn_core::backward`] has the formulas.
//!
//! ```
//! use attn_core::backward::Gradients;
//! use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut};
//! use attn_simd::backward::{self, Inputs};
//! let (sizes, attn) = ([1, 2, 50, 16], Attention::new().mask(Mask::causal(Align::TopLeft)));
//! let x: Vec<f32> = (0..1600).map(|n| (n as f32).sin()).collect();
//! let x = View::new(&x, Layout::Bhsd, sizes)?;
//! let (mut out, mut lse) = (vec![0.0f32; 1600], vec![0.0f32; 100]);
//! let mut workspace = attn_simd::Workspace::new();
//! let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, sizes)?).lse(&mut lse);
//! attn_simd::forward(&attn, x, x, x, outputs, &mut workspace)?;
//!
//! let dy = [1.0f32; 1600]; // of a loss that is the sum of the output
//! let (out, dy) = (View::new(&out, Layout::Bhsd, sizes)?, View::new(&dy, Layout::Bhsd, sizes)?);
//! let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0f32; 1600]);
//! let gradients = Gradients::new(
//!     ViewMut::new(&mut dq, Layout::Bhsd, sizes)?,
//!     ViewMut::new(&mut dk, Layout::Bhsd, sizes)?,
//!     ViewMut::new(&mut dv, Layout::Bhsd, sizes)?,
//! );
//! let inputs = Inputs { q: x, k: x, v: x, out, lse: &lse, dy };
//! backward::gradients(&attn, inputs, gradients, &mut workspace)?;
//! // Each query spreads a weight of 1 over the keys that it sees.
//! assert!((dv.iter().sum::<f32>() - 1600.0).abs() < 1e-2);
//! # Ok::<(), attn_core::AttnError>(())
//! ```

mod amx;
mod bias;
mod buffers;
mod call;
mod explain;
mod heads;
mod job;
mod layout;
mod output;
mod plan;
mod prefetch;
mod scores;
mod sinks;
mod sweep;
mod weights;
mod words;

pub use call::{BiasCall, BiasPiece, Call, Sweep};
pub use explain::Explain;
pub use heads::Heads;
pub use output::Writing;
pub use plan::{Inputs, Plan};
pub use sinks::SinksCall;

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Element, Result};

use crate::dtype::KernelElement;
use crate::level::Level;
use crate::workspace::Workspace;

/// Computes the gradients of `Σ y·dy` on one thread, at the best level of this machine (or the one that `ATTN_LEVEL`
/// names), with the options of the forward call that made `out` and `lse`.
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Unsupported`](attn_core::AttnError::Unsupported)
/// if a `score_mod` has no derivative (see [`Attention::score_mod_with`]).
pub fn gradients<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    inputs: Inputs<'_, T, G>,
    gradients: Gradients<'_, O>,
    workspace: &mut Workspace,
) -> Result<()> {
    gradients_at(Level::detect(), attn, inputs, gradients, workspace)
}

/// As [`gradients`], at a given level.
///
/// # Errors
/// As [`gradients`].
pub fn gradients_at<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
    level: Level,
    attn: &Attention<'_, M>,
    inputs: Inputs<'_, T, G>,
    gradients: Gradients<'_, O>,
    workspace: &mut Workspace,
) -> Result<()> {
    let shape = AttnShape::new(inputs.q.sizes(), inputs.k.sizes(), inputs.v.sizes())?;
    let plan = Plan::new(attn, shape, level)?;
    plan.check(&inputs, &gradients)?;
    plan.run(inputs, gradients, workspace.try_lines(plan.workspace_lines())?)
}
