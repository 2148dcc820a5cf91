//! Sums of the bytes of values, weighted by integers: four values side by side, so that lanes are channels.
//!
//! An integer of a weight has two digits of eight bits, and no sign, but SDOT takes signed bytes: 128 is taken from
//! each digit, and as many times the sum of the bytes is added in the end. So sums are those of
//! [`digits`](crate::isa::digits).

#![allow(unsafe_code, reason = "the leaf: addresses that the caller proves, and SDOT")]

use core::arch::aarch64::*;
use core::mem::MaybeUninit;

use super::sdot;
use crate::isa::{MAX_LANES, Values, Weights};

/// What is taken from an integer: 128 from each digit.
const TAKEN: i32 = 128 * 256 + 128;

/// The `n`-th four weights, each times its scale if there are scales; 0 for those whose bit is not set.
#[inline(always)]
fn weight(weights: &[f32; 64], scales: Option<&[f32; 64]>, (some, n): (u64, usize)) -> float32x4_t {
    // SAFETY: four floats of each array, and four words. NEON belongs to the base of aarch64.
    unsafe {
        let bit = vld1q_u32([1, 2, 4, 8].as_ptr());
        let seen = vtstq_u32(vdupq_n_u32((some >> (4 * n)) as u32), bit);
        let mut x = vld1q_f32(weights[4 * n..][..4].as_ptr());
        if let Some(scales) = scales {
            x = vmulq_f32(x, vld1q_f32(scales[4 * n..][..4].as_ptr()));
        }
        vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), seen))
    }
}

/// As [`Isa::most_weight`](crate::isa::Isa::most_weight).
#[inline]
pub(crate) fn most_weight(weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
    // SAFETY: NEON belongs to the base of aarch64.
    unsafe {
        let zero = vdupq_n_f32(0.0);
        let (mut most, mut held) = (zero, vdupq_n_u32(u32::MAX));
        for n in 0..16 {
            let x = weight(weights, scales, (some, n));
            most = vmaxq_f32(most, x);
            // Neither NaN, nor below 0, nor infinite.
            held = vandq_u32(held, vandq_u32(vcgeq_f32(x, zero), vcltq_f32(x, vdupq_n_f32(f32::INFINITY))));
        }
        if vminvq_u32(held) == u32::MAX { Some(vmaxvq_f32(most)) } else { None }
    }
}

/// As [`Isa::write_weights`](crate::isa::Isa::write_weights): all higher digits, then all lower ones, less 128 each.
#[inline]
pub(crate) fn write_weights(weights: &[f32; 64], scale: f32, scales: Option<&[f32; 64]>, some: u64, to: &mut Weights) {
    let [high, low] = &mut to.bytes;
    for (n, (high, low)) in high.as_chunks_mut::<8>().0.iter_mut().zip(low.as_chunks_mut::<8>().0).enumerate() {
        // SAFETY: eight bytes each. NEON belongs to the base of aarch64.
        unsafe {
            let mut integers = [vdup_n_u16(0); 2];
            for half in 0..2 {
                let n = 2 * n + half;
                let mut x = vmulq_n_f32(weight(weights, None, (some, n)), scale);
                if let Some(scales) = scales {
                    // What is not seen stays 0, whatever its scale.
                    x = vmulq_f32(x, weight(scales, None, (some, n)));
                }
                // To the nearest, ties to even; up to 65535.
                integers[half] = vqmovn_u32(vcvtnq_u32_f32(x));
            }
            let (eight, flip) = (vcombine_u16(integers[0], integers[1]), vdup_n_u8(128));
            vst1_u8(high.as_mut_ptr(), veor_u8(vshrn_n_u16::<8>(eight), flip));
            vst1_u8(low.as_mut_ptr(), veor_u8(vmovn_u16(eight), flip));
        }
    }
}

