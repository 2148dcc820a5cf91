//! Any cache, to be read by any engine: two tensors and the place of each token in them.
//!
//! A kernel sees one thing in all layouts: a sequence is a list of *runs*, tokens in neighbouring slots of k and v. A
//! plain tensor is one run. A ring has up to three (sinks, the older part, the newer part). Each page is a run. A view
//! is checked when it is made, and copies nothing. It also holds the RoPE tables that engines apply to the keys.

use super::checks::check_at_most;
use super::layout::{Place, TokenRun, Tokens, check_ring, check_rows};
use super::page_table::{PageTable, Pages};
use super::slots::Slots;
use crate::element::Real;
use crate::error::{AttnError, Result};
use crate::mask::Lengths;
use crate::position::rope::RopeTables;
use crate::shape::AttnShape;
use crate::view::View;

/// Keys and values of a batch of sequences, in any of the caches' layouts.
///
/// ```
/// use attn_core::kv_cache::{CacheView, PageTable};
/// use attn_core::{Layout, View};
/// let pages = [0.0f32; 6 * 4]; // six pages of four tokens of dim 1
/// let pages = View::new(&pages, Layout::Bshd, [6, 1, 4, 1])?;
/// let cache = CacheView::of_pages(pages, pages, PageTable::padded(&[5, 2, 0, 1], &[7, 5])?)?; // two sequences
/// assert_eq!((cache.batch(), cache.len(0)), (2, 7));
/// let run = cache.run(0, 5).unwrap(); // token 5 of sequence 0 is in its second page, with one token after it
/// assert_eq!((run.row, run.slot, run.len), (2, 1, 2));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'c, T> {
    k: View<'c, T>,
    v: View<'c, T>,
    place: Place<'c>,
    /// The number of the first token that is there.
    first: usize,
    rope: Option<CacheRope<'c>>,
}

/// RoPE tables, applied to cached keys as they are read, and to queries (position = index in the cache): the keys of a
/// sequence of `n` tokens have positions `0..n`, its last query has `n − 1`. The numbers have the type that the cache
/// is computed in.
#[derive(Clone, Copy, Debug)]
pub enum CacheRope<'c> {
    /// For caches of `f32` and of types that are widened to it.
    Single(RopeTables<'c, f32>),
    /// For caches of `f64`.
    Double(RopeTables<'c, f64>),
}

impl<'c> CacheRope<'c> {
    /// By tables of either type.
    pub(super) fn new<C: Real>(tables: RopeTables<'c, C>) -> Option<Self> {
        let single = || tables.with(C::singles).map(Self::Single);
        let double = || tables.with(C::doubles).map(Self::Double);
        single().or_else(double)
    }

    /// The tables, if they have the type that is computed in.
    pub(crate) fn tables<C: Real>(self) -> Option<RopeTables<'c, C>> {
        match self {
            Self::Single(tables) => tables.with(C::of_singles),
            Self::Double(tables) => tables.with(C::of_doubles),
        }
    }

    /// Sizes of the tables.
    const fn sizes(&self) -> [usize; 4] {
        match self {
            Self::Single(tables) => tables.sizes(),
            Self::Double(tables) => tables.sizes(),
        }
    }
}

impl<'c, T: Copy> CacheView<'c, T> {
    /// From checked parts.
    pub(super) const fn new(k: View<'c, T>, v: View<'c, T>, place: Place<'c>) -> Self {
        Self { k, v, place, first: 0, rope: None }
    }

    /// Plain tensors, all of whose slots are tokens: k `[batch, kv_heads, kv_len, head_dim]`, v
    /// `[batch, kv_heads, kv_len, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`] if k and v disagree.
    pub const fn of_tensors(k: View<'c, T>, v: View<'c, T>) -> Result<Self> {
        Self::of_part(k, v, 0)
    }

    /// Some of the tokens of longer sequences, from token `first` on: the share of one of several processes.
    ///
    /// # Errors
    /// [`AttnError::Size`] if k and v disagree, [`AttnError::Overflow`] if the tokens cannot be counted.
    pub const fn of_part(k: View<'c, T>, v: View<'c, T>, first: usize) -> Result<Self> {
        let [batch, heads, len, head_dim] = k.sizes();
        if let Err(e) = AttnShape::new([batch, heads, 0, head_dim], k.sizes(), v.sizes()) {
            return Err(e);
        }
        match first.checked_add(len) {
            Some(_) => Ok(Self { first, ..Self::new(k, v, Place::Rows(Lengths::All(len))) }),
            None => Err(AttnError::Overflow { what: "first token + kv_len" }),
        }
    }

