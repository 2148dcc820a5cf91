//! The streaming engine over a cache: one call for every layout.

use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::formats::StoredView;
use crate::kv_cache::attend::{self, Tensors};
use crate::kv_cache::checks::check_at_most;
use crate::kv_cache::layout::Tokens;
use crate::kv_cache::{CacheRope, CacheView, Queries};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::row::Row;
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
    let shape = cache.shape(cache_queries(q.sizes(), cache.batch()))?;
    let rope = cache.rope().and_then(CacheRope::tables);
    let tensors = Tensors { k: cache.k(), v: cache.v(), rope: rope.as_ref() };
    if rope.is_none() && cache.rope().is_some() {
        return Err(AttnError::Unsupported { what: "rope tables of another type than the cache is computed in" });
    }
    let call = OverCache { attn, q, queries, cache: &cache, shape };
    call.run(outputs.into(), scratch, cache_scratch_len(&cache), |problem, at, query, find, (acc, scratch)| {
        tensors.row(problem, at, query, |token| find.find(token), (acc, scratch))
    })
}

/// Elements of scratch that [`forward_stored`] needs: one output row, and a query and a key if the cache has RoPE
/// tables.
#[inline]
pub fn stored_scratch_len(cache: &StoredView<'_>) -> usize {
    let [head_dim, value_dim] = cache.dims();
    if cache.rope().is_some() { value_dim.saturating_add(head_dim.saturating_mul(2)) } else { value_dim }
}

/// As [`forward_cache`], over a cache in bytes of any [format](crate::formats). Queries are f32, f16 or bf16.
///
/// # Errors
/// As [`forward_cache`].
pub fn forward_stored<'o, T: Element<Compute = f32>, O: Element<Compute = f32>, M: Mods>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    queries: Queries<'_>,
    cache: StoredView<'_>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [f32],
) -> Result<()> {
    let shape = cache.shape(cache_queries(q.sizes(), cache.bytes().batch()))?;
    let call = OverCache { attn, q, queries, cache: cache.bytes(), shape };
    call.run(outputs.into(), scratch, stored_scratch_len(&cache), |problem, at, (q, position), find, (acc, scratch)| {
        let kv_head = shape.kv_head(at.1);
        let (keys, values) = (cache.key_row(kv_head), cache.value_row(kv_head));
        let add = |acc: &mut [f32], weight, (_, place)| values.add_scaled(acc, weight, place);
        let find = |token| find.find(token).map(|place| (token, place));
        match (cache.rope(), scratch.split_at_mut_checked(q.len())) {
            (Some(tables), Some((query, key))) => {
                tables.apply_to_row(q, position, query);
                let key = key.get_mut(..q.len()).unwrap_or_default();
                let dot = |(token, place)| {
                    keys.read(place, key);
                    let key = Row { data: key, start: 0, stride: 1, len: key.len() };
                    tables.dot_with_rope(query, key, token)
                };
                attend::row_with(problem, at, find, dot, add, acc)
            }
            _ => attend::row_with(problem, at, find, |(_, place)| keys.dot(q, place), add, acc),
        }
    })
}

/// Sizes of the queries of a batch of sequences.
fn cache_queries([_, q_heads, q_len, head_dim]: [usize; 4], batch: usize) -> [usize; 4] {
    [batch, q_heads, q_len, head_dim]
}

/// Where the tokens of a sequence are.
#[derive(Clone, Copy)]
pub(crate) struct Find<'x, 'c> {
    tokens: &'x Tokens<'c>,
    first: usize,
}

impl<'x, 'c> Find<'x, 'c> {
    /// Of a cache whose first token is `first`.
    pub(crate) const fn new(tokens: &'x Tokens<'c>, first: usize) -> Self {
        Self { tokens, first }
    }

    /// Row and slot of a token; `None` if it is not there.
    #[inline]
    pub(crate) fn find(&self, token: usize) -> Option<(usize, usize)> {
        self.tokens.find(token.checked_sub(self.first)?)
    }
}

/// A call over a cache: the part that does not depend on its type of numbers.
pub(crate) struct OverCache<'x, 'a, 'c, M, T, C> {
    pub(crate) attn: &'x Attention<'a, M>,
    pub(crate) q: View<'x, T>,
    pub(crate) queries: Queries<'x>,
    /// Where tokens are in memory.
    pub(crate) cache: &'x CacheView<'c, C>,
    /// With the sizes of numbers, and the longest sequence.
    pub(crate) shape: AttnShape,
}

