//! The plain cache: each sequence has a row of slots and a length.
//!
//! Slots from a sequence's length on are never read, whatever they hold. [`AppendCache::sequence`] hands a sequence's
//! keys and values to any other engine without copying.

use super::attend::{self, Sequence};
use super::cache_view::CacheView;
use super::checks::{check_at_most, check_new, copy_token};
use super::layout::{Place, check_rows};
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::mask::Lengths;
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::view::{View, ViewMut};

/// Keys and values of a batch of sequences of different lengths.
///
/// | tensor | shape |
/// |---|---|
/// | k | `[batch, kv_heads, capacity, head_dim]`, any strides |
/// | v | `[batch, kv_heads, capacity, value_dim]`, any strides |
/// | lens | `[batch]`: tokens cached so far |
#[derive(Debug)]
pub struct AppendCache<'c, T> {
    k: ViewMut<'c, T>,
    v: ViewMut<'c, T>,
    lens: &'c mut [usize],
}

impl<'c, T: Element> AppendCache<'c, T> {
    /// Takes the memory as it is: `lens` of zeros for an empty cache.
    ///
    /// # Errors
    /// [`AttnError::Size`] where k, v and lens disagree; [`AttnError::Index`] for a length above the capacity.
    pub fn new(k: ViewMut<'c, T>, v: ViewMut<'c, T>, lens: &'c mut [usize]) -> Result<Self> {
        check_rows(k.sizes(), v.sizes(), lens)?;
        Ok(Self { k, v, lens })
    }

    /// Tokens cached of each sequence.
    pub fn lens(&self) -> &[usize] {
        self.lens
    }

