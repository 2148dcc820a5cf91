//! Products of some query rows with int8 keys, as integers, where lanes are keys.
//!
//! Floats cost a multiply-add for each number and row, and a conversion for each number. A processor multiplies four
//! times as many bytes. So a query is written as integers of 24 bits times a power of two, each in three digits of
//! eight bits, and [`Isa::dot_bytes`] sums the products of each digit with the keys, exactly:
//!
//! ```text
//! q ≈ unit·n, |n| < 2²³, n = 65536·a + 256·b + c         s = unit·(256·Σ(256·a + b)·k + Σ c·k)
//! ```
//!
//! The only rounding that grows is that of the query: by at most `unit/2`, which is `2u` of the row's largest. Queries
//! in halves that are not more than some thousand times smaller than it are not rounded. The sums, which are exact, are
//! rounded twice. Products of floats would round once for each number.
//!
//! Rows that are not finite, or whose numbers are huge or tiny, are multiplied as floats, and so are keys of more than
//! [`WIDEST`] channels.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use super::ahead::Ahead;
use super::{Rows, TILE, Tile, tiles_of};
use crate::isa::{Bytes, Isa};
use crate::prefetch::Into;

/// The largest number of channels: no sum overflows, and `256·Σ a·k` neither.
pub(crate) const WIDEST: usize = 256;

/// The largest integer in three digits from −128 to 127 whose negative is one, too.
const LARGEST: f32 = (127 * 65536 + 127 * 256 + 127) as f32;

/// The largest numbers of rows that are held: units and scores are normal numbers.
const HELD: core::ops::Range<f32> = 1e-24..1e30;

/// Floats beside the digits of a row: where its three sums start, and its unit.
pub(crate) const BESIDE: usize = 4;

/// Floats of the integers of some rows.
const fn floats(rows: usize, columns: usize) -> usize {
    rows * (columns.next_multiple_of(64) * 3 / 4 + BESIDE)
}

/// Floats of scratch for the integers of some rows; 0 if their keys are too wide, or the level has other vectors than
/// AVX-512.
pub(crate) const fn scratch(lanes: usize, rows: usize, columns: usize) -> usize {
    if lanes < 16 || columns > WIDEST { 0 } else { floats(rows, columns) }
}

/// The rows of a block that are multiplied together, of as many as there are.
const fn block(rows: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 | 3 => 2,
        _ => 4,
    }
}

/// Writes queries `[rows][columns]` as integers: digits, and [`BESIDE`] floats for each row. The floats and then the
/// digits fill the [`scratch`] of these rows. `columns` is a multiple of `LANES`.
#[inline(always)]
pub(crate) fn write<I: Isa>(isa: I, q: &[f32], rows: usize, columns: usize, (beside, digits): (&mut [f32], &mut [i8])) {
    let row_digits = columns.next_multiple_of(64) * 3;
    digits.fill(0);
    let (mut first, mut beside) = (0, beside.chunks_exact_mut(BESIDE));
    while first < rows {
        let count = block(rows - first);
        let words = digits[first * row_digits..][..count * row_digits].as_chunks_mut::<4>().0;
        for (r, beside) in beside.by_ref().take(count).enumerate() {
            write_row(isa, &q[(first + r) * columns..][..columns], (r, count), words, beside);
        }
        first += count;
    }
}

/// Writes the row `r` of a block of `count` rows. A unit of 0 says that the row is none of integers.
#[inline(always)]
fn write_row<I: Isa>(isa: I, q: &[f32], (r, count): (usize, usize), words: &mut [[i8; 4]], beside: &mut [f32]) {
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
        beside[3] = 1.0;
        return;
    }
    if !HELD.contains(&largest) {
        return;
    }
    // The largest is below 2^exponent. `scale` is 2^(23 − exponent), and makes integers.
    let exponent = (largest.to_bits() >> 23) as i32 - 126;
    let power = |exponent: i32| f32::from_bits(((127 + exponent) as u32) << 23);
    let exponent = if largest * power(23 - exponent) > LARGEST { exponent + 1 } else { exponent };
    let scale = power(23 - exponent);
    let (mut sums, mut digits) = ([0i32; 3], [[0i8; WIDEST]; 3]);
    let [high, middle, low] = &mut digits;
    for (((&x, high), middle), low) in q.iter().zip(high).zip(middle).zip(low) {
        // The product is exact or tiny.
        let x = x * scale;
        let n = (x + 0.5f32.copysign(x)) as i32;
        *low = n as i8;
        let n = (n - i32::from(*low)) >> 8;
        *middle = n as i8;
        *high = ((n - i32::from(*middle)) >> 8) as i8;
        sums[0] += i32::from(*high);
        sums[1] += i32::from(*middle);
        sums[2] += i32::from(*low);
    }
    for word in 0..q.len().div_ceil(4) {
        let to = &mut words[(word * count + r) * 3..][..3];
        for (to, digits) in to.iter_mut().zip(&digits) {
            *to = digits.as_chunks::<4>().0[word];
        }
    }
    for (start, sum) in beside.iter_mut().zip(sums) {
        *start = (-128 * sum) as f32; // exact: below 2²³
    }
    beside[3] = power(exponent - 23);
}

