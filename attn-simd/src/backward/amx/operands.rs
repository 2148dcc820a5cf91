//! Weights and gradients of scores, `[key][query]` in rows of 32, become operands of bf16 parts.
//!
//! Of a float, each part but the last is its upper half, and the last is rounded: two parts have 16 bits, and three
//! have all. As A of the sums over queries a row is a key, and a word has the queries `n` and `n + 16`, so that
//! no lane moves; [`by_rows`](crate::amx::pack::by_rows) packs the other operand alike. As B of `dq` a row is a pair of
//! keys.
//!
//! Of numbers that are not finite the first part is the number, and the others are 0: ∞ − ∞ would be NaN.

use attn_core::half::bf16;

use crate::amx::product::{Operand, SIDE};
use crate::isa::Isa;

/// Splits the `[key][query]` rows of one half into `by_keys`, and into `across` if it is there, `[part][16 rows]` each.
/// `NQ` vectors make 32 queries.
#[inline(always)]
pub(super) fn split<I: Isa, const NQ: usize>(
    isa: I,
    parts: usize,
    numbers: &[f32],
    by_keys: &mut [Operand],
    across: Option<&mut [Operand]>,
) {
    match parts {
        1 => split_into::<I, NQ, 1>(isa, numbers, by_keys, across),
        2 => split_into::<I, NQ, 2>(isa, numbers, by_keys, across),
        _ => split_into::<I, NQ, 3>(isa, numbers, by_keys, across),
    }
}

#[inline(never)]
fn split_into<I: Isa, const NQ: usize, const PARTS: usize>(
    isa: I,
    numbers: &[f32],
    by_keys: &mut [Operand],
    mut across: Option<&mut [Operand]>,
) {
    let finite = isa.vectorize(
        #[inline(always)]
        || quickly::<I, NQ, PARTS>(isa, numbers, by_keys, across.as_deref_mut()),
    );
    if !finite {
        number_by_number::<PARTS>(numbers, by_keys, across);
    }
}

/// Says whether all numbers were finite.
#[inline(always)]
fn quickly<I: Isa, const NQ: usize, const PARTS: usize>(
    isa: I,
    numbers: &[f32],
    by_keys: &mut [Operand],
    mut across: Option<&mut [Operand]>,
) -> bool {
    let zero = isa.splat(0.0);
    // The rest of a number that is not finite is NaN. Rests are so much smaller than numbers that no sum overflows.
    let mut rests = [zero; NQ];
    for (pair, rows) in numbers.chunks_exact(2 * SIDE).enumerate().take(SIDE / 2) {
        let mut x = [[zero; NQ]; 2];
        for (key, x) in x.iter_mut().enumerate() {
            for (n, x) in x.iter_mut().enumerate() {
                *x = isa.load(&rows[key * SIDE + n * I::LANES..]);
            }
        }
        for part in 0..PARTS {
            let mut now = x;
            for key in 0..2 {
                for n in 0..NQ {
                    now[key][n] = if part + 1 == PARTS {
                        isa.round_bf16(x[key][n])
                    } else {
                        isa.pair_bf16(zero, x[key][n]) // the upper half, and zeros below
                    };
                    if part == 0 || part + 1 < PARTS {
                        x[key][n] = isa.sub(x[key][n], now[key][n]);
                    }
                    if part == 0 {
                        rests[n] = isa.add(rests[n], x[key][n]);
                    }
                }
            }
            for (key, now) in now.iter().enumerate() {
                let row = 2 * pair + key;
                let words = &mut by_keys[part * 2 + row / 16].0[row % 16 * 16..][..16];
                for n in 0..NQ / 2 {
                    isa.store(isa.pair_bf16(now[n], now[n + NQ / 2]), &mut words[n * I::LANES..]);
                }
            }
            if let Some(across) = across.as_deref_mut() {
                for n in 0..NQ {
                    let (column, lane) = (n * I::LANES / 16, n * I::LANES % 16);
                    let words = &mut across[part * 2 + column].0[pair * 16 + lane..][..I::LANES];
                    isa.store(isa.pair_bf16(now[0][n], now[1][n]), words);
                }
            }
        }
    }
    let mut finite = true;
    for rests in rests {
        finite &= isa.lanes(rests)[..I::LANES].iter().all(|x| x.is_finite());
    }
    finite
}

