//! Products of some query rows with keys of int8 or q8_0, as integers, where lanes are keys.
//!
//! Floats cost a multiply-add for each number and row, and a conversion for each number. A processor multiplies four
//! times as many bytes. So a query is written as integers of 24 bits times a power of two, each in three digits of
//! eight bits, and [`Isa::dot_bytes`] sums the products of each digit with the keys, exactly:
//!
//! ```text
//! q ≈ unit·n, |n| < 2²³, n = 65536·a + 256·b + c         s = unit·(256·Σ(256·a + b)·k + Σ c·k)
//! ```
//!
//! Keys in blocks have their own sums, times the block's scale.
//!
//! At AVX2, which multiplies sixteen bits at a time, integers of two digits lie whole, and lanes are channels: of keys
//! in blocks each lane adds up its own. Integers of three digits would gain nothing. SDOT on Arm takes keys as they
//! lie, so that lanes are channels there, too, and the digits of a row lie apart.
//!
//! The only rounding that grows is that of the query: by at most `unit/2`, which is `2u` of the row's largest; with two
//! digits, of `Precision::Fast`, 256 times as much. Queries in halves that are not more than some thousand times
//! smaller than it are not rounded (with two digits, not more than some ten times). The sums are exact, and are rounded
//! twice, of a block before they join those of others. Products of floats would round once for each number.
//!
//! Rows that are not finite, or whose numbers are huge or tiny, are multiplied as floats, and so are keys of more than
//! [`WIDEST`] channels.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use super::ahead::Ahead;
use super::{Integers, Rows, Stored, TILE, Tile, tiles_of};
use crate::isa::{BLOCK, Bytes, Integer, Isa, Order};
use crate::prefetch::Into;

pub(crate) mod values;

/// The largest number of channels: no sum overflows, and `256·Σ a·k` neither.
pub(crate) const WIDEST: usize = 256;

/// Digits of an integer: of [`Precision::Exact`](attn_core::Precision).
pub(crate) const DIGITS: usize = 3;

/// Digits of an integer under [`Precision::Fast`](attn_core::Precision).
pub(crate) const FAST_DIGITS: usize = 2;

/// Whether a level multiplies bytes by integers, of few digits or of many.
#[inline(always)]
pub(crate) const fn multiplies<I: Isa>(fast: bool) -> bool {
    I::DIGITS >= if fast { FAST_DIGITS } else { DIGITS }
}

/// Blocks of a key.
const BLOCKS: usize = WIDEST / BLOCK;

/// Floats beside the digits of a row: where its sums start, those of each block, and its unit.
pub(crate) const BESIDE: usize = BLOCKS * DIGITS + 1;

/// Floats of the integers of some rows.
pub(crate) const fn floats(rows: usize, columns: usize) -> usize {
    rows * (columns.next_multiple_of(64) * DIGITS / 4 + BESIDE)
}

/// Floats of scratch for the integers of some rows at a level with so many [`Isa::DIGITS`]; 0 if their keys are too
/// wide, or the level multiplies no bytes. Plans do not know the precision: at AVX2 Exact has the scratch, too.
pub(crate) const fn scratch(most_digits: usize, rows: usize, columns: usize) -> usize {
    if most_digits == 0 || columns > WIDEST { 0 } else { floats(rows, columns) }
}

/// The integers of the rows of one head in the scratch of all; nothing if the level has none.
pub(crate) fn words_of_head(
    words: &mut [f32],
    most_digits: usize,
    (head, rows): (usize, usize),
    columns: usize,
) -> &mut [f32] {
    let len = scratch(most_digits, rows, columns);
    &mut words[head * len..][..len]
}

/// The rows of a block that are multiplied together, of as many as there are.
const fn block(rows: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 | 3 => 2,
        _ => 4,
    }
}

