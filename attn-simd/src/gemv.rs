//! Products with few queries: lanes are channels, and every element of a key or value is read once for all rows.
//!
//! With as many queries as lanes, [`gemm`](crate::gemm) keeps all lanes busy and reads keys by broadcast. With few
//! queries most of its lanes would idle, and each element would cost an instruction. Here the product loads (and
//! widens) a vector of a key's channels once, and multiplies it by `R` query rows in registers. It takes `K` keys
//! together, so that their `R·K` sums over lanes are formed at once ([`Isa::sum_fours`]). If memory is the limit it
//! still reads keys one after the other, because processors prefetch best what is read in order.
//!
//! ```text
//! dots      acc[r][k] += q[r][c…]·key_k[c…]        for all c, then s[r][key] = Σ lanes of acc[r][k]
//! bytes     dots with int8 keys as integers, where the level multiplies bytes faster
//! weighted  acc[r][c…] += p[r][key]·value_key[c…]   for 8 keys, in a tree over the tile,
//!           then o[r][c…] = o[r][c…]·factor[r] + acc[r][c…]
//! ```
//!
//! With few rows both products are memory-bound. They prefetch lines far ahead and near, a few at a time between the
//! multiply-adds; how far is a [policy of the processor](crate::prefetch). No branch chooses between the two: a branch
//! between multiply-adds makes the compiler keep their operands in memory (eight rows took 1.7 times as long).
//!
//! Each row is given by the index of its first element, so that pages, rings and strides are read alike. The number of
//! rows or keys that are taken together changes no bit: a score is one chain per lane, cut every `CHAIN` steps, and an
//! output is one chain over each 8 keys of a tile.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use attn_core::half::{bf16, f16};
use attn_core::row::Row;

use crate::isa::{Isa, MAX_LANES, hint};
use crate::prefetch::{Into, PAGE, Prefetch};

pub(crate) mod bytes;
mod dots;
pub(crate) mod packed;
mod weighted;

pub(crate) use dots::dots;
pub(crate) use weighted::{Sums, weighted};

/// The largest number of keys in a tile, and the distance between rows of scores.
pub(crate) const TILE: usize = 64;

/// The type of a stored row: a type of numbers, or [bytes](packed) of a format. Any bits are a valid value.
pub(crate) trait Stored: Copy + Default + Send + Sync + 'static {
    /// Whether each number is finite.
    const FINITE: bool;
    /// Whether the products are compiled for every number of rows that [`rows_for`] returns, and for usual numbers of
    /// channels. Otherwise for [few](compiled) numbers of rows, because these instances are most of the code to
    /// compile.
    const EVERY: bool = true;
    /// Takes the rows for [integers](bytes), if they are.
    const INTEGERS: Option<for<'r> fn(Rows<'r, Self>) -> Rows<'r, i8>> = None;
    /// The number of elements that store some numbers.
    #[inline(always)]
    fn elements(numbers: usize) -> usize {
        numbers
    }
    /// Widens `LANES` numbers of a row, from a multiple of `LANES` on.
    ///
    /// # Safety
    /// The row is valid for reading [`elements`](Self::elements) for these numbers.
    unsafe fn load<I: Isa>(isa: I, row: *const Self, from: usize) -> I::F;
    /// Widens the numbers of a row, as many as both slices hold.
    fn read(row: Row<'_, Self>, out: &mut [f32]);
}

macro_rules! stored {
    ($($t:ty => $load:ident, $widen:expr, $finite:literal $(, $integers:expr)?;)*) => {$(
        impl Stored for $t {
            const FINITE: bool = $finite;
            #[inline(always)]
            unsafe fn load<I: Isa>(isa: I, row: *const Self, from: usize) -> I::F {
                // SAFETY: the caller vouches for the numbers.
                unsafe { isa.$load(row.add(from)) }
            }
            #[inline(always)]
            fn read(row: Row<'_, Self>, out: &mut [f32]) {
                out.iter_mut().zip(row.iter()).for_each(|(out, x)| *out = $widen(x));
            }
            $(const INTEGERS: Option<for<'r> fn(Rows<'r, Self>) -> Rows<'r, i8>> = Some($integers);)?
        }
    )*};
}
stored! {
    f32 => load_ptr, |x| x, false;
    f16 => load_f16_ptr, crate::isa::widen_f16, false;
    bf16 => load_bf16_ptr, bf16::to_f32, false;
    i8 => load_i8_ptr, f32::from, true, |rows| rows;
}

