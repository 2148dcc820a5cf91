//! The lines that the products request while they read others: distances in bytes from the present line.
//!
//! They follow from the [policy](crate::prefetch) and the spacing of rows. There are three requests and no choice
//! between two, because a branch between the multiply-adds would keep the compiler from holding their sums in
//! registers. One row over `f32` makes two of them, because it computes so little that each instruction counts.

use super::{Rows, Stored, TILE, Tile};
use crate::isa::{Isa, hint};
use crate::prefetch::{Into, PAGE, Prefetch};

/// Whether the products are compiled for requests of each line once: for one row over numbers that are no bytes, and
/// for two over `f32` or bfloat16 at AVX-512. They compute least for each byte.
pub(super) const fn may_be_once<T: Stored>(rows: usize, lanes: usize) -> bool {
    let size = size_of::<T>();
    rows == 1 && size >= 2 || rows == 2 && (size == 4 || T::PAIRS) && lanes == 16
}

/// The distances of the policy, in rows of some tiles.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    prefetch: Prefetch,
    /// Of the far request; 0 if it is for the present line.
    far: usize,
    /// Of the near request; 0 if it is less than a row.
    near: usize,
    /// Of the page that is translated.
    page: usize,
    /// Tiles between the row that the far distance means and the one that `far` reaches: rows may be so short that it
    /// is several tiles.
    beyond: usize,
    /// Whether each line is requested once.
    once: bool,
}

impl Ahead {
    /// For R rows of queries or outputs, which may have a policy of their own. `in_order` says whether the lines of
    /// rows that follow each other are read in the order of memory.
    #[inline(always)]
    pub(super) fn of<I: Isa, T: Stored, const R: usize>(rows: &Rows<'_, T>, in_order: bool) -> Self {
        let row = (T::elements(rows.columns()) * size_of::<T>()).max(1);
        let in_order = in_order && rows.is_contiguous();
        let once = rows
            .prefetch()
            .once
            .filter(|once| may_be_once::<T>(R, I::LANES) && once.takes(R, size_of::<T>(), row, in_order));
        let mut prefetch = *rows.prefetch();
        if let Some(once) = once {
            (prefetch.into, prefetch.far, prefetch.near) = (Into::First, once.distance(), 0);
        }
        let in_rows = |bytes: usize| (bytes / row).clamp(1, TILE);
        Self {
            prefetch,
            far: if prefetch.far == 0 { 0 } else { in_rows(prefetch.far) },
            near: (prefetch.near / row).min(TILE),
            page: in_rows(PAGE),
            beyond: (prefetch.far / (row * TILE)).saturating_sub(1),
            once: once.is_some(),
        }
    }

    /// Whether each line is requested once.
    #[inline(always)]
    pub(super) fn is_once(&self) -> bool {
        self.once
    }

    /// The same if the rows up to `rows` are read together.
    #[inline(always)]
    pub(super) fn at_least(self, rows: usize) -> Self {
        Self { far: self.far.max(rows), near: self.near.max(rows), page: self.page.max(rows), ..self }
    }

    /// Bytes to the row that the far distance means from the one that `far` rows reach.
    #[inline(always)]
    pub(super) fn beyond<T: Stored>(&self, tile: &Tile<'_, T>) -> usize {
        if self.beyond > 0 { tile.lead(0, TILE).wrapping_mul(self.beyond) } else { 0 }
    }

    /// The distances in bytes from a row: of the far request, and of the near one.
    #[inline(always)]
    pub(super) fn far_and_near<T: Stored>(&self, tile: &Tile<'_, T>, row: usize) -> [usize; 2] {
        // A distance of less than a row is taken as it is.
        let near = if self.near == 0 { self.prefetch.near } else { tile.lead(row, self.near) };
        [tile.lead(row, self.far), near]
    }

    /// The distances in bytes from the lines of a row.
    #[inline(always)]
    pub(super) fn from<T: Stored>(&self, tile: &Tile<'_, T>, row: usize) -> Requests {
        let [far, near] = self.far_and_near(tile, row);
        match self.prefetch.into {
            Into::First => Requests { second: near, first: far, near },
            Into::Second => Requests { second: far, first: near, near },
        }
    }

    /// The distances of the requests for values, of which `step` are read in turn by several blocks: rows to the line
    /// for the second cache and to that for the first, and bytes beyond the former.
    #[inline(always)]
    pub(super) fn of_values<T: Stored>(&self, tile: &Tile<'_, T>, step: usize) -> ([usize; 2], usize) {
        match self.prefetch.into {
            Into::First => ([self.near, self.far], 0),
            Into::Second => ([self.far.max(step), step], self.beyond(tile)),
        }
    }

    /// The cache that far requests fill.
    #[inline(always)]
    pub(super) fn into(&self) -> Into {
        self.prefetch.into
    }

    /// Prefetches the start of a row far ahead of this one, so that its page is translated.
    #[inline(always)]
    pub(super) fn page<I: Isa, T: Stored>(&self, isa: I, tile: &Tile<'_, T>, row: usize) {
        if self.far > 0 {
            isa.prefetch::<{ hint::READ }>(tile.row(row).cast::<u8>().wrapping_add(tile.lead(row, self.page)));
        }
    }
}

/// The distances in bytes from a line to the lines that are requested with it.
#[derive(Clone, Copy)]
pub(super) struct Requests {
    second: usize,
    first: usize,
    near: usize,
}

impl Requests {
    /// Prefetches the lines at these distances from a line, for R rows.
    #[inline(always)]
    pub(super) fn prefetch<I: Isa, T, const R: usize>(self, isa: I, line: *const u8) {
        isa.prefetch::<{ hint::SECOND }>(line.wrapping_add(self.second));
        isa.prefetch::<{ hint::READ }>(line.wrapping_add(self.first));
        if const { R > 1 || size_of::<T>() != 4 } {
            isa.prefetch::<{ hint::READ }>(line.wrapping_add(self.near));
        }
    }
}