    /// Rows of slots of which each sequence fills the first `lens[b]`, as [`AppendCache`](super::AppendCache) has them,
    /// to be read only: k `[batch, kv_heads, capacity, head_dim]`, v `[batch, kv_heads, capacity, value_dim]`.
    ///
    /// ```
    /// use attn_core::kv_cache::CacheView;
    /// use attn_core::{Layout, View};
    /// let slots = [0.0f32; 2 * 4]; // two sequences of up to four tokens of dim 1
    /// let slots = View::new(&slots, Layout::Bhsd, [2, 1, 4, 1])?;
    /// let cache = CacheView::of_slots(slots, slots, &[3, 4])?;
    /// assert_eq!((cache.len(0), cache.len(1)), (3, 4));
    /// assert!(CacheView::of_slots(slots, slots, &[3, 5]).is_err());
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// As [`AppendCache::new`](super::AppendCache::new).
    pub fn of_slots(k: View<'c, T>, v: View<'c, T>, lens: &'c [usize]) -> Result<Self> {
        check_rows(k.sizes(), v.sizes(), lens)?;
        Ok(Self::new(k, v, Place::Rows(Lengths::PerBatch(lens))))
    }

    /// Rings behind sinks, as [`RingCache`](super::RingCache) has them, to be read only; `seen[b]` tokens have come so
    /// far.
    ///
    /// ```
    /// use attn_core::kv_cache::CacheView;
    /// use attn_core::View;
    /// let slots = [0.0f32; 5];
    /// let slots = View::matrix(&slots, 5, 1)?;
    /// let cache = CacheView::of_ring(slots, slots, &[12], 2, 3)?;
    /// assert_eq!((cache.len(0), cache.has_dropped(0)), (5, true));
    /// assert!(CacheView::of_ring(slots, slots, &[12], 2, 4).is_err());
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// As [`RingCache::new`](super::RingCache::new).
    pub fn of_ring(k: View<'c, T>, v: View<'c, T>, seen: &'c [usize], sinks: usize, window: usize) -> Result<Self> {
        let slots = check_ring(k.sizes(), v.sizes(), seen, (sinks, window))?;
        Ok(Self::new(k, v, Place::Ring { seen, slots }))
    }

    /// Pages of any element type, in any order. Sequences may share the pages of a common prefix.
    ///
    /// | tensor | shape |
    /// |---|---|
    /// | k | `[pages, kv_heads, page_size, head_dim]`, any strides: vLLM's `[pages, page_size, kv_heads, head_dim]` is [`Layout::Bshd`](crate::Layout) |
    /// | v | `[pages, kv_heads, page_size, value_dim]`, any strides |
    ///
    /// ```
    /// use attn_core::kv_cache::{CacheView, PageTable, Queries};
    /// use attn_core::{Attention, Layout, View, ViewMut, streaming};
    /// let pages = [30.0f32, 40.0, 0.0, 0.0, 10.0, 20.0]; // three pages of two tokens of dim 1
    /// let k = View::new(&[0.0f32; 6], Layout::Bshd, [3, 1, 2, 1])?; // every score 0: outputs are means
    /// let v = View::new(&pages, Layout::Bshd, [3, 1, 2, 1])?;
    /// // One sequence of three tokens, in pages 2 and 0.
    /// let cache = CacheView::of_pages(k, v, PageTable::csr(&[0, 2], &[2, 0], &[1])?)?;
    /// let mut out = [0.0f32];
    /// let (q, to) = (View::matrix(&[0.0f32], 1, 1)?, ViewMut::matrix(&mut out, 1, 1)?);
    /// streaming::forward_cache(&Attention::new(), q, Queries::All, cache, to, &mut [0.0])?;
    /// assert_eq!(out, [20.0]); // (10 + 20 + 30)/3
    /// assert!(CacheView::of_pages(k, v, PageTable::csr(&[0, 2], &[2, 3], &[1])?).is_err()); // there is no page 3
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// [`AttnError::Index`] for an entry that is no page, or a length that the table does not hold;
    /// [`AttnError::Size`] if sizes disagree; [`AttnError::Option`] for pages of size 0, and for a last page of length
    /// 0.
    pub fn of_pages(k: View<'c, T>, v: View<'c, T>, table: PageTable<'c>) -> Result<Self> {
        Ok(Self::new(k, v, Place::Pages(Pages::new(k.sizes(), v.sizes(), table)?)))
    }

