//! The caches of [`kv_cache`](crate::kv_cache) whose rows are bytes: slots, ring, pages.
//!
//! They check and place tokens as those do. A token is encoded when it comes, and never again.

use super::stored::{StoredRows, StoredView};
use super::written::StoredRowsMut;
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::kv_cache::append::{append_tokens, truncate};
use crate::kv_cache::layout::{check_ring, check_rows};
use crate::kv_cache::memory::Memory;
use crate::kv_cache::paged::append_to_pages;
use crate::kv_cache::ring::insert_tokens;
use crate::kv_cache::slots::Slots;
use crate::kv_cache::{CacheView, PageTable};
use crate::view::View;

/// Keys and values of a batch of sequences of different lengths, as [`AppendCache`](crate::kv_cache::AppendCache), in
/// bytes: k and v have rows `[batch, kv_heads, capacity]`, `lens` counts the tokens of each sequence.
///
/// ```
/// use attn_core::formats::{Format, StoredCache, StoredRowsMut};
/// use attn_core::{Layout, View, ViewMut};
/// let (mut k, mut v, mut scales, mut lens) = ([0u8; 4 * 34], [0u8; 4 * 32], [0.0f32; 4], [0]); // four slots of dim 32
/// let k = StoredRowsMut::new(Format::Q8_0, ViewMut::matrix(&mut k, 4, 34)?)?;
/// let scales = ViewMut::matrix(&mut scales, 4, 1)?;
/// let v = StoredRowsMut::with_scales_per_token(Format::E4m3, ViewMut::matrix(&mut v, 4, 32)?, scales)?;
/// let mut cache = StoredCache::new(k, v, &mut lens)?;
/// let x: Vec<f32> = (0..64).map(|n| (n as f32).sin()).collect(); // two tokens: k = v
/// let x = View::matrix(&x, 2, 32)?;
/// cache.append(x, x)?;
/// assert_eq!((cache.lens(), cache.view()?.dims()), (&[2][..], [32, 32]));
/// let three = View::matrix(&[0.0f32; 96], 3, 32)?;
/// assert!(cache.append(three, three).is_err()); // there is room for two
/// let mut value = [0.0; 32];
/// cache.view()?.value(0, 0, 1, &mut value);
/// assert!((value[0] - 32f32.sin()).abs() < 1.0 / 16.0);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Debug)]
pub struct StoredCache<'c> {
    k: StoredRowsMut<'c>,
    v: StoredRowsMut<'c>,
    lens: &'c mut [usize],
}

impl<'c> StoredCache<'c> {
    /// Takes the memory as it is: `lens` of zeros for an empty cache.
    ///
    /// # Errors
    /// As [`AppendCache::new`](crate::kv_cache::AppendCache::new).
    #[inline]
    pub fn new(k: StoredRowsMut<'c>, v: StoredRowsMut<'c>, lens: &'c mut [usize]) -> Result<Self> {
        let [k_sizes, v_sizes] = sizes(&k, &v);
        check_rows(k_sizes, v_sizes, lens)?;
        Ok(Self { k, v, lens })
    }

    /// Tokens cached of each sequence.
    pub fn lens(&self) -> &[usize] {
        self.lens
    }

    /// The cache, to be read by any engine.
    ///
    /// # Errors
    /// None that [`new`](Self::new) has not met.
    #[inline]
    pub fn view(&self) -> Result<StoredView<'_>> {
        StoredView::new(CacheView::of_slots(self.k.bytes(), self.v.bytes(), self.lens)?, self.k.rows(), self.v.rows())
    }

    /// Appends as many tokens to every sequence: `k_new` `[batch, kv_heads, n, head_dim]`, `v_new`
    /// `[batch, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Index`] if a sequence has no room, [`AttnError::Size`]. Nothing has been written then.
    #[inline]
    pub fn append<T: Element<Compute = f32>>(&mut self, k_new: View<'_, T>, v_new: View<'_, T>) -> Result<()> {
        append_tokens((&mut self.k, &mut self.v), self.lens, k_new, v_new, None)
    }

    /// Appends the first `new_lens[b]` of the tokens to sequence `b`; the others are padding and are not read.
    ///
    /// # Errors
    /// As [`append`](Self::append); [`AttnError::Index`] if a length exceeds the tokens given.
    #[inline]
    pub fn append_ragged<T: Element<Compute = f32>>(
        &mut self,
        k_new: View<'_, T>,
        v_new: View<'_, T>,
        new_lens: &[usize],
    ) -> Result<()> {
        AttnError::check_size("new_lens against batch", self.lens.len(), new_lens.len())?;
        append_tokens((&mut self.k, &mut self.v), self.lens, k_new, v_new, Some(new_lens))
    }

    /// Forgets all tokens of a sequence from `len` on.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such sequence or it holds fewer tokens.
    #[inline]
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        truncate(self.lens, sequence, len)
    }
}