/// Writes queries `[rows][columns]` as integers of D digits, for keys of some kind: digits, and [`BESIDE`] floats for
/// each row. The floats and then the digits fill the [`scratch`] of these rows. `columns` is a multiple of `LANES`.
#[inline(always)]
pub(crate) fn write<I: Isa, const D: usize>(
    isa: I,
    kind: Integers,
    (q, rows, columns): (&[f32], usize, usize),
    (beside, digits): (&mut [f32], &mut [i8]),
) {
    let row_digits = columns.next_multiple_of(64) * D;
    digits.fill(0);
    let (mut first, mut beside) = (0, beside.chunks_exact_mut(BESIDE));
    while first < rows {
        let count = block(rows - first);
        let words = digits[first * row_digits..][..count * row_digits].as_chunks_mut::<4>().0;
        for (r, beside) in beside.by_ref().take(count).enumerate() {
            write_row::<I, D>(isa, kind, &q[(first + r) * columns..][..columns], (r, count), words, beside);
        }
        first += count;
    }
}

/// Writes the row `r` of a block of `count` rows. A unit of 0 says that the row is none of integers.
#[inline(always)]
fn write_row<I: Isa, const D: usize>(
    isa: I,
    kind: Integers,
    q: &[f32],
    (r, count): (usize, usize),
    words: &mut [[i8; 4]],
    beside: &mut [f32],
) {
    let zero = isa.splat(0.0);
    let (mut top, mut sum) = (zero, zero);
    for x in q.chunks_exact(I::LANES) {
        let x = isa.load(x);
        top = isa.max(isa.abs(x), top);
        sum = isa.mul_add(x, zero, sum); // NaN if one is not finite
    }
    let (largest, is_finite) = (isa.max_across(top), isa.lanes(sum).iter().all(|&x| x == 0.0));
    beside.fill(0.0);
    if !is_finite {
        return;
    }
    if largest == 0.0 {
        beside[0] = 1.0;
        return;
    }
    if !Integer::HELD.contains(&largest) {
        return;
    }
    let Integer { unit, scale } = Integer::of::<D>(largest);
    beside[0] = unit;
    let integer = |x: f32| {
        // The product is exact or tiny.
        let x = x * scale;
        (x + 0.5f32.copysign(x)) as i32
    };
    let row = words.len() / count;
    if const { matches!(I::ORDER, Order::Whole) } {
        assert!(D == 2, "integers of 16 bits");
        let to = words[r * row..][..row].as_flattened_mut().as_chunks_mut::<2>().0;
        for (&x, to) in q.iter().zip(to) {
            *to = (integer(x) as i16).to_le_bytes().map(u8::cast_signed);
        }
        return;
    }
    let mut digits = [[0i8; WIDEST]; D];
    let per_sum = if kind == Integers::Blocks { BLOCK } else { WIDEST };
    for (column, &x) in q.iter().enumerate() {
        let mut n = integer(x);
        for digit in (0..D).rev() {
            digits[digit][column] = n as i8;
            n = (n - i32::from(n as i8)) >> 8;
            if const { matches!(I::ORDER, Order::Words) } {
                // Exact: below 2²³.
                beside[1 + column / per_sum * D + digit] -= 128.0 * f32::from(digits[digit][column]);
            }
        }
    }
    if const { matches!(I::ORDER, Order::Apart) } {
        let to = words[r * row..][..row].as_flattened_mut();
        for (to, digits) in to.chunks_exact_mut(4 * row / D).zip(&digits) {
            to[..q.len()].copy_from_slice(&digits[..q.len()]);
        }
        return;
    }
    for word in 0..q.len().div_ceil(4) {
        let to = &mut words[(word * count + r) * D..][..D];
        for (to, digits) in to.iter_mut().zip(&digits) {
            *to = digits.as_chunks::<4>().0[word];
        }
    }
}

