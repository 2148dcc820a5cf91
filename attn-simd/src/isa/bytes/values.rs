//! Sums of the bytes of values, weighted by integers: four values in a word, so that lanes are channels.
//!
//! Sixteen times four values are a tile. Their bytes are interleaved by eight shuffles for four values and a vector of
//! channels, and [`Dot`] adds four products to each lane. The integers are weights: their digits are made here, too.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use super::dot::{Dot, Pairs, Vnni, joined};
use crate::isa::{Values, Weights};

/// The bits of each vector of a tile.
const fn lanes(some: u64) -> [u16; 4] {
    [some as u16, (some >> 16) as u16, (some >> 32) as u16, (some >> 48) as u16]
}

/// As [`Isa::most_weight`](crate::isa::Isa::most_weight).
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn most_weight(weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
    // SAFETY: 64 floats of each array.
    unsafe {
        let (mut most, mut held) = (_mm512_setzero_ps(), 0xffff);
        for (n, some) in lanes(some).into_iter().enumerate() {
            let mut x = _mm512_maskz_loadu_ps(some, weights.as_ptr().add(16 * n));
            if let Some(scales) = scales {
                x = _mm512_maskz_mul_ps(some, x, _mm512_loadu_ps(scales.as_ptr().add(16 * n)));
            }
            most = _mm512_max_ps(most, x);
            // Neither NaN, nor below 0, nor infinite.
            held &= _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, _mm512_setzero_ps())
                & _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(f32::INFINITY));
        }
        (held == 0xffff).then(|| _mm512_reduce_max_ps(most))
    }
}

/// As [`Isa::write_weights`](crate::isa::Isa::write_weights).
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn write_weights(
    weights: &[f32; 64],
    scale: f32,
    scales: Option<&[f32; 64]>,
    some: u64,
    to: &mut Weights,
) {
    // SAFETY: 64 floats of each array, and 64 bytes of each digit.
    unsafe {
        let (factor, mut x) = (_mm512_set1_ps(scale), [_mm512_setzero_si512(); 4]);
        for (n, some) in lanes(some).into_iter().enumerate() {
            let mut weight = _mm512_maskz_mul_ps(some, _mm512_loadu_ps(weights.as_ptr().add(16 * n)), factor);
            if let Some(scales) = scales {
                weight = _mm512_maskz_mul_ps(some, weight, _mm512_loadu_ps(scales.as_ptr().add(16 * n)));
            }
            x[n] = _mm512_cvtps_epi32(weight);
        }
        // Packed within quarters: so [`Weights::place`] is where it is.
        let (first, second) = (_mm512_packus_epi32(x[0], x[1]), _mm512_packus_epi32(x[2], x[3]));
        let low = _mm512_set1_epi16(0xff);
        let low = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
        let high = _mm512_packus_epi16(_mm512_srli_epi16::<8>(first), _mm512_srli_epi16::<8>(second));
        _mm512_storeu_si512(to.bytes[0].as_mut_ptr().cast(), high);
        _mm512_storeu_si512(to.bytes[1].as_mut_ptr().cast(), low);
    }
}

/// Vectors of the products of one width. Of four values, their bytes are interleaved within quarters.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL where a function is called.
trait Width: Copy {
    /// Bytes.
    type V: Copy;

    /// Bytes from an address on, as many as are readable.
    unsafe fn load(from: *const i8, bytes: usize) -> Self::V;
    /// Bytes of both in turn, within quarters: of their lower halves, or of the upper ones.
    unsafe fn bytes<const UPPER: bool>(a: Self::V, b: Self::V) -> Self::V;
    /// The same of pairs of bytes.
    unsafe fn pairs<const UPPER: bool>(a: Self::V, b: Self::V) -> Self::V;
    /// A word in all lanes.
    unsafe fn splat(word: i32) -> Self::V;
    /// Adds products of bytes.
    unsafe fn dot<U: Dot>(unit: U, sum: Self::V, weights: Self::V, values: Self::V) -> Self::V;
    /// The sums over digits, sixteen channels in a vector: of as many as the width has bytes in a value.
    unsafe fn channels(sums: [[Self::V; 4]; 2]) -> [__m512; 4];
}

/// 64 bytes of a value.
#[derive(Clone, Copy)]
struct Whole;

impl Width for Whole {
    type V = __m512i;

