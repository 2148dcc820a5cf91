//! Cache-tiled, streaming-softmax attention kernels for f32, f16 and bf16. The CPU's best kernel is chosen at run time.
//!
//! The kernels compute the result of [`attn_core::reference`] to the accuracy of `f32`, in one pass over keys and
//! values, with O(tile) scratch (FlashAttention, Dao et al. 2022, arXiv 2205.14135), on one thread. `attn-parallel`
//! runs them on many.
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
//! | I want … | take … |
//! |---|---|
//! | one call on one thread | [`forward`]; at a level of my choice [`forward_at`] |
//! | all cores | the crate `attn-parallel` |
//! | the same call many times, checked once | [`Plan`] |
//! | few queries over a cache | [`decode`] |
//! | gradients | [`backward`] |
//! | to know or choose the instruction set | [`Level`] |
//! | to know which kernel runs, and why | [`Plan::explain`] |
//! | threads of my own | [`Plan::work`] |
//! | to keep options with closures in a struct | [`BoxedMods`] |
//!
//! # How it works
//!
//! Lanes are queries. A block of queries (48 at AVX-512, 16 at AVX2) reads its keys in tiles of 64 or 60. One
//! register-blocked micro-kernel computes both products, `Sᵀ = K·Qᵀ` and `Oᵀ = Vᵀ·Pᵀ`. Maxima and sums are vertical:
//! nothing is reduced across lanes. Rows of f32 are read in place, others are widened a tile at a time; scores never
//! leave the cache. A kernel is written once, over a small trait of lane operations, and compiled for each [`Level`]:
//! `portable` (through `wide`), `avx2`, `avx512`. `ATTN_LEVEL=avx2` forces a level.
//!
//! Processors with AVX512_BF16 have the level `avx512bf16`, which multiplies bf16 tensors as they are, twice as many
//! numbers an instruction. It is the best level where it was measured to be faster: on AMD's Zen 4 and Zen 5.
//!
//! Processors of ARMv8.2 and later may have SDOT, and so the level `dotprod`: few queries over an int8 or q8_0 cache
//! are multiplied as integers, sixteen products an instruction.
//!
//! Processors with AMX have one more level, `amx`, which computes both products in bf16. It splits an f16 into two bf16
//! parts and an f32 into three; the products of the parts add up to the product. [`Precision`](attn_core::Precision)
//! says how many of them are computed, and [`Plan::explain`] describes the kernel of a call.
//!
//! # What f32 can hold
//!
//! All levels add in `f32`, and divide outputs by the sum of the weights at the end. So values must stay below 3.4·10³⁸
//! divided by the number of keys that a row sees (a sum can reach `Σ |v|`), and `q·k` and scores below 3.4·10³⁸.
//! [`attn_core`] says what happens beyond these limits. As in every engine, if the weight of a visible key is 0 (below
//! 2⁻¹⁰⁰ of the largest), a ±∞ in its value gives NaN (0·∞). A hidden key never does.
//!
//! The kernels do not change the processor's rounding and flush modes. With flush-to-zero or denormals-are-zero,
//! numbers below 2⁻¹²⁶ in inputs and results count as 0, and results have the bits of that mode.

#![cfg_attr(not(any(feature = "std", test)), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]

extern crate alloc;

mod amx;
pub mod backward;
mod boxed;
mod caches;
pub mod decode;
mod dtype;
mod gemm;
mod gemv;
mod isa;
mod level;
mod math;
mod pack;
mod pages;
mod plan;
mod prefetch;
mod prefill;
#[cfg(feature = "std")]
pub mod probe;
mod queue;
mod recomputed;
mod scoring;
mod workspace;

pub use boxed::BoxedMods;
pub use caches::Caches;
pub use dtype::{Input, KernelElement};
pub use isa::LevelError;
pub use level::{AmxModel, Level};
pub use pages::advise_huge_pages;
pub use plan::{Explain, Kernel, Plan, Work};
pub use prefetch::Prefetch;
pub use prefill::call::Blocks;
#[doc(hidden)] // for attn-parallel
pub use recomputed::with_weights;
pub use workspace::{Line, Workspace};

use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Outputs, Result, View};

/// Computes attention on one thread, at the best level of this machine (or the one that `ATTN_LEVEL` names).
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, `k`: `[batch, kv_heads, kv_len, head_dim]`, `v`:
/// `[batch, kv_heads, kv_len, value_dim]`, any strides. `outputs` is a [`ViewMut`](attn_core::ViewMut) or [`Outputs`];
/// its type may differ from the inputs' (f16 in, f32 out).
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<'o, T: KernelElement, O: KernelElement, M: Mods + Sync>(
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
pub fn forward_at<'o, T: KernelElement, O: KernelElement, M: Mods + Sync>(
    level: Level,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    workspace: &mut Workspace,
) -> Result<()> {
    let plan = Plan::new(attn, AttnShape::new(q.sizes(), k.sizes(), v.sizes())?, level)?;
    plan.run(q, k, v, outputs, workspace.try_lines(plan.workspace_lines_for(T::DTYPE, O::DTYPE))?)
}