/// `s[r][j] = Σ_c q[r][c]·key_j[c]` for `rows` query rows, whose integers of D digits are in `scratch`, and each tile
/// whose bit is set in `seen`. `q`: `[rows][columns]`; `s`: `[rows][TILE]` for each tile, `stride` floats apart. Whole
/// groups of keys are written. The keys are made of int8.
#[inline(always)]
pub(crate) fn dots<I: Isa, T: Stored, const D: usize>(
    isa: I,
    rows: usize,
    (keys, seen): (&Rows<'_, T>, u32),
    (q, scratch): (&[f32], &[f32]),
    (s, stride): (&mut [f32], usize),
) {
    let columns = keys.columns();
    let ahead = Ahead::of::<I, T, 4>(keys, false).at_least(I::LANES);
    assert!(T::INTEGERS.is_some() && columns <= WIDEST && scratch.len() >= floats(rows, columns));
    let (beside, digits) = scratch.split_at(rows * BESIDE);
    let row_words = columns.next_multiple_of(64) / 4 * D;
    assert!(digits.len() >= rows * row_words);
    for n in tiles_of(seen) {
        let (tile, s) = (keys.tile(n, 0), &mut s[n * stride..][..rows * TILE]);
        let (mut first, mut odd) = (0, 0);
        while first < rows {
            let count = block(rows - first);
            let (beside, digits) = (&beside[first * BESIDE..][..count * BESIDE], &digits[first * row_words..]);
            let s = &mut s[first * TILE..][..count * TILE];
            macro_rules! of {
                ($R:literal) => {
                    isa.apart(
                        #[inline(always)]
                        // SAFETY: as many words of digits, as asserted above, and rows of keys that `Rows` has checked.
                        || unsafe { dots_of::<I, T, $R, D>(isa, (&tile, &ahead), beside, digits.as_ptr().cast(), s) },
                    )
                };
            }
            odd |= match count {
                1 => of!(1),
                2 => of!(2),
                _ => of!(4),
            };
            first += count;
        }
        for (r, beside) in beside.chunks_exact(BESIDE).enumerate() {
            if beside[0] == 0.0 {
                super::dots(isa, 1, (keys, n..n + 1), &q[r * columns..], (&mut s[r * TILE..], 0));
            } else if odd != 0 {
                // Keys with an infinite scale, or NaN, are what floats make of them, and the others as ever.
                let mut by_floats = [0.0; TILE];
                super::dots(isa, 1, (keys, n..n + 1), &q[r * columns..], (&mut by_floats, 0));
                for (key, (s, x)) in s[r * TILE..][..TILE].iter_mut().zip(by_floats).enumerate() {
                    *s = if odd >> key & 1 == 1 { x } else { *s };
                }
            }
        }
    }
}

/// Returns the keys that are [none of integers](Isa::dot_blocks).
///
/// # Safety
/// The digits of R rows are readable, for `columns` rounded up to a multiple of 64.
#[inline(always)]
unsafe fn dots_of<I: Isa, T: Stored, const R: usize, const D: usize>(
    isa: I,
    (keys, ahead): (&Tile<'_, T>, &Ahead),
    beside: &[f32],
    digits: *const [i8; 4],
    s: &mut [f32],
) -> u64 {
    let (mut start, mut unit) = ([[[0i32; D]; R]; BLOCKS], [0.0f32; R]);
    let start = match T::INTEGERS {
        Some(Integers::Blocks) => &mut start[..keys.columns() / BLOCK],
        _ => &mut start[..1],
    };
    for (r, beside) in beside.chunks_exact(BESIDE).enumerate().take(R) {
        unit[r] = beside[0];
        if const { !matches!(I::ORDER, Order::Words) } {
            continue;
        }
        for (start, beside) in start.iter_mut().zip(beside[1..].as_chunks::<D>().0) {
            start[r] = beside.map(
                #[inline(always)]
                |x| x as i32,
            );
        }
    }
    let ahead = requests(isa, keys, ahead);
    let (at, some) = (keys.addresses(), keys.len().next_multiple_of(I::LANES));
    let (columns, unit, start) = (keys.columns(), &unit, &*start);
    let of = Bytes { keys: &at[..some], columns, digits, start, unit, ahead, s, stride: TILE };
    // SAFETY: rows that `Rows` has checked; the caller vouches for the digits.
    unsafe {
        match T::INTEGERS {
            Some(Integers::Blocks) => isa.dot_blocks::<R, D>(of),
            _ => {
                isa.dot_bytes::<R, D>(of);
                0
            }
        }
    }
}

/// Bytes from a line of a tile to those that are requested meanwhile, into the first cache and into the second. Rows
/// are read side by side, so what comes next is a step away.
#[inline(always)]
fn requests<I: Isa, T: Stored>(isa: I, rows: &Tile<'_, T>, ahead: &Ahead) -> [usize; 2] {
    ahead.page(isa, rows, 0);
    let [far, near] = ahead.far_and_near(rows, 0);
    let far = far.wrapping_add(ahead.beyond(rows));
    match ahead.into() {
        Into::First => [far, near],
        Into::Second => [near, far],
    }
}
