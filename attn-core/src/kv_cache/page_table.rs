//! Page tables in two forms, padded and CSR, and the check of a table against the pages of k and v.

use super::checks::check_at_most;
use crate::error::{AttnError, Result};
use crate::shape::AttnShape;

/// Which pages belong to which sequence, and how many tokens it has. Token `t` of a sequence is in its page
/// `t / page_size`, slot `t mod page_size`.
///
/// | form | tables |
/// |---|---|
/// | [padded](Self::padded), as in vLLM | `block_table` `[batch, width]`; `lens` `[batch]` |
/// | [CSR](Self::csr), as in FlashInfer and SGLang | `kv_indptr` `[batch + 1]`; `kv_indices` `[pages in use]`; `kv_last_page_len` `[batch]` |
///
/// Entries are checked against the pages as soon as k and v are known: by
/// [`CacheView::of_pages`](super::CacheView::of_pages) and [`append_paged`](super::append_paged).
///
/// ```
/// use attn_core::kv_cache::{CacheView, PageTable};
/// use attn_core::{Layout, View};
/// let pages = [0.0f32; 6 * 4]; // six pages of four tokens of dim 1
/// let pages = View::new(&pages, Layout::Bshd, [6, 1, 4, 1])?;
/// // Two sequences of seven tokens and of one, in the pages 5, 2 and 0.
/// let padded = CacheView::of_pages(pages, pages, PageTable::padded(&[5, 2, 0, -1], &[7, 1])?)?;
/// let csr = CacheView::of_pages(pages, pages, PageTable::csr(&[0, 2, 3], &[5, 2, 0], &[3, 1])?)?;
/// for sequence in 0..2 {
///     assert_eq!(padded.len(sequence), csr.len(sequence));
///     assert!((0..8).all(|token| padded.run(sequence, token) == csr.run(sequence, token)));
/// }
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PageTable<'c> {
    form: Form<'c>,
    /// Whether a negative entry is a page that was given back; otherwise it is a mistake.
    evicted: bool,
}

/// The tables of one form.
#[derive(Clone, Copy, Debug)]
enum Form<'c> {
    Padded { entries: &'c [i32], width: usize, lens: &'c [usize] },
    Csr { indptr: &'c [i32], indices: &'c [i32], last: &'c [i32] },
}

impl<'c> PageTable<'c> {
    /// A row of entries for each sequence: `block_table` `[batch, width]`, row-major. Entries after a sequence's last
    /// page are not read (−1 by custom).
    ///
    /// # Errors
    /// [`AttnError::Size`] if the entries are not a whole number of rows.
    pub fn padded(block_table: &'c [i32], lens: &'c [usize]) -> Result<Self> {
        let width = block_table.len().checked_div(lens.len()).unwrap_or(0);
        let whole = lens.len().saturating_mul(width);
        AttnError::check_size("block_table (a whole number of rows)", whole, block_table.len())?;
        Ok(Self { form: Form::Padded { entries: block_table, width, lens }, evicted: false })
    }

    /// Compressed rows: the pages of sequence `b` are `kv_indices[kv_indptr[b]..kv_indptr[b + 1]]`. The last of them
    /// holds `kv_last_page_len[b]` tokens, from 1 to the page size; the others are full. A sequence without pages has
    /// no tokens, and its `kv_last_page_len` is not read. Indices outside of all rows are not read either.
    ///
    /// # Errors
    /// [`AttnError::Size`] if the tables disagree about the batch; [`AttnError::Index`] or [`AttnError::Order`] for an
    /// entry of `kv_indptr` that is negative, beyond `kv_indices`, or less than the one before it.
    pub fn csr(kv_indptr: &'c [i32], kv_indices: &'c [i32], kv_last_page_len: &'c [i32]) -> Result<Self> {
        AttnError::check_size(
            "kv_indptr against batch + 1",
            kv_last_page_len.len().saturating_add(1),
            kv_indptr.len(),
        )?;
        let mut before = 0;
        for (at, &entry) in kv_indptr.iter().enumerate() {
            let entry = number(entry);
            check_at_most("kv_indptr", at, entry, kv_indices.len())?;
            if entry < before {
                return Err(AttnError::Order { what: "kv_indptr", at });
            }
            before = entry;
        }
        Ok(Self { form: Form::Csr { indptr: kv_indptr, indices: kv_indices, last: kv_last_page_len }, evicted: false })
    }

