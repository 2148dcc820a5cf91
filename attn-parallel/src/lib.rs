//! Multi-core attention (interface; the scheduling follows).

use attn_core::{Attention, Modifier, Outputs, Result, View};
use attn_simd::{KernelElement, Level};

/// Computes attention on the threads of the current rayon pool.
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    forward_at(Level::detect(), attn, q, k, v, outputs)
}

/// As [`forward`], at a given level.
///
/// # Errors
/// As [`forward`].
pub fn forward_at<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    level: Level,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    attn_simd::forward_at(level, attn, q, k, v, outputs, &mut attn_simd::Workspace::new())
}
