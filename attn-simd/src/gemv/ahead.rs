//! The lines that the products request while they read others: distances in bytes from the present line.
//!
//! They follow from the [policy](crate::prefetch) and the spacing of rows. There are three requests and no choice
//! between two, because a branch between the multiply-adds would keep the compiler from holding their sums in
//! registers. One row over `f32` makes two of them, because it computes so little that each instruction counts.

use super::rows::EIGHT;
use super::{Heads, Rows, Stored, TILE, Tile, in_line};
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
    heads: Heads,
    /// Whether the heads of a token, and then those of the next one, are spaced alike.
    even: bool,
    /// The rows of a head that are read before those of the next one.
    turn: usize,
}

impl Ahead {
    /// For R rows of queries or outputs, which may have a policy of their own. `in_order` says whether the lines of
    /// rows that follow each other are read in the order of memory.
    #[inline(always)]
    pub(super) fn of<I: Isa, T: Stored, const R: usize>(rows: &Rows<'_, T>, in_order: bool) -> Self {
        let heads = rows.heads();
        // Of all heads, since all are read before the next turn.
        let row = (T::elements(rows.columns()) * size_of::<T>() * heads.beside).max(1);
        let in_order = in_order && rows.is_contiguous();
        let once = rows.prefetch().once.filter(|once| {
            may_be_once::<T>(R, I::LANES) && heads.count == 1 && once.takes(R, size_of::<T>(), row, in_order)
        });
        let mut prefetch = *rows.prefetch();
        if let Some(once) = once {
            (prefetch.into, prefetch.far, prefetch.near) = (Into::First, once.distance(), 0);
        }
        let even = rows.are_even();
        let turn = match heads.count {
            1 => TILE,
            _ if even => turn(row),
            _ => EIGHT,
        };
        // Values may be added in two parts of eight.
        let turn = turn.max(const { if I::LANES == 16 { 2 * EIGHT } else { EIGHT } });
        let least = if heads.count > 1 { turn } else { 1 };
        let in_rows = |bytes: usize| (bytes / row).clamp(least, TILE);
        Self {
            prefetch,
            far: if prefetch.far == 0 && heads.count == 1 { 0 } else { in_rows(prefetch.far) },
            near: (prefetch.near / row).min(TILE),
            page: in_rows(PAGE),
            beyond: (prefetch.far / (row * TILE)).saturating_sub(1),
            once: once.is_some(),
            heads,
            even,
            turn,
        }
    }

