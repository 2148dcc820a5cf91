//! A cache in pages: sequences grow page by page, and a table says which pages are whose.
//!
//! The layout of PagedAttention (Kwon et al. 2023, vLLM, arXiv 2309.06180): token `t` of sequence `b` lies in page
//! `block_table[b, t/page_size]`, slot `t mod page_size`. Pages may be of any size and stand in any order, and
//! sequences may share the pages of a common prefix. Who owns which page is the caller's affair; here every entry that
//! would be used is checked before use, and a page that another sequence reads is not written.

use super::cache_view::CacheView;
use super::checks::{check_at_most, check_new, copy_token};
use super::layout::{EvictedPages, Place, Table};
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::view::{Row, View, ViewMut};

/// Keys and values in pages, to be read.
///
/// | tensor | shape |
/// |---|---|
/// | k pages | `[pages, kv_heads, page_size, head_dim]`, any strides: vLLM's `[pages, page_size, kv_heads, head_dim]` is [`Layout::Bshd`](crate::Layout) |
/// | v pages | `[pages, kv_heads, page_size, value_dim]` |
/// | block table | `[batch, width]`, row-major; entries behind a sequence's last page are not looked at (−1 by custom) |
/// | lens | `[batch]`: tokens of each sequence |
///
/// ```
/// use attn_core::kv_cache::{PagedCache, Queries};
/// use attn_core::{Attention, Layout, View, ViewMut, streaming};
/// let pages = [30.0f32, 40.0, 0.0, 0.0, 10.0, 20.0]; // three pages of two tokens of dim 1
/// let k = View::new(&[0.0f32; 6], Layout::Bshd, [3, 1, 2, 1])?; // every score 0: outputs are means
/// let v = View::new(&pages, Layout::Bshd, [3, 1, 2, 1])?;
/// let cache = PagedCache::new(k, v, &[2, 0, -1], &[3])?; // one sequence of three tokens, in pages 2 and 0
/// let mut out = [0.0f32];
/// let (q, to) = (View::matrix(&[0.0f32], 1, 1)?, ViewMut::matrix(&mut out, 1, 1)?);
/// streaming::forward_cache(&Attention::new(), q, Queries::All, cache.view(), to, &mut [0.0])?;
/// assert_eq!(out, [20.0]); // (10 + 20 + 30)/3
/// assert!(PagedCache::new(k, v, &[2, 3, -1], &[3]).is_err()); // there is no page 3
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PagedCache<'c, T> {
    k: View<'c, T>,
    v: View<'c, T>,
    table: Table<'c>,
    lens: &'c [usize],
}

impl<'c, T: Element> PagedCache<'c, T> {
    /// Checks everything that attention will use.
    ///
    /// # Errors
    /// [`AttnError::Index`] for a length that the table's rows do not hold, or an entry that is no page;
    /// [`AttnError::Size`] where sizes disagree; [`AttnError::Option`] for pages of size 0.
    pub fn new(k: View<'c, T>, v: View<'c, T>, block_table: &'c [i32], lens: &'c [usize]) -> Result<Self> {
        Ok(Self { k, v, table: Table::new(k.sizes(), v.sizes(), block_table, lens, EvictedPages::Reject)?, lens })
    }

    /// As [`new`](Self::new), where a negative entry stands for a page that was given back: its tokens are hidden keys
    /// that keep their numbers. So a sliding window needs no more pages than the window has.
    ///
    /// ```
    /// use attn_core::kv_cache::{PagedCache, Queries};
    /// use attn_core::{Attention, Layout, View, ViewMut, streaming};
    /// let pages = [30.0f32, 40.0, 50.0, 0.0];
    /// let k = View::new(&[0.0f32; 4], Layout::Bshd, [2, 1, 2, 1])?; // every score 0: outputs are means
    /// let v = View::new(&pages, Layout::Bshd, [2, 1, 2, 1])?;
    /// let cache = PagedCache::with_evicted(k, v, &[-1, 0, 1], &[5])?; // five tokens, of which the first two are gone
    /// let mut out = [0.0f32];
    /// let (q, to) = (View::matrix(&[0.0f32], 1, 1)?, ViewMut::matrix(&mut out, 1, 1)?);
    /// streaming::forward_cache(&Attention::new(), q, Queries::All, cache.view(), to, &mut [0.0])?;
    /// assert_eq!(out, [40.0]); // (30 + 40 + 50)/3
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_evicted(k: View<'c, T>, v: View<'c, T>, block_table: &'c [i32], lens: &'c [usize]) -> Result<Self> {
        Ok(Self { k, v, table: Table::new(k.sizes(), v.sizes(), block_table, lens, EvictedPages::Hide)?, lens })
    }

