//! A cache of fixed size for endless streams: the first tokens and the last ones.
//!
//! A sliding window alone breaks models, because they park attention on the very first tokens (Xiao et al. 2023,
//! StreamingLLM, arXiv 2309.17453). Token `t` sees key `j ≤ t` if `t − j < window` or `j < sinks`. The slots after the
//! sinks are a ring, so that nothing is ever moved ([`slots`](super::slots)).
//!
//! There are two ways to use rotary positions. Apply RoPE first, by positions in the stream. Or let the cache apply it,
//! by index in the cache ([`RingCache::cache_relative`]): positions then stay within the length that a model was
//! trained for. StreamingLLM does that.

use super::attend::{self, Tensors};
use super::cache_view::{CacheRope, CacheView};
use super::checks::{check_at_most, check_count, check_new, copy_token};
use super::layout::{Place, check_ring};
use super::memory::Memory;
use super::slots::{Held, Slots};
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::position::rope::RopeTables;
use crate::row::Row;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::view::{View, ViewMut};

/// Sinks and a ring of the last tokens, for each sequence of a batch.
///
/// | tensor | shape |
/// |---|---|
/// | k | `[batch, kv_heads, slots, head_dim]`, `slots ≥ sinks + window`, any strides |
/// | v | `[batch, kv_heads, slots, value_dim]`, any strides |
/// | seen | `[batch]`: tokens seen so far |
///
/// ```
/// use attn_core::kv_cache::RingCache;
/// use attn_core::{Attention, View, ViewMut};
/// let (mut k, mut v, mut seen) = ([0.0f32; 3], [0.0f32; 3], [0]);
/// let (k, v) = (ViewMut::matrix(&mut k, 3, 1)?, ViewMut::matrix(&mut v, 3, 1)?);
/// let mut cache = RingCache::new(k, v, &mut seen, 1, 2)?; // one sink, a window of two
/// let x = [0.0f32, 10.0, 20.0, 31.0, 44.0];
/// let zero = View::matrix(&[0.0f32; 5], 5, 1)?; // every score 0: outputs are means
/// let mut out = [0.0f32; 5];
/// let (v, to) = (View::matrix(&x, 5, 1)?, ViewMut::matrix(&mut out, 5, 1)?);
/// cache.advance(&Attention::new(), zero, zero, v, to, &mut [0.0])?;
/// assert_eq!(out, [0.0, 5.0, 10.0, 17.0, 25.0]); // the last: (0 + 31 + 44)/3
/// assert!(cache.positions(0).eq([0, 3, 4]));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Debug)]
pub struct RingCache<'c, T: Element> {
    k: ViewMut<'c, T>,
    v: ViewMut<'c, T>,
    seen: &'c mut [usize],
    slots: Slots,
    rope: Option<RopeTables<'c, T::Compute>>,
}

impl<'c, T: Element> RingCache<'c, T> {
    /// Takes the memory as it is: `seen` of zeros for an empty cache.
    ///
    /// # Errors
    /// [`AttnError::Size`] if k, v and seen disagree; [`AttnError::Option`] for a window of 0;
    /// [`AttnError::TooShort`] for too few slots.
    pub fn new(
        k: ViewMut<'c, T>,
        v: ViewMut<'c, T>,
        seen: &'c mut [usize],
        sinks: usize,
        window: usize,
    ) -> Result<Self> {
        let slots = check_ring(k.sizes(), v.sizes(), seen, (sinks, window))?;
        Ok(Self { k, v, seen, slots, rope: None })
    }

    /// Applies RoPE to queries and keys by their index in the cache: at each token the `n` keys held have positions
    /// `0..n`, the query has `n − 1`. The keys in memory do not change. `tables` are
    /// `[1, 1, at least sinks + window, rotary_dim/2]`, made by [`Rope::tables`](crate::position::rope::Rope::tables)
    /// from position 0 on.
    ///
    /// # Errors
    /// [`AttnError::Size`], [`AttnError::TooShort`] or [`AttnError::Index`] if the tables do not fit.
    pub fn cache_relative(mut self, tables: RopeTables<'c, T::Compute>) -> Result<Self> {
        let ([batch, heads, rows, pairs], [.., head_dim]) = (tables.sizes(), self.k.sizes());
        AttnError::check_size("rope tables batch", 1, batch)?;
        AttnError::check_size("rope tables heads", 1, heads)?;
        AttnError::check_len("rope tables (sinks + window)", self.slots.most(), rows)?;
        check_at_most("rope table pairs against head_dim/2", 0, pairs, head_dim / 2)?;
        self.rope = Some(tables);
        Ok(self)
    }

