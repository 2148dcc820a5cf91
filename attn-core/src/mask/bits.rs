//! Up to 64 keys of a row as the bits of a word, and the transposition from rows of keys to keys of rows.
//!
//! Engines whose lanes are queries need, for each key, one bit per query. Masks have one word per row, because their
//! tables are stored by row. A 64×64 bit transposition (Warren, Hacker's Delight, §7-3) turns one into the other in
//! some 400 operations.

use core::ops::Range;

/// Bits of the keys `start..start + 64` that are in `range`.
#[inline]
pub(crate) fn range_bits(range: Range<usize>, start: usize) -> u64 {
    let low = range.start.saturating_sub(start).min(64);
    let high = range.end.saturating_sub(start).min(64);
    if low >= high { 0 } else { lowest_bits(high) & !lowest_bits(low) }
}

/// The lowest `n ≤ 64` bits set.
#[inline(always)]
pub const fn lowest_bits(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

/// Packs eight bools into eight bits, the first in the lowest: the multiplication gathers each byte's bit in the top
/// byte.
#[inline]
pub(crate) fn pack8(keep: [bool; 8]) -> u64 {
    let bytes = u64::from_le_bytes(keep.map(u8::from));
    bytes.wrapping_mul(0x0102_0408_1020_4080) >> 56
}

/// Packs 64 bools into bits, the first in the lowest.
///
/// ```
/// let mut keep = [false; 64];
/// keep[5] = true;
/// assert_eq!(attn_core::engine::pack_bools(&keep), 1 << 5);
/// ```
#[inline(always)]
pub fn pack_bools(keep: &[bool; 64]) -> u64 {
    let (eights, _) = keep.as_chunks::<8>();
    eights.iter().rev().fold(0, |bits, eight| bits << 8 | pack8(*eight))
}

/// Transposes a 64×64 bit matrix: bit `r` of word `c` becomes the former bit `c` of word `r`.
///
/// ```
/// let mut bits = [0u64; 64];
/// bits[3] = 1 << 17;
/// attn_core::engine::transpose_bits(&mut bits);
/// assert_eq!(bits[17], 1 << 3);
/// ```
pub fn transpose_bits(rows: &mut [u64; 64]) {
    let mut width = 32;
    let mut mask = 0x0000_0000_ffff_ffffu64;
    while width != 0 {
        for pair in rows.chunks_exact_mut(2 * width) {
            let (upper, lower) = pair.split_at_mut(width);
            for (a, b) in upper.iter_mut().zip(lower) {
                let swap = ((*a >> width) ^ *b) & mask;
                *b ^= swap;
                *a ^= swap << width;
            }
        }
        width /= 2;
        mask ^= mask << width;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_bits() {
        for start in [0, 5, 64, 100] {
            for range in [0..0, 0..3, 5..70, 60..64, 64..128, 100..101, 90..1000] {
                let bits = range_bits(range.clone(), start);
                for n in 0..64 {
                    assert_eq!(bits >> n & 1 == 1, range.contains(&(start + n)), "{range:?} from {start}, bit {n}");
                }
            }
        }
    }

    #[test]
    fn transposition_moves_every_bit() {
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        let before: [u64; 64] = core::array::from_fn(|_| {
            x = x.wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(17) ^ 0x5851_f42d_4c95_7f2d;
            x
        });
        let mut after = before;
        transpose_bits(&mut after);
        for r in 0..64 {
            for c in 0..64 {
                assert_eq!(after[c] >> r & 1, before[r] >> c & 1);
            }
        }
    }

    #[test]
    fn eight_bools_pack_in_order() {
        for bits in 0..=255u64 {
            assert_eq!(pack8(core::array::from_fn(|n| bits >> n & 1 == 1)), bits);
        }
    }
}
