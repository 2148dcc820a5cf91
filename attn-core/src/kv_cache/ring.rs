//! A cache of fixed size for endless streams: the first tokens and the last ones.
//!
//! A sliding window alone breaks models, because they park attention on the very first tokens; keeping a few of those
//! beside the window does not (Xiao et al. 2023, StreamingLLM, arXiv 2309.17453). Token `t` sees key `j ≤ t` when
//! `t − j < window` or `j < sinks`: the window counts the token itself.
//!
//! The slots behind the sinks are a ring, so that nothing is ever moved ([`slots`](super::slots)). Keys are read in the
//! order of their tokens.
//!
//! With rotary positions there are two ways. Apply RoPE to queries and keys first, by their position in the stream. Or
//! let the cache apply it as keys are read, by their index in the cache ([`RingCache::cache_relative`]): positions then
//! stay within the length that a model was trained for. StreamingLLM does that.

use super::attend;
use super::cache_view::{CacheRope, CacheView};
use super::checks::{check_at_most, check_count, check_new, copy_token};
use super::layout::{Place, check_ring};
use super::slots::{Held, Slots};
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::position::RopeTables;
use crate::score::{Problem, dot};
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::view::{Row, View, ViewMut};

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
    /// [`AttnError::Size`] where k, v and seen disagree; [`AttnError::Option`] for a window of 0;
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
    /// `0..n`, the query has `n − 1`. The keys in memory do not change. `tables` are `[1, 1, at least sinks + window, rotary_dim/2]`, made
    /// by [`Rope::tables`](crate::position::Rope::tables) from position 0 on.
    ///
    /// # Errors
    /// [`AttnError::Size`], [`AttnError::TooShort`] or [`AttnError::Index`] where the tables do not fit.
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

    /// Tokens held of one sequence; 0 where there is no such sequence.
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

    /// Key of the `i`-th token held (`i < len`), in ascending order of the tokens, as cached. Empty where there is
    /// none.
    pub fn key(&self, sequence: usize, kv_head: usize, i: usize) -> Row<'_, T> {
        held_row(self.k.as_view(), (sequence, kv_head), self.held(sequence), i)
    }

    /// Value of the `i`-th token held. Empty where there is none.
    pub fn value(&self, sequence: usize, kv_head: usize, i: usize) -> Row<'_, T> {
        held_row(self.v.as_view(), (sequence, kv_head), self.held(sequence), i)
    }

    /// Copies the tokens held of one sequence in ascending order: `k_out` `[1, kv_heads, len, head_dim]`, `v_out`
    /// `[1, kv_heads, len, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Index`] where there is no such sequence, [`AttnError::Size`].
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

    /// Elements of scratch that [`advance`](Self::advance) needs: one output row, and with tables a query.
    pub fn scratch_len(&self) -> usize {
        let ([.., head_dim], [.., value_dim]) = (self.k.sizes(), self.v.sizes());
        if self.rope.is_some() { value_dim.saturating_add(head_dim) } else { value_dim }
    }

    /// Takes tokens without attending: `k_new` `[batch, kv_heads, n, head_dim]`, `v_new`
    /// `[batch, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`], before anything is written.
    pub fn insert(&mut self, k_new: View<'_, T>, v_new: View<'_, T>) -> Result<()> {
        let n = check_new(self.k.sizes(), self.v.sizes(), k_new.sizes(), v_new.sizes())?;
        check_count(self.seen, n)?;
        for sequence in 0..self.seen.len() {
            for token in 0..n {
                self.insert_token(sequence, token, k_new, v_new);
            }
        }
        Ok(())
    }

    /// Puts one token where the oldest non-sink token stood.
    fn insert_token(&mut self, sequence: usize, token: usize, k_new: View<'_, T>, v_new: View<'_, T>) {
        let slot = self.slots.of_position(self.seen.get(sequence).copied().unwrap_or(0));
        copy_token(k_new, (sequence, token), &mut self.k, (sequence, slot));
        copy_token(v_new, (sequence, token), &mut self.v, (sequence, slot));
        if let Some(seen) = self.seen.get_mut(sequence) {
            *seen += 1;
        }
    }

    /// Takes `n` tokens of every sequence and attends with each: `q` `[batch, q_heads, n, head_dim]`, `k_new`
    /// `[batch, kv_heads, n, head_dim]`, `v_new` `[batch, kv_heads, n, value_dim]`. Token by token the new key
    /// displaces the oldest and the query sees what is held, so that chunks longer than the window follow the same
    /// rule.
    ///
    /// To the options each token is a call of one query against the keys held, in logical order (see
    /// [the module](crate::kv_cache)); no causal mask is needed.
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
        let Some((acc, roped)) = scratch.split_at_mut_checked(shape.value_dim) else {
            return Ok(());
        };
        for sequence in 0..shape.batch {
            for token in 0..n {
                self.insert_token(sequence, token, k_new, v_new);
                let problem = Problem::of_shape(attn, attend::own_shape(&shape, 1, self.len(sequence)))?;
                for head in 0..shape.q_heads {
                    let state = self.row(&problem, q.row(sequence, head, token), (sequence, head), acc, roped);
                    attend::write(&mut outputs, &shape, (sequence, head, token), acc, &state);
                }
            }
        }
        Ok(())
    }

    /// Attention of one query to all keys held.
    fn row<M: Mods>(
        &self,
        problem: &Problem<'_, '_, M>,
        q_row: Row<'_, T>,
        (sequence, head): (usize, usize),
        acc: &mut [T::Compute],
        roped: &mut [T::Compute],
    ) -> crate::softmax::RowState<T::Compute> {
        let (shape, kv_head) = (problem.shape(), problem.shape().kv_head(head));
        let (held, kv) = (self.held(sequence), (sequence, kv_head));
        let key = |i| held_row(self.k.as_view(), kv, held, i);
        let value = |i| held_row(self.v.as_view(), kv, held, i);
        let at = (sequence, head, 0);
        match &self.rope {
            None => {
                let dot = |i| dot(q_row, key(i));
                attend::row(problem, at, dot, value, acc)
            }
            Some(tables) => {
                let roped = roped.get_mut(..q_row.len()).unwrap_or_default();
                tables.apply_to_row(q_row, shape.kv_len.saturating_sub(1), roped);
                let dot = |i| tables.dot_with_rope(roped, key(i), i);
                attend::row(problem, at, dot, value, acc)
            }
        }
    }
}