    /// The tokens held, in ascending order, to be read by any engine; with the tables of a cache that is
    /// [relative](Self::cache_relative).
    pub fn view(&self) -> CacheView<'_, T> {
        let place = Place::Ring { seen: self.seen, slots: self.slots };
        CacheView::new(self.k.as_view(), self.v.as_view(), place).with_rope(self.rope.and_then(CacheRope::new))
    }

    /// Tokens seen of each sequence, held or not.
    pub fn seen(&self) -> &[usize] {
        self.seen
    }

    /// Tokens held of one sequence; 0 if there is no such sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.held(sequence).len
    }

    fn held(&self, sequence: usize) -> Held {
        self.slots.held(self.seen.get(sequence).copied().unwrap_or(0))
    }

    /// Whether a sequence holds no token.
    pub fn is_empty(&self, sequence: usize) -> bool {
        self.len(sequence) == 0
    }

    /// Places in the stream of the tokens held, ascending.
    pub fn positions(&self, sequence: usize) -> impl Iterator<Item = usize> + use<T> {
        let held = self.held(sequence);
        (0..held.len).map(move |i| held.position(i))
    }

    /// Key of the `i`-th token held (`i < len`), in ascending order of the tokens, as cached. Empty if there is
    /// none.
    pub fn key(&self, sequence: usize, kv_head: usize, i: usize) -> Row<'_, T> {
        held_row(self.k.as_view(), (sequence, kv_head), self.held(sequence), i)
    }

    /// Value of the `i`-th token held. Empty if there is none.
    pub fn value(&self, sequence: usize, kv_head: usize, i: usize) -> Row<'_, T> {
        held_row(self.v.as_view(), (sequence, kv_head), self.held(sequence), i)
    }

    /// Copies the tokens held of one sequence in ascending order: `k_out` `[1, kv_heads, len, head_dim]`, `v_out`
    /// `[1, kv_heads, len, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such sequence, [`AttnError::Size`].
    pub fn unroll(&self, sequence: usize, k_out: &mut ViewMut<'_, T>, v_out: &mut ViewMut<'_, T>) -> Result<()> {
        let ([batch, heads, _, head_dim], [.., value_dim]) = (self.k.sizes(), self.v.sizes());
        if sequence >= batch {
            return Err(AttnError::Index { what: "sequence", at: 0, value: sequence, limit: batch });
        }
        let held = self.held(sequence);
        let n = held.len;
        for (what, expected, found) in [
            ("unrolled keys", [1, heads, n, head_dim], k_out.sizes()),
            ("unrolled values", [1, heads, n, value_dim], v_out.sizes()),
        ] {
            for (expected, found) in expected.into_iter().zip(found) {
                AttnError::check_size(what, expected, found)?;
            }
        }
        for i in 0..n {
            let slot = held.slot(i);
            copy_token(self.k.as_view(), (sequence, slot), k_out, (0, i));
            copy_token(self.v.as_view(), (sequence, slot), v_out, (0, i));
        }
        Ok(())
    }

    fn tensors(&self) -> Tensors<'_, T> {
        Tensors { k: self.k.as_view(), v: self.v.as_view(), rope: self.rope.as_ref() }
    }

    /// Elements of scratch that [`advance`](Self::advance) needs: one output row, and with tables a query.
    pub fn scratch_len(&self) -> usize {
        attend::scratch_len(self.k.sizes(), self.v.sizes(), self.rope.is_some())
    }

    /// Takes tokens without attending: `k_new` `[batch, kv_heads, n, head_dim]`, `v_new`
    /// `[batch, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`], before anything is written.
    pub fn insert(&mut self, k_new: View<'_, T>, v_new: View<'_, T>) -> Result<()> {
        insert_tokens((&mut self.k, &mut self.v), self.seen, self.slots, k_new, v_new)
    }

    /// Takes `n` tokens of every sequence and attends with each: `q` `[batch, q_heads, n, head_dim]`, `k_new`
    /// `[batch, kv_heads, n, head_dim]`, `v_new` `[batch, kv_heads, n, value_dim]`. The tokens come one by one: each
    /// key replaces the oldest one, then its query sees all keys held. To the options each token is a call of one query
    /// against these keys (see [the module](crate::kv_cache)), and no causal mask is needed.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written, to the cache or the outputs.
    pub fn advance<'o, O: Element<Compute = T::Compute>, M: Mods>(
        &mut self,
        attn: &Attention<'_, M>,
        q: View<'_, T>,
        k_new: View<'_, T>,
        v_new: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
        scratch: &mut [T::Compute],
    ) -> Result<()> {
        let mut outputs = outputs.into();
        let n = check_new(self.k.sizes(), self.v.sizes(), k_new.sizes(), v_new.sizes())?;
        let shape = AttnShape::new(q.sizes(), k_new.sizes(), v_new.sizes())?;
        AttnError::check_size("queries against new tokens", n, shape.q_len)?;
        attend::check(attn, &shape, &outputs, (self.scratch_len(), scratch.len()))?;
        check_count(self.seen, n)?;
        // Every length that will occur, so that no option fails half-way.
        for &seen in self.seen.iter() {
            for kv_len in self.slots.lengths(seen, n) {
                Problem::of_shape(attn, attend::own_shape(&shape, 1, kv_len))?;
            }
        }
        let Some((acc, query)) = scratch.split_at_mut_checked(shape.value_dim) else {
            return Ok(());
        };
        for sequence in 0..shape.batch {
            for token in 0..n {
                insert_token((&mut self.k, &mut self.v), self.seen, self.slots, (sequence, token), (k_new, v_new));
                let (tensors, held) = (self.tensors(), self.held(sequence));
                let problem = Problem::of_shape(attn, attend::own_shape(&shape, 1, held.len))?;
                let find = |i| Some((sequence, held.slot(i))); // the keys are those held
                for head in 0..shape.q_heads {
                    let q = (q.row(sequence, head, token), held.len.saturating_sub(1));
                    let state = tensors.row(&problem, (sequence, head, 0), q, find, (acc, query));
                    attend::write(&mut outputs, &shape, (sequence, head, token), acc, &state);
                }
            }
        }
        Ok(())
    }
}

