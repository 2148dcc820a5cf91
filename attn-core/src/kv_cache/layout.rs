//! The place of each token in a cache: rows, rings, pages. Rows and rings are checked here, once, against the sizes of
//! k and v; page tables are checked in [`page_table`](super::page_table).

use super::checks::check_at_most;
use super::page_table::Pages;
use super::slots::{Held, Slots};
use crate::error::{AttnError, Result};
use crate::mask::Lengths;
use crate::shape::AttnShape;

/// Contiguous tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// Index on the first axis of k and v: the sequence, or the page.
    pub row: usize,
    /// Index on their third axis of the first token.
    pub slot: usize,
    /// How many tokens; at least 1.
    pub len: usize,
}

/// Where tokens are in memory.
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
    Pages(Pages<'c>),
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
        pages: Pages<'c>,
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
            Self::Pages { sequence, pages, len } => {
                (token < *len).then(|| pages.place(*sequence, token)).filter(|&(page, _)| page != usize::MAX)
            }
        }
    }
}

/// Checks a cache's sizes, and every length against the capacity.
pub(crate) fn check_rows(k: [usize; 4], v: [usize; 4], lens: &[usize]) -> Result<()> {
    let [batch, kv_heads, capacity, head_dim] = k;
    AttnShape::new([batch, kv_heads, 0, head_dim], k, v)?;
    AttnError::check_size("cache lens against batch", batch, lens.len())?;
    lens.iter().enumerate().try_for_each(|(at, &len)| check_at_most("cache lens", at, len, capacity))
}

/// Checks a ring's sizes.
pub(crate) fn check_ring(
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
