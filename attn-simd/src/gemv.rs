//! Products with few queries: lanes are channels, and every element of a key or value is read once for all rows.
//!
//! With as many queries as lanes, [`gemm`](crate::gemm) keeps all lanes busy and reads keys by broadcast. With a
//! few, most of its lanes would idle, and an element would cost an instruction. Here a vector of a key's channels is
//! loaded (and widened) once and meets `R` query rows in registers; `K` keys are taken together, so that their `R·K`
//! sums over lanes are formed in one go ([`Isa::sum_fours`]). More than four keys at once would be as many streams from
//! memory, which prefetchers do not like: measured on Zen 4, 16 keys at a time read memory at 0.6 of the speed of 4.
//!
//! ```text
//! dots      acc[r][k] += q[r][c…]·key_k[c…]        for all c, then s[r][key] = Σ lanes of acc[r][k]
//! weighted  acc[r][c…] += p[r][key]·value_key[c…]   for 8 keys, in a tree over the tile,
//!           then o[r][c…] = o[r][c…]·factor[r] + acc[r][c…]
//! ```
//!
//! Both are as fast as memory if it is always asked for as much as it can bring, and for no more: lines are asked for
//! far ahead, twice, and one by one between the products, never in bursts.
//!
//! Where a row lies is told by the index of its first element, one per key, so that pages, rings and strides are all
//! alike. How many rows or keys are taken together changes no bit: a score is one chain per lane, cut every `CHAIN`
//! steps, and an output one chain over each 8 keys of a tile.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use attn_core::half::{bf16, f16};

use crate::isa::Isa;

mod dots;
mod weighted;

pub(crate) use dots::dots;
pub(crate) use weighted::{Sums, weighted};

/// Keys of a tile at most, and the distance between the rows of scores.
pub(crate) const TILE: usize = 64;

/// A number type that rows can be stored in. Any bits are a value of it.
pub(crate) trait Stored: Copy + Default + Send + Sync + 'static {
    /// Widens `LANES` elements.
    ///
    /// # Safety
    /// `src` is valid for reading as many.
    unsafe fn load<I: Isa>(isa: I, src: *const Self) -> I::F;
    /// One element, widened.
    fn widen(self) -> f32;
}

macro_rules! stored {
    ($($t:ty => $load:ident, $widen:expr;)*) => {$(
        impl Stored for $t {
            #[inline(always)]
            unsafe fn load<I: Isa>(isa: I, src: *const Self) -> I::F {
                // SAFETY: the caller vouches for LANES elements.
                unsafe { isa.$load(src) }
            }
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
        }
    )*};
}
stored! {
    f32 => load_ptr, |x| x;
    f16 => load_f16_ptr, crate::isa::widen_f16;
    bf16 => load_bf16_ptr, bf16::to_f32;
    i8 => load_i8_ptr, f32::from;
}

/// Bytes ahead at which rows are first prefetched, into the nearest cache. Measured on Zen 5, four rows over caches of
/// 32 to 256 MiB: against 8 KiB, f32 reads 0.96 to 1.0 times as fast and halves 1.12 to 1.14; 16 KiB is 0.89 to 1.0 of
/// this. Into the second cache only, 4 KiB ahead, it was 0.7 to 0.8 of this.
const PREFETCH_FAR: usize = 12 << 10;

/// Bytes ahead at which they are prefetched again. A processor drops prefetches while all its miss buffers are taken
/// (on Zen 5 they can be issued six times as fast as memory answers), and a missing line stalls everything. Measured
/// there, prefetching twice is 1.09 to 1.2 times as fast as once; every other line only, either time, gains nothing.
const PREFETCH_NEAR: usize = 4 << 10;

/// Bytes ahead at which one row of every group is prefetched besides, so that its page is translated before its rows
/// are requested: a page walk can take as long as reading the page, above all in a virtual machine. Without, 0.79 to
/// 0.92 of the speed.
const PREFETCH_PAGE: usize = 32 << 10;

/// Where the rows of two tiles start, the present one and the next in turn; a tile of fewer rows ends with its last one
/// repeated.
pub(crate) type Starts = [usize; 2 * TILE];

/// Writes where the rows of a tile start that lie a step apart, from `first` on, the last of `len` repeated.
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

/// What [`Rows`] are made of, before it is checked: the check is worth vectors, and is left to the kernel that reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unchecked<'a, T> {
    /// Where the rows lie.
    pub(crate) data: &'a [T],
    /// Index of each row's first element.
    pub(crate) starts: &'a Starts,
    /// Which of them is the first row's: 0 or [`TILE`].
    pub(crate) base: usize,
    /// How many rows there are.
    pub(crate) len: usize,
    /// Elements of each.
    pub(crate) columns: usize,
}

impl<'a, T> Unchecked<'a, T> {
    /// Finds all rows to lie inside the slice, those of the next tile as well.
    #[inline(always)]
    pub(crate) fn check(self) -> Rows<'a, T> {
        let Self { data, starts, base, len, columns } = self;
        let last = data.len().checked_sub(columns);
        let largest = starts.iter().fold(0, |max, &start| if start > max { start } else { max });
        assert!(last.is_some_and(|last| largest <= last), "a row reaches outside of its slice");
        assert!(len > 0 && len <= TILE && columns > 0);
        Rows { data, starts, base, len, columns }
    }
}

