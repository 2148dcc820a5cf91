//! Queries in bfloat16 as pairs: with keys in bfloat16 they are multiplied exactly, by half as many instructions, and
//! no key is widened.
//!
//! [`Isa::step`](crate::isa::Isa::step) takes numbers below 2⁻¹²⁶ for 0, and sums below it too. So a row is pairs only
//! if it has no such number and none of 2⁴⁰ or more, and no score has a factor of 2⁴⁰ or more: then each channel loses
//! less than 2⁻⁴⁵ of a score. Other rows are multiplied as floats. Which way a row goes depends on its own numbers.

use core::ops::Range;

use crate::level::Level;

/// Sizes of the numbers that may be pairs, beside 0. Its end bounds the factor of their scores, too.
const HELD: Range<f32> = f32::MIN_POSITIVE..(1u64 << 40) as f32;

/// Floats of scratch for the pairs of some rows; 0 if the level multiplies none.
pub(crate) const fn scratch(level: Level, rows: usize, columns: usize) -> usize {
    if fit(level, columns) { rows * columns / 2 } else { 0 }
}

/// Whether the level multiplies pairs, and keys of so many channels are whole vectors of them. (In memory a pair begins
/// with its lower half on little-endian machines only.)
pub(crate) const fn fit(level: Level, columns: usize) -> bool {
    cfg!(target_endian = "little")
        && level.uses_dot_products()
        && columns > 0
        && columns.is_multiple_of(2 * level.lanes())
}

/// Whether scores that are multiplied by this factor may be made of pairs. Not if it is NaN.
pub(crate) fn holds(factor: f32) -> bool {
    factor.abs() < HELD.end
}

/// Writes rows, whose numbers are all bfloat16, as pairs; the first `count` of them are queries. Returns the queries
/// that are pairs, as bits.
pub(crate) fn write(q: &[f32], columns: usize, count: usize, words: &mut [f32]) -> u32 {
    let mut paired = 0;
    for (r, (row, words)) in q.chunks_exact(columns).zip(words.chunks_exact_mut(columns / 2)).enumerate() {
        let held = row.iter().all(|x| *x == 0.0 || HELD.contains(&x.abs()));
        paired |= u32::from(held && r < count) << r;
        for (word, [low, high]) in words.iter_mut().zip(row.as_chunks::<2>().0) {
            *word = f32::from_bits(high.to_bits() | low.to_bits() >> 16);
        }
    }
    paired
}