    /// The same, but a negative entry means a page that was given back: its tokens are hidden keys that keep
    /// their numbers. A sliding window then needs no more pages than the window has.
    ///
    /// ```
    /// use attn_core::kv_cache::{CacheView, PageTable, Queries};
    /// use attn_core::{Attention, Layout, View, ViewMut, streaming};
    /// let pages = [30.0f32, 40.0, 50.0, 0.0];
    /// let k = View::new(&[0.0f32; 4], Layout::Bshd, [2, 1, 2, 1])?; // every score 0: outputs are means
    /// let v = View::new(&pages, Layout::Bshd, [2, 1, 2, 1])?;
    /// let table = PageTable::padded(&[-1, 0, 1], &[5])?; // five tokens, of which the first two are gone
    /// assert!(CacheView::of_pages(k, v, table).is_err());
    /// let cache = CacheView::of_pages(k, v, table.with_evicted())?;
    /// let mut out = [0.0f32];
    /// let (q, to) = (View::matrix(&[0.0f32], 1, 1)?, ViewMut::matrix(&mut out, 1, 1)?);
    /// streaming::forward_cache(&Attention::new(), q, Queries::All, cache, to, &mut [0.0])?;
    /// assert_eq!(out, [40.0]); // (30 + 40 + 50)/3
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    #[must_use]
    pub const fn with_evicted(self) -> Self {
        Self { evicted: true, ..self }
    }

    /// Sequences.
    pub const fn batch(&self) -> usize {
        match self.form {
            Form::Padded { lens, .. } => lens.len(),
            Form::Csr { last, .. } => last.len(),
        }
    }

    /// The entries of a sequence; none if there is no such sequence.
    #[inline]
    fn row(&self, sequence: usize) -> &'c [i32] {
        let (entries, start, end) = match self.form {
            Form::Padded { entries, width, .. } => {
                let start = sequence.saturating_mul(width);
                (entries, start, start.saturating_add(width))
            }
            Form::Csr { indptr, indices, .. } => {
                let at = |n: usize| indptr.get(n).map_or(0, |&entry| number(entry));
                (indices, at(sequence), at(sequence.saturating_add(1)))
            }
        };
        entries.get(start..end).unwrap_or_default()
    }

    /// The error for the `i`-th entry of a sequence.
    fn bad_entry(&self, sequence: usize, i: usize, pages: usize) -> AttnError {
        let (what, start) = match self.form {
            Form::Padded { width, .. } => ("block_table", sequence.saturating_mul(width)),
            Form::Csr { indptr, .. } => ("kv_indices", indptr.get(sequence).map_or(0, |&entry| number(entry))),
        };
        let value = self.row(sequence).get(i).map_or(usize::MAX, |&entry| number(entry));
        AttnError::Index { what, at: start.saturating_add(i), value, limit: pages }
    }
}

/// An entry as a number. A negative one is the largest: no smaller number is out of every range.
#[inline]
fn number(entry: i32) -> usize {
    usize::try_from(entry).unwrap_or(usize::MAX)
}

/// A page table that was checked against the pages of k and v.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages<'c> {
    table: PageTable<'c>,
    pages: usize,
    page_size: usize,
}