    #[inline(always)]
    unsafe fn load(from: *const i8, bytes: usize) -> __m512i {
        // SAFETY: as many bytes are readable; the caller vouches for that and for the instructions.
        unsafe {
            if bytes < 64 { _mm512_maskz_loadu_epi8((1 << bytes) - 1, from) } else { _mm512_loadu_si512(from.cast()) }
        }
    }

    #[inline(always)]
    unsafe fn bytes<const UPPER: bool>(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { if UPPER { _mm512_unpackhi_epi8(a, b) } else { _mm512_unpacklo_epi8(a, b) } }
    }

    #[inline(always)]
    unsafe fn pairs<const UPPER: bool>(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { if UPPER { _mm512_unpackhi_epi16(a, b) } else { _mm512_unpacklo_epi16(a, b) } }
    }

    #[inline(always)]
    unsafe fn splat(word: i32) -> __m512i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm512_set1_epi32(word) }
    }

    #[inline(always)]
    unsafe fn dot<U: Dot>(unit: U, sum: __m512i, weights: __m512i, values: __m512i) -> __m512i {
        unit.dot(sum, weights, values)
    }

    #[inline(always)]
    unsafe fn channels(sums: [[__m512i; 4]; 2]) -> [__m512; 4] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let mut x = [_mm512_setzero_si512(); 4];
            for n in 0..4 {
                x[n] = _mm512_castps_si512(joined([sums[0][n], sums[1][n]]));
            }
            // Lanes of x[n] in quarter q are the channels from 16·q + 4·n on.
            let low = [_mm512_shuffle_i32x4::<0x44>(x[0], x[1]), _mm512_shuffle_i32x4::<0x44>(x[2], x[3])];
            let high = [_mm512_shuffle_i32x4::<0xee>(x[0], x[1]), _mm512_shuffle_i32x4::<0xee>(x[2], x[3])];
            [
                _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0x88>(low[0], low[1])),
                _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0xdd>(low[0], low[1])),
                _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0x88>(high[0], high[1])),
                _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0xdd>(high[0], high[1])),
            ]
        }
    }
}

/// 32 bytes of a value: a block.
#[derive(Clone, Copy)]
struct Half;

impl Width for Half {
    type V = __m256i;

    #[inline(always)]
    unsafe fn load(from: *const i8, _: usize) -> __m256i {
        // SAFETY: 32 bytes are readable; the caller vouches for that and for the instructions.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn bytes<const UPPER: bool>(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { if UPPER { _mm256_unpackhi_epi8(a, b) } else { _mm256_unpacklo_epi8(a, b) } }
    }

    #[inline(always)]
    unsafe fn pairs<const UPPER: bool>(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { if UPPER { _mm256_unpackhi_epi16(a, b) } else { _mm256_unpacklo_epi16(a, b) } }
    }

    #[inline(always)]
    unsafe fn splat(word: i32) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm256_set1_epi32(word) }
    }

    #[inline(always)]
    unsafe fn dot<U: Dot>(unit: U, sum: __m256i, weights: __m256i, values: __m256i) -> __m256i {
        unit.dot_half(sum, weights, values)
    }

    #[inline(always)]
    unsafe fn channels(sums: [[__m256i; 4]; 2]) -> [__m512; 4] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let mut x = [_mm512_setzero_si512(); 2];
            for n in 0..2 {
                let mut of = [x[0]; 2];
                for digit in 0..2 {
                    let [low, high] = [sums[digit][2 * n], sums[digit][2 * n + 1]];
                    of[digit] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                }
                x[n] = _mm512_castps_si512(joined(of));
            }
            // The first and third quarters of both are the first sixteen channels.
            let zero = _mm512_setzero_ps();
            let first = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0x88>(x[0], x[1]));
            [first, _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0xdd>(x[0], x[1])), zero, zero]
        }
    }
}

/// Sums of sixteen channels of R rows each.
type Vectors<const R: usize> = [[MaybeUninit<[f32; 16]>; 4]; R];

/// As [`Isa::weigh_bytes`](crate::isa::Isa::weigh_bytes).
///
/// # Safety
/// As there; and the CPU has AVX-512 F, BW, DQ, VL, and AVX512_VNNI if `vnni` says so.
#[inline(always)]
pub(crate) unsafe fn weigh<const R: usize, const C: usize>(
    vnni: bool,
    of: &Values<'_>,
    weights: (&[Weights; R], &[f32; R]),
    out: &mut [Vectors<R>; C],
) {
    // SAFETY: the caller vouches for the features, and for the values.
    unsafe { if vnni { with_vnni(of, weights, out) } else { without_vnni(of, weights, out) } }
}