/// As [`Isa::weigh_bytes`](crate::isa::Isa::weigh_bytes): eight channels at a time, of four values at a time.
///
/// # Safety
/// As there; and the CPU has SDOT.
#[inline]
#[target_feature(enable = "dotprod")]
pub(crate) unsafe fn weigh<const R: usize, const C: usize>(
    of: &Values<'_>,
    (weights, units): (&[Weights; R], &[f32; R]),
    out: &mut [[[MaybeUninit<[f32; MAX_LANES]>; 4]; R]; C],
) {
    let bytes = if C > 1 { 16 } else { of.bytes };
    for (c, out) in out.iter_mut().enumerate() {
        for half in 0..bytes.div_ceil(8) {
            let from = of.at + 16 * c + 8 * half;
            // SAFETY: eight bytes of each value from there on, or four; the caller vouches for them and the
            // instruction.
            let sums = unsafe {
                if bytes - 8 * half >= 8 {
                    eight::<R, false>(of, from, weights)
                } else {
                    eight::<R, true>(of, from, weights)
                }
            };
            for r in 0..R {
                for v in 0..2 {
                    // SAFETY: room for four floats and more. NEON belongs to the base of aarch64.
                    unsafe {
                        let sum = vmulq_n_f32(vcvtq_f32_s32(sums[r][v]), units[r]);
                        vst1q_f32(out[r][2 * half + v].as_mut_ptr().cast(), sum);
                    }
                }
            }
        }
    }
}

/// Eight bytes in the lower half of a vector, or four.
///
/// # Safety
/// As many are readable.
#[inline(always)]
unsafe fn load<const FEW: bool>(from: *const i8) -> int8x16_t {
    // SAFETY: the caller vouches for the bytes. NEON belongs to the base of aarch64.
    unsafe {
        let bits = if FEW { from.cast::<u32>().read_unaligned().into() } else { from.cast::<u64>().read_unaligned() };
        vreinterpretq_s8_u64(vcombine_u64(vcreate_u64(bits), vcreate_u64(0)))
    }
}

/// The sums of eight channels over all values, or of four if they are few.
///
/// # Safety
/// As [`weigh`], for these channels.
#[inline(always)]
unsafe fn eight<const R: usize, const FEW: bool>(
    of: &Values<'_>,
    from: usize,
    weights: &[Weights; R],
) -> [[int32x4_t; 2]; R] {
    // SAFETY: the caller vouches for the bytes and the instructions; four digits of each row.
    unsafe {
        let zero = vdupq_n_s32(0);
        let (mut acc, mut plain) = ([[[zero; 2]; 2]; R], [zero; 2]);
        // Four at a time: the last may be none, whose integers are those of a weight of 0.
        for (n, four) in of.values.as_chunks::<4>().0.iter().enumerate().take(of.len.div_ceil(4)) {
            let mut x = [vdupq_n_s8(0); 4];
            for k in 0..4 {
                x[k] = load::<FEW>(four[k].add(from));
            }
            // Pairs of two values, then words of four.
            let two = [vreinterpretq_s16_s8(vzip1q_s8(x[0], x[1])), vreinterpretq_s16_s8(vzip1q_s8(x[2], x[3]))];
            let words = [vzip1q_s16(two[0], two[1]), vzip2q_s16(two[0], two[1])];
            let words = [vreinterpretq_s8_s16(words[0]), vreinterpretq_s8_s16(words[1])];
            for v in 0..2 {
                plain[v] = sdot(plain[v], words[v], vdupq_n_s8(1));
            }
            for r in 0..R {
                for d in 0..2 {
                    let digits = weights[r].bytes[d].as_ptr().add(4 * n).cast::<i32>().read_unaligned();
                    let digits = vreinterpretq_s8_s32(vdupq_n_s32(digits));
                    for v in 0..2 {
                        acc[r][d][v] = sdot(acc[r][d][v], words[v], digits);
                    }
                }
            }
        }
        let mut sums = [[zero; 2]; R];
        for r in 0..R {
            for v in 0..2 {
                let digits = vaddq_s32(vshlq_n_s32::<8>(acc[r][0][v]), acc[r][1][v]);
                sums[r][v] = vmlaq_n_s32(digits, plain[v], TAKEN);
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::dotprod;
    use super::*;
    use crate::isa::digits::testing::weights_and_sums_are_those_of_plain_rust;

    /// The integer of a weight.
    fn integer(weights: &Weights, value: usize) -> i32 {
        let [high, low] = weights.bytes.map(|digit| i32::from(digit[value] ^ 128));
        256 * high + low
    }

    #[test]
    fn integers_and_sums_are_those_of_plain_rust() {
        if let Some(isa) = dotprod() {
            weights_and_sums_are_those_of_plain_rust(isa, integer);
        }
    }
}
