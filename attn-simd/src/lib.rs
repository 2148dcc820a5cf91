//! Cache-tiled, streaming-softmax attention kernels for f32, f16 and bf16, chosen at run time per CPU.
//!
//! The result is that of [`attn_core::reference`], computed in `f32` in one pass over keys and values with O(tile)
//! scratch (FlashAttention, Dao et al. 2022, arXiv 2205.14135), on one thread. `attn-parallel` runs it on many.
//!
//! ```
//! use attn_core::{Align, Attention, Layout, Mask, View, ViewMut};
//! let (heads, len, dim) = (2, 100, 64);
//! let x: Vec<f32> = (0..heads * len * dim).map(|n| (n as f32).sin()).collect();
//! let x = View::new(&x, Layout::Bhsd, [1, heads, len, dim])?;
//! let mut out = vec![0.0f32; heads * len * dim];
//! let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
//! attn_simd::forward(
//!     &attn,
//!     x,
//!     x,
//!     x,
//!     ViewMut::new(&mut out, Layout::Bhsd, [1, heads, len, dim])?,
//!     &mut attn_simd::Workspace::new(),
//! )?;
//! assert!((out[0] - 0.0f32.sin()).abs() < 1e-6); // the first query sees only itself
//! # Ok::<(), attn_core::AttnError>(())
//! ```
//!
//! # How it works
//!
//! Lanes are queries. A block of up to 48 queries meets its keys 64 at a time: `Sᵀ = K·Qᵀ` and `Oᵀ = Vᵀ·Pᵀ` run through
//! one register-blocked micro-kernel, maxima and sums are vertical, and nothing is ever reduced across lanes. Keys and
//! values are read where the caller has them; scores never leave the cache. A kernel is written once, over a small
//! trait of lane operations, and compiled for each [`Level`]: `portable` (through `wide`), `avx2`, `avx512`.
//! `ATTN_LEVEL=avx2` forces one.
//!
//! Processors with matrix tiles have a level more, `amx`: both products run through bf16 tiles, f16 and f32 split into
//! two or three bf16 parts whose products add up to theirs. [`Precision`](attn_core::Precision) says how many;
//! [`Plan::explain`] what a call gets.
//!
//! # What f32 can hold
//!
//! All levels compute in `f32`, outputs are divided by the sum of the weights at the end. Values must therefore stay
//! below 3.4·10³⁸ divided by the number of keys that a row sees (`Σ |v|` is what can be added up), and so must `q·k`
//! and scores below 3.4·10³⁸ itself; [`attn_core`] says what becomes of larger ones. A visible key whose weight is 0
//! (below 2⁻¹²⁶ of the largest) makes NaN of a ±∞ in its value, 0·∞, as in every engine; a hidden key never does.
//!
//! The processor's rounding and flush modes are left as they are. A caller that has set flush-to-zero or
//! denormals-are-zero gets numbers below 2⁻¹²⁶, of inputs and of results, as 0; the bits are then those of that mode.

#![cfg_attr(not(any(feature = "std", test)), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]

extern crate alloc;

mod caches;
pub mod decode;
mod input;
mod isa;
mod job;
mod kernel;
mod level;
mod math;
mod output;
mod plan;
#[cfg(feature = "std")]
pub mod probe;
mod tile;
mod tiles;
mod workspace;

pub use caches::Caches;
pub use input::{Input, KernelElement};
pub use level::{Level, LevelError, TileModel};
pub use plan::{Blocks, Explain, Kernel, Plan, Work};
pub use workspace::{Line, Workspace};

use attn_core::{Attention, AttnShape, Modifier, Outputs, Result, View};

/// Computes attention on one thread, at the best level of this machine (or the one that `ATTN_LEVEL` names).
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, `k`: `[batch, kv_heads, kv_len, head_dim]`, `v`:
/// `[batch, kv_heads, kv_len, value_dim]`, any strides. `outputs` is a [`ViewMut`](attn_core::ViewMut) or [`Outputs`];
/// its type may differ from the inputs' (f16 in, f32 out).
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
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
pub fn forward_at<'o, T: KernelElement, O: KernelElement, M: Modifier + Sync>(
    level: Level,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    workspace: &mut Workspace,
) -> Result<()> {
    let plan = Plan::new(attn, AttnShape::new(q.sizes(), k.sizes(), v.sizes())?, level)?;
    plan.run(q, k, v, outputs, workspace.try_lines(plan.workspace_lines())?)
}