/// Some rows of a slice, each `columns` elements side by side; at least one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    starts: &'a Starts,
    base: usize,
    len: usize,
    columns: usize,
}

impl<T> Rows<'_, T> {
    /// How many.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address of a row, of this tile or of the next.
    #[inline(always)]
    fn at(&self, n: usize) -> *const T {
        let start = self.starts[(self.base + n) % (2 * TILE)];
        // SAFETY: `Unchecked::check` has found that every row lies inside the slice.
        unsafe { self.data.as_ptr().add(start) }
    }

    /// Bytes from a row to the one that is asked for while it is read. Exact where rows are evenly apart, as they are
    /// but at the ends of pages; a hint elsewhere.
    #[inline(always)]
    fn lead(&self, row: usize, ahead: usize) -> usize {
        self.at(row + ahead).addr().wrapping_sub(self.at(row).addr())
    }

    /// How many rows lie in a distance in bytes; at most a tile.
    #[inline(always)]
    fn rows_in(&self, bytes: usize) -> usize {
        (bytes / (self.columns * size_of::<T>())).clamp(1, TILE)
    }

    /// Prefetches the start of a row far ahead of this one.
    #[inline(always)]
    fn prefetch_page<I: Isa>(&self, isa: I, row: usize, pages: usize) {
        isa.prefetch::<false>(self.at(row).cast::<u8>().wrapping_add(self.lead(row, pages)));
    }

    /// Whether all elements are finite. Columns come in whole vectors.
    #[inline(always)]
    pub(crate) fn is_finite<I: Isa>(&self, isa: I) -> bool
    where
        T: Stored,
    {
        assert!(self.columns.is_multiple_of(I::LANES));
        // Sums of x·0, which is 0 for finite x and NaN else, in two chains.
        let zero = isa.splat(0.0);
        let mut sums = [zero; 2];
        for n in 0..self.len() {
            let row = self.at(n);
            for (i, c) in (0..self.columns).step_by(I::LANES).enumerate() {
                // SAFETY: a whole vector below `columns` of a row that has been checked.
                let x = unsafe { T::load(isa, row.add(c)) };
                sums[i % 2] = isa.mul_add(x, zero, sums[i % 2]);
            }
        }
        let mut lanes = [0.0; 16];
        isa.store(isa.add(sums[0], sums[1]), &mut lanes);
        lanes.iter().all(|&x| x == 0.0)
    }
}

/// Vectors of elements in a cache line, or 1.
const fn in_line<T>(lanes: usize) -> usize {
    let vectors = 64 / (lanes * size_of::<T>());
    if vectors == 0 { 1 } else { vectors }
}

/// Rounds a number of query rows up to one that is compiled: 1, 2, 4 or 8 (with four lanes at most 4), and 3 or 6 with
/// 16 lanes.
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

/// Most query rows that are taken together.
pub(crate) const fn most(lanes: usize) -> usize {
    if lanes < 8 { 4 } else { 8 }
}

/// Rows that a number of them needs room for, blocks of [`most`] and the last as [`rows_for`] says.
pub(crate) const fn padded(rows: usize, lanes: usize) -> usize {
    let (whole, rest) = (rows / most(lanes) * most(lanes), rows % most(lanes));
    if rest == 0 { whole } else { whole + rows_for(rest, lanes) }
}

/// Evaluates an expression with the constants of the instance for a number of rows: rows R, keys K that are taken
/// together (`R·K` is a multiple of 4), steps S of K keys whose sums are finished together, vectors C of channels of an
/// output at a time.
macro_rules! with_rows {
    ($I:ident, $rows:expr, [$R:ident, $K:ident, $S:ident, $C:ident] => $body:expr) => {
        with_rows!(@isa $I, $rows, $R, $K, $S, $C, $body;
            16 => [1 4 4 8] [2 4 2 8] [3 4 1 8] [4 4 1 4] [6 2 1 4] [8 2 1 2],
            8 => [1 4 2 8] [2 4 1 4] [4 2 1 2] [8 1 1 1],
            4 => [1 4 1 8] [2 2 1 4] [4 1 1 2])
    };
    (@isa $I:ident, $rows:expr, $R:ident, $K:ident, $S:ident, $C:ident, $body:expr;
        $($lanes:literal => $([$r:literal $k:literal $s:literal $c:literal])*),*) => {
        // A constant, so that what other levels would run is not compiled at all.
        $(if const { $I::LANES == $lanes } {
            match $rows {
                $($r => {
                    const $R: usize = $r;
                    const $K: usize = $k;
                    const $S: usize = $s;
                    const $C: usize = $c;
                    $body
                })*
                _ => unreachable!("a number of rows that `rows_for` does not give"),
            }
        })*
    };
}

use with_rows;