/// # Safety
/// As [`weigh`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")]
unsafe fn with_vnni<const R: usize, const C: usize>(
    of: &Values<'_>,
    weights: (&[Weights; R], &[f32; R]),
    out: &mut [Vectors<R>; C],
) {
    // SAFETY: this function has the features; the caller vouches for the values.
    unsafe { of_width(Vnni, of, weights, out) }
}

/// # Safety
/// As [`weigh`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn without_vnni<const R: usize, const C: usize>(
    of: &Values<'_>,
    weights: (&[Weights; R], &[f32; R]),
    out: &mut [Vectors<R>; C],
) {
    // SAFETY: this function has the features; the caller vouches for the values.
    unsafe { of_width(Pairs, of, weights, out) }
}

/// # Safety
/// As [`sums`].
#[inline(always)]
unsafe fn of_width<U: Dot, const R: usize, const C: usize>(
    unit: U,
    of: &Values<'_>,
    weights: (&[Weights; R], &[f32; R]),
    out: &mut [Vectors<R>; C],
) {
    // SAFETY: the caller vouches for the same.
    unsafe {
        if const { C == 1 } && of.bytes == 32 {
            sums::<U, Half, R, C>(unit, of, weights, out);
        } else {
            sums::<U, Whole, R, C>(unit, of, weights, out);
        }
    }
}

