//! Any cache, to be read by any engine: two tensors and where each token lies in them.
//!
//! All layouts are one thing to a kernel: the tokens of a sequence lie in *runs* of neighbouring slots of k and v. A plain
//! tensor is one run, a ring has up to three (sinks, the older part, the newer part), pages are as many as there are. A view is
//! checked when the cache is, and copies nothing.

use super::paged::Table;
use super::slots::Slots;
use super::{AppendCache, PagedCache, PagedCacheMut, RingCache};
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::mask::Lengths;
use crate::shape::AttnShape;
use crate::view::View;

/// Keys and values of a batch of sequences, wherever they lie.
///
/// ```
/// use attn_core::kv_cache::{CacheView, PagedCache};
/// use attn_core::{Layout, View};
/// let pages = [0.0f32; 6 * 4]; // six pages of four tokens of dim 1
/// let pages = View::new(&pages, Layout::Bshd, [6, 1, 4, 1])?;
/// let cache = PagedCache::new(pages, pages, &[5, 2, 0, 1], &[7, 5])?; // two sequences
/// let view: CacheView<'_, f32> = cache.view();
/// assert_eq!((view.batch(), view.len(0)), (2, 7));
/// let run = view.run(0, 5).unwrap(); // token 5 of sequence 0 lies in its second page, with one token after it
/// assert_eq!((run.row, run.slot, run.len), (2, 1, 2));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'c, T> {
    k: View<'c, T>,
    v: View<'c, T>,
    place: Place<'c>,
}

/// Tokens that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// Index on the first axis of k and v: the sequence, or the page.
    pub row: usize,
    /// Index on their third axis of the first token.
    pub slot: usize,
    /// How many tokens; at least 1.
    pub len: usize,
}

/// Where tokens lie.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place<'c> {
    /// Token `first + t` of sequence `b` at `[b, t]`.
    Rows {
        /// The token in slot 0.
        first: usize,
        /// End of the tokens of each sequence.
        ends: Lengths<'c>,
    },
    /// The first tokens, and a ring of the last ones.
    Ring {
        /// Tokens seen of each sequence.
        seen: &'c [usize],
        /// The ring.
        slots: Slots,
    },
    /// Pages by a table.
    Pages {
        /// Which page holds which tokens.
        table: Table<'c>,
        /// Tokens of each sequence.
        lens: &'c [usize],
    },
}

impl<'c, T: Copy> CacheView<'c, T> {
    pub(super) const fn new(k: View<'c, T>, v: View<'c, T>, place: Place<'c>) -> Self {
        Self { k, v, place }
    }

    /// Plain tensors, all of whose slots are tokens: k `[batch, kv_heads, kv_len, head_dim]`, v
    /// `[batch, kv_heads, kv_len, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`] where k and v disagree.
    pub const fn of_tensors(k: View<'c, T>, v: View<'c, T>) -> Result<Self> {
        Self::of_part(k, v, 0)
    }

    /// Some of the tokens of longer sequences, from token `first` on: what one of several processes holds of a cache.
    ///
    /// # Errors
    /// [`AttnError::Size`] where k and v disagree, [`AttnError::Overflow`] where the tokens cannot be counted.
    pub const fn of_part(k: View<'c, T>, v: View<'c, T>, first: usize) -> Result<Self> {
        let [batch, heads, len, head_dim] = k.sizes();
        if let Err(e) = AttnShape::new([batch, heads, 0, head_dim], k.sizes(), v.sizes()) {
            return Err(e);
        }
        match first.checked_add(len) {
            Some(end) => Ok(Self::new(k, v, Place::Rows { first, ends: Lengths::All(end) })),
            None => Err(AttnError::Overflow { what: "first token + kv_len" }),
        }
    }

    /// Rows of slots of which each sequence fills the first `lens[b]`, as [`AppendCache`] has them, to be read only: k
    /// `[batch, kv_heads, capacity, head_dim]`, v `[batch, kv_heads, capacity, value_dim]`.
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
    /// As [`AppendCache::new`].
    pub fn of_slots(k: View<'c, T>, v: View<'c, T>, lens: &'c [usize]) -> Result<Self> {
        super::append::check(k.sizes(), v.sizes(), lens)?;
        Ok(Self::new(k, v, Place::Rows { first: 0, ends: Lengths::PerBatch(lens) }))
    }

