//! Keys and values that stay between calls, over memory of the caller: append, ring with sinks, pages.
//!
//! A decoder that keeps the keys and values of earlier tokens computes those of each token once (Shazeer 2019, arXiv
//! 1911.02150, §2.4). Three ways to lay them out:
//!
//! | cache | memory | what a token sees |
//! |---|---|---|
//! | [`AppendCache`] | `[batch, kv_heads, capacity, dim]`, one length per sequence | all before it, as masked |
//! | [`RingCache`] | `sinks + window` slots per sequence | the first `sinks` tokens and the last `window` |
//! | [`PageTable`], [`append_paged`] | pages that a table assigns to sequences | all before it |
//!
//! Each of them may hold its rows in fewer bytes: see [`formats`](crate::formats) and [`int8`](crate::int8).
//!
//! The ring is StreamingLLM's (arXiv 2309.17453), pages are PagedAttention's (arXiv 2309.06180).
//!
//! A cache stores; no cache allocates. Each checks every index, length and page before it writes or reads. An engine
//! reads any of them as a [`CacheView`]: [`streaming::forward_cache`](crate::streaming::forward_cache) here, the decode
//! kernel of `attn-simd`. Attention over a cache is causal: the queries are the last tokens of their sequence. A
//! token's output has the same bits for every cut of the stream into calls: a prompt may come at once, in chunks, or
//! token by token.
//!
//! ```
//! use attn_core::kv_cache::{AppendCache, Queries};
//! use attn_core::{Attention, Layout, View, ViewMut, streaming};
//! let (mut k, mut v, mut lens) = ([0.0f32; 8 * 2], [0.0f32; 8 * 2], [0]); // room for 8 tokens of dim 2
//! let sizes = [1, 1, 8, 2];
//! let (k, v) = (ViewMut::new(&mut k, Layout::Bhsd, sizes)?, ViewMut::new(&mut v, Layout::Bhsd, sizes)?);
//! let mut cache = AppendCache::new(k, v, &mut lens)?;
//!
//! let x: Vec<f32> = (0..10).map(|i| (i as f32).sin()).collect(); // five tokens: q = k = v
//! let mut out = [0.0f32; 10];
//! let mut done = 0;
//! for chunk in [3, 1, 1] {
//!     let range = done * 2..(done + chunk) * 2;
//!     let tokens = View::matrix(&x[range.clone()], chunk, 2)?;
//!     cache.append(tokens, tokens)?;
//!     let out = ViewMut::matrix(&mut out[range], chunk, 2)?;
//!     streaming::forward_cache(&Attention::new(), tokens, Queries::All, cache.view(), out, &mut [0.0; 2])?;
//!     done += chunk;
//! }
//! assert_eq!(cache.lens(), [5]);
//!
//! // The same bits as all five at once.
//! use attn_core::{Align, Mask};
//! let (mut whole, x) = ([0.0f32; 10], View::matrix(&x, 5, 2)?);
//! let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
//! streaming::forward(&causal, x, x, x, ViewMut::matrix(&mut whole, 5, 2)?, &mut [0.0; 2])?;
//! assert_eq!(out, whole);
//! # Ok::<(), attn_core::AttnError>(())
//! ```
//!
//! # Options of a call over a cache
//!
//! Scale, soft-cap, temperature, sinks, masks, bias, ALiBi and mods all apply. Sequences have lengths of their own,
//! so that each is a call of its own shape: `q_len` queries against `kv_len` = its own cached keys, `batch` as in the
//! cache. Masks, biases and tables are checked against each of these shapes. For results that do not depend on the
//! chunks, align windows and ALiBi at the bottom right. Dropout has no place in decoding and is refused.

pub(crate) mod append;
pub(crate) mod attend;
mod cache_view;
pub(crate) mod checks;
pub(crate) mod layout;
pub(crate) mod memory;
mod page_table;
pub(crate) mod paged;
mod queries;
pub(crate) mod ring;
pub(crate) mod slots;

pub use append::AppendCache;
pub use cache_view::{CacheRope, CacheView};
pub use layout::TokenRun;
pub use page_table::PageTable;
pub use paged::append_paged;
pub use queries::Queries;
pub use ring::RingCache;

#[cfg(test)]
mod tests;