/// # Safety
/// As [`weigh`]; compiled into a function with the features of `unit`.
#[inline(always)]
unsafe fn sums<U: Dot, W: Width, const R: usize, const C: usize>(
    unit: U,
    of: &Values<'_>,
    (weights, units): (&[Weights; R], &[f32; R]),
    out: &mut [Vectors<R>; C],
) {
    let Values { values, len, at, bytes, ahead, .. } = *of;
    // SAFETY: the bytes of each value; the caller vouches for them and for the instructions.
    unsafe {
        let zero = W::splat(0);
        let mut all = [[[[zero; 4]; 2]; R]; C];
        // Halves are two of four vectors: those of lower bytes and of upper ones.
        macro_rules! halves {
            ($($half:literal)*) => {{
                let mut acc = [[[[zero; 4]; 2]; R]; C];
                for (quad, values) in values.as_chunks::<4>().0.iter().enumerate().take(len.div_ceil(4)) {
                    for c in 0..C {
                        let mut x = [zero; 4];
                        for k in 0..4 {
                            let from = values[k].add(at + 64 * c);
                            x[k] = W::load(from, if C > 1 { 64 } else { bytes });
                            _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(ahead[1]));
                            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead[0]));
                        }
                        let mut words = [zero; 4];
                        $(
                            let ab = W::bytes::<{ $half == 1 }>(x[0], x[1]);
                            let cd = W::bytes::<{ $half == 1 }>(x[2], x[3]);
                            words[2 * $half] = W::pairs::<false>(ab, cd);
                            words[2 * $half + 1] = W::pairs::<true>(ab, cd);
                        )*
                        for r in 0..R {
                            for digit in 0..2 {
                                let four = &weights[r].bytes[digit].as_chunks::<4>().0[Weights::place(4 * quad) / 4];
                                let four = W::splat(i32::from_ne_bytes(*four));
                                $(for n in [2 * $half, 2 * $half + 1] {
                                    acc[c][r][digit][n] = W::dot(unit, acc[c][r][digit][n], four, words[n]);
                                })*
                            }
                        }
                    }
                }
                for c in 0..C {
                    for r in 0..R {
                        for digit in 0..2 {
                            $(for n in [2 * $half, 2 * $half + 1] {
                                all[c][r][digit][n] = acc[c][r][digit][n];
                            })*
                        }
                    }
                }
            }};
        }
        // Registers hold sixteen sums beside what they are made of.
        if const { C * R <= 2 } {
            halves!(0 1);
        } else {
            halves!(0);
            halves!(1);
        }
        for c in 0..C {
            for r in 0..R {
                let unit = _mm512_set1_ps(units[r]);
                for (x, out) in W::channels(all[c][r]).iter().zip(&mut out[c][r]) {
                    _mm512_storeu_ps(out.as_mut_ptr().cast(), _mm512_mul_ps(*x, unit));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::isa::bytes::testing;
    use crate::isa::{Next, digits};

    /// Weights, their digits and sums of values, both ways beside plain Rust.
    #[test]
    fn integers_and_sums_are_those_of_plain_rust() {
        let Some(isa) = testing::avx512() else { return };
        let mut number = testing::numbers(5);
        let data: Vec<i8> = (0..64 * 200).map(|n| if n % 7 == 3 { -128 } else { number() as i8 }).collect();
        let values: [*const i8; 64] = core::array::from_fn(|n| data[n * 200..].as_ptr());
        let rows: [[f32; 64]; 4] = core::array::from_fn(|r| core::array::from_fn(|_| (number() >> r) as f32 * 1e-7));
        let scales: [[f32; 64]; 2] = core::array::from_fn(|_| core::array::from_fn(|_| (number() % 99) as f32 / 64.0));
        for len in [64, 1, 16, 17, 50, 63] {
            // All of them, or all but one.
            let [all, some] = [u64::MAX >> (64 - len), u64::MAX >> (64 - len) & !(1 << (len / 2))];
            for scales in [None, Some(&scales[0]), Some(&scales[1])] {
                for (row, odd) in rows.iter().flat_map(|row| [1.0, -1e-9, f32::NAN, f32::INFINITY].map(|x| (row, x))) {
                    let mut row = *row;
                    row[len / 2] *= odd;
                    // SAFETY: the token proves AVX-512.
                    let most = unsafe { most_weight(&row, scales, all) };
                    assert_eq!(most, digits::most_weight(&row, scales, all), "{len} {odd}");
                    let is_zero = row[len / 2] == 0.0 || scales.is_some_and(|scales| scales[len / 2] == 0.0);
                    assert!(most.is_some() == (odd == 1.0) || is_zero && odd < 0.0, "{len} {odd}");
                    // SAFETY: the same.
                    let most = unsafe { most_weight(&row, scales, some) };
                    assert!(most.is_some() && most == digits::most_weight(&row, scales, some), "{len} {odd}");
                }
            }
            let mut weights = [Weights::ZERO; 4];
            for (r, row) in rows.iter().enumerate() {
                let scales = (r > 1).then_some(&scales[0]);
                let seen = if r % 2 == 0 { all } else { some };
                let most = digits::most_weight(row, scales, all);
                let (factor, mut want) = (Weights::MOST / most.expect("weights"), Weights::ZERO);
                // SAFETY: the token proves AVX-512.
                unsafe { write_weights(row, factor, scales, seen, &mut weights[r]) };
                digits::write_weights(row, factor, scales, seen, &mut want);
                assert_eq!(weights[r].bytes, want.bytes, "{len} {r}");
            }
            for vnni in [false, isa.vnni] {
                for bytes in [64, 48, 32, 16] {
                    let next = Next { row: 0, part: 0, parts: 1, step: 64 };
                    let of = Values { values: &values, len, at: 3, bytes, ahead: [0, 0], next };
                    check::<1, 1>(vnni, &of, &weights);
                    check::<2, 1>(vnni, &of, &weights);
                    check::<4, 1>(vnni, &of, &weights);
                }
                let next = Next { row: 0, part: 0, parts: 1, step: 64 };
                check::<1, 2>(vnni, &Values { values: &values, len, at: 5, bytes: 128, ahead: [0, 0], next }, &weights);
            }
        }
    }

    fn check<const R: usize, const C: usize>(vnni: bool, of: &Values<'_>, weights: &[Weights; 4]) {
        let (weights, units) = (weights.first_chunk::<R>().expect("rows"), [0.25; R]);
        let mut out: [Vectors<R>; C] = [[[MaybeUninit::new([f32::NAN; 16]); 4]; R]; C];
        // SAFETY: 200 bytes of each value; the token proves AVX-512, and says whether there is AVX512_VNNI.
        unsafe { weigh(vnni, of, (weights, &units), &mut out) };
        for (c, r) in (0..C).flat_map(|c| (0..R).map(move |r| (c, r))) {
            let (mut want, bytes) = ([0.0; 64], if C > 1 { 64 } else { of.bytes });
            // SAFETY: the same.
            unsafe { digits::weigh(&Values { at: of.at + 64 * c, bytes, ..*of }, &weights[r], units[r], &mut want) };
            for n in 0..bytes {
                // SAFETY: written above.
                let got = unsafe { out[c][r][n / 16].assume_init() }[n % 16];
                assert_eq!(got, want[n], "{R} rows, {C} times, row {r}, byte {n}");
            }
        }
    }
}
