//! Products of integers with bytes by SDOT, which processors of ARMv8.2 and later may have.
//!
//! The instruction adds four products of signed bytes to each lane: sixteen at once, where a fused multiply-add has
//! four, and bytes are not widened first. It takes sixteen channels of a key as they lie, so the digits of a row lie
//! [apart](Order::Apart), and lanes are words of four channels. Even integers of three digits take fewer instructions
//! than floats.
//!
//! Sums are those of [`digits`](super::digits), but for keys in blocks: there each lane adds up the scaled sums of its
//! own channels. The intrinsic of SDOT is younger than the oldest supported compiler.

#![allow(unsafe_code, reason = "the leaf: an instruction without an intrinsic, and addresses that the caller proves")]

use core::arch::aarch64::*;
use core::arch::asm;

use attn_core::half::f16;

use super::digits::{BLOCK, BLOCK_BYTES, joined};
use super::{Bytes, neon};

pub(super) mod values;

/// Adds four products of bytes to each lane.
///
/// # Safety
/// The CPU has SDOT.
#[inline]
#[target_feature(enable = "dotprod")]
unsafe fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction touches its three registers only.
    unsafe {
        asm!("sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum = inlateout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// As [`Isa::dot_bytes`](super::Isa::dot_bytes).
///
/// # Safety
/// As there; and the CPU has SDOT.
#[inline]
#[target_feature(enable = "dotprod")]
pub(super) unsafe fn dot_bytes<const R: usize, const D: usize>(of: Bytes<'_, R, D>) {
    // SAFETY: the caller vouches for the bytes and the instruction.
    unsafe { if const { R == 4 } { sums::<R, D, 2>(of) } else { sums::<R, D, 4>(of) } }
}

/// As [`Isa::dot_blocks`](super::Isa::dot_blocks): each lane adds up its own.
///
/// # Safety
/// As there; and the CPU has SDOT.
#[inline]
#[target_feature(enable = "dotprod")]
pub(super) unsafe fn dot_blocks<const R: usize, const D: usize>(of: Bytes<'_, R, D>) -> u64 {
    // SAFETY: the caller vouches for the blocks and the instruction.
    unsafe { if const { R == 4 } { block_sums::<R, D, 2>(of) } else { block_sums::<R, D, 4>(of) } }
}

/// Sixteen bytes of a key, or as many as there are, and zeros.
///
/// # Safety
/// As many are readable.
#[inline(always)]
unsafe fn sixteen(from: *const i8, there: usize) -> int8x16_t {
    // SAFETY: the caller vouches for the bytes.
    unsafe {
        if there >= 16 {
            return vld1q_s8(from);
        }
        let mut bytes = [0i8; 16];
        core::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), there);
        vld1q_s8(bytes.as_ptr())
    }
}

/// # Safety
/// As [`dot_bytes`]; compiled into a function with its features. K keys are taken together.
#[inline(always)]
unsafe fn sums<const R: usize, const D: usize, const K: usize>(of: Bytes<'_, R, D>) {
    let Bytes { keys, columns, digits, unit, s, stride, .. } = of;
    let (digits, each, whole) = (digits.cast::<i8>(), columns.next_multiple_of(64), columns / 16 * 16);
    // SAFETY: the bytes of each key below `columns`, and the digits of all rows up to a multiple of 64 columns. The
    // caller vouches for both, and for the instructions.
    unsafe {
        for (n, keys) in keys.as_chunks::<K>().0.iter().enumerate() {
            let mut acc = [[[vdupq_n_s32(0); K]; D]; R];
            macro_rules! add {
                ($from:expr, $there:expr) => {
                    let mut x = [vdupq_n_s8(0); K];
                    for k in 0..K {
                        x[k] = sixteen(keys[k].add($from), $there);
                    }
                    for r in 0..R {
                        for d in 0..D {
                            let y = vld1q_s8(digits.add((r * D + d) * each + $from));
                            for k in 0..K {
                                acc[r][d][k] = sdot(acc[r][d][k], y, x[k]);
                            }
                        }
                    }
                };
            }
            for from in (0..whole).step_by(16) {
                add!(from, 16);
            }
            if whole < columns {
                add!(whole, columns - whole);
            }
            for r in 0..R {
                for k in 0..K {
                    let mut sums = [0; D];
                    for d in 0..D {
                        sums[d] = vaddvq_s32(acc[r][d][k]);
                    }
                    s[r * stride + n * K + k] = unit[r] * joined(sums);
                }
            }
        }
    }
}

