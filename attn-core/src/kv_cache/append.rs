//! The plain cache: each sequence has a row of slots and a length.
//!
//! Slots from a sequence's length on are never read, whatever they hold. [`AppendCache::sequence`] hands a sequence's
//! keys and values to any other engine without copying.

use super::cache_view::CacheView;
use super::checks::{check_at_most, check_new};
use super::layout::{Place, check_rows};
use super::memory::Memory;
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::mask::Lengths;
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
    /// [`AttnError::Size`] if k, v and lens disagree; [`AttnError::Index`] for a length above the capacity.
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
    /// [`AttnError::Index`] if a sequence has no room, [`AttnError::Size`]. Nothing has been written then.
    pub fn append(&mut self, k_new: View<'_, T>, v_new: View<'_, T>) -> Result<()> {
        self.append_counts(k_new, v_new, None)
    }

    /// Appends the first `new_lens[b]` of the tokens to sequence `b`; the others are padding and are not read.
    ///
    /// # Errors
    /// As [`append`](Self::append); [`AttnError::Index`] if a length exceeds the tokens given.
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
        append_tokens((&mut self.k, &mut self.v), self.lens, k_new, v_new, counts)
    }

    /// Forgets all tokens of a sequence from `len` on: the rejected end of a speculation, or all of it.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such sequence or it holds fewer tokens.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        truncate(self.lens, sequence, len)
    }

    /// Keys `[1, kv_heads, len, head_dim]` and values `[1, kv_heads, len, value_dim]` of one sequence, for any engine.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such sequence.
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
}

/// Writes the first `counts[b]` of the new tokens, or all of them, behind those of each sequence.
#[inline]
pub(crate) fn append_tokens<T: Element, M: Memory<T>>(
    (k, v): (&mut M, &mut M),
    lens: &mut [usize],
    k_new: View<'_, T>,
    v_new: View<'_, T>,
    counts: Option<&[usize]>,
) -> Result<()> {
    let (k_sizes, v_sizes) = (k.of_numbers(), v.of_numbers());
    let (given, [_, _, capacity, _]) = (check_new(k_sizes, v_sizes, k_new.sizes(), v_new.sizes())?, k_sizes);
    let count = |b: usize| counts.map_or(given, |counts| counts.get(b).copied().unwrap_or(0));
    for (b, &len) in lens.iter().enumerate() {
        check_at_most("new_lens", b, count(b), given)?;
        let end = len.checked_add(count(b)).ok_or(AttnError::Overflow { what: "cache lens after appending" })?;
        check_at_most("cache lens after appending", b, end, capacity)?;
    }
    for (b, len) in lens.iter_mut().enumerate() {
        for token in 0..count(b) {
            k.store(k_new, (b, token), (b, *len + token));
            v.store(v_new, (b, token), (b, *len + token));
        }
        *len += count(b);
    }
    Ok(())
}

/// Forgets all tokens of a sequence from `len` on.
#[inline]
pub(crate) fn truncate(lens: &mut [usize], sequence: usize, len: usize) -> Result<()> {
    let sequences = lens.len();
    let Some(slot) = lens.get_mut(sequence) else {
        return Err(AttnError::Index { what: "sequence", at: 0, value: sequence, limit: sequences });
    };
    check_at_most("truncated length", sequence, len, *slot)?;
    *slot = len;
    Ok(())
}