    /// Tokens of each sequence.
    pub fn lens(&self) -> &'c [usize] {
        self.lens
    }

    /// The cache, to be read by any engine.
    pub fn view(&self) -> CacheView<'c, T> {
        CacheView::new(self.k, self.v, Place::Pages { table: self.table, lens: self.lens })
    }

    /// Key of one token. Empty where there is none.
    pub fn key(&self, sequence: usize, kv_head: usize, token: usize) -> Row<'c, T> {
        let (page, slot) = self.place(sequence, token);
        self.k.row(page, kv_head, slot)
    }

    /// Value of one token. Empty where there is none.
    pub fn value(&self, sequence: usize, kv_head: usize, token: usize) -> Row<'c, T> {
        let (page, slot) = self.place(sequence, token);
        self.v.row(page, kv_head, slot)
    }

    fn place(&self, sequence: usize, token: usize) -> (usize, usize) {
        let there = self.lens.get(sequence).is_some_and(|&len| token < len);
        if there { self.table.place(sequence, token) } else { (usize::MAX, 0) }
    }
}

/// Keys and values in pages, to be written. The tensors are those of [`PagedCache`].
#[derive(Debug)]
pub struct PagedCacheMut<'c, T> {
    k: ViewMut<'c, T>,
    v: ViewMut<'c, T>,
    table: Table<'c>,
    lens: &'c mut [usize],
}

impl<'c, T: Element> PagedCacheMut<'c, T> {
    /// Checks every page that the present tokens use; those of later tokens are checked when they come.
    ///
    /// # Errors
    /// As [`PagedCache::new`].
    pub fn new(k: ViewMut<'c, T>, v: ViewMut<'c, T>, block_table: &'c [i32], lens: &'c mut [usize]) -> Result<Self> {
        let table = Table::new(k.sizes(), v.sizes(), block_table, lens, EvictedPages::Reject)?;
        Ok(Self { k, v, table, lens })
    }

    /// As [`new`](Self::new), where a negative entry stands for a page that was given back
    /// ([`PagedCache::with_evicted`]). New tokens need pages.
    ///
    /// # Errors
    /// As [`PagedCache::new`].
    pub fn with_evicted(
        k: ViewMut<'c, T>,
        v: ViewMut<'c, T>,
        block_table: &'c [i32],
        lens: &'c mut [usize],
    ) -> Result<Self> {
        let table = Table::new(k.sizes(), v.sizes(), block_table, lens, EvictedPages::Hide)?;
        Ok(Self { k, v, table, lens })
    }