/// The index where each row of two tiles starts: the present one and the next, which take turns. A tile of fewer rows
/// repeats its last one.
pub(crate) type Starts = [usize; 2 * TILE];

/// Writes the starts of evenly spaced rows: from `first` on, `step` apart, with the last of `len` repeated.
#[inline(always)]
pub(crate) fn evenly(starts: &mut [usize; TILE], first: usize, step: isize, len: usize) {
    if len == TILE {
        for (n, start) in starts.iter_mut().enumerate() {
            *start = first.wrapping_add_signed((n as isize).wrapping_mul(step));
        }
    } else {
        for (n, start) in starts.iter_mut().enumerate() {
            *start = first.wrapping_add_signed((n.min(len.saturating_sub(1)) as isize).wrapping_mul(step));
        }
    }
}

/// [`Rows`] before their check. The check is worth vectors, so the kernel that reads does it, at its level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unchecked<'a, T> {
    /// The elements of all rows.
    pub(crate) data: &'a [T],
    /// Index of each row's first element.
    pub(crate) starts: &'a Starts,
    /// The index of the first row in `starts`: 0 or [`TILE`].
    pub(crate) base: usize,
    /// The number of rows.
    pub(crate) len: usize,
    /// The number of columns of each row.
    pub(crate) columns: usize,
    /// How rows are prefetched.
    pub(crate) prefetch: Prefetch,
}

impl<'a, T: Stored> Unchecked<'a, T> {
    /// Asserts that all rows are inside the slice, those of the next tile too.
    #[inline(always)]
    pub(crate) fn check(self) -> Rows<'a, T> {
        let Self { data, starts, base, len, columns, prefetch } = self;
        let last = data.len().checked_sub(T::elements(columns));
        let largest = starts.iter().fold(0, |max, &start| if start > max { start } else { max });
        assert!(last.is_some_and(|last| largest <= last), "a row reaches outside of its slice");
        assert!(len > 0 && len <= TILE && columns > 0 && base <= TILE);
        Rows { data, starts, base, len, columns, prefetch }
    }
}

/// Some rows of a slice, at least one, each of `columns` contiguous numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    starts: &'a Starts,
    base: usize,
    len: usize,
    columns: usize,
    prefetch: Prefetch,
}

/// The distances in bytes from a line to the lines that are prefetched. They follow from the policy and the spacing of
/// the rows. There are three prefetches and no choice between two, because a branch between the multiply-adds would
/// keep the compiler from holding their sums in registers. One row over `f32` makes two of them, because it computes so
/// little that each instruction counts.
#[derive(Clone, Copy)]
struct PrefetchAt {
    second: usize,
    first: usize,
    near: usize,
}

impl PrefetchAt {
    #[inline(always)]
    fn of(into: Into, far: usize, near: usize) -> Self {
        match into {
            Into::First => Self { second: near, first: far, near },
            Into::Second => Self { second: far, first: near, near },
        }
    }

    /// Prefetches the lines at these distances from a line, for R rows.
    #[inline(always)]
    fn prefetch<I: Isa, T, const R: usize>(self, isa: I, line: *const u8) {
        isa.prefetch::<{ hint::SECOND }>(line.wrapping_add(self.second));
        isa.prefetch::<{ hint::READ }>(line.wrapping_add(self.first));
        if const { !is_alone::<T>(R) } {
            isa.prefetch::<{ hint::READ }>(line.wrapping_add(self.near));
        }
    }
}

/// Whether R rows over a type are one over `f32`, which computes least for each byte.
const fn is_alone<T>(rows: usize) -> bool {
    rows == 1 && size_of::<T>() == 4
}

