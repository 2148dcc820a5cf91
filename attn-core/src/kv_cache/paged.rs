//! A cache in pages: sequences grow page by page, and a table says which pages are whose.
//!
//! The layout of PagedAttention (Kwon et al. 2023, vLLM, arXiv 2309.06180): token `t` of sequence `b` lies in page
//! `block_table[b, t/page_size]`, slot `t mod page_size`. Pages may be of any size and stand in any order, and
//! sequences may share the pages of a common prefix. Who owns which page is the caller's affair; here every entry that
//! would be used is checked before use, and a page that another sequence reads is not written.

use super::attend::{self, Sequence};
use super::cache_view::CacheView;
use super::checks::{check_at_most, check_new, copy_token};
use super::layout::{EvictedPages, Place, Table};
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
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
/// use attn_core::kv_cache::PagedCache;
/// use attn_core::{Attention, Layout, View, ViewMut};
/// let pages = [30.0f32, 40.0, 0.0, 0.0, 10.0, 20.0]; // three pages of two tokens of dim 1
/// let k = View::new(&[0.0f32; 6], Layout::Bshd, [3, 1, 2, 1])?; // every score 0: outputs are means
/// let v = View::new(&pages, Layout::Bshd, [3, 1, 2, 1])?;
/// let cache = PagedCache::new(k, v, &[2, 0, -1], &[3])?; // one sequence of three tokens, in pages 2 and 0
/// let mut out = [0.0f32];
/// let q = View::matrix(&[0.0f32], 1, 1)?;
/// cache.attend(&Attention::new(), q, ViewMut::matrix(&mut out, 1, 1)?, &mut [0.0])?;
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
    /// use attn_core::kv_cache::PagedCache;
    /// use attn_core::{Attention, Layout, View, ViewMut};
    /// let pages = [30.0f32, 40.0, 50.0, 0.0];
    /// let k = View::new(&[0.0f32; 4], Layout::Bshd, [2, 1, 2, 1])?; // every score 0: outputs are means
    /// let v = View::new(&pages, Layout::Bshd, [2, 1, 2, 1])?;
    /// let cache = PagedCache::with_evicted(k, v, &[-1, 0, 1], &[5])?; // five tokens, of which the first two are gone
    /// let mut out = [0.0f32];
    /// let q = View::matrix(&[0.0f32], 1, 1)?;
    /// cache.attend(&Attention::new(), q, ViewMut::matrix(&mut out, 1, 1)?, &mut [0.0])?;
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

    /// Elements of scratch that [`attend`](Self::attend) needs: one output row.
    pub fn scratch_len(&self) -> usize {
        let [.., value_dim] = self.v.sizes();
        value_dim
    }

    /// Attention of the last `q_len` tokens of every sequence, whose keys lie in the pages already: `q`
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
        let ([_, heads, _, head_dim], [.., value_dim]) = (self.k.sizes(), self.v.sizes());
        let batch = self.lens.len();
        let shape = AttnShape::new(q.sizes(), [batch, heads, 0, head_dim], [batch, heads, 0, value_dim])?;
        attend::check(attn, &shape, &outputs, (self.scratch_len(), scratch.len()))?;
        let attn = attend::causal(attn);
        attend::check_sequences(&attn, &shape, q_lens, self.lens)?;
        let Some(acc) = scratch.get_mut(..self.scratch_len()) else {
            return Ok(());
        };
        for (batch, &kv_len) in self.lens.iter().enumerate() {
            // Tokens whose page was given back are hidden.
            let attn = attn.by_ref().mask_mod(|at| self.place(batch, at.key).0 != usize::MAX);
            Sequence {
                batch,
                shape: &shape,
                q_len: attend::q_len_of(q_lens, &shape, batch),
                kv_len,
                q,
                key: |head, token| self.key(batch, head, token),
                value: |head, token| self.value(batch, head, token),
            }
            .attend(&attn, &mut outputs, acc)?;
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::attend::tests::{Stream, assert_same_bits};
    use crate::{Align, Layout, Mask};
    use std::vec;

    /// Any page size and order of pages, ragged chunks: the bits of one plain call.
    #[test]
    fn pages_and_chunks_change_no_bit() {
        let stream = Stream::new(2, 4, 2, 11, 6, 3);
        let attn = Attention::new().mask(Mask::window(6, 0, Align::BottomRight));
        let want = stream.plain(&attn.mask(attn.get_mask().and(Mask::causal(Align::BottomRight))));
        for (page_size, table) in [
            (4, &[5, 0, 3, -1, 2, 1, 4, -1][..]),
            (1, &[0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1]),
            (16, &[1, 0]),
        ] {
            if cfg!(miri) && page_size != 4 {
                continue; // Miri takes hundreds of times as long, and looks for something else.
            }
            for (layout, chunks) in [(Layout::Bshd, &[[11usize, 11]][..]), (Layout::Bhsd, &[[4, 1], [0, 5], [7, 5]])] {
                let pages = 22 / page_size + 2;
                let (mut k, mut v) =
                    (vec![f32::NAN; pages * 2 * page_size * 6], vec![f32::NAN; pages * 2 * page_size * 3]);
                let mut lens = [0, 0];
                let k = ViewMut::new(&mut k, layout, [pages, 2, page_size, 6]).unwrap();
                let v = ViewMut::new(&mut v, layout, [pages, 2, page_size, 3]).unwrap();
                let mut cache = PagedCacheMut::new(k, v, table, &mut lens).unwrap();
                for counts in chunks {
                    let starts = [cache.lens[0], cache.lens[1]];
                    let n = counts[0].max(counts[1]);
                    let chunk = stream.chunk(starts, n);
                    let (cq, ck, cv) = chunk.views();
                    cache.append_ragged(ck, cv, counts).unwrap();
                    let (mut out, mut lse) = (vec![9.0f32; 8 * n * 3], vec![9.0f32; 8 * n]);
                    let out_view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap();
                    let outputs = Outputs::new(out_view).lse(&mut lse);
                    cache.as_cache().attend_ragged(&attn, cq, counts, outputs, &mut [0.0; 3]).unwrap();
                    assert_same_bits(&want, &out, &lse, starts, *counts, n);
                }
            }
        }
    }

    #[test]
    fn tables_are_checked_before_use() {
        let x = [0.0f32; 12];
        let view = View::new(&x, Layout::Bhsd, [3, 1, 2, 2]).unwrap(); // three pages of two tokens
        let new = |table: &[i32], lens: &[usize]| PagedCache::new(view, view, table, lens).map(|_| ()).unwrap_err();
        assert_eq!(new(&[0, 3], &[3]), AttnError::Index { what: "block_table", at: 1, value: 3, limit: 3 });
        assert_eq!(
            new(&[0, 1, 2, -1], &[3, 3]),
            AttnError::Index { what: "block_table", at: 3, value: usize::MAX, limit: 3 }
        );
        assert!(matches!(new(&[0, 1], &[5]), AttnError::Index { value: 3, limit: 3, .. }));
        assert!(matches!(new(&[0, 1, 2], &[1, 1]), AttnError::Size { .. }));
        assert!(matches!(new(&[0], &[]), AttnError::Size { .. }));
        let none = View::new(&x, Layout::Bhsd, [3, 1, 0, 2]).unwrap();
        assert!(PagedCache::new(none, none, &[0], &[0]).is_err());
        // What is not used is not looked at.
        let cache = PagedCache::new(view, view, &[2, 0, 99], &[2]).unwrap();
        assert!(cache.key(0, 0, 2).is_empty() && cache.value(1, 0, 0).is_empty() && cache.key(0, 0, 1).len() == 2);
        let q = View::matrix(&x, 3, 2).unwrap();
        let mut out = [7.0f32; 6];
        let out_view = ViewMut::matrix(&mut out, 3, 2).unwrap();
        assert!(cache.attend(&Attention::new(), q, out_view, &mut [0.0; 2]).is_err()); // three queries, two tokens
        assert_eq!(out, [7.0; 6]);
    }

    #[test]
    fn shared_pages_are_read_and_never_written() {
        let (mut k, mut v, mut lens) = ([0.0f32; 8], [0.0f32; 8], [2, 2]); // four pages of two tokens of dim 1
        fn view(x: &mut [f32]) -> ViewMut<'_, f32> {
            ViewMut::new(x, Layout::Bhsd, [4, 1, 2, 1]).unwrap()
        }
        let new = [5.0f32, 6.0];
        let new = View::new(&new, Layout::Bhsd, [2, 1, 1, 1]).unwrap();
        // A common first page is fine: the new tokens go to pages 1 and 2.
        let mut cache = PagedCacheMut::new(view(&mut k), view(&mut v), &[0, 1, 0, 2], &mut lens).unwrap();
        cache.append(new, new).unwrap();
        assert_eq!((k, lens), ([0.0, 0.0, 5.0, 0.0, 6.0, 0.0, 0.0, 0.0], [3, 3]));
        // A common second page is not, nor a page twice in one row, nor none at all.
        for table in [[0, 1, 0, 1], [0, 0, 3, 2], [0, 1, 0, -1]] {
            let mut lens = [2, 2];
            let mut cache = PagedCacheMut::new(view(&mut k), view(&mut v), &table, &mut lens).unwrap();
            assert!(cache.append(new, new).is_err());
            assert_eq!(lens, [2, 2]);
        }
        assert_eq!(k[2..], [5.0, 0.0, 6.0, 0.0, 0.0, 0.0]);
    }
}
