//! The streaming engine over a cache: one call for every layout.

use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::kv_cache::attend::{self, Tensors};
use crate::kv_cache::checks::check_at_most;
use crate::kv_cache::{CacheRope, CacheView, Queries};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::softmax::RowState;
use crate::view::View;

/// Elements of scratch that [`forward_cache`] needs: one output row, and a query if the cache has RoPE tables.
pub fn cache_scratch_len<T: Element>(cache: &CacheView<'_, T>) -> usize {
    attend::scratch_len(cache.k().sizes(), cache.v().sizes(), cache.rope().is_some())
}

/// Attention of the last tokens of every sequence, which the cache holds already, over all of its tokens.
///
/// Causal. Each sequence is a call of its own shape to the options; see [`kv_cache`](crate::kv_cache). The same for
/// every layout of a cache: appended, ring, pages, plain tensors. A [part](CacheView::of_part) of a cache gives the
/// output over that part, with its lse.
///
/// ```
/// use attn_core::kv_cache::{CacheView, Queries};
/// use attn_core::{Attention, Layout, View, ViewMut, streaming};
/// // Two sequences of three tokens and one, of dim 1. The first prefills all three, the second decodes its token.
/// let (k, v) = ([0.0f32; 8], [1.0f32, 3.0, 8.0, 0.0, 5.0, 0.0, 0.0, 0.0]); // every score 0: outputs are means
/// let view = |x| View::new(x, Layout::Bhsd, [2, 1, 4, 1]);
/// let cache = CacheView::of_slots(view(&k)?, view(&v)?, &[3, 1])?;
/// let (q, mut out) = ([0.0f32; 4], [0.0f32; 4]);
/// let (q, to) = (View::matrix(&q, 4, 1)?, ViewMut::matrix(&mut out, 4, 1)?);
/// streaming::forward_cache(&Attention::new(), q, Queries::Packed(&[0, 3, 4]), cache, to, &mut [0.0])?;
/// assert_eq!(out, [1.0, 2.0, 4.0, 5.0]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Index`] if a sequence has fewer tokens than queries;
/// [`AttnError::Unsupported`] for dropout, for the full weights, and for several queries over a ring that has dropped
/// tokens which they see.
pub fn forward_cache<'o, T: Element, O: Element<Compute = T::Compute>, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    queries: Queries<'_>,
    cache: CacheView<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [T::Compute],
) -> Result<()> {
    let mut outputs = outputs.into();
    let [rows, q_heads, q_len, head_dim] = q.sizes();
    queries.check(q.sizes(), cache.batch())?;
    let shape = cache.shape([cache.batch(), q_heads, q_len, head_dim])?;
    let rows = AttnShape { batch: rows, ..shape }; // of q and the outputs
    let rope = cache.rope().and_then(CacheRope::tables);
    let tensors = Tensors { k: cache.k(), v: cache.v(), rope: rope.as_ref() };
    if rope.is_none() && cache.rope().is_some() {
        return Err(AttnError::Unsupported { what: "rope tables of another type than the cache is computed in" });
    }
    attend::check(attn, &rows, &outputs, (cache_scratch_len(&cache), scratch.len()))?;
    let attn = attend::causal(attn);
    for sequence in 0..cache.batch() {
        let (q_len, kv_len) = (queries.len(sequence, q_len), cache.len(sequence));
        let here = kv_len.saturating_sub(cache.first());
        check_at_most("queries of a sequence against its cached tokens", sequence, q_len, here)?;
        if q_len > 1 && cache.has_dropped(sequence) {
            let what = "several queries over a ring cache that has dropped tokens which they see";
            return Err(AttnError::Unsupported { what });
        }
        Problem::of_shape(&attn, attend::own_shape(&shape, q_len, kv_len))?;
    }
    let Some((acc, query_row)) = scratch.split_at_mut_checked(shape.value_dim) else {
        return Ok(());
    };
    for sequence in 0..cache.batch() {
        let (own_len, kv_len) = (queries.len(sequence, q_len), cache.len(sequence));
        let problem = Problem::of_shape(&attn, attend::own_shape(&shape, own_len, kv_len))?;
        let (tokens, [row, start]) = (cache.tokens(sequence), queries.start(sequence));
        let find = |token: usize| tokens.find(token.checked_sub(cache.first())?);
        for head in 0..q_heads {
            for query in 0..own_len {
                let to = start.saturating_add(query);
                let q = (q.row(row, head, to), kv_len.saturating_sub(own_len).saturating_add(query));
                let state = tensors.row(&problem, (sequence, head, query), q, find, (&mut *acc, &mut *query_row));
                attend::write(&mut outputs, &rows, (row, head, to), acc, &state);
            }
            acc.fill(T::Compute::default());
            for query in queries.padding(sequence, shape.batch, q_len) {
                attend::write(&mut outputs, &rows, (row, head, start.saturating_add(query)), acc, &RowState::new());
            }
        }
    }
    Ok(())
}
