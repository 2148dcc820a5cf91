//! Sums of the values of some tiles, weighted by some rows of weights.
//!
//! Works on one part of a tile at a time, on C vectors of channels of R rows at a time. If a value has more channels
//! than registers can accumulate, several blocks pass over the part; all but the first find it in the nearest cache.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use core::ops::Range;
use core::sync::atomic::{Ordering, compiler_fence};

use super::ahead::{Ahead, Eights, by_eights, may_be_once, turns};
use super::rows::EIGHT;
use super::{Rows, Stored, TILE, Tile, in_line, with_rows};
use crate::isa::{Isa, MAX_LANES, hint};
use crate::math::{add_compensated, finite_or_zero};

/// Outputs of some rows: `[rows][columns]` each.
pub(crate) struct Sums<'s> {
    /// The sums.
    pub(crate) o: &'s mut [f32],
    /// What rounding took from the sums.
    pub(crate) rest: &'s mut [f32],
    /// Sums over parts of a tile that wait for their sibling: sums of one, two and four parts.
    pub(crate) waiting: [&'s mut [f32]; 3],
}

impl<'s> Sums<'s> {
    /// The sums of the rows from an element on.
    pub(crate) fn from(&mut self, at: usize) -> Sums<'_> {
        let waiting = self.waiting.each_mut().map(|array| &mut array[at..]);
        Sums { o: &mut self.o[at..], rest: &mut self.rest[at..], waiting }
    }
}