impl<'c> Pages<'c> {
    /// Checks sizes, lengths, and every entry of a page that holds tokens.
    pub(super) fn new(k: [usize; 4], v: [usize; 4], table: PageTable<'c>) -> Result<Self> {
        let [pages, heads, page_size, head_dim] = k;
        AttnShape::new([pages, heads, 0, head_dim], k, v)?;
        if page_size == 0 {
            return Err(AttnError::Option { name: "page_size", must: "above 0" });
        }
        let this = Self { table, pages, page_size };
        (0..table.batch()).try_for_each(|sequence| this.check_sequence(sequence))?;
        Ok(this)
    }

    /// Checks the length of a sequence and the entries of its pages.
    fn check_sequence(&self, sequence: usize) -> Result<()> {
        let row = self.table.row(sequence);
        match self.table.form {
            Form::Padded { lens, .. } => {
                let used = lens.get(sequence).map_or(0, |len| len.div_ceil(self.page_size.max(1)));
                check_at_most("seq_lens in pages against the block_table's width", sequence, used, row.len())?;
            }
            Form::Csr { last, .. } if !row.is_empty() => {
                let last = last.get(sequence).map_or(0, |&last| number(last));
                check_at_most("kv_last_page_len", sequence, last, self.page_size)?;
                if last == 0 {
                    let name = "kv_last_page_len of a sequence that has pages";
                    return Err(AttnError::Option { name, must: "from 1 to the page size" });
                }
                if row.len().checked_mul(self.page_size).is_none() {
                    return Err(AttnError::Overflow { what: "tokens of a sequence in pages" });
                }
            }
            Form::Csr { .. } => {}
        }
        let needed = if self.has_evicted() { usize::MAX } else { 0 };
        self.check_entries(sequence, needed)
    }

    /// Checks that a sequence has a page for each of its tokens. Pages below `needed` may have been given back.
    pub(super) fn check_entries(&self, sequence: usize, needed: usize) -> Result<()> {
        let used = self.used(sequence);
        for (i, &entry) in self.table.row(sequence).iter().take(used).enumerate() {
            let given_back = entry < 0 && i < needed;
            if !given_back && number(entry) >= self.pages {
                return Err(self.table.bad_entry(sequence, i, self.pages));
            }
        }
        Ok(())
    }

    /// Sequences.
    #[inline]
    pub(super) const fn batch(&self) -> usize {
        self.table.batch()
    }

    /// Tokens of a sequence; 0 if there is no such sequence.
    #[inline]
    pub(super) fn len(&self, sequence: usize) -> usize {
        match self.table.form {
            Form::Padded { lens, .. } => lens.get(sequence).copied().unwrap_or(0),
            Form::Csr { last, .. } => match (self.table.row(sequence).len().checked_sub(1), last.get(sequence)) {
                // Fits: checked by `new`.
                (Some(full), Some(&last)) => full.wrapping_mul(self.page_size).wrapping_add(number(last)),
                _ => 0,
            },
        }
    }

    /// Pages of a sequence that hold tokens.
    pub(super) fn used(&self, sequence: usize) -> usize {
        self.len(sequence).div_ceil(self.page_size.max(1))
    }

    /// The `i`-th page of a sequence, if there is one.
    #[inline]
    pub(super) fn page(&self, sequence: usize, i: usize) -> Option<usize> {
        let entry = *self.table.row(sequence).get(i)?;
        usize::try_from(entry).ok().filter(|&page| page < self.pages)
    }

    /// Whether pages in use may have been given back.
    pub(super) const fn has_evicted(&self) -> bool {
        self.table.evicted
    }

    /// Tokens of a page.
    pub(super) const fn page_size(&self) -> usize {
        self.page_size
    }

    /// Page and slot of a token; outside of every page if there is none.
    #[inline]
    pub(super) fn place(&self, sequence: usize, token: usize) -> (usize, usize) {
        let (Some(i), Some(slot)) = (token.checked_div(self.page_size), token.checked_rem(self.page_size)) else {
            return (usize::MAX, 0);
        };
        (self.page(sequence, i).unwrap_or(usize::MAX), slot)
    }
}
