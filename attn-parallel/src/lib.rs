//! Multi-core exact attention: `attn-simd`'s kernels over rayon, bit-identical for every thread count.
//!
//! A call is cut into blocks of query rows, heaviest first; the threads of the current rayon pool take them one by one
//! from a shared counter. Each row is computed by one thread from start to end, so that its bits do not depend on how
//! many there are. With few queries the keys are cut instead, at fixed places, and the parts of a row are merged in a
//! fixed tree: one token against one long sequence keeps all threads busy, with the same bits for any number of them.
//! There is no pool of our own: inside `pool.install(|| ..)` the caller's pool is used, else rayon's global one, and
//! `RAYON_NUM_THREADS` is respected. A process that forks after a call may call in the child too: the global pool's
//! threads do not exist there, so calls from outside a pool start threads of their own.
//!
//! A thread computes in its own floating-point mode. A caller that sets flush-to-zero for itself alone, and not for the
//! pool's threads (`ThreadPoolBuilder::start_handler`), has some rows with numbers below 2⁻¹²⁶ and some without: the
//! one case where bits depend on which thread took a row.
//!
//! ```
//! use attn_core::{Attention, Layout, View, ViewMut};
//! let x: Vec<f32> = (0..4 * 200 * 64).map(|n| (n as f32).sin()).collect();
//! let x = View::new(&x, Layout::Bhsd, [1, 4, 200, 64])?;
//! let mut out = vec![0.0f32; 4 * 200 * 64];
//! attn_parallel::forward(&Attention::new(), x, x, x, ViewMut::new(&mut out, Layout::Bhsd, [1, 4, 200, 64])?)?;
//! # Ok::<(), attn_core::AttnError>(())
//! ```

mod module;
mod runner;
mod scratch;
mod split;
mod threads;
mod worth;

pub use attn_simd::decode::{Queries, Source, Step};
pub use module::Kernels;
pub use runner::{Runner, attend_cache, forward};
pub use threads::threads;

// The examples of the pages that people read first are run as tests here, where all engines are at hand.
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