/// `o[r][c] = o[r][c]·factor[r] + Σ_j p[r][j]·value_j[c]` for `rows` rows, one tile after the other. `p`:
/// `[rows][TILE]` for each tile, and `factor`: `[rows]`, both with the floats from tile to tile; sums:
/// `[rows][columns]`. The rows of the next head come [`Heads::rows`](super::Heads) later. `columns` is a multiple of
/// `LANES`.
///
/// If there are several heads, each reads some values, and then each the next ones.
///
/// A tile is added up in a tree: chains of eight values, pairs of those, pairs of pairs, halves. The result joins a
/// compensated sum. The chains err most, by 2.5u at most.
#[inline(always)]
pub(crate) fn weighted<I: Isa, T: Stored>(
    isa: I,
    rows: usize,
    (values, tiles): (&Rows<'_, T>, Range<usize>),
    [(p, p_stride), (factor, factor_stride)]: [(&[f32], usize); 2],
    sums: Sums<'_>,
) {
    let (columns, heads) = (values.columns(), values.heads());
    let Sums { o, rest, waiting: [one, two, four] } = sums;
    let arrays = [o, rest, one, two, four];
    let all_rows = (heads.count - 1) * heads.rows + rows;
    assert!(columns.is_multiple_of(I::LANES) && arrays.iter().all(|array| array.len() >= all_rows * columns));
    let o = arrays.map(|array| array.as_mut_ptr());
    with_rows!(I, T, rows, [R, _K, _S, C] => {
        let (values, weights) = ((values, tiles.clone()), [(p, p_stride), (factor, factor_stride)]);
        // SAFETY: the assertion above: sums of all rows.
        unsafe {
            if const { may_be_by_line::<T>(R, I::LANES) } && values.0.prefetch().by_line {
                weighted_of_rows::<I, T, R, 1>(isa, values, weights, o);
            } else {
                weighted_of_rows::<I, T, R, C>(isa, values, weights, o);
            }
        }
    });
}

/// [`weighted`] of R rows, compiled by itself. C vectors of channels are added at a time.
///
/// # Safety
/// The arrays `o` are readable and writable for R rows of `columns` floats of each head, a multiple of LANES.
#[inline(always)]
unsafe fn weighted_of_rows<I: Isa, T: Stored, const R: usize, const C: usize>(
    isa: I,
    (values, tiles): (&Rows<'_, T>, Range<usize>),
    [(p, p_stride), (factor, factor_stride)]: [(&[f32], usize); 2],
    o: [*mut f32; 5],
) {
    isa.apart(
        #[inline(always)]
        || {
            let (columns, heads) = (values.columns(), values.heads());
            let ahead = Ahead::of::<I, T, R>(values, in_order(R, columns / I::LANES, I::LANES));
            let turn = ahead.turn().next_multiple_of(const { PART * parts(I::LANES, R, 1) });
            for (n, tile) in tiles.enumerate() {
                let len = values.tile(tile, 0).len();
                for first in (0..len).step_by(turn) {
                    let some = first..if first + turn < len { first + turn } else { len };
                    for head in 0..heads.count {
                        let before = head * heads.rows;
                        let p = &p[n * p_stride + before * TILE..][..R * TILE];
                        let factor = &factor[n * factor_stride + before..][..R];
                        let values = values.tile(tile, head);
                        let lines =
                            if heads.count > 1 { ahead.of_heads(&values, head, (first, turn), 1) } else { None };
                        let values = (values, ahead, lines);
                        // SAFETY: these slices: R rows of weights and factors; the caller vouches for the outputs; the
                        // values are checked by `Rows`.
                        unsafe {
                            let [o, rest, one, two, four] = o;
                            let at = before * columns;
                            let o = [o.add(at), rest.add(at), one.add(at), two.add(at), four.add(at)];
                            weighted_of::<I, T, R, C>(isa, values, some.clone(), p.as_ptr(), factor.as_ptr(), o);
                        }
                    }
                }
            }
        },
    );
}

/// Values of a chain: those of one distance.
const PART: usize = EIGHT;

/// The number of parts that the blocks pass over together. Their sums are joined in registers if R·C sums leave room,
/// which saves stores. All blocks must find the values of these parts in the nearest cache.
const fn parts(lanes: usize, rows: usize, vectors: usize) -> usize {
    if lanes < 16 || rows * vectors > 12 { 1 } else { 2 }
}

/// Whether the rows are taken in two halves, one after the other, over the same eight values: four rows of two
/// vectors need six loads for eight multiply-adds, eight rows of one vector nine. Measured 2026-11-30 on Zen 3 at AVX2,
/// groups of eight over 4096 tokens, cold: numbers 1.02 to 1.12 times as fast, q4_0 and q8_0, whose bytes are widened
/// twice, 1.0, fp8 0.92 to 0.99.
const fn in_halves(rows: usize, lanes: usize) -> bool {
    rows == 8 && lanes == 8
}

/// Of some values of a tile of one head, the first a multiple of the parts that blocks pass over.
///
/// # Safety
/// `p` is readable for R rows of TILE floats, `factor` for R; the arrays `o` readable and writable for R rows of
/// `columns` floats, a multiple of LANES.
#[inline(always)]
unsafe fn weighted_of<I: Isa, T: Stored, const R: usize, const C: usize>(
    isa: I,
    (values, ahead, lines): (Tile<'_, T>, Ahead, Option<(*const u8, isize)>),
    some: Range<usize>,
    p: *const f32,
    factor: *const f32,
    o: [*mut f32; 5],
) {
    let columns = values.columns();
    let vectors = columns / I::LANES;
    // Of several blocks, all but the first must find the values in the nearest cache.
    let step = if vectors <= C { const { PART * parts(I::LANES, R, C) } } else { PART };
    let at_once = const { wide::<I, T>(R) } && vectors == WIDE;
    let once = ahead.is_once() && (vectors <= C || at_once);
    let (rows, beyond) = ahead.of_values(&values, step);
    let prefetcher = Prefetcher { lines, first: some.start, rows, beyond };
    for first in some.step_by(step) {
        let mut done = 0;
        // The chains that begin here: where their values are, and what is requested meanwhile.
        // Not by `map`: what calls a closure there may not be inlined.
        let chains = [first, first + PART];
        let chains = [prefetcher.chain(&values, chains[0]), prefetcher.chain(&values, chains[1])];
        // A block of some vectors, with one request for each line or with two.
        macro_rules! block {
            ($C:expr) => {{
                let at = (first, step, done * I::LANES, chains);
                // SAFETY: the vectors are below `columns`; the caller vouches for the rest.
                unsafe {
                    if const { in_halves(R, I::LANES) } {
                        for r in [0, R / 2] {
                            let mut o = o;
                            for array in &mut o {
                                *array = array.add(r * columns);
                            }
                            let (p, factor) = (p.add(r * TILE), factor.add(r));
                            block::<I, T, 4, { $C }, 2>(isa, &values, at, p, factor, o);
                        }
                    } else if const { may_be_once::<T>(R, I::LANES) } && once {
                        block::<I, T, R, { $C }, 1>(isa, &values, at, p, factor, o);
                    } else {
                        block::<I, T, R, { $C }, 2>(isa, &values, at, p, factor, o);
                    }
                }
                done += $C;
            }};
        }
        if const { wide::<I, T>(R) } && vectors == WIDE {
            block!(WIDE);
        }
        if const { R == 1 && I::LANES == 16 && T::EVERY } {
            match vectors {
                5 => block!(5),
                6 => block!(6),
                7 => block!(7),
                _ => {}
            }
        }
        while vectors - done >= C {
            block!(C);
        }
        if C > 4 && vectors - done >= 4 {
            block!(4);
        }
        while C > 1 && vectors > done {
            block!(1);
        }
    }
}

/// The vectors of a value of 256 channels at AVX-512, of 128 at AVX2. One row takes them at once, since its values are
/// read best in the order of memory, even where not all sums have a register. Measured on Zen 3, cold caches of 128
/// MiB: f32 and halves 1.1 times as fast, bytes 0.98; halves that the third cache holds 0.9.
const WIDE: usize = 16;

/// Whether [`WIDE`] values are compiled for R rows.
const fn wide<I: Isa, T: Stored>(rows: usize) -> bool {
    rows == 1 && T::EVERY && (I::LANES == 16 || I::LANES == 8 && size_of::<T>() > 1)
}

/// Whether the lines of values are read in the order of memory, or nearly: registers hold the sums of most vectors.
const fn in_order(rows: usize, vectors: usize, lanes: usize) -> bool {
    match rows {
        1 => vectors <= if lanes == 16 { WIDE } else { 8 } || lanes == 8 && vectors == WIDE,
        2 => (vectors == 4 || vectors == 8) && lanes == 16,
        _ => false,
    }
}

/// Whether the sums of rows are compiled for values [by line](crate::prefetch::Prefetch::by_line), too.
const fn may_be_by_line<T>(rows: usize, lanes: usize) -> bool {
    matches!(rows, 3 | 4) && lanes == 16 && size_of::<T>() == 4
}

/// The number of values that a chain adds in one turn of its loop.
const fn group(vectors: usize) -> usize {
    if vectors >= 8 { 1 } else { 4 }
}

/// Rows from the present value to those whose lines a block prefetches meanwhile, for its own channels.
#[derive(Clone, Copy)]
struct Prefetcher {
    /// The lines that the first of the values requests, if they are [of other heads](Ahead::of_heads).
    lines: Option<(*const u8, isize)>,
    first: usize,
    /// Into the second cache, and into the first.
    rows: [usize; 2],
    /// Bytes from the former to the lines that are prefetched into the second cache.
    beyond: usize,
}

impl Prefetcher {
    /// The chain that begins at a value.
    #[inline(always)]
    fn chain<T: Stored>(self, values: &Tile<'_, T>, first: usize) -> Chain<T> {
        let ([second, near], value) = (self.rows, values.row(first));
        if let Some((line, step)) = self.lines {
            let lines = (line.wrapping_byte_offset(step * (first - self.first) as isize), step);
            return Chain { value, lines, ahead: [0; 2] };
        }
        let ahead = [values.lead(first, second).wrapping_add(self.beyond), values.lead(first, near)];
        Chain { value, lines: (value.cast(), values.step()), ahead }
    }
}

/// Adds one value to a chain. LINES is the number of requests for each of its lines: into the first cache, or into
/// both.
///
/// # Safety
/// As [`chain`]; the value has C vectors.
#[inline(always)]
unsafe fn add_value<I: Isa, T: Stored, const R: usize, const C: usize, const LINES: usize>(
    isa: I,
    (value, from, ahead): (*const T, usize, [usize; 2]),
    requested: Option<*const u8>,
    p: *const f32,
    acc: &mut [[I::F; C]; R],
) {
    // SAFETY: the caller vouches for the value and the weights.
    unsafe {
        let line = |c: usize| value.wrapping_add(T::elements(from + c * I::LANES)).cast::<u8>();
        if const { LINES > 1 } {
            if let Some(first) = requested {
                for c in 0..C {
                    if c.is_multiple_of(const { in_line::<T>(I::LANES) }) {
                        let line = first.wrapping_add(T::elements(c * I::LANES) * size_of::<T>());
                        isa.prefetch::<{ hint::SECOND }>(line.wrapping_add(ahead[0]));
                        isa.prefetch::<{ hint::READ }>(line.wrapping_add(ahead[1]));
                    }
                }
            }
            compiler_fence(Ordering::SeqCst);
        }
        // A loop: the closure of `from_fn` may be compiled by itself, without the level's instructions.
        let mut x = [isa.splat(0.0); C];
        for c in 0..C {
            if const { !T::TOGETHER || !C.is_multiple_of(2) } {
                x[c] = T::load(isa, value, from + c * I::LANES);
            } else if c.is_multiple_of(2) {
                [x[c], x[c + 1]] = T::load_two(isa, value, from + c * I::LANES);
            }
            if const { LINES == 1 } && (c + 1).is_multiple_of(const { in_line::<T>(I::LANES) }) {
                isa.prefetch::<{ hint::READ }>(line(c).wrapping_add(ahead[1]));
                compiler_fence(Ordering::SeqCst);
            }
        }
        for r in 0..R {
            let weight = isa.splat(*p.add(r * TILE));
            for c in 0..C {
                acc[r][c] = isa.mul_add(weight, x[c], acc[r][c]);
            }
        }
    }
}

/// Where a chain begins.
#[derive(Clone, Copy)]
struct Chain<T> {
    value: *const T,
    /// A line of the first value, or of the row that requests start from instead; and the bytes to that of the next.
    lines: (*const u8, isize),
    /// Bytes from these lines to those that are requested.
    ahead: [usize; 2],
}

/// The chain of the part of a tile from value `first` on: `Σ_j p[r][j]·value_j[c…]` for R rows and C vectors of
/// channels.
///
/// # Safety
/// As [`block`].
#[inline(always)]
unsafe fn chain<I: Isa, T: Stored, const R: usize, const C: usize, const LINES: usize>(
    isa: I,
    values: &Tile<'_, T>,
    Chain { mut value, lines, ahead }: Chain<T>,
    p: *const f32,
    from: usize,
    first: usize,
) -> [[I::F; C]; R] {
    let mut acc = [[isa.splat(0.0); C]; R];
    let (mut j, end) = (first, values.len().min(first + PART));
    let step = values.step();
    let mut lines = Eights::of::<I, T, C>(values.columns(), lines, from);
    while j < end {
        // SAFETY: values of the tile, in whole vectors, as `Rows` has checked; the caller vouches for the weights.
        unsafe {
            let some = if end - j >= const { group(C) } { const { group(C) } } else { end - j };
            macro_rules! add {
                ($n:expr, $requests:expr) => {
                    let line = (const { !by_eights::<I, T>() } || $requests).then_some(lines.first);
                    add_value::<I, T, R, C, LINES>(isa, (value, from, ahead), line, p.add(j + $n), &mut acc);
                    value = value.wrapping_byte_offset(step);
                    lines.first = lines.first.wrapping_byte_offset(lines.step);
                };
            }
            // Written out: a loop would ask at each value whether it requests a line.
            macro_rules! group {
                ($($n:literal)*) => {$(
                    if const { $n < group(C) } {
                        add!($n, const { $n % turns::<I, T>(C) == 0 });
                    }
                )*};
            }
            if some == const { group(C) } {
                group!(0 1 2 3);
            } else {
                for n in 0..some {
                    add!(n, n.is_multiple_of(const { turns::<I, T>(C) }));
                }
            }
            j += some;
        }
    }
    acc
}

/// One block: C vectors of channels from `from` on, over the `step` values from `first` on.
///
/// # Safety
/// As [`weighted_of`]; the vectors are below `columns`, and the first value is in the tile.
#[inline(always)]
unsafe fn block<I: Isa, T: Stored, const R: usize, const C: usize, const LINES: usize>(
    isa: I,
    values: &Tile<'_, T>,
    (first, step, from, chains): (usize, usize, usize, [Chain<T>; 2]),
    p: *const f32,
    factor: *const f32,
    o: [*mut f32; 5],
) {
    let columns = values.columns();
    // SAFETY: rows of values in whole vectors are checked by `Rows`; the caller vouches for weights, factors and
    // outputs.
    unsafe {
        let mut acc = chain::<I, T, R, C, LINES>(isa, values, chains[0], p, from, first);
        if const { parts(I::LANES, R, C) > 1 } && step > PART && first + PART < values.len() {
            let other = chain::<I, T, R, C, LINES>(isa, values, chains[1], p, from, first + PART);
            for r in 0..R {
                for c in 0..C {
                    acc[r][c] = isa.add(acc[r][c], other[r][c]);
                }
            }
        }
        // The n-th sum completes as many nodes of the tree as n has trailing ones; the last sum completes all.
        let [o, rest, waiting @ ..] = o;
        let (nth, last) = (first / step, first + step >= values.len());
        let ends = nth.trailing_ones() as usize;
        for (level, slots) in waiting.into_iter().enumerate() {
            if nth >> level & 1 == 1 && (last || level < ends) {
                for r in 0..R {
                    for c in 0..C {
                        let slot = slots.add(r * columns + from + c * I::LANES);
                        acc[r][c] = isa.add(isa.load_ptr(slot), acc[r][c]);
                    }
                }
            }
        }
        if !last {
            for r in 0..R {
                for c in 0..C {
                    isa.store_ptr(acc[r][c], waiting[ends].add(r * columns + from + c * I::LANES));
                }
            }
            return;
        }
        let mut tile: TileSums<R, C> = [[core::mem::MaybeUninit::uninit(); C]; R];
        for r in 0..R {
            for c in 0..C {
                isa.store_ptr(acc[r][c], tile[r][c].as_mut_ptr().cast());
            }
        }
        add_tile(isa, &tile, factor, (o.add(from), rest.add(from)), columns);
    }
}

/// The sums of a tile: C vectors of channels of R rows, each with room for a vector of any level.
pub(super) type TileSums<const R: usize, const C: usize> = [[core::mem::MaybeUninit<[f32; MAX_LANES]>; C]; R];

/// Adds the sums of a whole tile to what was before. They come through memory: so this is compiled once for all types
/// of values. (For all numbers of rows too, groups of queries were 2 to 3 % slower at AVX2.)
///
/// # Safety
/// The first LANES floats of each place of `tile` are there; `factor` is readable for R floats, `o` and `rest` are
/// readable and writable for C vectors of R rows that lie `columns` apart.
#[inline(never)]
pub(super) unsafe fn add_tile<I: Isa, const R: usize, const C: usize>(
    isa: I,
    tile: &TileSums<R, C>,
    factor: *const f32,
    (o, rest): (*mut f32, *mut f32),
    columns: usize,
) {
    isa.vectorize(
        #[inline(always)]
        || {
            for r in 0..R {
                // SAFETY: r is below R, c below C, and the caller vouches for these places.
                unsafe {
                    let by = *factor.add(r);
                    // A factor of 1 changes no bit.
                    let factor = (by != 1.0).then(
                        #[inline(always)]
                        || isa.splat(by),
                    );
                    for c in 0..C {
                        let at = r * columns + c * I::LANES;
                        let (o, rest) = (o.add(at), rest.add(at));
                        let before = (isa.load_ptr(o), isa.load_ptr(rest));
                        let part = isa.load_ptr(tile[r][c].as_ptr().cast());
                        let (sum, missing) = add_compensated(isa, before, factor, part);
                        isa.store_ptr(sum, o);
                        isa.store_ptr(finite_or_zero(isa, missing), rest);
                    }
                }
            }
        },
    );
}
