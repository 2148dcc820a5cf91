//! Sums of the bytes of values, weighted by integers: four values in a word, so that lanes are channels.
//!
//! Sixteen times four values are a tile. Their bytes are interleaved by eight shuffles for four values and a vector of
//! channels, and VPDPBUSD adds four products to each lane; without it, VPMADDWD adds two. The integers are weights:
//! their digits are made here, too.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use super::width::{Half, Whole, Width};
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
    (weights, units): (&[Weights; R], &[f32; R]),
    out: &mut [Vectors<R>; C],
) {
    // SAFETY: this function has the features; the caller vouches for the values.
    unsafe {
        if const { C == 1 } && of.bytes == 32 {
            write::<Half, R, C>(sums::<Half, R, C>(of, weights), units, out);
        } else {
            write::<Whole, R, C>(sums::<Whole, R, C>(of, weights), units, out);
        }
    }
}

/// # Safety
/// As [`weigh`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn without_vnni<const R: usize, const C: usize>(
    of: &Values<'_>,
    (weights, units): (&[Weights; R], &[f32; R]),
    out: &mut [Vectors<R>; C],
) {
    // SAFETY: this function has the features; the caller vouches for the values.
    unsafe {
        if const { C == 1 } && of.bytes == 32 {
            write::<Half, R, C>(sums_of_pairs::<Half, R, C>(of, weights), units, out);
        } else {
            write::<Whole, R, C>(sums_of_pairs::<Whole, R, C>(of, weights), units, out);
        }
    }
}

/// Sums of integers, for each of C times a width, R rows and the four vectors of a width.
type Integers<W, const R: usize, const C: usize> = [[[<W as Width>::V; 4]; R]; C];

/// Sums, times the units of their rows.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL.
#[inline(always)]
unsafe fn write<W: Width, const R: usize, const C: usize>(
    sums: Integers<W, R, C>,
    units: &[f32; R],
    out: &mut [Vectors<R>; C],
) {
    // SAFETY: sixteen floats of each vector; the caller vouches for the instructions.
    unsafe {
        for c in 0..C {
            for r in 0..R {
                let unit = _mm512_set1_ps(units[r]);
                for (x, out) in W::channels(sums[c][r]).iter().zip(&mut out[c][r]) {
                    _mm512_storeu_ps(out.as_mut_ptr().cast(), _mm512_mul_ps(*x, unit));
                }
            }
        }
    }
}

/// The bytes of four values that are taken, each the `c`-th width of them; requests others.
///
/// # Safety
/// They are readable; the CPU has AVX-512 F, BW and VL.
#[inline(always)]
unsafe fn four<W: Width, const C: usize>(of: &Values<'_>, values: &[*const i8; 4], c: usize) -> [W::V; 4] {
    // SAFETY: the caller vouches for the bytes and the instructions. A prefetch reads nothing and faults on no address.
    unsafe {
        let mut x = [W::splat(0); 4];
        for k in 0..4 {
            let from = values[k].add(of.at + 64 * c);
            x[k] = W::load(from, if C > 1 { 64 } else { of.bytes });
            _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(of.ahead[1]));
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(of.ahead[0]));
        }
        x
    }
}

