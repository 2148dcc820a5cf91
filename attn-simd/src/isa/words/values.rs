//! Sums of the bytes of values, weighted by integers of 16 bits: two values side by side, so that lanes are channels.
//!
//! An integer of a weight has 16 bits, and no sign. [`TAKEN`] is taken from it, so that it has one, and as many times
//! the sum of the bytes is added in the end. So sums are those of [`digits`](crate::isa::digits), which has two digits.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;
use core::mem::MaybeUninit;
use core::sync::atomic::{Ordering, compiler_fence};

use super::add_products;
use crate::isa::request::request;
use crate::isa::{MAX_LANES, Next, Values, Weights};

/// As [`Isa::most_weight`](crate::isa::Isa::most_weight).
///
/// # Safety
/// The CPU has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn most_weight(weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
    // SAFETY: 64 floats of each array; the caller vouches for the instructions.
    unsafe {
        let zero = _mm256_setzero_ps();
        let (mut most, mut held) = (zero, 0xff);
        for n in 0..8 {
            let x = weight(weights, scales, (some, n));
            most = _mm256_max_ps(most, x);
            // Neither NaN, nor below 0, nor infinite.
            let above = _mm256_cmp_ps::<_CMP_GE_OQ>(x, zero);
            let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(f32::INFINITY));
            held &= _mm256_movemask_ps(_mm256_and_ps(above, below));
        }
        let mut lanes = [0.0f32; 8];
        _mm256_storeu_ps(lanes.as_mut_ptr(), most);
        (held == 0xff).then(|| lanes.iter().fold(0.0f32, |most, &x| most.max(x)))
    }
}

/// The `n`-th eight weights, each times its scale if there are scales; 0 for those whose bit is not set.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn weight(weights: &[f32; 64], scales: Option<&[f32; 64]>, (some, n): (u64, usize)) -> __m256 {
    // SAFETY: 64 floats of each array; the caller vouches for the instructions.
    unsafe {
        let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let bits = _mm256_and_si256(_mm256_set1_epi32((some >> (8 * n)) as i32), bit);
        let mut x = _mm256_loadu_ps(weights.as_ptr().add(8 * n));
        if let Some(scales) = scales {
            x = _mm256_mul_ps(x, _mm256_loadu_ps(scales.as_ptr().add(8 * n)));
        }
        _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, bit)))
    }
}

/// What is taken from an integer of a weight, so that it has 16 bits and a sign. A shift adds it again.
const TAKEN: i32 = 1 << TAKEN_BITS;
const TAKEN_BITS: i32 = 15;

/// As [`Isa::write_weights`](crate::isa::Isa::write_weights): whole, one after the other, less [`TAKEN`].
///
/// # Safety
/// The CPU has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn write_weights(
    weights: &[f32; 64],
    scale: f32,
    scales: Option<&[f32; 64]>,
    some: u64,
    to: &mut Weights,
) {
    const { assert!(size_of::<Weights>() == 64 * size_of::<i16>()) }
    let to: *mut i16 = to.bytes.as_mut_ptr().cast();
    // SAFETY: 64 floats of each array, and 64 integers; the caller vouches for the instructions.
    unsafe {
        let (factor, taken) = (_mm256_set1_ps(scale), _mm256_set1_epi32(TAKEN));
        let integers = |n: usize| {
            let mut x = _mm256_mul_ps(weight(weights, None, (some, n)), factor);
            if let Some(scales) = scales {
                // What is not seen stays 0, whatever its scale.
                let seen = weight(scales, None, (some, n));
                x = _mm256_mul_ps(x, seen);
            }
            _mm256_sub_epi32(_mm256_cvtps_epi32(x), taken)
        };
        for n in 0..4 {
            // Packed within halves of a vector.
            let packed = _mm256_packs_epi32(integers(2 * n), integers(2 * n + 1));
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(to.add(16 * n).cast(), packed);
        }
    }
}

