//! Products with few queries: lanes are channels, and every element of a key or value is read once for all rows.
//!
//! With as many queries as lanes, [`product`](super::product) keeps all lanes busy and reads keys by broadcast. With a few, most of
//! its lanes would idle, and an element would cost an instruction. Here a vector of a key's channels is loaded (and widened) once
//! and meets `R` query rows in registers; `K` keys are taken together, so that their `R·K` sums over lanes are formed in one go
//! ([`Isa::sum_fours`]). More than four keys at once would be as many streams from memory, which prefetchers do not like: measured
//! on Zen 4, 16 keys at a time read memory at 0.6 of the speed of 4.
//!
//! ```text
//! dots      acc[r][k] += q[r][c…]·key_k[c…]        for all c, then s[r][key] = Σ lanes of acc[r][k]
//! weighted  acc[r][c…] += p[r][key]·value_key[c…]   for all keys, then o[r][c…] = o[r][c…]·factor[r] + acc[r][c…]
//! ```
//!
//! Where a row lies is told by the index of its first element, one per key, so that pages, rings and strides are all alike. How
//! many rows or keys are taken together changes no bit: a score is one chain per lane, cut every `CHAIN` steps, and an
//! output one chain over the keys of a tile.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use attn_core::half::{bf16, f16};

use super::Isa;

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
    f16 => load_f16_ptr, super::widen_f16;
    bf16 => load_bf16_ptr, bf16::to_f32;
    i8 => load_i8_ptr, f32::from;
}

/// How far ahead rows are asked for, in bytes, into the nearest cache. Measured on Zen 5, four rows over caches of 32 to 256 MiB: against
/// 8 KiB, f32 reads 0.96 to 1.0 times as fast and halves 1.12 to 1.14; 16 KiB is 0.89 to 1.0 of this. Into the second cache only, 4 KiB
/// ahead, it was 0.7 to 0.8 of this.
const AHEAD: usize = 12 << 10;

/// How far ahead one row of every group is asked for besides, so that the address of its page is translated before its rows are asked
/// for: walking the tables can take as long as reading the page, above all in a virtual machine. Without, 0.79 to 0.92 of the speed.
const PAGES_AHEAD: usize = 32 << 10;