impl<T: Stored> Rows<'_, T> {
    /// The same for R rows of queries or outputs, which may have a policy of their own.
    #[inline(always)]
    fn for_rows<const R: usize>(self) -> Self {
        let prefetch = if const { is_alone::<T>(R) } { self.prefetch.alone() } else { self.prefetch };
        Self { prefetch, ..self }
    }

    /// The number of rows.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of a row, of this tile or of the next.
    #[inline(always)]
    fn at(&self, n: usize) -> *const T {
        let start = self.starts[(self.base + n) % (2 * TILE)];
        // SAFETY: `Unchecked::check` has found that every row is inside the slice.
        unsafe { self.data.as_ptr().add(start) }
    }

    /// Address of a row of this tile.
    ///
    /// # Safety
    /// `n` is below [`TILE`].
    #[inline(always)]
    unsafe fn here(&self, n: usize) -> *const T {
        debug_assert!(n < TILE && self.base <= TILE);
        // SAFETY: the base is 0 or TILE, and the row below TILE; `Unchecked::check` has found that every row is inside
        // the slice.
        unsafe { self.data.as_ptr().add(*self.starts.get_unchecked(self.base + n)) }
    }

    /// Bytes from a row to the row that is prefetched while it is read. Exact if rows are evenly spaced, as within a
    /// page; otherwise a hint.
    #[inline(always)]
    fn lead(&self, row: usize, ahead: usize) -> usize {
        self.at(row + ahead).addr().wrapping_sub(self.at(row).addr())
    }

    /// Bytes of a row; at least one.
    #[inline(always)]
    fn row_bytes(&self) -> usize {
        (T::elements(self.columns) * size_of::<T>()).max(1)
    }

    /// The number of rows in a distance in bytes; at least one, at most a tile.
    #[inline(always)]
    fn rows_in(&self, bytes: usize) -> usize {
        (bytes / self.row_bytes()).clamp(1, TILE)
    }

    /// The distances from a row's lines to those that are prefetched, from distances in rows.
    #[inline(always)]
    fn prefetch_at(&self, row: usize, [far, near]: [usize; 2]) -> PrefetchAt {
        // The distance is less than a row, so the policy's bytes are taken as they are.
        let near = if near == 0 { self.prefetch.near } else { self.lead(row, near) };
        PrefetchAt::of(self.prefetch.into, self.lead(row, far), near)
    }

    /// Prefetches the start of a row far ahead of this one.
    #[inline(always)]
    fn prefetch_page<I: Isa>(&self, isa: I, row: usize, pages: usize) {
        isa.prefetch::<{ hint::READ }>(self.at(row).cast::<u8>().wrapping_add(self.lead(row, pages)));
    }

    /// The distances of the policy in rows: far, near, page.
    #[inline(always)]
    fn distances(&self) -> [usize; 3] {
        let Prefetch { far, near, .. } = self.prefetch;
        [self.rows_in(far), (near / self.row_bytes()).min(TILE), self.rows_in(PAGE)]
    }

    /// Bytes from a row as far ahead as [`rows_in`](Self::rows_in) reaches to the row that the policy's far distance
    /// means: rows are so short that it is several tiles. Exact if rows are evenly spaced, otherwise a hint.
    #[inline(always)]
    fn beyond(&self) -> usize {
        let tiles = self.prefetch.far / (self.row_bytes() * TILE);
        if tiles > 1 { self.lead(0, TILE).wrapping_mul(tiles - 1) } else { 0 }
    }

    /// Whether all elements are finite. Columns are whole vectors.
    #[inline(always)]
    pub(crate) fn is_finite<I: Isa>(&self, isa: I) -> bool {
        assert!(self.columns.is_multiple_of(I::LANES));
        // Sums of x·0, in two chains: 0 if x is finite, and NaN otherwise.
        let zero = isa.splat(0.0);
        let mut sums = [zero; 2];
        for n in 0..self.len() {
            let row = self.at(n);
            for (i, c) in (0..self.columns).step_by(I::LANES).enumerate() {
                // SAFETY: a whole vector below `columns` of a row that has been checked.
                let x = unsafe { T::load(isa, row, c) };
                sums[i % 2] = isa.mul_add(x, zero, sums[i % 2]);
            }
        }
        let mut lanes = [0.0; MAX_LANES];
        isa.store(isa.add(sums[0], sums[1]), &mut lanes);
        lanes.iter().all(|&x| x == 0.0)
    }
}