/// By AVX512_VNNI: sums of each digit.
///
/// # Safety
/// As [`weigh`]; compiled into a function with the features.
#[inline(always)]
unsafe fn sums<W: Width, const R: usize, const C: usize>(of: &Values<'_>, weights: &[Weights; R]) -> Integers<W, R, C> {
    // SAFETY: the bytes of each value; the caller vouches for them and for the instructions.
    unsafe {
        let zero = W::splat(0);
        let mut all = [[[zero; 4]; R]; C];
        // Halves are two of four vectors: those of lower bytes and of upper ones.
        macro_rules! halves {
            ($($half:literal)*) => {{
                let mut acc = [[[[zero; 4]; 2]; R]; C];
                for (quad, values) in of.values.as_chunks::<4>().0.iter().enumerate().take(of.len.div_ceil(4)) {
                    for c in 0..C {
                        let x = four::<W, C>(of, values, c);
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
                                    acc[c][r][digit][n] = W::dot(acc[c][r][digit][n], four, words[n]);
                                })*
                            }
                        }
                    }
                }
                for c in 0..C {
                    for r in 0..R {
                        $(for n in [2 * $half, 2 * $half + 1] {
                            all[c][r][n] = W::add(W::shift::<8>(acc[c][r][0][n]), acc[c][r][1][n]);
                        })*
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
        all
    }
}

/// Without AVX512_VNNI: integers of weights whole, in 16 bits, and values in pairs of 16 bits. [`TAKEN`] is taken from
/// an integer, so that it has a sign: its upper bit changes. As many times the sum of the bytes is added in the end.
///
/// # Safety
/// As [`weigh`]; compiled into a function with the features.
#[inline(always)]
unsafe fn sums_of_pairs<W: Width, const R: usize, const C: usize>(
    of: &Values<'_>,
    weights: &[Weights; R],
) -> Integers<W, R, C> {
    // SAFETY: the bytes of each value, and 64 bytes of each digit; the caller vouches for the values and for the
    // instructions.
    unsafe {
        // Of four values: the first and the third, then the second and the fourth.
        let mut integers = [[[0i32; 16]; 2]; R];
        for (weights, integers) in weights.iter().zip(&mut integers) {
            let high = _mm512_loadu_si512(weights.bytes[0].as_ptr().cast());
            let low = _mm512_loadu_si512(weights.bytes[1].as_ptr().cast());
            let (lower, taken) = (_mm512_set1_epi16(0xff), _mm512_set1_epi16(TAKEN as i16));
            let even = _mm512_or_si512(_mm512_slli_epi16::<8>(high), _mm512_and_si512(low, lower));
            let odd = _mm512_or_si512(_mm512_andnot_si512(lower, high), _mm512_srli_epi16::<8>(low));
            _mm512_storeu_si512(integers[0].as_mut_ptr().cast(), _mm512_xor_si512(even, taken));
            _mm512_storeu_si512(integers[1].as_mut_ptr().cast(), _mm512_xor_si512(odd, taken));
        }
        let zero = W::splat(0);
        // A lane of 16 bits sums 32 bytes.
        let (mut all, mut plain) = ([[[zero; 4]; R]; C], [[zero; 4]; C]);
        for (quad, values) in of.values.as_chunks::<4>().0.iter().enumerate().take(of.len.div_ceil(4)) {
            let place = Weights::place(4 * quad) / 4;
            for c in 0..C {
                let x = four::<W, C>(of, values, c);
                // Written out by a macro, so that sums stay in registers.
                macro_rules! half {
                    ($half:literal) => {
                        let ab = W::bytes::<{ $half == 1 }>(x[0], x[1]);
                        let cd = W::bytes::<{ $half == 1 }>(x[2], x[3]);
                        let words = [W::pairs::<false>(ab, cd), W::pairs::<true>(ab, cd)];
                        let even = [W::even(words[0]), W::even(words[1])];
                        let odd = [W::odd(words[0]), W::odd(words[1])];
                        for n in 0..2 {
                            let plain = &mut plain[c][2 * $half + n];
                            *plain = W::unseen(W::add_halves(*plain, W::add_halves(even[n], odd[n])));
                        }
                        for r in 0..R {
                            let of_even = W::splat(integers[r][0][place]);
                            let of_odd = W::splat(integers[r][1][place]);
                            for n in 0..2 {
                                let sum = &mut all[c][r][2 * $half + n];
                                let both = W::add(W::products(even[n], of_even), W::products(odd[n], of_odd));
                                *sum = W::unseen(W::add(*sum, both));
                            }
                        }
                    };
                }
                half!(0);
                half!(1);
            }
        }
        for c in 0..C {
            for n in 0..4 {
                let taken = W::shift::<TAKEN_BITS>(W::products(plain[c][n], W::splat(1 << 16 | 1)));
                for r in 0..R {
                    all[c][r][n] = W::add(all[c][r][n], taken);
                }
            }
        }
        all
    }
}

/// What is taken from an integer of a weight, so that it has 16 bits and a sign. A shift adds it again.
const TAKEN: u16 = 1 << TAKEN_BITS;
const TAKEN_BITS: u32 = 15;

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
