//! Multi-core exact attention: `attn-simd`'s kernels over rayon, bit-identical for every thread count.
//!
//! ```
//! use attn_parallel::{Align, Attention, Layout, Mask, View, ViewMut};
//!
//! let (q_heads, kv_heads, len, dim) = (8, 2, 256, 64); // four query heads share a key/value head
//! let q: Vec<f32> = (0..q_heads * len * dim).map(|n| (n as f32).sin()).collect();
//! let kv: Vec<f32> = (0..kv_heads * len * dim).map(|n| (n as f32).cos()).collect();
//! let mut out = vec![0.0f32; q.len()];
//!
//! let attn = Attention::new().mask(Mask::causal(Align::BottomRight)); // scale 1/√dim unless you say otherwise
//! let q = View::new(&q, Layout::Bhsd, [1, q_heads, len, dim])?; // [batch, heads, seq, dim], any strides
//! let kv = View::new(&kv, Layout::Bhsd, [1, kv_heads, len, dim])?;
//! let to = ViewMut::new(&mut out, Layout::Bhsd, [1, q_heads, len, dim])?;
//! attn_parallel::forward(&attn, q, kv, kv, to)?;
//! # Ok::<(), attn_parallel::AttnError>(())
//! ```
//!
//! | I want … | take … |
//! |---|---|
//! | attention, now | [`forward`]; for a prototype [`attention`], which allocates its output |
//! | to generate text: one token after the other over a cache | [`attend_cache`], over the caches of [`attn_core::kv_cache`] |
//! | masks: causal, windows, padding, documents, trees, my own tensor | [`Mask`], [`Align`], [`attn_core::mask`] |
//! | ALiBi, soft-cap, sinks, dropout, a bias, functions of my own | the methods of [`Attention`] |
//! | to keep options with closures in a struct | [`BoxedMods`] |
//! | the weights, for a picture | [`Outputs::weights`]; single rows: [`attn_core::weights`] |
//! | gradients | [`backward`]; in `f64`, of every option: [`attn_core::backward`] |
//! | to choose level, number of threads or scratch | [`Runner`], [`Level`], [`Workspace`] |
//! | the same call many times, checked once | [`Plan`] and [`Runner::forward_planned`], [`DecodePlan`] |
//! | projections around it | `attn_layers::module`, with [`Kernels`] as its engine |
//! | one thread, or no `std` | [`attn_simd`] |
//! | a microcontroller | [`attn_core::guide_embedded`] |
//!
//! For attention an application needs this crate alone; projections and modules are in `attn-layers`. It re-exports the
//! names of every call, and [`attn_core`] and [`attn_simd`] for all others.
//!
//! # Threads
//!
//! A call is divided into blocks of queries. The threads of the current rayon pool take them one by one from a shared
//! counter, heaviest first. One thread computes a row from start to end, so that its bits do not depend on the number
//! of threads. A call with few queries is divided along its keys at fixed positions; the states of a row are merged in
//! a fixed tree. So one token against one long sequence keeps all threads busy, with the same bits for any number of
//! them.
//!
//! This crate has no pool of its own. Inside `pool.install(|| ..)` it uses the caller's pool, else rayon's global one,
//! which respects `RAYON_NUM_THREADS`. After a `fork`, the child lacks the threads of the global pool, so a call from
//! outside a pool starts threads of its own.
//!
//! # Numerics
//!
//! [`attn_simd`] says what `f32` can hold. A thread computes in its own floating-point mode. If a caller sets
//! flush-to-zero for its own thread, but not for the pool's threads (`ThreadPoolBuilder::start_handler`), some rows
//! keep numbers below 2⁻¹²⁶ and others do not. This is the only case in which bits depend on the thread.

mod allocating;
mod decode;
mod gradients;
mod module;
mod runner;
mod scratch;
mod threads;
mod weights;
mod worth;

pub use allocating::attention;
pub use attn_core;
#[doc(inline)]
pub use attn_core::{
    Align, Attention, AttnError, AttnShape, Bias, Dtype, Element, Layout, Mask, Outputs, Precision, Result, View,
    ViewMut, half,
};
pub use attn_simd;
#[doc(inline)]
pub use attn_simd::decode::{DecodePlan, Source};
#[doc(inline)]
pub use attn_simd::{BoxedMods, KernelElement, Level, Plan, Workspace};
pub use module::Kernels;
pub use runner::{Runner, attend_cache, backward, forward};
pub use threads::threads;

// The examples of README and docs run as tests here, because this crate has all engines.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct WorkspaceReadme;
#[cfg(doctest)]
#[doc = include_str!("../../docs/migrating.md")]
struct Migrating;
#[cfg(doctest)]
#[doc = include_str!("../../docs/decoding.md")]
struct Decoding;
#[cfg(doctest)]
#[doc = include_str!("../../docs/training.md")]
struct Training;
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
#[cfg(doctest)]
#[doc = include_str!("../../attn-core/README.md")]
struct CoreReadme;
#[cfg(doctest)]
#[doc = include_str!("../../attn-simd/README.md")]
struct SimdReadme;