/// The number of vectors in a cache line, or 1.
const fn in_line<T>(lanes: usize) -> usize {
    let vectors = 64 / (lanes * size_of::<T>());
    if vectors == 0 { 1 } else { vectors }
}

/// Rounds a number of query rows up to a compiled one: 1, 2, 4 or 8 (with four lanes at most 4), and 3 or 6 with 16
/// lanes.
pub(crate) const fn rows_for(rows: usize, lanes: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 => 2,
        3 if lanes == 16 => 3,
        3 | 4 => 4,
        _ if lanes == 4 => 4,
        5 | 6 if lanes == 16 => 6,
        _ => 8,
    }
}

/// The largest number of query rows that are taken together.
pub(crate) const fn most(lanes: usize) -> usize {
    if lanes < 8 { 4 } else { 8 }
}

/// The rows that need room: blocks of [`most`] rows, and a last block rounded up by [`rows_for`].
pub(crate) const fn padded(rows: usize, lanes: usize) -> usize {
    let (whole, rest) = (rows / most(lanes) * most(lanes), rows % most(lanes));
    if rest == 0 { whole } else { whole + rows_for(rest, lanes) }
}

/// Whether the products with a type are compiled for a number of rows.
const fn compiled<T: Stored>(rows: usize) -> bool {
    T::EVERY || matches!(rows, 1 | 4 | 8)
}

/// The blocks of rows that are taken together: the first row of each, and its compiled number of rows.
#[inline(always)]
pub(crate) fn blocks<T: Stored>(rows: usize, lanes: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    core::iter::from_fn(
        #[inline(always)]
        move || {
            let rest = rows.checked_sub(first).filter(|&rest| rest > 0)?.min(most(lanes));
            let at = first;
            let count = match rows_for(rest, lanes) {
                count if compiled::<T>(count) => count,
                _ if rest < 4 => 1,
                _ => 4,
            };
            first += count;
            Some((at, count))
        },
    )
}

/// Evaluates an expression with the constants of the instance for a number of rows: R rows, K keys that are taken
/// together (`R·K` is a multiple of 4), S steps of K keys whose sums are finished together, and C vectors of an
/// output's channels at a time.
macro_rules! with_rows {
    ($I:ident, $T:ident, $rows:expr, [$R:ident, $K:ident, $S:ident, $C:ident] => $body:expr) => {
        with_rows!(@isa $I, $T, $rows, $R, $K, $S, $C, $body;
            16 => [1 4 4 8] [2 4 2 8] [3 4 1 8] [4 4 1 4] [6 2 1 4] [8 2 1 2],
            8 => [1 4 2 8] [2 4 1 4] [4 2 1 2] [8 1 1 1],
            4 => [1 4 1 8] [2 2 1 4] [4 1 1 2])
    };
    (@isa $I:ident, $T:ident, $rows:expr, $R:ident, $K:ident, $S:ident, $C:ident, $body:expr;
        $($lanes:literal => $([$r:literal $k:literal $s:literal $c:literal])*),*) => {
        // A constant condition, so that no code of other levels is compiled.
        $(if const { $I::LANES == $lanes } {
            match $rows {
                $($r => {
                    const $R: usize = $r;
                    const $K: usize = $k;
                    const $S: usize = $s;
                    const $C: usize = $c;
                    if const { $crate::gemv::compiled::<$T>($r) } {
                        $body
                    } else {
                        unreachable!("a number of rows that `blocks` does not give")
                    }
                })*
                _ => unreachable!("a number of rows that `blocks` does not give"),
            }
        })*
    };
}

use with_rows;