/// The row of the `i`-th token held; empty where there is none.
#[inline]
fn held_row<T: Element>(x: View<'_, T>, (sequence, head): (usize, usize), held: Held, i: usize) -> Row<'_, T> {
    x.row(sequence, head, if i < held.len { held.slot(i) } else { usize::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::attend::tests::{Stream, assert_same_bits};
    use crate::position::{Pairing, Positions, Rope};
    use crate::{Align, At, Layout, Mask, streaming};
    use std::vec;
    use std::vec::Vec;

    /// Whatever the chunks, sinks and window, each token gets the bits of a plain call with the rule as a closure.
    #[test]
    fn chunks_and_eviction_follow_the_rule_bit_for_bit() {
        let stream = Stream::new(2, 4, 2, 13, 6, 3);
        // Miri takes hundreds of times as long, and looks for something else.
        let rules = if cfg!(miri) { &[(2, 3)][..] } else { &[(0, 1), (0, 4), (2, 3), (1, 20), (9, 3), (4, 9)] };
        for &(sinks, window) in rules {
            let attn = Attention::new().softcap(3.0).sinks(&[0.5, -1.0, 0.0, 2.0]);
            let rule = |at: At| at.key <= at.query && (at.query - at.key < window || at.key < sinks);
            let want = stream.plain(&attn.mask_mod(rule));
            for chunks in [&[13usize][..], &[1; 13], &[5, 7, 1]] {
                let slots = sinks + window;
                let (mut k, mut v) = (vec![f32::NAN; 4 * slots * 6], vec![f32::NAN; 4 * slots * 3]);
                let mut seen = [0, 0];
                let k = ViewMut::new(&mut k, Layout::Bshd, [2, 2, slots, 6]).unwrap();
                let v = ViewMut::new(&mut v, Layout::Bhsd, [2, 2, slots, 3]).unwrap();
                let mut cache = RingCache::new(k, v, &mut seen, sinks, window).unwrap();
                for &n in chunks {
                    let start = cache.seen()[0];
                    let chunk = stream.chunk([start; 2], n);
                    let (cq, ck, cv) = chunk.views();
                    let (mut out, mut lse) = (vec![9.0f32; 8 * n * 3], vec![9.0f32; 8 * n]);
                    let out_view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap();
                    let outputs = Outputs::new(out_view).lse(&mut lse);
                    cache.advance(&attn, cq, ck, cv, outputs, &mut [0.0; 3]).unwrap();
                    assert_same_bits(&want, &out, &lse, [start; 2], [n; 2], n);
                }
                // What is held is what the last token saw, in ascending order.
                let kept: Vec<usize> = (0..13).filter(|j| 12 - j < window || *j < sinks).collect();
                assert!(cache.positions(1).eq(kept.iter().copied()));
                let n = cache.len(1);
                let (mut k_out, mut v_out) = (vec![0.0f32; 2 * n * 6], vec![0.0f32; 2 * n * 3]);
                let mut k_out = ViewMut::new(&mut k_out, Layout::Bhsd, [1, 2, n, 6]).unwrap();
                let mut v_out = ViewMut::new(&mut v_out, Layout::Bhsd, [1, 2, n, 3]).unwrap();
                cache.unroll(1, &mut k_out, &mut v_out).unwrap();
                let (_, k, v) = stream.views();
                for (i, &t) in kept.iter().enumerate() {
                    assert!(k_out.as_view().row(0, 1, i).iter().eq(k.row(1, 1, t).iter()));
                    assert!(v_out.as_view().row(0, 0, i).iter().eq(v.row(1, 0, t).iter()));
                    assert!(cache.key(1, 1, i).iter().eq(k.row(1, 1, t).iter()));
                }
                assert!(cache.key(1, 1, n).is_empty() && cache.unroll(2, &mut k_out, &mut v_out).is_err());
            }
        }
    }

    /// Cache-relative rotation against turning copies of what is held by hand, token by token.
    #[test]
    fn cache_relative_positions_are_places_in_the_cache() {
        let (sinks, window, len) = (2, 3, 9);
        let stream = Stream::new(1, 2, 1, len, 6, 3);
        let (q, k, v) = stream.views();
        let rope = Rope::new(Pairing::Half).rotary_dim(4);
        let (mut cos, mut sin) = ([0.0f32; 10], [0.0f32; 10]);
        let (mut c, mut s) = (ViewMut::matrix(&mut cos, 5, 2).unwrap(), ViewMut::matrix(&mut sin, 5, 2).unwrap());
        rope.tables(6, Positions::Offset(0), &mut c, &mut s).unwrap();
        let tables = RopeTables::new(Pairing::Half, c.as_view(), s.as_view()).unwrap();
        let (mut ck, mut cv, mut seen) = ([0.0f32; 30], [0.0f32; 15], [0]);
        let (ck, cv) = (ViewMut::matrix(&mut ck, 5, 6).unwrap(), ViewMut::matrix(&mut cv, 5, 3).unwrap());
        let mut cache = RingCache::new(ck, cv, &mut seen, sinks, window).unwrap().cache_relative(tables).unwrap();
        let mut got = vec![0.0f32; 2 * len * 3];
        let out = ViewMut::new(&mut got, Layout::Bhsd, [1, 2, len, 3]).unwrap();
        assert_eq!(cache.scratch_len(), 9);
        cache.advance(&Attention::new(), q, k, v, out, &mut [0.0; 9]).unwrap();
        for t in 0..len {
            let kept: Vec<usize> = (0..=t).filter(|&j| t - j < window || j < sinks).collect();
            let n = kept.len();
            let rows = |x: View<'_, f32>| kept.iter().flat_map(|&j| x.row(0, 0, j).iter()).collect::<Vec<f32>>();
            let (mut keys, values) = (rows(k), rows(v));
            rope.apply_in_place(&mut ViewMut::matrix(&mut keys, n, 6).unwrap(), Positions::Offset(0)).unwrap();
            for head in 0..2 {
                let mut query: Vec<f32> = q.row(0, head, t).iter().collect();
                let place = Positions::Offset(n as isize - 1);
                rope.apply_in_place(&mut ViewMut::matrix(&mut query, 1, 6).unwrap(), place).unwrap();
                let mut want = [0.0f32; 3];
                streaming::forward(
                    &Attention::new(),
                    View::matrix(&query, 1, 6).unwrap(),
                    View::matrix(&keys, n, 6).unwrap(),
                    View::matrix(&values, n, 3).unwrap(),
                    ViewMut::matrix(&mut want, 1, 3).unwrap(),
                    &mut [0.0; 3],
                )
                .unwrap();
                for (got, want) in got[(head * len + t) * 3..].iter().zip(want) {
                    assert!((got - want).abs() < 1e-5, "token {t}: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_before_writing() {
        let (mut k, mut v, mut seen) = ([1.0f32; 3], [1.0f32; 3], [1]);
        fn ring<'c>(
            k: &'c mut [f32],
            v: &'c mut [f32],
            seen: &'c mut [usize],
            sinks: usize,
            window: usize,
        ) -> Result<RingCache<'c, f32>> {
            RingCache::new(ViewMut::matrix(k, 3, 1)?, ViewMut::matrix(v, 3, 1)?, seen, sinks, window)
        }
        assert!(matches!(ring(&mut k, &mut v, &mut seen, 3, 0), Err(AttnError::Option { .. })));
        assert!(matches!(ring(&mut k, &mut v, &mut seen, 2, 2), Err(AttnError::TooShort { .. })));
        assert!(matches!(ring(&mut k, &mut v, &mut seen, usize::MAX, 1), Err(AttnError::Overflow { .. })));
        let mut cache = ring(&mut k, &mut v, &mut seen, 1, 2).unwrap();
        let x = [7.0f32; 4];
        let x = View::matrix(&x, 4, 1).unwrap();
        let mut out = [7.0f32; 4];
        // A mask that fits the first lengths and not the last.
        let lens = [1usize];
        let mut advance = |attn: Attention<'_>, scratch: &mut [f32]| {
            cache.advance(&attn, x, x, x, ViewMut::matrix(&mut out, 4, 1).unwrap(), scratch).unwrap_err()
        };
        let keep = [true; 2];
        let mask = Mask::keep(View::broadcast(&keep, &[2]).unwrap());
        assert!(matches!(advance(Attention::new().mask(mask), &mut [0.0]), AttnError::Broadcast { .. }));
        let attn = Attention::new().mask(Mask::kv_lens(&lens).and(Mask::causal(Align::BottomRight)));
        assert!(matches!(advance(attn, &mut []), AttnError::TooShort { .. }));
        let table = [0.0f32; 2];
        let tables =
            RopeTables::new(Pairing::Half, View::matrix(&table, 2, 1).unwrap(), View::matrix(&table, 2, 1).unwrap());
        assert!(cache.insert(x, View::matrix(&[0.0; 3], 3, 1).unwrap()).is_err());
        assert!(matches!(cache.cache_relative(tables.unwrap()), Err(AttnError::TooShort { .. })));
        assert!(ring(&mut k, &mut v, &mut [usize::MAX], 1, 2).unwrap().insert(x, x).is_err());
        assert_eq!((out, k, seen), ([7.0; 4], [1.0; 3], [1]));
    }
}