    /// A ring that was checked before.
    pub(crate) const fn of_checked_ring(k: View<'c, T>, v: View<'c, T>, seen: &'c [usize], slots: Slots) -> Self {
        Self::new(k, v, Place::Ring { seen, slots })
    }

    /// The same tokens as the continuation of `before` others in another cache: they are numbered from there on, and
    /// lengths count the others.
    ///
    /// # Errors
    /// [`AttnError::Overflow`] if the tokens cannot be counted.
    pub fn after(self, before: usize) -> Result<Self> {
        let first = self.first.checked_add(before);
        let longest = (0..self.batch()).map(|b| self.own_len(b)).max().unwrap_or(0);
        match first.filter(|first| first.checked_add(longest).is_some()) {
            Some(first) => {
                let this = Self { first, ..self };
                this.check_rope()?;
                Ok(this)
            }
            None => Err(AttnError::Overflow { what: "tokens before + cache lens" }),
        }
    }

    /// The same tokens, with RoPE applied to keys as they are read, and to queries (position = index in the cache). The
    /// keys in memory do not change. `tables` are `[1, 1, at least the longest sequence, rotary_dim/2]`, made by
    /// [`Rope::tables`](crate::position::rope::Rope::tables) from position 0 on.
    ///
    /// # Errors
    /// [`AttnError::Size`], [`AttnError::TooShort`] or [`AttnError::Index`] if the tables do not fit.
    pub fn cache_relative<C: Real>(self, tables: RopeTables<'c, C>) -> Result<Self> {
        let this = Self { rope: CacheRope::new(tables), ..self };
        this.check_rope()?;
        Ok(this)
    }

    /// Checks that there is a row of the tables for every token.
    fn check_rope(&self) -> Result<()> {
        let (Some(rope), [.., head_dim]) = (&self.rope, self.k.sizes()) else { return Ok(()) };
        self.check_rope_of(rope, head_dim)
    }

    /// The same of tables for keys of `head_dim` numbers.
    pub(crate) fn check_rope_of(&self, rope: &CacheRope<'_>, head_dim: usize) -> Result<()> {
        let [batch, heads, rows, pairs] = rope.sizes();
        AttnError::check_size("rope tables batch", 1, batch)?;
        AttnError::check_size("rope tables heads", 1, heads)?;
        let longest = (0..self.batch()).map(|b| self.len(b)).max().unwrap_or(0);
        AttnError::check_len("rope tables (tokens of the longest sequence)", longest, rows)?;
        check_at_most("rope table pairs against head_dim/2", 0, pairs, head_dim / 2)
    }

