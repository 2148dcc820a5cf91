//! Cache-tiled, streaming-softmax attention kernels (interface; the kernels follow).
#![cfg_attr(not(feature = "std"), no_std)]
extern crate alloc;

mod level;
mod workspace;

pub use level::{Level, LevelError};
pub use workspace::{Line, Workspace};

use attn_core::{Attention, Element, Modifier, Outputs, Result, View};

/// The element types that the kernels take: f32, f16 and bf16.
pub trait KernelElement: Element<Compute = f32> {}
impl KernelElement for f32 {}
impl KernelElement for attn_core::half::f16 {}
impl KernelElement for attn_core::half::bf16 {}

/// Computes attention on one thread, at the best level of this machine (or the one that `ATTN_LEVEL` names).
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<'o, T: KernelElement, O: KernelElement, M: Modifier>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    workspace: &mut Workspace,
) -> Result<()> {
    forward_at(Level::detect(), attn, q, k, v, outputs, workspace)
}

/// As [`forward`], at a given level.
///
/// # Errors
/// As [`forward`].
pub fn forward_at<'o, T: KernelElement, O: KernelElement, M: Modifier>(
    _level: Level,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    workspace: &mut Workspace,
) -> Result<()> {
    let [.., dv] = v.sizes();
    attn_core::streaming::forward(attn, q, k, v, outputs, workspace.scratch(dv))
}