/// Where the rows of two tiles start, the present one and the next in turn; a tile of fewer rows ends with its last one repeated.
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

    /// Bytes from a row to the one that is asked for while it is read. Exact where rows are evenly apart, as they are but at the ends
    /// of pages; a hint elsewhere.
    #[inline(always)]
    fn lead(&self, row: usize, ahead: usize) -> usize {
        self.at(row + ahead).addr().wrapping_sub(self.at(row).addr())
    }

    /// How many rows lie in a distance in bytes; at most a tile.
    #[inline(always)]
    fn rows_in(&self, bytes: usize) -> usize {
        (bytes / (self.columns * size_of::<T>())).clamp(1, TILE)
    }

    /// Asks for the start of a row far ahead of this one.
    #[inline(always)]
    fn ask_for_page<I: Isa>(&self, isa: I, row: usize, pages: usize) {
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

/// Rounds a number of query rows up to one that is compiled: 1, 2, 4 or 8 (with four lanes at most 4), and 3 or 6 with 16 lanes.
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

/// Evaluates an expression with the constants of the instance for a number of rows: rows R, keys K that are taken together (`R·K` is a
/// multiple of 4), steps S of K keys whose sums are finished together, vectors C of channels of an
/// output for B rows at a time. Rows of outputs two by two let a pass over the values read whole lines in order.
macro_rules! with_rows {
    ($I:ident, $rows:expr, [$R:ident, $K:ident, $S:ident, $B:ident, $C:ident] => $body:expr) => {
        with_rows!(@isa $I, $rows, $R, $K, $S, $B, $C, $body;
            16 => [1 4 4 1 8] [2 4 2 2 8] [3 4 1 3 8] [4 4 1 2 8] [6 2 1 2 8] [8 2 1 2 8],
            8 => [1 4 2 1 8] [2 4 1 2 4] [4 2 1 4 2] [8 1 1 8 1],
            4 => [1 4 1 1 8] [2 2 1 2 4] [4 1 1 4 2])
    };
    (@isa $I:ident, $rows:expr, $R:ident, $K:ident, $S:ident, $B:ident, $C:ident, $body:expr;
        $($lanes:literal => $([$r:literal $k:literal $s:literal $b:literal $c:literal])*),*) => {
        // A constant, so that what other levels would run is not compiled at all.
        $(if const { $I::LANES == $lanes } {
            match $rows {
                $($r => {
                    const $R: usize = $r;
                    const $K: usize = $k;
                    const $S: usize = $s;
                    const $B: usize = $b;
                    const $C: usize = $c;
                    $body
                })*
                _ => unreachable!("a number of rows that `rows_for` does not give"),
            }
        })*
    };
}

/// `s[r][j] = Σ_c q[r][c]·key_j[c]` for `rows` query rows. `q`: `[rows][columns]`; `s`: `[rows][TILE]`, of which whole groups of
/// keys are written. `columns` is a multiple of `LANES`.
#[inline(always)]
pub(crate) fn dots<I: Isa, T: Stored>(isa: I, rows: usize, keys: Rows<'_, T>, q: &[f32], s: &mut [f32]) {
    let columns = keys.columns;
    assert!(columns.is_multiple_of(I::LANES) && q.len() >= rows * columns && s.len() >= rows * TILE);
    with_rows!(I, rows, [R, K, S, _B, _C] => {
        // SAFETY: the assertion above: R rows of queries and of scores, and rows of keys in whole vectors, which `Rows` has
        // checked.
        unsafe { dots_of::<I, T, R, K, S>(isa, keys, q.as_ptr(), s.as_mut_ptr()) }
    });
}

/// # Safety
/// `q` is readable for R rows of `columns` floats, a multiple of LANES; `s` writable for R rows of TILE.
#[inline(always)]
unsafe fn dots_of<I: Isa, T: Stored, const R: usize, const K: usize, const S: usize>(
    isa: I,
    keys: Rows<'_, T>,
    q: *const f32,
    s: *mut f32,
) {
    const { assert!(TILE.is_multiple_of(K * S) && (R * K).is_multiple_of(4) && S * R * K <= 16) }
    let (columns, ahead, pages) = (keys.columns, keys.rows_in(AHEAD), keys.rows_in(PAGES_AHEAD));
    for first in (0..keys.len()).step_by(K * S) {
        keys.ask_for_page(isa, first, pages);
        for chain in (0..columns).step_by(I::CHAIN * I::LANES) {
            let end = columns.min(chain + I::CHAIN * I::LANES);
            let mut fours = [isa.splat(0.0); 4];
            for step in 0..S {
                let at = first + step * K;
                let key: [*const T; K] = core::array::from_fn(
                    #[inline(always)]
                    |k| keys.at(at + k),
                );
                let lead = keys.lead(at, ahead);
                let mut acc = [[isa.splat(0.0); K]; R];
                for line in (chain..end).step_by(const { in_line::<T>(I::LANES) } * I::LANES) {
                    for k in 0..K {
                        isa.prefetch::<false>(key[k].wrapping_add(line).cast::<u8>().wrapping_add(lead));
                    }
                    for v in 0..const { in_line::<T>(I::LANES) } {
                        let c = line + v * I::LANES;
                        if c >= end {
                            break;
                        }
                        // SAFETY: whole vectors below `columns` of rows that `Rows` has checked, and of the queries the caller
                        // vouches for.
                        unsafe {
                            let vectors: [I::F; K] = core::array::from_fn(
                                #[inline(always)]
                                |k| T::load(isa, key[k].add(c)),
                            );
                            for r in 0..R {
                                let x = isa.load_ptr(q.add(r * columns + c));
                                for k in 0..K {
                                    acc[r][k] = isa.mul_add(x, vectors[k], acc[r][k]);
                                }
                            }
                        }
                    }
                }
                // Copied with constant indices, so that accumulators stay in registers.
                let mut flat = [isa.splat(0.0); 16];
                for r in 0..R {
                    for k in 0..K {
                        flat[r * K + k] = acc[r][k];
                    }
                }
                let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = flat;
                let sums = [[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p]];
                for n in 0..4 {
                    if n < R * K / 4 {
                        fours[(step * R * K / 4 + n) % 4] = isa.sum_fours(sums[n]);
                    }
                }
            }
            let mut sums = [0.0f32; 32];
            let joined = I::LANES / 4;
            for n in 0..(S * R * K / 4).div_ceil(joined) {
                let of = |i: usize| fours[(n * joined + i) % 4];
                isa.store(isa.join_fours([of(0), of(1), of(2), of(3)]), &mut sums[n * I::LANES..]);
            }
            for r in 0..R {
                for j in 0..K * S {
                    let sum = sums[j / K * R * K + r * K + j % K];
                    // SAFETY: TILE is a multiple of K·S, so that groups end inside a row of scores.
                    unsafe {
                        let slot = s.add(r * TILE + first + j);
                        *slot = if chain == 0 { sum } else { *slot + sum };
                    }
                }
            }
        }
    }
}

/// `o[r][c] = o[r][c]·factor[r] + Σ_j p[r][j]·value_j[c]` for `rows` rows. `p`: `[rows][TILE]`; `o`: `[rows][columns]`.
/// `columns` is a multiple of `LANES`.
#[inline(always)]
pub(crate) fn weighted<I: Isa, T: Stored>(
    isa: I,
    rows: usize,
    values: Rows<'_, T>,
    (p, factor): (&[f32], &[f32]),
    o: &mut [f32],
) {
    let columns = values.columns;
    assert!(columns.is_multiple_of(I::LANES) && o.len() >= rows * columns);
    assert!(p.len() >= rows * TILE && factor.len() >= rows);
    with_rows!(I, rows, [R, _K, _S, B, C] => {
        const { assert!(R.is_multiple_of(B)) }
        for r in (0..R).step_by(B) {
            let (p, factor, o) = (&p[r * TILE..], &factor[r..], &mut o[r * columns..]);
            // SAFETY: the assertions above: R rows of weights, factors and outputs in whole vectors, of which B are left from the r-th
            // on; the values are checked by `Rows`.
            unsafe { weighted_of::<I, T, B, C>(isa, values, p.as_ptr(), factor.as_ptr(), o.as_mut_ptr()) }
        }
    });
}

/// # Safety
/// `p` is readable for R rows of TILE floats, `factor` for R; `o` readable and writable for R rows of `columns` floats, a multiple
/// of LANES.
#[inline(always)]
unsafe fn weighted_of<I: Isa, T: Stored, const R: usize, const C: usize>(
    isa: I,
    values: Rows<'_, T>,
    p: *const f32,
    factor: *const f32,
    o: *mut f32,
) {
    let vectors = values.columns / I::LANES;
    let mut done = 0;
    // SAFETY: each block of vectors lies below `columns`, and the caller vouches for the rest.
    unsafe {
        while vectors - done >= C {
            block::<I, T, R, C>(isa, values, p, factor, o, done * I::LANES);
            done += C;
        }
        if C > 4 && vectors - done >= 4 {
            block::<I, T, R, 4>(isa, values, p, factor, o, done * I::LANES);
            done += 4;
        }
        while C > 1 && vectors > done {
            block::<I, T, R, 1>(isa, values, p, factor, o, done * I::LANES);
            done += 1;
        }
    }
}

/// Vectors of elements in a cache line, or 1.
const fn in_line<T>(lanes: usize) -> usize {
    let vectors = 64 / (lanes * size_of::<T>());
    if vectors == 0 { 1 } else { vectors }
}

/// Values that one lead serves.
const GROUP: usize = 4;

/// C vectors of channels from `from` on.
///
/// # Safety
/// As [`weighted_of`]; the vectors lie below `columns`.
#[inline(always)]
unsafe fn block<I: Isa, T: Stored, const R: usize, const C: usize>(
    isa: I,
    values: Rows<'_, T>,
    p: *const f32,
    factor: *const f32,
    o: *mut f32,
    from: usize,
) {
    let mut acc = [[isa.splat(0.0); C]; R];
    let (ahead, pages) = (values.rows_in(AHEAD), values.rows_in(PAGES_AHEAD));
    let lines = (values.columns * size_of::<T>()).div_ceil(64);
    // SAFETY: rows of values in whole vectors are checked by `Rows`; the caller vouches for weights, factors and outputs.
    unsafe {
        for first in (0..values.len()).step_by(GROUP) {
            let lead = values.lead(first, ahead);
            if from == 0 {
                values.ask_for_page(isa, first, pages);
            }
            for j in first..values.len().min(first + GROUP) {
                let value = values.at(j).add(from);
                // The whole row, while its first channels are read.
                if from == 0 {
                    let mut line = value.cast::<u8>().wrapping_add(lead);
                    for _ in 0..lines {
                        isa.prefetch::<false>(line);
                        line = line.wrapping_add(64);
                    }
                }
                let weight: [I::F; R] = core::array::from_fn(
                    #[inline(always)]
                    |r| isa.splat(*p.add(r * TILE + j)),
                );
                for c in 0..C {
                    let x = T::load(isa, value.add(c * I::LANES));
                    for r in 0..R {
                        acc[r][c] = isa.mul_add(weight[r], x, acc[r][c]);
                    }
                }
            }
        }
        for r in 0..R {
            let factor = isa.splat(*factor.add(r));
            for c in 0..C {
                let slot = o.add(r * values.columns + from + c * I::LANES);
                isa.store_ptr(isa.mul_add(isa.load_ptr(slot), factor, acc[r][c]), slot);
            }
        }
    }
}