/// As [`Isa::weigh_bytes`](crate::isa::Isa::weigh_bytes): sixteen channels at a time, of two values at a time.
///
/// # Safety
/// As there; and the CPU has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn weigh<const R: usize, const C: usize>(
    of: &Values<'_>,
    (weights, units): (&[Weights; R], &[f32; R]),
    out: &mut [[[MaybeUninit<[f32; MAX_LANES]>; 4]; R]; C],
) {
    let bytes = if C > 1 { 32 } else { of.bytes };
    let mut requests = Requests { next: of.next, ahead: of.ahead };
    for (c, out) in out.iter_mut().enumerate() {
        for half in 0..bytes.div_ceil(16) {
            let from = of.at + 32 * c + 16 * half;
            // SAFETY: 16 bytes of each value from there on, or 8; the caller vouches for them and the instructions.
            let sums = unsafe {
                if bytes - 16 * half >= 16 {
                    sixteen::<R, false>(of, from, weights, &mut requests)
                } else {
                    sixteen::<R, true>(of, from, weights, &mut requests)
                }
            };
            for r in 0..R {
                for v in 0..2 {
                    // SAFETY: room for sixteen floats; the caller vouches for the instructions.
                    unsafe {
                        let sum = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][v]), _mm256_set1_ps(units[r]));
                        _mm256_storeu_ps(out[r][2 * half + v].as_mut_ptr().cast(), sum);
                    }
                }
            }
        }
    }
}

/// The lines that are requested meanwhile.
struct Requests {
    next: Next,
    ahead: [usize; 2],
}

impl Requests {
    /// Requests the next line.
    #[inline(always)]
    fn one(&mut self, values: &[*const i8; 64]) {
        let Next { row, part, parts, step } = &mut self.next;
        request(values[*row % 64].wrapping_add(*part * *step), self.ahead);
        *part += 2;
        while *part >= *parts {
            (*row, *part) = (*row + 1, *part - *parts);
        }
    }
}

/// The sums of sixteen channels over all values, or of eight if they are few: of two values at a time.
///
/// # Safety
/// As [`weigh`], for these channels.
#[inline(always)]
unsafe fn sixteen<const R: usize, const FEW: bool>(
    of: &Values<'_>,
    from: usize,
    weights: &[Weights; R],
    requests: &mut Requests,
) -> [[__m256i; 2]; R] {
    // SAFETY: the caller vouches for the bytes and the instructions.
    unsafe {
        let zero = _mm256_setzero_si256();
        let (mut acc, mut plain) = ([[zero; 2]; R], [zero; 2]);
        // Four at a time: the last may be none, whose integers are those of a weight of 0.
        for (n, four) in of.values.as_chunks::<4>().0.iter().enumerate().take(of.len.div_ceil(4)) {
            requests.one(of.values);
            for (m, two) in four.as_chunks::<2>().0.iter().enumerate() {
                compiler_fence(Ordering::SeqCst);
                let mut x = [_mm_setzero_si128(); 2];
                for k in 0..2 {
                    let from = two[k].add(from).cast();
                    x[k] = if FEW { _mm_loadl_epi64(from) } else { _mm_loadu_si128(from) };
                }
                let low = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x[0], x[1]));
                let high = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x[0], x[1]));
                // At most 32 times 128 in 16 bits.
                plain = [_mm256_add_epi16(plain[0], low), _mm256_add_epi16(plain[1], high)];
                for r in 0..R {
                    let two = weights[r].bytes.as_ptr().cast::<i32>().add(2 * n + m).read_unaligned();
                    let two = _mm256_set1_epi32(two);
                    add_products(&mut acc[r][0], two, low);
                    add_products(&mut acc[r][1], two, high);
                }
            }
        }
        for v in 0..2 {
            let taken = _mm256_slli_epi32::<TAKEN_BITS>(_mm256_madd_epi16(plain[v], _mm256_set1_epi16(1)));
            for r in 0..R {
                acc[r][v] = _mm256_add_epi32(acc[r][v], taken);
            }
        }
        acc
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::digits::testing::weights_and_sums_are_those_of_plain_rust;
    use crate::isa::words::testing;

    /// The integer of a weight.
    fn integer(weights: &Weights, value: usize) -> i32 {
        let bytes = weights.bytes.as_flattened();
        i32::from(i16::from_le_bytes([bytes[2 * value], bytes[2 * value + 1]])) + TAKEN
    }

    #[test]
    fn integers_and_sums_are_those_of_plain_rust() {
        if let Some(isa) = testing::avx2() {
            weights_and_sums_are_those_of_plain_rust(isa, integer);
        }
    }
}