    /// Keys: `[batch or pages, kv_heads, slots, head_dim]`.
    pub const fn k(&self) -> View<'c, T> {
        self.k
    }

    /// Values: `[batch or pages, kv_heads, slots, value_dim]`.
    pub const fn v(&self) -> View<'c, T> {
        self.v
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        match self.place {
            Place::Rows(_) => self.k.sizes().first().copied().unwrap_or(0),
            Place::Ring { seen, .. } => seen.len(),
            Place::Pages(pages) => pages.batch(),
        }
    }

    /// Tokens of one sequence; 0 if there is no such sequence. Of a ring those that are held, of a
    /// [part](Self::of_part) or a [continuation](Self::after) all up to its end.
    #[inline]
    pub fn len(&self, sequence: usize) -> usize {
        // Fits: checked by whoever has set `first`.
        if sequence < self.batch() { self.first.wrapping_add(self.own_len(sequence)) } else { 0 }
    }

    /// Tokens of a sequence that are here.
    #[inline]
    fn own_len(&self, sequence: usize) -> usize {
        let of = |lens: &[usize]| lens.get(sequence).copied().unwrap_or(0);
        match &self.place {
            Place::Rows(lens) => lens.of(sequence),
            Place::Ring { seen, slots } => slots.held(of(seen)).len,
            Place::Pages(pages) => pages.len(sequence),
        }
    }

    /// Where the tokens of a sequence are, counted from [`first`](Self::first).
    pub(crate) fn tokens(&self, sequence: usize) -> Tokens<'c> {
        let len = self.own_len(sequence);
        match self.place {
            Place::Rows(_) => Tokens::Row { row: sequence, len },
            Place::Ring { seen, slots } => {
                Tokens::Ring { row: sequence, held: slots.held(seen.get(sequence).copied().unwrap_or(0)) }
            }
            Place::Pages(pages) => Tokens::Pages { sequence, pages, len },
        }
    }

    /// Whether a ring has dropped tokens of a sequence to make room for later ones.
    pub fn has_dropped(&self, sequence: usize) -> bool {
        match &self.place {
            Place::Ring { seen, .. } => seen.get(sequence).is_some_and(|&seen| seen > self.own_len(sequence)),
            Place::Rows(_) | Place::Pages(_) => false,
        }
    }

    /// The first token that is there: 0, but of a [part](Self::of_part) or a [continuation](Self::after).
    pub const fn first(&self) -> usize {
        self.first
    }

    /// RoPE tables that are applied to keys as they are read.
    pub const fn rope(&self) -> Option<CacheRope<'c>> {
        self.rope
    }

    /// The same cache with last strides of 1, for rows that are contiguous: one element is at any stride.
    pub(crate) fn with_contiguous_rows(self) -> Self {
        Self { k: self.k.with_contiguous_rows(), v: self.v.with_contiguous_rows(), ..self }
    }

    /// With RoPE tables that fit.
    pub(super) const fn with_rope(self, rope: Option<CacheRope<'c>>) -> Self {
        Self { rope, ..self }
    }

    /// Whether tokens may be in pages that were [given back](super::PageTable::with_evicted).
    #[inline]
    pub const fn has_evicted(&self) -> bool {
        matches!(&self.place, Place::Pages(pages) if pages.has_evicted())
    }

    /// How many tokens from one on are in pages that were [given back](super::PageTable::with_evicted): hidden keys. 0
    /// where the token is there, or where the sequence has no such token.
    pub fn evicted(&self, sequence: usize, token: usize) -> usize {
        let Place::Pages(pages) = &self.place else { return 0 };
        let Some(token) = token.checked_sub(self.first) else { return 0 };
        let left = pages.len(sequence).saturating_sub(token);
        let (row, slot) = pages.place(sequence, token);
        if row == usize::MAX { left.min(pages.page_size().saturating_sub(slot)) } else { 0 }
    }

    /// Where a token is, and how many from it on are contiguous. `None` if the sequence has no such token, or
    /// its page was [given back](super::PageTable::with_evicted).
    #[inline]
    pub fn run(&self, sequence: usize, token: usize) -> Option<TokenRun> {
        let token = token.checked_sub(self.first)?;
        if sequence >= self.batch() {
            return None;
        }
        let left = self.own_len(sequence).checked_sub(token).filter(|&left| left > 0)?;
        let run = match &self.place {
            Place::Rows(_) => TokenRun { row: sequence, slot: token, len: left },
            Place::Ring { seen, slots } => {
                let held = slots.held(seen.get(sequence).copied()?);
                TokenRun { row: sequence, slot: held.slot(token), len: left.min(held.side_by_side(token)) }
            }
            Place::Pages(pages) => {
                let (row, slot) = pages.place(sequence, token);
                TokenRun { row, slot, len: left.min(pages.page_size().saturating_sub(slot)) }
            }
        };
        (run.len > 0 && run.row != usize::MAX).then_some(run)
    }

    /// The sizes of attention to this cache by queries `[batch, q_heads, q_len, head_dim]`; `kv_len` is the longest
    /// sequence.
    ///
    /// # Errors
    /// [`AttnError::Size`] or [`AttnError::Heads`] if they do not fit.
    pub fn shape(&self, q: [usize; 4]) -> Result<AttnShape> {
        let ([_, heads, _, head_dim], [.., value_dim]) = (self.k.sizes(), self.v.sizes());
        let (batch, kv_len) = (self.batch(), (0..self.batch()).map(|b| self.len(b)).max().unwrap_or(0));
        AttnShape::new(q, [batch, heads, kv_len, head_dim], [batch, heads, kv_len, value_dim])
    }
}