    /// The rows of a head that are read before those of the next one; a tile if there is only one.
    #[inline(always)]
    pub(super) fn turn(&self) -> usize {
        self.turn
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

    /// The requests of some rows of a head, the first at `line`; `side` of them are read side by side.
    #[inline(always)]
    pub(super) fn from<T: Stored>(
        &self,
        tile: &Tile<'_, T>,
        (row, rows, line): (usize, usize, *const u8),
        (head, side): (usize, usize),
    ) -> Requests {
        if self.heads.count > 1
            && let Some((to, step)) = self.of_heads(tile, head, (row, rows), side)
        {
            let next = step.wrapping_sub(tile.step().wrapping_mul(side as isize)) as usize;
            return Requests { second: to.addr().wrapping_sub(line.addr()), next, first: 0, near: 0 };
        }
        let [far, near] = self.far_and_near(tile, row);
        match self.prefetch.into {
            Into::First => Requests { second: near, next: 0, first: far, near },
            Into::Second => Requests { second: far, next: 0, first: near, near },
        }
    }

    /// Where the requests of a head begin while some of its rows are read, from row `row` on: the first line, and the
    /// bytes from the requests of a row to those of the next. They go through all heads of the next tokens, in the
    /// order of memory. So a row requests lines of other heads. `side` rows that are read side by side request the same
    /// slot of as many tokens, and the next ones the next slot. Of the policy only the far distance counts here: keys
    /// request lines into the second cache, values into both.
    ///
    /// `None` if one head is read, or if the requests of `rows` rows are not so evenly spaced.
    #[inline(never)]
    pub(super) fn of_heads<T: Stored>(
        &self,
        tile: &Tile<'_, T>,
        head: usize,
        (row, rows): (usize, usize),
        side: usize,
    ) -> Option<(*const u8, isize)> {
        let Heads { count, step, .. } = self.heads;
        let even = side == 1 && self.even;
        if count == 1 || !even && !count.is_multiple_of(rows / side) {
            return None;
        }
        let step = step.wrapping_mul(size_of::<T>() as isize);
        let first = row / self.turn * self.turn;
        // Which of all rows of this turn, over all heads.
        let nth = (head * self.turn + row - first) / side;
        let (token, slot) = (nth / count * side, nth % count);
        let to_first = step.wrapping_mul(slot as isize - head as isize);
        let line = tile.row(first).cast::<u8>().wrapping_add(tile.lead(first, self.far + token));
        Some((line.wrapping_byte_offset(to_first), step))
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
    /// What the distance grows by from rows that are read side by side to the next ones.
    next: usize,
    first: usize,
    near: usize,
}

impl Requests {
    /// The line itself.
    pub(super) const NONE: Self = Self { second: 0, next: 0, first: 0, near: 0 };

    /// Those of later rows.
    #[inline(always)]
    pub(super) fn after(self, steps: usize) -> Self {
        Self { second: self.second.wrapping_add(self.next.wrapping_mul(steps)), ..self }
    }

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

/// Bytes of all heads that are read in one turn, unless eight tokens have more. Measured 2026-11-29 on Zen 3 at AVX2, 8
/// and 32 heads of 128 channels, cold caches: 16 KiB take 0.76 to 1.15 of the time, 64 KiB 0.96 to 1.3, 128 KiB 0.8 to
/// 1.5.
const TURN_BYTES: usize = 32 << 10;

/// The rows of a head that are read before those of the next one, where those of a token and all heads have so many
/// bytes: a divisor of a tile, and whole eights.
fn turn(bytes: usize) -> usize {
    1 << (TURN_BYTES / bytes).clamp(EIGHT, TILE).ilog2()
}

/// Lines that blocks of channels request while they read the same eight values.
///
/// A block of few channels reads a line of one value, then of the next. Where the values follow each other without
/// gaps, the blocks request what comes later in the order of memory instead: the first block the lines of the first
/// values, and so on. The processor's prefetcher follows that. A line that several blocks share is requested once (of
/// eight rows, which AVX2 takes in halves, twice).
///
/// Measured on Zen 3 at AVX2, caches of 128 MiB, one thread: four rows over f32 are 1.35 times as fast, two 1.25, eight
/// 1.1; four over halves 1.0 to 1.1, of 256 channels 1.18, eight 0.96. With gaps 0.93 to 1.03. Bytes are bound by
/// arithmetic, and keep their order (0.97). So do other levels, where it is not measured.
#[derive(Clone, Copy)]
pub(super) struct Eights {
    /// The line that the first value requests, but for the distance.
    pub(super) first: *const u8,
    /// Bytes from there to that of the next value.
    pub(super) step: isize,
}

impl Eights {
    /// Of a block of C vectors of channels from `from` on. The first of the eight begins at `first`, the next one
    /// `step` bytes later.
    #[inline(always)]
    pub(super) fn of<I: Isa, T: Stored, const C: usize>(
        columns: usize,
        (first, step): (*const u8, isize),
        from: usize,
    ) -> Self {
        let bytes = |channels: usize| T::elements(channels) * size_of::<T>();
        let block = bytes(C * I::LANES) as isize;
        if const { !by_eights::<I, T>() } {
            return Self { first: first.wrapping_add(bytes(from)), step };
        }
        if step == bytes(columns) as isize {
            return Self { first: first.wrapping_add(EIGHT * bytes(from)), step: block };
        }
        // The blocks that share a line take turns with the values.
        let nth = from / (C * I::LANES) % const { turns::<I, T>(C) };
        Self { first: first.wrapping_add(bytes(from)).wrapping_byte_offset((step - block) * nth as isize), step }
    }
}

/// Whether blocks request lines as [`Eights`] says.
pub(super) const fn by_eights<I: Isa, T: Stored>() -> bool {
    I::LANES == 8 && T::EVERY && size_of::<T>() > 1
}

/// Values of which the first requests a line for all.
pub(super) const fn turns<I: Isa, T: Stored>(vectors: usize) -> usize {
    let line = in_line::<T>(I::LANES);
    if vectors < line { line / vectors } else { 1 }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use attn_core::half::f16;

    use super::*;
    use crate::gemv::{Group, Places, Unchecked};
    use crate::isa::avx2::Avx2;
    use crate::isa::avx512::Avx512;

    /// The lines of eight values that blocks of C vectors request. After each row are `gap` numbers of none.
    fn requested<T: Stored, const C: usize>(columns: usize, gap: usize) -> Vec<usize> {
        let (data, row) = (vec![T::default(); 8 * (columns + gap)], columns + gap);
        let mut places = Places::NONE;
        places.find(&Group::new(0, 8, 1), row as isize, |n| (n < 8).then_some((n * row, 8 - n)));
        let values = Unchecked::copy(&data, &places, columns).check().tile(0, 0);
        let mut lines = Vec::new();
        for from in (0..columns).step_by(C * 8) {
            let eights = Eights::of::<Avx2, T, C>(columns, (values.row(0).cast(), values.step()), from);
            for n in (0..8isize).step_by(turns::<Avx2, T>(C)) {
                let line = eights.first.wrapping_byte_offset(eights.step * n);
                for c in (0..C).step_by(in_line::<T>(8)) {
                    let at = line.wrapping_add(c * 8 * size_of::<T>()).addr() - data.as_ptr().addr();
                    lines.push(at / 64);
                }
            }
        }
        lines
    }

    #[test]
    fn blocks_request_each_line_of_eight_values_once() {
        assert!(by_eights::<Avx2, f32>() && by_eights::<Avx2, f16>());
        fn check<T: Stored, const C: usize>() {
            let line = 64 / size_of::<T>();
            for columns in [64, 128, 192, 256] {
                let lines = columns / line;
                // Without gaps in the order of memory.
                let want: Vec<usize> = (0..8 * lines).collect();
                assert_eq!(requested::<T, C>(columns, 0), want, "{C} vectors of {columns} channels");
                let mut got = requested::<T, C>(columns, 2 * line);
                got.sort_unstable();
                let want = (0..8).flat_map(|row| (0..lines).map(move |n| row * (lines + 2) + n));
                assert!(got.into_iter().eq(want), "{C} vectors of {columns} channels, with gaps");
            }
        }
        check::<f32, 1>();
        check::<f32, 2>();
        check::<f32, 4>();
        check::<f32, 8>();
        check::<f16, 2>();
        check::<f16, 4>();
    }

    /// The rows of memory that all heads request while they read some tokens, `side` of them side by side. Keys ask for
    /// each eight rows, values for those of a turn.
    fn requested_by_heads<I: Isa>([count, of, columns]: [usize; 3], side: usize, values: bool) -> Option<Vec<usize>> {
        let (data, token) = (vec![0.0f32; 600 * of * columns], of * columns);
        let (group, mut places) = (Group::new(0, 128, 2), Places::NONE);
        places.find(&group, token as isize, |n| (n < 600).then_some((n * token, 600 - n)));
        let heads = Heads { first: 0, count, step: columns as isize, rows: 1, beside: count };
        let rows = Unchecked { data: &data, places: &places, heads, columns, prefetch: Prefetch::OTHER }.check();
        let ahead = Ahead::of::<I, f32, 4>(&rows, false);
        let at_once = if values { ahead.turn() } else { EIGHT };
        let mut lines = Vec::new();
        for first in (0..64).step_by(ahead.turn()) {
            for head in 0..count {
                let tile = rows.tile(0, head);
                for row in (first..first + ahead.turn()).step_by(at_once) {
                    let (line, step) = ahead.of_heads(&tile, head, (row, at_once), side)?;
                    for n in 0..at_once {
                        let nth = step * (n / side) as isize + tile.step() * (n % side) as isize;
                        let at = line.wrapping_byte_offset(nth).addr() - data.as_ptr().addr();
                        lines.push(at / (columns * 4) - ahead.far * of);
                    }
                }
            }
        }
        Some(lines)
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes long, and only addresses are computed")]
    fn heads_request_what_comes_later_in_the_order_of_memory() {
        fn check<I: Isa>() {
            for [count, of, columns] in [[8, 8, 128], [8, 8, 64], [5, 5, 128], [3, 3, 16], [16, 32, 128], [24, 24, 64]]
            {
                // The rows of all these heads, and of no others.
                let want: Vec<usize> = (0..64 * of).filter(|row| row % of < count).collect();
                let values = requested_by_heads::<I>([count, of, columns], 1, true);
                assert_eq!(values, Some(want.clone()), "values, {count} of {of}");
                for side in [1, 2, 4] {
                    let Some(mut rows) = requested_by_heads::<I>([count, of, columns], side, false) else {
                        assert!(!count.is_multiple_of(EIGHT / side), "{count} of {of}, {side} side by side");
                        continue;
                    };
                    rows.sort_unstable();
                    assert_eq!(rows, want, "{count} of {of}, {side} side by side");
                }
            }
            assert_eq!(requested_by_heads::<I>([4, 8, 128], 1, false), None);
            assert_eq!(requested_by_heads::<I>([1, 8, 128], 1, false), None);
        }
        check::<Avx2>();
        check::<Avx512>();
    }
}
