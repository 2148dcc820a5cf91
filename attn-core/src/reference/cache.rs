//! The reference over a cache in bytes: the oracle of all engines that read such caches.

use crate::element::{Element, Real};
use crate::error::Result;
use crate::formats::StoredView;
use crate::kv_cache::Queries;
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score_mod::Mods;
use crate::streaming::cache::{OverCache, RowOf};
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
    let Some((acc, all_weights)) = scratch.split_at_mut_checked(shape.value_dim) else {
        return Ok(());
    };
    call.for_each_row(|(q_row, head, to), of| {
        acc.fill(0.0);
        let lse = of.map_or(O::Compute::NEG_INFINITY, |RowOf { problem, at, find, .. }| {
            let kv_head = shape.kv_head(head);
            let (keys, values, row) = (cache.key_row(kv_head), cache.value_row(kv_head), q.row(q_row, head, to));
            let weights = all_weights.get_mut(..problem.shape().kv_len).unwrap_or_default();
            let dot = |key| find.find(key).map_or(0.0, |place| keys.dot_f64(row, place));
            let (sequence, head, query) = at;
            let is_there = |key| find.find(key).is_some();
            let lse = super::row_weights_by(problem, [sequence, head, query], is_there, dot, weights);
            problem.for_each_visible(sequence, head, query, |at| {
                if let Some(place) = find.find(at.key) {
                    values.add_f64(acc, super::get(weights, at), place);
                }
            });
            O::Compute::of(lse)
        });
        for (d, &x) in acc.iter().enumerate() {
            outputs.out.set(q_row, head, to, d, O::from_f64(x));
        }
        outputs.set_lse(rows.row(q_row, head, to), lse);
    })
}
