//! Keys and values that stay between calls, over memory of the caller: append, ring with sinks, pages.
//!
//! A decoder that keeps the keys and values of earlier tokens computes those of each token once (Shazeer 2019, arXiv
//! 1911.02150, §2.4). Three ways to lay them out:
//!
//! | cache | memory | what a token sees |
//! |---|---|---|
//! | [`AppendCache`] | `[batch, kv_heads, capacity, dim]`, one length per sequence | all before it, as masked |
//! | [`RingCache`] | `sinks + window` slots per sequence | the first `sinks` tokens and the last `window` |
//! | [`PagedCache`], [`PagedCacheMut`] | pages that a table assigns to sequences | all before it |
//!
//! The ring is StreamingLLM's (arXiv 2309.17453), pages are PagedAttention's (arXiv 2309.06180).
//!
//! None allocates, and each checks every index, length and page before it writes or reads. Attention over each is the
//! [`streaming`](crate::streaming) form, with lse on request, and always causal: the queries are the last tokens of
//! their sequence. What a token gets does not depend on how the stream was cut into calls, bit for bit: a prompt may
//! come at once, in chunks, or token by token.
//!
//! ```
//! use attn_core::kv_cache::AppendCache;
//! use attn_core::{Attention, Layout, View, ViewMut};
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
//!     cache.attend(&Attention::new(), tokens, out, &mut [0.0; 2])?;
//!     done += chunk;
//! }
//! assert_eq!(cache.lens(), [5]);
//!
//! // The same bits as all five at once.
//! use attn_core::{Align, Mask, streaming};
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

mod append;
pub(crate) mod attend;
mod cache_view;
mod paged;
mod ring;
pub(crate) mod slots;

pub use append::AppendCache;
pub use cache_view::{CacheView, TokenRun, Turn};
pub use paged::{PagedCache, PagedCacheMut};
pub use ring::RingCache;

use crate::error::{AttnError, Result};
use crate::view::{View, ViewMut};

/// Checks new keys and values against a cache's `[batch, kv_heads, _, head_dim]` and `[batch, kv_heads, _, value_dim]`,
/// and against each other. Gives their number per sequence.
pub(crate) fn check_new(cache_k: [usize; 4], cache_v: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<usize> {
    let ([batch, heads, _, head_dim], [.., value_dim]) = (cache_k, cache_v);
    let ([k_batch, k_heads, k_len, k_dim], [v_batch, v_heads, v_len, v_dim]) = (k, v);
    for (what, expected, found) in [
        ("new k batch against the cache's", batch, k_batch),
        ("new v batch against the cache's", batch, v_batch),
        ("new k heads against the cache's", heads, k_heads),
        ("new v heads against the cache's", heads, v_heads),
        ("new k head_dim against the cache's", head_dim, k_dim),
        ("new v value_dim against the cache's", value_dim, v_dim),
        ("new v length against new k length", k_len, v_len),
    ] {
        AttnError::check_size(what, expected, found)?;
    }
    Ok(k_len)
}

/// Checks that no entry of a table lies above its limit.
pub(crate) fn check_at_most(what: &'static str, at: usize, value: usize, most: usize) -> Result<()> {
    if value <= most { Ok(()) } else { Err(AttnError::Index { what, at, value, limit: most.saturating_add(1) }) }
}

/// Checks that the numbers of tokens seen can grow by `n`.
pub(crate) fn check_count(seen: &[usize], n: usize) -> Result<()> {
    let fits = seen.iter().all(|seen| seen.checked_add(n).is_some());
    if fits { Ok(()) } else { Err(AttnError::Overflow { what: "tokens seen" }) }
}

/// Copies token `from.1` of sequence `from.0` to row `to.1` of `to.0`, all heads.
pub(crate) fn copy_token<T: Copy + Default>(
    x: View<'_, T>,
    (batch, token): (usize, usize),
    out: &mut ViewMut<'_, T>,
    (to, row): (usize, usize),
) {
    let [_, heads, ..] = x.sizes();
    for head in 0..heads {
        for (d, value) in x.row(batch, head, token).iter().enumerate() {
            out.set(to, head, row, d, value);
        }
    }
}