/// # Safety
/// As [`dot_blocks`]; compiled into a function with its features. K keys are taken together.
#[inline(always)]
unsafe fn block_sums<const R: usize, const D: usize, const K: usize>(of: Bytes<'_, R, D>) -> u64 {
    const { assert!(K <= 4 && (D == 2 || D == 3)) }
    let Bytes { keys, columns, digits, unit, s, stride, .. } = of;
    let (digits, each) = (digits.cast::<i8>(), columns.next_multiple_of(64));
    let mut odd = 0;
    // SAFETY: the blocks of each key, and the digits of all rows for them. The caller vouches for both, and for the
    // instructions.
    unsafe {
        let zero = vdupq_n_s32(0);
        for (n, keys) in keys.as_chunks::<K>().0.iter().enumerate() {
            let mut acc = [[vdupq_n_f32(0.0); K]; R];
            for block in 0..columns / BLOCK {
                let (mut halves, mut x) = ([f16::ZERO; 4], [[vdupq_n_s8(0); 2]; K]);
                for k in 0..K {
                    let from = keys[k].add(block * BLOCK_BYTES);
                    halves[k] = f16::from_bits(u16::from_le(from.cast::<u16>().read_unaligned()));
                    x[k] = [vld1q_s8(from.add(2)), vld1q_s8(from.add(18))];
                    odd |= u64::from(!halves[k].is_finite()) << (n * K + k);
                }
                let scales = neon::widen_f16(&halves);
                for r in 0..R {
                    let mut sums = [[zero; K]; D];
                    for d in 0..D {
                        let from = digits.add((r * D + d) * each + block * BLOCK);
                        let y = [vld1q_s8(from), vld1q_s8(from.add(16))];
                        for k in 0..K {
                            sums[d][k] = sdot(sdot(zero, y[0], x[k][0]), y[1], x[k][1]);
                        }
                    }
                    for k in 0..K {
                        let mut n = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32::<8>(sums[0][k]), sums[1][k]));
                        if const { D == 3 } {
                            n = vfmaq_n_f32(vcvtq_f32_s32(sums[D - 1][k]), n, 256.0);
                        }
                        acc[r][k] = vfmaq_n_f32(acc[r][k], n, scales[k]);
                    }
                }
            }
            for r in 0..R {
                for k in 0..K {
                    s[r * stride + n * K + k] = unit[r] * vaddvq_f32(acc[r][k]);
                }
            }
        }
    }
    odd
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::isa::Order;
    use crate::isa::digits::{self, testing::numbers};
    use crate::isa::portable::Dotprod;
    use crate::level::Level;

    /// The proof of SDOT, if it is here.
    pub(super) fn dotprod() -> Option<Dotprod> {
        if let Ok(Level::Dotprod(isa)) = Level::by_name("dotprod") {
            return Some(isa);
        }
        assert!(!attn_testing::is_demanded("dotprod"));
        std::eprintln!("no SDOT here: nothing was compared");
        None
    }

    /// Sums of bytes are those of plain Rust to the bit, those of blocks but for the last bits; odd scales are told.
    #[test]
    fn sums_are_those_of_plain_rust() {
        fn check<const R: usize, const D: usize>(columns: usize, blocks: bool) {
            assert_eq!(<Dotprod as crate::isa::Isa>::ORDER, Order::Apart);
            let (mut number, each) = (numbers(7), columns.next_multiple_of(64));
            let rows: Vec<Vec<i8>> =
                (0..R * D).map(|_| (0..each).map(|c| if c < columns { number() as i8 } else { 0 }).collect()).collect();
            let apart = rows.concat();
            let words: Vec<[i8; 4]> =
                (0..each / 4).flat_map(|word| rows.iter().map(move |row| row.as_chunks::<4>().0[word])).collect();
            let size = if blocks { columns / BLOCK * BLOCK_BYTES } else { columns };
            let mut data: Vec<i8> = (0..8 * size).map(|n| if n % 5 == 2 { -128 } else { number() as i8 }).collect();
            if blocks {
                for (n, block) in data.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
                    let scale = f16::from_f32([0.37, -0.011, 1.9, 0.0][n % 4]);
                    let scale = if (n + 1) * BLOCK_BYTES == 4 * size { f16::NAN } else { scale };
                    block[..2].copy_from_slice(&scale.to_le_bytes().map(u8::cast_signed));
                }
            }
            let keys: Vec<*const i8> = data.chunks(size).map(<[i8]>::as_ptr).collect();
            let (unit, start) = ([0.5; R], vec![[[0; D]; R]; 8]);
            let run = |digits: *const [i8; 4], plain: bool| {
                let mut s = vec![0.0f32; R * 9];
                let (keys, start, unit) = (&*keys, &*start, &unit);
                let of = Bytes::<R, D> { keys, columns, digits, start, unit, ahead: [0; 2], s: &mut s, stride: 9 };
                // SAFETY: whole keys, digits of all rows; the caller has seen that SDOT is here.
                let odd = unsafe {
                    match (plain, blocks) {
                        (true, true) => digits::dot_blocks(of),
                        (false, true) => dot_blocks(of),
                        (true, false) => {
                            digits::dot_bytes(of);
                            0
                        }
                        (false, false) => {
                            dot_bytes(of);
                            0
                        }
                    }
                };
                (s, odd)
            };
            let ((want, want_odd), (got, odd)) = (run(words.as_ptr(), true), run(apart.as_ptr().cast(), false));
            assert_eq!(odd, want_odd, "{R} rows, {D} digits, {columns} columns");
            assert!(!blocks || odd == 1 << 3);
            let most = want.iter().filter(|x| x.is_finite()).fold(0.0f32, |most, x| most.max(x.abs()));
            for (n, (got, want)) in got.iter().zip(&want).enumerate().filter(|(n, _)| odd >> (n % 9) & 1 == 0) {
                let near = if blocks { (got - want).abs() <= 1e-5 * most } else { got == want };
                assert!(near, "{R} rows, {D} digits, {columns} columns, {n}: {got} of {want}");
            }
        }
        if dotprod().is_none() {
            return;
        }
        for columns in [4, 8, 12, 16, 20, 60, 64, 68, 128, 256] {
            check::<1, 3>(columns, false);
            check::<2, 3>(columns, false);
            check::<4, 3>(columns, false);
            check::<1, 2>(columns, false);
            check::<2, 2>(columns, false);
            check::<4, 2>(columns, false);
        }
        for columns in [32, 64, 96, 256] {
            check::<1, 3>(columns, true);
            check::<2, 3>(columns, true);
            check::<4, 3>(columns, true);
            check::<2, 2>(columns, true);
            check::<4, 2>(columns, true);
        }
    }
}