/// Sinks and a ring of the last tokens, as [`RingCache`](crate::kv_cache::RingCache), in bytes: k and v have rows
/// `[batch, kv_heads, at least sinks + window]`, `seen` counts the tokens of each sequence.
#[derive(Debug)]
pub struct StoredRing<'c> {
    k: StoredRowsMut<'c>,
    v: StoredRowsMut<'c>,
    seen: &'c mut [usize],
    slots: Slots,
}

impl<'c> StoredRing<'c> {
    /// Takes the memory as it is: `seen` of zeros for an empty cache.
    ///
    /// # Errors
    /// As [`RingCache::new`](crate::kv_cache::RingCache::new).
    #[inline]
    pub fn new(
        k: StoredRowsMut<'c>,
        v: StoredRowsMut<'c>,
        seen: &'c mut [usize],
        sinks: usize,
        window: usize,
    ) -> Result<Self> {
        let [k_sizes, v_sizes] = sizes(&k, &v);
        let slots = check_ring(k_sizes, v_sizes, seen, (sinks, window))?;
        Ok(Self { k, v, seen, slots })
    }

    /// Tokens seen of each sequence, held or not.
    pub fn seen(&self) -> &[usize] {
        self.seen
    }

    /// The tokens held, in ascending order, to be read by any engine.
    ///
    /// # Errors
    /// None that [`new`](Self::new) has not met.
    #[inline]
    pub fn view(&self) -> Result<StoredView<'_>> {
        let bytes = CacheView::of_checked_ring(self.k.bytes(), self.v.bytes(), self.seen, self.slots);
        StoredView::new(bytes, self.k.rows(), self.v.rows())
    }

    /// Takes tokens: each is written over the oldest that is not a sink. `k_new` `[batch, kv_heads, n, head_dim]`,
    /// `v_new` `[batch, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`], before anything is written.
    #[inline]
    pub fn insert<T: Element<Compute = f32>>(&mut self, k_new: View<'_, T>, v_new: View<'_, T>) -> Result<()> {
        insert_tokens((&mut self.k, &mut self.v), self.seen, self.slots, k_new, v_new)
    }
}

/// Writes new tokens into pages of bytes: as [`append_paged`](crate::kv_cache::append_paged), k and v having rows
/// `[pages, kv_heads, page_size]`.
///
/// # Errors
/// As there.
#[inline]
pub fn append_paged_stored<T: Element<Compute = f32>>(
    k: &mut StoredRowsMut<'_>,
    v: &mut StoredRowsMut<'_>,
    table: PageTable<'_>,
    k_new: View<'_, T>,
    v_new: View<'_, T>,
    new_lens: Option<&[usize]>,
) -> Result<()> {
    append_to_pages(k, v, table, k_new, v_new, new_lens)
}

impl<'c> StoredRowsMut<'c> {
    /// The pages of [`append_paged_stored`], to be read by any engine.
    ///
    /// # Errors
    /// As [`CacheView::of_pages`].
    #[inline]
    pub fn view_of_pages<'r>(k: &'r Self, v: &'r Self, table: PageTable<'r>) -> Result<StoredView<'r>> {
        let (k_rows, v_rows): (StoredRows<'r>, StoredRows<'r>) = (k.rows(), v.rows());
        StoredView::new(CacheView::of_pages(k.bytes(), v.bytes(), table)?, k_rows, v_rows)
    }
}

/// Sizes in numbers.
#[inline]
fn sizes(k: &StoredRowsMut<'_>, v: &StoredRowsMut<'_>) -> [[usize; 4]; 2] {
    [Memory::<f32>::of_numbers(k), Memory::<f32>::of_numbers(v)]
}