    /// Rings behind sinks, as [`RingCache`] has them, to be read only; `seen[b]` tokens have come so far.
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
    /// As [`RingCache::new`].
    pub fn of_ring(k: View<'c, T>, v: View<'c, T>, seen: &'c [usize], sinks: usize, window: usize) -> Result<Self> {
        let slots = super::ring::check(k.sizes(), v.sizes(), seen, (sinks, window))?;
        Ok(Self::new(k, v, Place::Ring { seen, slots }))
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
            Place::Rows { .. } => self.k.sizes().first().copied().unwrap_or(0),
            Place::Ring { seen: lens, .. } | Place::Pages { lens, .. } => lens.len(),
        }
    }

    /// Tokens of one sequence; 0 where there is no such sequence. Of a ring those that are held, of a
    /// [part](Self::of_part) all up to its end.
    pub fn len(&self, sequence: usize) -> usize {
        let of = |lens: &[usize]| lens.get(sequence).copied().unwrap_or(0);
        match &self.place {
            Place::Rows { ends, .. } if sequence < self.batch() => ends.of(sequence),
            Place::Rows { .. } => 0,
            Place::Ring { seen, slots } => slots.held(of(seen)).len,
            Place::Pages { lens, .. } => of(lens),
        }
    }

    /// Whether a ring has dropped tokens of a sequence to make room for later ones.
    pub fn has_dropped(&self, sequence: usize) -> bool {
        match &self.place {
            Place::Ring { seen, .. } => seen.get(sequence).is_some_and(|&seen| seen > self.len(sequence)),
            Place::Rows { .. } | Place::Pages { .. } => false,
        }
    }

    /// The first token that is there: 0, but of a [part](Self::of_part).
    pub const fn first(&self) -> usize {
        match self.place {
            Place::Rows { first, .. } => first,
            Place::Ring { .. } | Place::Pages { .. } => 0,
        }
    }

    /// Where a token lies, and how many from it on lie side by side. `None` where the sequence has no such token.
    #[inline]
    pub fn run(&self, sequence: usize, token: usize) -> Option<TokenRun> {
        let left = self.len(sequence).checked_sub(token).filter(|&left| left > 0)?;
        let run = match &self.place {
            Place::Rows { first, .. } => TokenRun { row: sequence, slot: token.checked_sub(*first)?, len: left },
            Place::Ring { seen, slots } => {
                let held = slots.held(seen.get(sequence).copied()?);
                TokenRun { row: sequence, slot: held.slot(token), len: left.min(held.side_by_side(token)) }
            }
            Place::Pages { table, .. } => {
                let (row, slot) = table.place(sequence, token);
                TokenRun { row, slot, len: left.min(table.page_size().saturating_sub(slot)) }
            }
        };
        (run.len > 0).then_some(run)
    }

    /// The sizes of attention to this cache by queries `[batch, q_heads, q_len, head_dim]`; `kv_len` is the longest sequence.
    ///
    /// # Errors
    /// [`AttnError::Size`] or [`AttnError::Heads`] where they do not fit.
    pub fn shape(&self, q: [usize; 4]) -> Result<AttnShape> {
        let ([_, heads, _, head_dim], [.., value_dim]) = (self.k.sizes(), self.v.sizes());
        let (batch, kv_len) = (self.batch(), (0..self.batch()).map(|b| self.len(b)).max().unwrap_or(0));
        AttnShape::new(q, [batch, heads, kv_len, head_dim], [batch, heads, kv_len, value_dim])
    }
}

impl<T: Element> AppendCache<'_, T> {
    /// The cache, to be read by any engine.
    pub fn view(&self) -> CacheView<'_, T> {
        let (k, v, lens) = self.parts();
        CacheView::new(k, v, Place::Rows { first: 0, ends: Lengths::PerBatch(lens) })
    }
}

impl<T: Element> RingCache<'_, T> {
    /// The tokens held, in ascending order, to be read by any engine. Turning by the place in the cache is not part of it.
    pub fn view(&self) -> CacheView<'_, T> {
        let (k, v, place) = self.parts();
        CacheView::new(k, v, place)
    }
}

impl<'c, T: Element> PagedCache<'c, T> {
    /// The cache, to be read by any engine.
    pub fn view(&self) -> CacheView<'c, T> {
        let (k, v, place) = self.parts();
        CacheView::new(k, v, place)
    }
}

impl<T: Element> PagedCacheMut<'_, T> {
    /// The cache, to be read by any engine.
    pub fn view(&self) -> CacheView<'_, T> {
        let (k, v, place) = self.as_cache().parts();
        CacheView::new(k, v, place)
    }
}