impl<M: Mods, T: Element, C: Copy> OverCache<'_, '_, '_, M, T, C> {
    /// Sizes of q and the outputs. Checks the options against every sequence, and what the cache must hold.
    #[inline]
    pub(crate) fn check<O: Element>(&self, outputs: &Outputs<'_, O>, scratch: (usize, usize)) -> Result<AttnShape> {
        let Self { attn, q, queries, cache, shape } = self;
        let [rows, _, q_len, _] = q.sizes();
        queries.check(q.sizes(), cache.batch())?;
        let rows = AttnShape { batch: rows, ..*shape };
        attend::check(attn, &rows, outputs, scratch)?;
        let attn = attend::causal(attn);
        for sequence in 0..cache.batch() {
            let (q_len, kv_len) = (queries.len(sequence, q_len), cache.len(sequence));
            let here = kv_len.saturating_sub(cache.first());
            check_at_most("queries of a sequence against its cached tokens", sequence, q_len, here)?;
            if q_len > 1 && cache.has_dropped(sequence) {
                let what = "several queries over a ring cache that has dropped tokens which they see";
                return Err(AttnError::Unsupported { what });
            }
            Problem::of_shape(&attn, attend::own_shape(shape, q_len, kv_len))?;
        }
        Ok(rows)
    }

    /// Row by row: `row` leaves the output in the first of the two parts of the scratch, of `value_dim` numbers.
    #[inline]
    fn run<O: Element<Compute = T::Compute>>(
        &self,
        mut outputs: Outputs<'_, O>,
        scratch: &mut [T::Compute],
        needed: usize,
        mut row: impl FnMut(
            &Problem<'_, '_, &M>,
            (usize, usize, usize),
            (Row<'_, T>, usize),
            Find<'_, '_>,
            (&mut [T::Compute], &mut [T::Compute]),
        ) -> RowState<T::Compute>,
    ) -> Result<()> {
        let rows = self.check(&outputs, (needed, scratch.len()))?;
        let Some((acc, rest)) = scratch.split_at_mut_checked(self.shape.value_dim) else {
            return Ok(());
        };
        self.for_each_row(|place, of| {
            let state = match of {
                Some(RowOf { problem, at, position, find }) => {
                    let q = (self.q.row(place.0, place.1, place.2), position);
                    row(problem, at, q, find, (&mut *acc, &mut *rest))
                }
                None => {
                    acc.fill(T::Compute::default());
                    RowState::new()
                }
            };
            attend::write(&mut outputs, &rows, place, acc, &state);
        })
    }

    /// Calls `row` with the place of each row in q and the outputs, and with what it attends to; with `None` behind the
    /// last query of a sequence.
    #[inline]
    pub(crate) fn for_each_row(
        &self,
        mut row: impl FnMut((usize, usize, usize), Option<RowOf<'_, '_, '_, '_, &M>>),
    ) -> Result<()> {
        let Self { q, queries, cache, shape, .. } = self;
        let (attn, [_, q_heads, q_len, _]) = (attend::causal(self.attn), q.sizes());
        for sequence in 0..cache.batch() {
            let (own_len, kv_len) = (queries.len(sequence, q_len), cache.len(sequence));
            let problem = &Problem::of_shape(&attn, attend::own_shape(shape, own_len, kv_len))?;
            let (tokens, [q_row, start]) = (cache.tokens(sequence), queries.start(sequence));
            let find = Find::new(&tokens, cache.first());
            for head in 0..q_heads {
                for query in 0..own_len {
                    let position = kv_len.saturating_sub(own_len).saturating_add(query);
                    let of = RowOf { problem, at: (sequence, head, query), position, find };
                    row((q_row, head, start.saturating_add(query)), Some(of));
                }
                for query in queries.padding(sequence, shape.batch, q_len) {
                    row((q_row, head, start.saturating_add(query)), None);
                }
            }
        }
        Ok(())
    }
}

/// What a row over a cache attends to: its sequence as a call of its own, head and query, the position of the query,
/// and where tokens are.
pub(crate) struct RowOf<'r, 'p, 'a, 'c, M> {
    pub(crate) problem: &'r Problem<'p, 'a, M>,
    pub(crate) at: (usize, usize, usize),
    pub(crate) position: usize,
    pub(crate) find: Find<'r, 'c>,
}