    /// The cache, to be read by any engine.
    pub fn view(&self) -> CacheView<'_, T> {
        CacheView::new(self.k.as_view(), self.v.as_view(), Place::Rows(Lengths::PerBatch(self.lens)))
    }

    /// Slots per sequence.
    pub fn capacity(&self) -> usize {
        let [_, _, capacity, _] = self.k.sizes();
        capacity
    }

    /// Appends as many tokens to every sequence: `k_new` `[batch, kv_heads, n, head_dim]`, `v_new`
    /// `[batch, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Index`] where a sequence has no room, [`AttnError::Size`]. Nothing has been written then.
    pub fn append(&mut self, k_new: View<'_, T>, v_new: View<'_, T>) -> Result<()> {
        self.append_counts(k_new, v_new, None)
    }

    /// Appends the first `new_lens[b]` of the tokens to sequence `b`; the others are padding and are not read.
    ///
    /// # Errors
    /// As [`append`](Self::append); [`AttnError::Index`] where a length exceeds the tokens given.
    ///
    /// ```
    /// use attn_core::kv_cache::AppendCache;
    /// use attn_core::{Layout, View, ViewMut};
    /// let (mut k, mut v, mut lens) = ([0.0f32; 8], [0.0f32; 8], [3, 1]); // two sequences, four slots of dim 1
    /// let view = |x| ViewMut::new(x, Layout::Bhsd, [2, 1, 4, 1]);
    /// let mut cache = AppendCache::new(view(&mut k)?, view(&mut v)?, &mut lens)?;
    /// let new = [1.0, 2.0, 3.0, 4.0];
    /// let new = View::new(&new, Layout::Bhsd, [2, 1, 2, 1])?;
    /// assert!(cache.append(new, new).is_err()); // the first sequence has room for one
    /// cache.append_ragged(new, new, &[1, 2])?;
    /// assert_eq!(cache.lens(), [4, 3]);
    /// assert_eq!(k, [0.0, 0.0, 0.0, 1.0, 0.0, 3.0, 4.0, 0.0]);
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn append_ragged(&mut self, k_new: View<'_, T>, v_new: View<'_, T>, new_lens: &[usize]) -> Result<()> {
        AttnError::check_size("new_lens against batch", self.lens.len(), new_lens.len())?;
        self.append_counts(k_new, v_new, Some(new_lens))
    }

    fn append_counts(&mut self, k_new: View<'_, T>, v_new: View<'_, T>, counts: Option<&[usize]>) -> Result<()> {
        let given = check_new(self.k.sizes(), self.v.sizes(), k_new.sizes(), v_new.sizes())?;
        let count = |b: usize| counts.map_or(given, |counts| counts.get(b).copied().unwrap_or(0));
        for (b, &len) in self.lens.iter().enumerate() {
            check_at_most("new_lens", b, count(b), given)?;
            let end = len.checked_add(count(b)).ok_or(AttnError::Overflow { what: "cache lens after appending" })?;
            check_at_most("cache lens after appending", b, end, self.capacity())?;
        }
        for (b, len) in self.lens.iter_mut().enumerate() {
            for token in 0..count(b) {
                copy_token(k_new, (b, token), &mut self.k, (b, *len + token));
                copy_token(v_new, (b, token), &mut self.v, (b, *len + token));
            }
            *len += count(b);
        }
        Ok(())
    }

    /// Forgets all tokens of a sequence from `len` on: the rejected end of a speculation, or all of it.
    ///
    /// # Errors
    /// [`AttnError::Index`] where there is no such sequence or it holds fewer tokens.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let sequences = self.lens.len();
        let Some(slot) = self.lens.get_mut(sequence) else {
            return Err(AttnError::Index { what: "sequence", at: 0, value: sequence, limit: sequences });
        };
        check_at_most("truncated length", sequence, len, *slot)?;
        *slot = len;
        Ok(())
    }

    /// Keys `[1, kv_heads, len, head_dim]` and values `[1, kv_heads, len, value_dim]` of one sequence, for any engine.
    ///
    /// # Errors
    /// [`AttnError::Index`] where there is no such sequence.
    pub fn sequence(&self, sequence: usize) -> Result<(View<'_, T>, View<'_, T>)> {
        let Some(&len) = self.lens.get(sequence) else {
            return Err(AttnError::Index { what: "sequence", at: 0, value: sequence, limit: self.lens.len() });
        };
        let cut = |x: &'_ ViewMut<'c, T>| {
            let ([_, heads, _, dim], [step, ..]) = (x.sizes(), x.strides());
            (heads, dim, x.offset().wrapping_add_signed((sequence as isize).wrapping_mul(step)))
        };
        let ((heads, head_dim, k_at), (_, value_dim, v_at)) = (cut(&self.k), cut(&self.v));
        Ok((
            View::strided(self.k.as_view().data(), [1, heads, len, head_dim], self.k.strides(), k_at)?,
            View::strided(self.v.as_view().data(), [1, heads, len, value_dim], self.v.strides(), v_at)?,
        ))
    }

    /// Elements of scratch that [`attend`](Self::attend) needs: one output row.
    pub fn scratch_len(&self) -> usize {
        let [.., value_dim] = self.v.sizes();
        value_dim
    }

    /// Attention of the last `q_len` tokens of every sequence, which have been appended before: `q`
    /// `[batch, q_heads, q_len, head_dim]`. Causal; see [the module](crate::kv_cache) for the options.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written; [`AttnError::Index`] where a sequence has fewer tokens than
    /// queries.
    pub fn attend<'o, O: Element<Compute = T::Compute>, M: Mods>(
        &self,
        attn: &Attention<'_, M>,
        q: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
        scratch: &mut [T::Compute],
    ) -> Result<()> {
        self.attend_counts(attn, q, None, outputs.into(), scratch)
    }

    /// As [`attend`](Self::attend), where only the first `q_lens[b]` queries of sequence `b` are tokens: its last ones.
    /// The rows of the others are 0, their lse −∞.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub fn attend_ragged<'o, O: Element<Compute = T::Compute>, M: Mods>(
        &self,
        attn: &Attention<'_, M>,
        q: View<'_, T>,
        q_lens: &[usize],
        outputs: impl Into<Outputs<'o, O>>,
        scratch: &mut [T::Compute],
    ) -> Result<()> {
        self.attend_counts(attn, q, Some(q_lens), outputs.into(), scratch)
    }

    fn attend_counts<O: Element<Compute = T::Compute>, M: Mods>(
        &self,
        attn: &Attention<'_, M>,
        q: View<'_, T>,
        q_lens: Option<&[usize]>,
        mut outputs: Outputs<'_, O>,
        scratch: &mut [T::Compute],
    ) -> Result<()> {
        let (k, v) = (self.k.as_view(), self.v.as_view());
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        attend::check(attn, &shape, &outputs, (self.scratch_len(), scratch.len()))?;
        let attn = attend::causal(attn);
        attend::check_sequences(&attn, &shape, q_lens, self.lens)?;
        let Some(acc) = scratch.get_mut(..self.scratch_len()) else {
            return Ok(());
        };
        for (batch, &kv_len) in self.lens.iter().enumerate() {
            Sequence {
                batch,
                shape: &shape,
                q_len: attend::q_len_of(q_lens, &shape, batch),
                kv_len,
                q,
                key: |head, key| k.row(batch, head, key),
                value: |head, key| v.row(batch, head, key),
            }
            .attend(&attn, &mut outputs, acc)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::attend::tests::{Stream, assert_same_bits};
    use crate::{Align, At, Dropout, Layout, Mask, streaming};
    use std::vec;

    /// Any chunks, ragged lengths, junk in the free slots: each sequence gets the bits of one plain call.
    #[test]
    fn chunks_and_neighbours_change_no_bit() {
        let stream = Stream::new(2, 4, 2, 11, 6, 3);
        let sinks = [0.5f32, -1.0, 0.0, 2.0];
        let attn = Attention::new()
            .softcap(3.0)
            .sinks(&sinks)
            .mask(Mask::window(5, 0, Align::BottomRight))
            .score_mod(|s, at: At| s + at.batch as f64 * 0.25);
        let whole = attn.mask(Mask::window(5, 0, Align::BottomRight).and(Mask::causal(Align::BottomRight)));
        let want = stream.plain(&whole);

        for chunks in [&[[11usize, 11]][..], &[[4, 1], [0, 5], [7, 5]], &[[1, 2]; 5]] {
            if cfg!(miri) && chunks.len() != 3 {
                continue; // Miri takes hundreds of times as long, and looks for something else.
            }
            let (mut k, mut v) = (vec![f32::NAN; 2 * 2 * 13 * 6], vec![f32::NAN; 2 * 2 * 13 * 3]);
            let mut lens = [0, 0];
            let mut cache = AppendCache::new(
                ViewMut::new(&mut k, Layout::Bshd, [2, 2, 13, 6]).unwrap(),
                ViewMut::new(&mut v, Layout::Bhsd, [2, 2, 13, 3]).unwrap(),
                &mut lens,
            )
            .unwrap();
            for counts in chunks {
                let starts = [cache.lens()[0], cache.lens()[1]];
                let n = counts[0].max(counts[1]);
                let chunk = stream.chunk(starts, n);
                let (cq, ck, cv) = chunk.views();
                cache.append_ragged(ck, cv, counts).unwrap();
                let (mut out, mut lse) = (vec![9.0f32; 2 * 4 * n * 3], vec![9.0f32; 2 * 4 * n]);
                let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap()).lse(&mut lse);
                cache.attend_ragged(&attn, cq, counts, outputs, &mut [0.0; 3]).unwrap();
                assert_same_bits(&want, &out, &lse, starts, *counts, n);
            }
        }
    }

    #[test]
    fn a_sequence_is_a_view_for_any_engine() {
        let stream = Stream::new(2, 2, 2, 5, 4, 4);
        let (mut k, mut v, mut lens) = (vec![0.0; 2 * 2 * 8 * 4], vec![0.0; 2 * 2 * 8 * 4], [0, 0]);
        let sizes = [2, 2, 8, 4];
        let mut cache = AppendCache::new(
            ViewMut::new(&mut k, Layout::Sbhd, sizes).unwrap(),
            ViewMut::new(&mut v, Layout::Bhsd, sizes).unwrap(),
            &mut lens,
        )
        .unwrap();
        let chunk = stream.chunk([0, 0], 5);
        let (q, k_new, v_new) = chunk.views();
        cache.append(k_new, v_new).unwrap();
        let mut all = vec![0.0f32; 2 * 2 * 5 * 4];
        let out = ViewMut::new(&mut all, Layout::Bhsd, [2, 2, 5, 4]).unwrap();
        cache.attend(&Attention::new(), q, out, &mut [0.0; 4]).unwrap();
        let (k1, v1) = cache.sequence(1).unwrap();
        let q1 = View::strided(q.data(), [1, 2, 5, 4], q.strides(), q.offset() + q.strides()[0] as usize).unwrap();
        let mut one = vec![0.0f32; 2 * 5 * 4];
        let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
        let out = ViewMut::new(&mut one, Layout::Bhsd, [1, 2, 5, 4]).unwrap();
        streaming::forward(&causal, q1, k1, v1, out, &mut [0.0; 4]).unwrap();
        assert_eq!(one[..], all[40..]);
        assert!(cache.sequence(0).unwrap().0.row(0, 1, 4).iter().eq(k_new.row(0, 1, 4).iter()));
        assert!(cache.sequence(2).is_err());
        cache.truncate(1, 3).unwrap();
        assert_eq!((cache.lens(), cache.sequence(1).unwrap().0.sizes()), (&[5, 3][..], [1, 2, 3, 4]));
        assert!(cache.truncate(1, 4).is_err() && cache.truncate(2, 0).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused_before_writing() {
        let (mut k, mut v, mut lens) = ([1.0f32; 8], [1.0f32; 8], [1, 4]);
        fn view(x: &mut [f32]) -> ViewMut<'_, f32> {
            ViewMut::new(x, Layout::Bhsd, [2, 1, 4, 1]).unwrap()
        }
        assert!(AppendCache::new(view(&mut k), view(&mut v), &mut [0, 5]).is_err());
        assert!(AppendCache::new(view(&mut k), view(&mut v), &mut [0]).is_err());
        let mut cache = AppendCache::new(view(&mut k), view(&mut v), &mut lens).unwrap();
        let new = [7.0f32; 4];
        let two = View::new(&new, Layout::Bhsd, [2, 1, 2, 1]).unwrap();
        assert_eq!(
            cache.append(two, two).unwrap_err(),
            AttnError::Index { what: "cache lens after appending", at: 1, value: 6, limit: 5 }
        );
        assert!(cache.append_ragged(two, two, &[3, 0]).is_err());
        assert!(cache.append_ragged(two, two, &[1]).is_err());
        let wide = View::new(&new, Layout::Bhsd, [2, 1, 1, 2]).unwrap();
        let one = View::new(&new, Layout::Bhsd, [2, 1, 1, 1]).unwrap();
        assert!(cache.append_ragged(wide, one, &[0, 0]).is_err() && cache.append_ragged(one, wide, &[0, 0]).is_err());
        let mut out = [7.0f32; 4];
        let mut attend = |attn: Attention<'_>, cache: &AppendCache<'_, f32>, scratch: usize| {
            let out = ViewMut::new(&mut out, Layout::Bhsd, [2, 1, 2, 1]).unwrap();
            cache.attend(&attn, two, out, &mut [0.0; 2][..scratch]).unwrap_err()
        };
        let attn = Attention::new();
        assert!(matches!(attend(attn, &cache, 1), AttnError::Index { at: 0, value: 2, limit: 2, .. }));
        cache.append_ragged(two, two, &[1, 0]).unwrap();
        assert!(matches!(attend(attn, &cache, 0), AttnError::TooShort { .. }));
        let dropout = attn.dropout(Dropout::Seeded { p: 0.5, seed: 0 });
        assert!(matches!(attend(dropout, &cache, 1), AttnError::Unsupported { .. }));
        assert!(matches!(attend(attn.scale(f64::NAN), &cache, 1), AttnError::Option { .. }));
        assert_eq!((out, k, lens), ([7.0; 4], [1.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [2, 4]));
    }
}
