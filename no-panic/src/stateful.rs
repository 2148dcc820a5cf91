//! KV caches and the variants that are not a mask.

use attn_core::kv_cache::{AppendCache, CacheView, PageTable, Queries, RingCache, append_paged};
use attn_core::position::rope::RopeTables;
use attn_core::{Attention, Outputs, View, ViewMut, streaming};
use attn_layers::variants::differential::Differential;
use attn_layers::variants::linear::{LinearAttention, LinearState};
use attn_layers::variants::mla::{Mla, MlaForm};

#[unsafe(no_mangle)]
pub fn attn_entry_append_cache<'c>(
    kv: (ViewMut<'c, f32>, ViewMut<'c, f32>),
    lens: &'c mut [usize],
    attn: &Attention<'_>,
    qkv: &[View<'_, f32>; 3],
    new_lens: &[usize],
    out: Outputs<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    let [q, k, v] = *qkv;
    let Ok(mut cache) = AppendCache::new(kv.0, kv.1, lens) else { return false };
    let mut done = cache.append(k, v).is_ok();
    done &= cache.append_ragged(k, v, new_lens).is_ok();
    done &= cache.truncate(new_lens.len(), new_lens.len()).is_ok();
    done &= cache.sequence(new_lens.len()).is_ok();
    done & streaming::forward_cache(attn, q, Queries::Packed(new_lens), cache.view(), out, scratch).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_paged_cache(
    kv: &mut [ViewMut<'_, f32>; 2],
    tables: [&[i32]; 3],
    lens: &[usize],
    attn: &Attention<'_>,
    qkv: &[View<'_, f32>; 3],
    new_lens: &[usize],
    out: Outputs<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    let [q, k, v] = *qkv;
    let [indptr, indices, last] = tables;
    let (padded, csr) = (PageTable::padded(indices, lens), PageTable::csr(indptr, indices, last));
    let (Ok(padded), Ok(csr)) = (padded, csr) else { return false };
    let [k_pages, v_pages] = kv;
    let mut done = append_paged(k_pages, v_pages, padded, k, v, None).is_ok();
    done &= append_paged(k_pages, v_pages, csr.with_evicted(), k, v, Some(new_lens)).is_ok();
    let cache = CacheView::of_pages(k_pages.as_view(), v_pages.as_view(), csr);
    let Ok(cache) = cache else { return false };
    done & streaming::forward_cache(attn, q, Queries::First(new_lens), cache, out, scratch).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_ring_cache<'c>(
    kv: (ViewMut<'c, f32>, ViewMut<'c, f32>),
    seen: &'c mut [usize],
    sinks_and_window: [usize; 2],
    tables: Option<RopeTables<'c, f32>>,
    attn: &Attention<'_>,
    qkv: &[View<'_, f32>; 3],
    unrolled: &mut [ViewMut<'_, f32>; 2],
    out: Outputs<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    let [q, k, v] = *qkv;
    let [sinks, window] = sinks_and_window;
    let cache = RingCache::new(kv.0, kv.1, seen, sinks, window);
    let cache = match tables {
        Some(tables) => cache.and_then(|cache| cache.cache_relative(tables)),
        None => cache,
    };
    let Ok(mut cache) = cache else { return false };
    let mut done = cache.insert(k, v).is_ok();
    done &= cache.advance(attn, q, k, v, out, scratch).is_ok();
    let [k_out, v_out] = unrolled;
    done &= cache.unroll(window, k_out, v_out).is_ok();
    done & (cache.positions(window).map(|position| cache.key(window, 0, position).get(0)).sum::<f32>() >= 0.0)
}

#[unsafe(no_mangle)]
pub fn attn_entry_linear_attention(
    options: &LinearAttention,
    qkv: &[View<'_, f32>; 3],
    out: &mut ViewMut<'_, f32>,
    state: LinearState<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    let [q, k, v] = *qkv;
    options.forward(q, k, v, out, state, scratch).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_differential(
    options: &Differential<'_>,
    attn: &Attention<'_>,
    qk: &[[View<'_, f32>; 2]; 2],
    v: View<'_, f32>,
    out: &mut ViewMut<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    let [q, k] = *qk;
    options.forward(attn, q, k, v, out, scratch).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_mla(
    layer: &Mla<'_, f32>,
    form: MlaForm,
    x: View<'_, f32>,
    cache: &mut ViewMut<'_, f32>,
    past: usize,
    out: &mut ViewMut<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    layer.forward(form, x, cache, past, out, scratch).is_ok()
}
