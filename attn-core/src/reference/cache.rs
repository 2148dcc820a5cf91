//! The reference over a cache in bytes: the oracle of everything that reads such caches.

use crate::element::{Element, Real};
use crate::error::Result;
use crate::formats::StoredView;
use crate::kv_cache::{Queries, attend};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::streaming::cache::{Find, OverCache};
use crate::view::View;

/// Elements of scratch that [`forward_stored`] needs: one score per key of the longest sequence, and one output row.
#[inline]
pub fn stored_scratch_len(cache: &StoredView<'_>) -> usize {
    let longest = (0..cache.bytes().batch()).map(|b| cache.bytes().len(b)).max().unwrap_or(0);
    longest.saturating_add(cache.dims()[1])
}

/// As [`streaming::forward_stored`](crate::streaming::forward_stored), in double precision: products, weights and sums
/// of the decoded numbers, rounded once to the output's type. RoPE tables of the cache are not read.
///
/// ```
/// use attn_core::formats::{Format, StoredRows, StoredView};
/// use attn_core::kv_cache::{CacheView, Queries};
/// use attn_core::{Attention, View, ViewMut, reference};
/// let (codes, half) = ([0x38u8, 0x40], [0.5f32]); // 1 and 2 in e4m3fn, times a half
/// let bytes = View::matrix(&codes, 2, 1)?;
/// let rows = StoredRows::new(Format::E4m3, Some(View::broadcast(&half, &[])?))?;
/// let cache = StoredView::new(CacheView::of_tensors(bytes, bytes)?, rows, rows)?;
/// let mut out = [0.0f32];
/// let (q, to) = (View::matrix(&[0.0f32], 1, 1)?, ViewMut::matrix(&mut out, 1, 1)?);
/// reference::forward_stored(&Attention::new(), q, Queries::All, cache, to, &mut [0.0; 3])?;
/// assert_eq!(out, [0.75]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// # Errors
/// As there; [`AttnError::Unsupported`](crate::AttnError::Unsupported) for a cache with RoPE tables.
pub fn forward_stored<'o, T: Element, O: Element, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    queries: Queries<'_>,
    cache: StoredView<'_>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [f64],
) -> Result<()> {
    let (mut outputs, [_, q_heads, q_len, head_dim]) = (outputs.into(), q.sizes());
    let shape = cache.shape([cache.bytes().batch(), q_heads, q_len, head_dim])?;
    if cache.rope().is_some() {
        return Err(crate::AttnError::Unsupported { what: "rope tables of a cache by the reference engine" });
    }
    let call = OverCache { attn, q, queries, cache: cache.bytes(), shape };
    let rows = call.check(&outputs, (stored_scratch_len(&cache), scratch.len()))?;
    let attn = attend::causal(attn);
    let Some((acc, all_weights)) = scratch.split_at_mut_checked(shape.value_dim) else {
        return Ok(());
    };
    for sequence in 0..shape.batch {
        let (own_len, kv_len) = (queries.len(sequence, q_len), cache.bytes().len(sequence));
        let problem = Problem::of_shape(&attn, attend::own_shape(&shape, own_len, kv_len))?;
        let (tokens, [q_row, start]) = (cache.bytes().tokens(sequence), queries.start(sequence));
        let (find, weights) = (Find::new(&tokens, cache.bytes().first()), all_weights.get_mut(..kv_len));
        let weights = weights.unwrap_or_default();
        for head in 0..q_heads {
            let (keys, values) = (cache.key_row(shape.kv_head(head)), cache.value_row(shape.kv_head(head)));
            for query in 0..own_len {
                let to = start.saturating_add(query);
                let row = q.row(q_row, head, to);
                let dot = |key| find.find(key).map_or(0.0, |place| keys.dot_f64(row, place));
                let is_there = |key| find.find(key).is_some();
                let at = [sequence, head, query];
                let lse = super::row_weights_by(&problem, at, is_there, dot, weights);
                acc.fill(0.0);
                problem.for_each_visible(sequence, head, query, |at| {
                    if let Some(place) = find.find(at.key) {
                        values.add_f64(acc, super::get(weights, at), place);
                    }
                });
                for (d, &x) in acc.iter().enumerate() {
                    outputs.out.set(q_row, head, to, d, O::from_f64(x));
                }
                outputs.set_lse(rows.row(q_row, head, to), O::Compute::of(lse));
            }
            for query in queries.padding(sequence, shape.batch, q_len) {
                let to = start.saturating_add(query);
                (0..shape.value_dim).for_each(|d| outputs.out.set(q_row, head, to, d, O::default()));
                outputs.set_lse(rows.row(q_row, head, to), O::Compute::NEG_INFINITY);
            }
        }
    }
    Ok(())
}
