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
//! bytes     dots with keys of int8 or q8_0 as integers, where the level multiplies bytes faster (at AVX2 for
//!           Precision::Fast alone); for Precision::Fast weighted, too
//! pairs     queries for dots with bfloat16 keys, two channels in a lane, where the level multiplies such pairs
//! weighted  acc[r][c…] += p[r][key]·value_key[c…]   for 8 keys, in a tree over the tile,
//!           then o[r][c…] = o[r][c…]·factor[r] + acc[r][c…]
//! ```
//!
//! With few rows both products are memory-bound. They prefetch lines far ahead and near, a few at a time between the
//! multiply-adds; how far is a [policy of the processor](crate::prefetch). No branch chooses between the two: a branch
//! between multiply-adds makes the compiler keep their operands in memory (eight rows took 1.7 times as long).
//!
//! [`rows`] says where keys and values are, [`heads`] which heads are read together, and [`ahead`] which lines are
//! requested. The number of rows or keys that are taken together changes no bit: a score is one chain per lane, cut
//! every `CHAIN` steps, and an output is one chain over each 8 keys of a tile.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use attn_core::half::{bf16, f16};
use attn_core::row::Row;

use crate::isa::Isa;

mod ahead;
pub(crate) mod bytes;
mod dots;
mod heads;
pub(crate) mod packed;
pub(crate) mod pairs;
mod rows;
mod weighted;

pub(crate) use dots::dots;
pub(crate) use heads::Heads;
pub(crate) use rows::{Group, Places, Rows, TILES, Tile, Unchecked, tiles_of};
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
    /// How a row is made of [integers](bytes), if it is.
    const INTEGERS: Option<Integers> = None;
    /// Whether two of them are a word of a product of pairs of bfloat16.
    const PAIRS: bool = false;
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
    /// Whether two vectors are widened [together](Self::load_two) in fewer instructions. Those of a format with blocks
    /// are in one.
    const TOGETHER: bool = false;
    /// Widens `2·LANES` numbers of a row, from a multiple of as many on.
    ///
    /// # Safety
    /// As [`load`](Self::load), for as many numbers.
    #[inline(always)]
    unsafe fn load_two<I: Isa>(isa: I, row: *const Self, from: usize) -> [I::F; 2] {
        // SAFETY: the caller vouches for the numbers.
        unsafe { [Self::load(isa, row, from), Self::load(isa, row, from + I::LANES)] }
    }
    /// `LANES` words of a product with a row, from a channel on: numbers, widened, or pairs of them.
    ///
    /// # Safety
    /// As [`load`](Self::load), for `LANES·WORD` numbers; a word of two is only of a type of [pairs](Self::PAIRS),
    /// whose elements are two bytes.
    #[inline(always)]
    unsafe fn load_words<I: Isa>(isa: I, row: *const Self, from: usize) -> I::F {
        // SAFETY: the caller vouches for the numbers.
        unsafe { if const { I::WORD == 1 } { Self::load(isa, row, from) } else { isa.load_ptr(row.add(from).cast()) } }
    }
    /// Widens the numbers of a row, as many as both slices hold.
    fn read(row: Row<'_, Self>, out: &mut [f32]);
}

macro_rules! stored {
    ($($t:ty => $load:ident, $widen:expr, $finite:literal, { $($items:tt)* };)*) => {$(
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
            $($items)*
        }
    )*};
}
stored! {
    f32 => load_ptr, |x| x, false, {};
    f16 => load_f16_ptr, crate::isa::widen_f16, false, {};
    bf16 => load_bf16_ptr, bf16::to_f32, false, {
        const PAIRS: bool = true;
    };
    i8 => load_i8_ptr, f32::from, true, {
        const INTEGERS: Option<Integers> = Some(Integers::Bytes);
    };
}

/// How a row is made of int8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Integers {
    /// One after the other.
    Bytes,
    /// In blocks of 32 behind an f16, their scale: ggml's q8_0.
    Blocks,
}

/// Rows of queries, `[rows][columns]`, as the products read them.
#[derive(Clone, Copy)]
pub(crate) struct QueryRows<'a> {
    pub(crate) floats: &'a [f32],
    /// The same as [integers](bytes) if the keys are [some](Stored::INTEGERS) and not too wide, or as [`pairs`].
    pub(crate) words: &'a [f32],
    /// The rows that are pairs, as bits.
    pub(crate) paired: u32,
    /// Whether integers have few digits: those of `Precision::Fast`.
    pub(crate) fast: bool,
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
            8 => [1 4 2 8] [2 4 1 4] [4 2 1 2] [8 1 1 2],
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