/// `s[r][j] = Σ_c q[r][c]·key_j[c]` for `rows` query rows, whose integers are in `scratch`, and each tile whose bit is
/// set in `seen`. `q`: `[rows][columns]`; `s`: `[rows][TILE]` for each tile, `stride` floats apart. Whole groups of
/// keys are written.
#[inline(always)]
pub(crate) fn dots<I: Isa>(
    isa: I,
    rows: usize,
    (keys, seen): (&Rows<'_, i8>, u32),
    (q, scratch): (&[f32], &[f32]),
    (s, stride): (&mut [f32], usize),
) {
    let columns = keys.columns();
    let ahead = Ahead::of::<I, i8, 4>(keys, false).at_least(I::LANES);
    assert!(columns <= WIDEST && scratch.len() >= floats(rows, columns));
    let (beside, digits) = scratch.split_at(rows * BESIDE);
    let row_words = columns.next_multiple_of(64) / 4 * 3;
    assert!(digits.len() >= rows * row_words);
    for n in tiles_of(seen) {
        let (tile, s) = (keys.tile(n), &mut s[n * stride..][..rows * TILE]);
        let mut first = 0;
        while first < rows {
            let count = block(rows - first);
            let (beside, digits) = (&beside[first * BESIDE..][..count * BESIDE], &digits[first * row_words..]);
            let s = &mut s[first * TILE..][..count * TILE];
            // SAFETY: as many words of digits, as asserted above, and rows of keys that `Rows` has checked.
            unsafe {
                match count {
                    1 => dots_of::<I, 1>(isa, (&tile, &ahead), beside, digits.as_ptr().cast(), s),
                    2 => dots_of::<I, 2>(isa, (&tile, &ahead), beside, digits.as_ptr().cast(), s),
                    _ => dots_of::<I, 4>(isa, (&tile, &ahead), beside, digits.as_ptr().cast(), s),
                }
            }
            first += count;
        }
        for (r, beside) in beside.chunks_exact(BESIDE).enumerate() {
            if beside[3] == 0.0 {
                super::dots(isa, 1, (keys, n..n + 1), &q[r * columns..], (&mut s[r * TILE..], 0));
            }
        }
    }
}

/// # Safety
/// The digits of R rows are readable, for `columns` rounded up to a multiple of 64.
#[inline(always)]
unsafe fn dots_of<I: Isa, const R: usize>(
    isa: I,
    (keys, ahead): (&Tile<'_, i8>, &Ahead),
    beside: &[f32],
    digits: *const [i8; 4],
    s: &mut [f32],
) {
    let (mut start, mut unit) = ([[0i32; 3]; R], [0.0f32; R]);
    for (r, beside) in beside.chunks_exact(BESIDE).enumerate().take(R) {
        start[r] = [beside[0], beside[1], beside[2]].map(|x| x as i32);
        unit[r] = beside[3];
    }
    // The keys of a step are read side by side, so what comes next is a step away.
    ahead.page(isa, keys, 0);
    let [far, near] = ahead.far_and_near(keys, 0);
    let far = far.wrapping_add(ahead.beyond(keys));
    let ahead = match ahead.into() {
        Into::First => [far, near],
        Into::Second => [near, far],
    };
    let mut at = [keys.row(0); TILE];
    let some = keys.len().next_multiple_of(I::LANES);
    for (n, at) in at.iter_mut().enumerate().take(some) {
        *at = keys.row(n);
    }
    let (columns, unit) = (keys.columns(), &unit);
    let of = Bytes { keys: &at[..some], columns, digits, start: &start, unit, ahead, s, stride: TILE };
    // SAFETY: rows that `Rows` has checked; the caller vouches for the digits.
    unsafe { isa.dot_bytes::<R>(of) }
}
