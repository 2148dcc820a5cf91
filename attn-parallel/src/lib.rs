//! Multi-core exact attention: `attn-simd`'s kernels over rayon, bit-identical for every thread count.
//!
//! A call is divided into blocks of queries. The threads of the current rayon pool take them one by one from a shared
//! counter, heaviest first. One thread computes a row from start to end, so that its bits do not depend on the number
//! of threads. A call with few queries is divided along its keys instead: at fixed keys, and the states of a row are
//! merged in a fixed tree. So one token against one long sequence keeps all threads busy, with the same bits for any
//! number of them.
//!
//! This crate has no pool of its own. Inside `pool.install(|| ..)` it uses the caller's pool, else rayon's global one,
//! which respects `RAYON_NUM_THREADS`. A process may fork after a call, and call in the child too: the threads of the
//! global pool do not exist there, so a call from outside a pool starts threads of its own.
//!
//! A thread computes in its own floating-point mode. If a caller sets flush-to-zero for its own thread, but not for the
//! pool's threads (`ThreadPoolBuilder::start_handler`), some rows keep numbers below 2⁻¹²⁶ and others do not. This is
//! the only case in which bits depend on the thread.
//!
//! ```
//! use attn_core::{Attention, Layout, View, ViewMut};
//! let x: Vec<f32> = (0..4 * 200 * 64).map(|n| (n as f32).sin()).collect();
//! let x = View::new(&x, Layout::Bhsd, [1, 4, 200, 64])?;
//! let mut out = vec![0.0f32; 4 * 200 * 64];
//! attn_parallel::forward(&Attention::new(), x, x, x, ViewMut::new(&mut out, Layout::Bhsd, [1, 4, 200, 64])?)?;
//! # Ok::<(), attn_core::AttnError>(())
//! ```

mod decode;
mod module;
mod runner;
mod scratch;
mod threads;
mod worth;

pub use attn_simd::decode::{DecodePlan, Source};
pub use module::Kernels;
pub use runner::{Runner, attend_cache, forward};
pub use threads::threads;

// The examples of README and docs run as tests here, because this crate has all engines.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct WorkspaceReadme;
#[cfg(doctest)]
#[doc = include_str!("../../docs/migrating.md")]
struct Migrating;
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
#[cfg(doctest)]
#[doc = include_str!("../../attn-core/README.md")]
struct CoreReadme;
#[cfg(doctest)]
#[doc = include_str!("../../attn-simd/README.md")]
struct SimdReadme;
