//! Checks that every cache makes before it writes, and the copy of one token.

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

/// Checks that no entry of a table exceeds its limit.
pub(crate) fn check_at_most(what: &'static str, at: usize, value: usize, most: usize) -> Result<()> {
    if value <= most { Ok(()) } else { Err(AttnError::Index { what, at, value, limit: most.saturating_add(1) }) }
}

/// Checks that the numbers of tokens seen can grow by `n`.
pub(crate) fn check_count(seen: &[usize], n: usize) -> Result<()> {
    let fits = seen.iter().all(|seen| seen.checked_add(n).is_some());
    if fits { Ok(()) } else { Err(AttnError::Overflow { what: "tokens seen" }) }
}

/// Copies token `from.1` of sequence `from.0` to row `to.1` of `to.0`, all heads. Element by element: a copy of slices
/// would link `memcpy` into firmware, 0.7 to 1 KB of flash.
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