/// The row of the `i`-th token held; empty if there is none.
#[inline]
fn held_row<T: Element>(x: View<'_, T>, (sequence, head): (usize, usize), held: Held, i: usize) -> Row<'_, T> {
    x.row(sequence, head, if i < held.len { held.slot(i) } else { usize::MAX })
}

/// Takes tokens: each is written over the oldest that is not a sink.
#[inline]
pub(crate) fn insert_tokens<T: Element, M: Memory<T>>(
    (k, v): (&mut M, &mut M),
    seen: &mut [usize],
    slots: Slots,
    k_new: View<'_, T>,
    v_new: View<'_, T>,
) -> Result<()> {
    let n = check_new(k.of_numbers(), v.of_numbers(), k_new.sizes(), v_new.sizes())?;
    check_count(seen, n)?;
    for sequence in 0..seen.len() {
        for token in 0..n {
            insert_token((&mut *k, &mut *v), seen, slots, (sequence, token), (k_new, v_new));
        }
    }
    Ok(())
}

/// Writes one token over the oldest that is not a sink.
#[inline]
fn insert_token<T: Element, M: Memory<T>>(
    (k, v): (&mut M, &mut M),
    seen: &mut [usize],
    slots: Slots,
    (sequence, token): (usize, usize),
    (k_new, v_new): (View<'_, T>, View<'_, T>),
) {
    let slot = slots.of_position(seen.get(sequence).copied().unwrap_or(0));
    k.store(k_new, (sequence, token), (sequence, slot));
    v.store(v_new, (sequence, token), (sequence, slot));
    if let Some(seen) = seen.get_mut(sequence) {
        *seen += 1;
    }
}