/// The same where some are not finite.
fn number_by_number<const PARTS: usize>(numbers: &[f32], by_keys: &mut [Operand], mut across: Option<&mut [Operand]>) {
    let put = |operands: &mut [Operand], part: usize, row: usize, word: usize, high: bool, half: bf16| {
        let word = &mut operands[part * 2 + row / 16].0[row % 16 * 16 + word];
        let (shift, other) = if high { (16, 0xffff) } else { (0, 0xffff_0000) };
        *word = f32::from_bits(word.to_bits() & other | u32::from(half.to_bits()) << shift);
    };
    for (key, row) in numbers.chunks_exact(SIDE).enumerate().take(SIDE) {
        for (query, &x) in row.iter().enumerate() {
            for (part, half) in parts_of::<PARTS>(x).into_iter().enumerate() {
                put(by_keys, part, key, query % 16, query >= 16, half);
                if let Some(across) = across.as_deref_mut() {
                    // The operand of a column of sixteen queries, whose rows are pairs of keys.
                    put(&mut across[query / 16..], part, key / 2, query % 16, key % 2 == 1, half);
                }
            }
        }
    }
}

/// The parts of one number.
fn parts_of<const PARTS: usize>(x: f32) -> [bf16; PARTS] {
    let mut parts = [bf16::ZERO; PARTS];
    if !x.is_finite() {
        parts[0] = bf16::from_f32(x); // a NaN stays one
        return parts;
    }
    let mut rest = x;
    for (n, part) in parts.iter_mut().enumerate() {
        // The last one is rounded as `Isa::round_bf16` does: so a number beside one that is not finite keeps its bits.
        let half = if n + 1 == PARTS { 0x8000 } else { 0 };
        *part = bf16::from_bits(((rest.to_bits() + half) >> 16) as u16);
        rest -= part.to_f32();
    }
    parts
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::isa::portable::Portable;

    const ISA: Portable = <Portable>::PROVEN;

    fn half_of(operands: &[Operand], operand: usize, row: usize, word: usize, high: bool) -> f64 {
        let bits = operands[operand].0[row * 16 + word].to_bits();
        bf16::from_bits(if high { bits >> 16 } else { bits } as u16).to_f64()
    }

    /// The parts in both operands add up to the number, as far as they go, and none that is not finite reaches another.
    #[test]
    fn operands_hold_the_numbers() {
        let mut numbers: Vec<f32> =
            (0..SIDE * SIDE).map(|n| (n as f32 * 0.37).sin() * 2.0f32.powi(n as i32 % 40)).collect();
        for others in [&[][..], &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff), f32::MAX]] {
            numbers[100..100 + others.len()].copy_from_slice(others);
            // Miri takes hundreds of times as long.
            for parts in if cfg!(miri) { 2..=2 } else { 1..=3 } {
                let fresh = || vec![Operand([f32::NAN; 256]); 2 * parts];
                let (mut by_keys, mut across) = (fresh(), fresh());
                split::<_, 8>(ISA, parts, &numbers, &mut by_keys, Some(&mut across));
                for (at, &x) in numbers.iter().enumerate() {
                    let (key, query) = (at / SIDE, at % SIDE);
                    let (mut one, mut other) = (0.0, 0.0);
                    for part in 0..parts {
                        one += half_of(&by_keys, part * 2 + key / 16, key % 16, query % 16, query >= 16);
                        other += half_of(&across, part * 2 + query / 16, key / 2, query % 16, key % 2 == 1);
                    }
                    let name = (x, one, other, parts, key, query);
                    assert!(one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan(), "{name:?}");
                    let x = f64::from(x);
                    let most = [1.0 / 256.0, 1.0 / 65536.0, 0.0][parts - 1] * x.abs();
                    let rounds_to_infinity = parts == 1 && x == f64::from(f32::MAX) && one == f64::INFINITY;
                    let same = one == x || one.is_nan() && x.is_nan() || rounds_to_infinity;
                    assert!(same || (one - x).abs() <= most, "{name:?}");
                }
            }
        }
    }
}