    /// The same cache, to be read.
    pub fn as_cache(&self) -> PagedCache<'_, T> {
        PagedCache { k: self.k.as_view(), v: self.v.as_view(), table: self.table, lens: self.lens }
    }

    /// The cache, to be read by any engine.
    pub fn view(&self) -> CacheView<'_, T> {
        self.as_cache().view()
    }

    /// Appends as many tokens to every sequence: `k_new` `[batch, kv_heads, n, head_dim]`, `v_new`
    /// `[batch, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Index`] where the table has no page for a token, [`AttnError::Overlap`] where a page that would be
    /// written is in use elsewhere, [`AttnError::Size`]. Nothing has been written then.
    pub fn append(&mut self, k_new: View<'_, T>, v_new: View<'_, T>) -> Result<()> {
        self.append_counts(k_new, v_new, None)
    }

    /// Appends the first `new_lens[b]` of the tokens to sequence `b`; the others are padding and are not read.
    ///
    /// # Errors
    /// As [`append`](Self::append); [`AttnError::Index`] where a length exceeds the tokens given.
    pub fn append_ragged(&mut self, k_new: View<'_, T>, v_new: View<'_, T>, new_lens: &[usize]) -> Result<()> {
        AttnError::check_size("new_lens against batch", self.lens.len(), new_lens.len())?;
        self.append_counts(k_new, v_new, Some(new_lens))
    }

    fn append_counts(&mut self, k_new: View<'_, T>, v_new: View<'_, T>, counts: Option<&[usize]>) -> Result<()> {
        let batch = self.lens.len();
        let of_batch = |[_, heads, slots, dim]: [usize; 4]| [batch, heads, slots, dim];
        let given = check_new(of_batch(self.k.sizes()), of_batch(self.v.sizes()), k_new.sizes(), v_new.sizes())?;
        let count = |b: usize| counts.map_or(given, |counts| counts.get(b).copied().unwrap_or(0));
        for (b, &len) in self.lens.iter().enumerate() {
            check_at_most("new_lens", b, count(b), given)?;
            let end = len.checked_add(count(b)).ok_or(AttnError::Overflow { what: "cache lens after appending" })?;
            let written = if count(b) > 0 { len.checked_div(self.table.page_size()) } else { None };
            self.table.check_len(b, end, written.unwrap_or(usize::MAX))?;
        }
        self.check_alone(&count)?;
        for (b, len) in self.lens.iter_mut().enumerate() {
            for token in 0..count(b) {
                let (page, slot) = self.table.place(b, *len + token);
                copy_token(k_new, (b, token), &mut self.k, (page, slot));
                copy_token(v_new, (b, token), &mut self.v, (page, slot));
            }
            *len += count(b);
        }
        Ok(())
    }

    /// Checks that no page which new tokens would be written to is used a second time. The pages to be written are
    /// taken some at a time, and all tables are looked through once for each of these portions.
    fn check_alone(&self, count: &impl Fn(usize) -> usize) -> Result<()> {
        let page_size = self.table.page_size().max(1);
        let len = |b: usize| self.lens.get(b).copied().unwrap_or(0);
        let used = |b: usize| (len(b).saturating_add(count(b))).div_ceil(page_size);
        let first = |b: usize| if count(b) > 0 { len(b).checked_div(page_size).unwrap_or(0) } else { usize::MAX };
        let pages = |b: usize, range: core::ops::Range<usize>| range.filter_map(move |i| self.table.page(b, i));
        let twice = AttnError::Overlap {
            what: "page that the append writes and block_table names twice",
            size: page_size,
            stride: 0,
        };
        let sequences = 0..self.lens.len();
        let mut written = sequences.clone().flat_map(|b| pages(b, first(b)..used(b)));
        loop {
            let mut portion = PageSet::new();
            for page in written.by_ref().take(PageSet::ROOM) {
                if !portion.insert(page) {
                    return Err(twice);
                }
            }
            // Each stands in a table once, where it is to be written.
            let found = sequences.clone().flat_map(|b| pages(b, 0..used(b))).filter(|&page| portion.holds(page));
            match portion.len {
                0 => return Ok(()),
                len if found.take(len.saturating_add(1)).count() > len => return Err(twice),
                _ => {}
            }
        }
    }
}

/// A few pages, to be found again in constant time.
struct PageSet {
    /// Each at its place or behind it; `usize::MAX` is none.
    slots: [usize; 2 * Self::ROOM],
    len: usize,
}

impl PageSet {
    /// How many it takes.
    const ROOM: usize = 64;

    const fn new() -> Self {
        Self { slots: [usize::MAX; 2 * Self::ROOM], len: 0 }
    }

    /// Slots in the order in which a page may lie in them.
    fn places(page: usize) -> impl Iterator<Item = usize> {
        // The golden ratio scatters neighbours.
        let start = ((page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (0..2 * Self::ROOM).map(move |n| start.wrapping_add(n) & (2 * Self::ROOM - 1))
    }

    /// Says whether the page was not there.
    fn insert(&mut self, page: usize) -> bool {
        for place in Self::places(page) {
            match self.slots.get_mut(place) {
                Some(slot) if *slot == usize::MAX => {
                    *slot = page;
                    self.len += 1;
                    return true;
                }
                Some(slot) if *slot == page => return false,
                _ => {}
            }
        }
        false
    }

    fn holds(&self, page: usize) -> bool {
        let mut slots = Self::places(page).filter_map(|place| self.slots.get(place));
        slots.find(|&&slot| slot == page || slot == usize::MAX) == Some(&page)
    }
}
