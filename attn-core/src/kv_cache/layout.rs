//! Where the tokens of a cache are: rows, rings, pages. Each is checked here, once, against the sizes of k and v.

use super::checks::check_at_most;
use super::slots::{Held, Slots};
use crate::error::{AttnError, Result};
use crate::mask::Lengths;
use crate::shape::AttnShape;

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
    /// Token `t` of sequence `b` at `[b, t]`.
    Rows(Lengths<'c>),
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

/// Where the tokens of one sequence are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tokens<'c> {
    /// Side by side in a row.
    Row {
        /// Index on the first axis.
        row: usize,
        /// How many.
        len: usize,
    },
    /// In a ring.
    Ring {
        /// Index on the first axis.
        row: usize,
        /// The slots.
        held: Held,
    },
    /// In pages.
    Pages {
        /// Which sequence.
        sequence: usize,
        /// Which page holds which tokens.
        table: Table<'c>,
        /// How many tokens.
        len: usize,
    },
}

impl Tokens<'_> {
    /// Row and slot of a token; `None` if it is not here.
    #[inline]
    pub(crate) fn find(&self, token: usize) -> Option<(usize, usize)> {
        match self {
            Self::Row { row, len } => (token < *len).then_some((*row, token)),
            Self::Ring { row, held } => (token < held.len).then(|| (*row, held.slot(token))),
            Self::Pages { sequence, table, len } => {
                (token < *len).then(|| table.place(*sequence, token)).filter(|&(page, _)| page != usize::MAX)
            }
        }
    }
}

/// Checks a cache's sizes, and every length against the capacity.
pub(super) fn check_rows(k: [usize; 4], v: [usize; 4], lens: &[usize]) -> Result<()> {
    let [batch, kv_heads, capacity, head_dim] = k;
    AttnShape::new([batch, kv_heads, 0, head_dim], k, v)?;
    AttnError::check_size("cache lens against batch", batch, lens.len())?;
    lens.iter().enumerate().try_for_each(|(at, &len)| check_at_most("cache lens", at, len, capacity))
}

/// Checks a ring's sizes.
pub(super) fn check_ring(
    k: [usize; 4],
    v: [usize; 4],
    seen: &[usize],
    (sinks, window): (usize, usize),
) -> Result<Slots> {
    let [batch, kv_heads, slots, head_dim] = k;
    AttnShape::new([batch, kv_heads, 0, head_dim], k, v)?;
    AttnError::check_size("seen against batch", batch, seen.len())?;
    Slots::new(sinks, window, slots)
}

/// Which page holds which tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'c> {
    pages: usize,
    page_size: usize,
    entries: &'c [i32],
    /// Entries per sequence.
    width: usize,
    evicted: EvictedPages,
}

/// What a negative entry of the block table means where a page is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictedPages {
    /// A mistake, which is an error.
    Reject,
    /// A page that was given back: its tokens are hidden.
    Hide,
}

impl<'c> Table<'c> {
    /// Checks sizes, and every entry that `lens` tokens use.
    pub(super) fn new(
        k: [usize; 4],
        v: [usize; 4],
        entries: &'c [i32],
        lens: &[usize],
        evicted: EvictedPages,
    ) -> Result<Self> {
        let [pages, heads, page_size, head_dim] = k;
        AttnShape::new([pages, heads, 0, head_dim], k, v)?;
        let batch = lens.len();
        let width = entries.len().checked_div(batch).unwrap_or(0);
        AttnError::check_size("block_table (a whole number of rows)", batch.saturating_mul(width), entries.len())?;
        if page_size == 0 {
            return Err(AttnError::Option { name: "page_size", must: "above 0" });
        }
        let table = Self { pages, page_size, entries, width, evicted };
        lens.iter().enumerate().try_for_each(|(b, &len)| table.check_len(b, len, usize::MAX))?;
        Ok(table)
    }

    /// Checks that the table has a valid page for each of the first `len` tokens of a sequence. Pages below `needed`
    /// may have been given back where such are allowed.
    pub(super) fn check_len(&self, sequence: usize, len: usize, needed: usize) -> Result<()> {
        let used = len.div_ceil(self.page_size.max(1));
        check_at_most("seq_lens in pages against the block_table's width", sequence, used, self.width)?;
        for i in 0..used {
            if self.has_evicted() && i < needed && self.entry(sequence, i).is_some_and(|page| page < 0) {
                continue;
            }
            if self.page(sequence, i).is_none() {
                let at = sequence.saturating_mul(self.width).saturating_add(i);
                // An unused (negative) entry is reported as the largest number: there is no smaller one to name.
                let value = self.entries.get(at).and_then(|&page| usize::try_from(page).ok()).unwrap_or(usize::MAX);
                return Err(AttnError::Index { what: "block_table", at, value, limit: self.pages });
            }
        }
        Ok(())
    }

    /// The `i`-th page of a sequence, if there is one.
    pub(super) fn page(&self, sequence: usize, i: usize) -> Option<usize> {
        usize::try_from(self.entry(sequence, i)?).ok().filter(|&page| page < self.pages)
    }

    /// What stands in the table for the `i`-th page of a sequence.
    #[inline]
    fn entry(&self, sequence: usize, i: usize) -> Option<i32> {
        if i >= self.width {
            return None;
        }
        self.entries.get(sequence.checked_mul(self.width)?.checked_add(i)?).copied()
    }

    /// Whether pages in use may have been given back.
    pub(super) const fn has_evicted(&self) -> bool {
        matches!(self.evicted, EvictedPages::Hide)
    }

    /// Tokens of a page.
    pub(super) const fn page_size(&self) -> usize {
        self.page_size
    }

    /// Page and slot of a token; outside of every page where there is none.
    #[inline]
    pub(super) fn place(&self, sequence: usize, token: usize) -> (usize, usize) {
        let (Some(i), Some(slot)) = (token.checked_div(self.page_size), token.checked_rem(self.page_size)) else {
            return (usize::MAX, 0);
        };
        (self.page(sequence, i).unwrap_or(usize::MAX), slot)
    }
}
