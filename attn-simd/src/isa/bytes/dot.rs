//! Products of bytes, by AVX512_VNNI and without, and what their sums are.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;

/// Adds the products of four unsigned bytes with four signed ones to each lane.
pub(super) trait Dot: Copy {
    fn dot(self, sum: __m512i, keys: __m512i, digits: __m512i) -> __m512i;
    /// The same in half as many lanes.
    fn dot_half(self, sum: __m256i, keys: __m256i, digits: __m256i) -> __m256i;
}

/// By AVX512_VNNI.
#[derive(Clone, Copy)]
pub(super) struct Vnni;

impl Dot for Vnni {
    #[inline(always)]
    fn dot(self, sum: __m512i, keys: __m512i, digits: __m512i) -> __m512i {
        // SAFETY: used only in functions with the features.
        unsafe { _mm512_dpbusd_epi32(sum, keys, digits) }
    }

    #[inline(always)]
    fn dot_half(self, sum: __m256i, keys: __m256i, digits: __m256i) -> __m256i {
        // SAFETY: used only in functions with the features.
        unsafe { _mm256_dpbusd_epi32(sum, keys, digits) }
    }
}

/// By products of pairs of 16 bits: even bytes, then odd ones.
#[derive(Clone, Copy)]
pub(super) struct Pairs;

impl Dot for Pairs {
    #[inline(always)]
    fn dot(self, sum: __m512i, keys: __m512i, digits: __m512i) -> __m512i {
        // SAFETY: used only in functions with the features.
        unsafe {
            let (even, odd) = (_mm512_and_si512(keys, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(keys));
            let of_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(digits));
            let of_odd = _mm512_srai_epi16::<8>(digits);
            let sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, of_even));
            _mm512_add_epi32(sum, _mm512_madd_epi16(odd, of_odd))
        }
    }

    #[inline(always)]
    fn dot_half(self, sum: __m256i, keys: __m256i, digits: __m256i) -> __m256i {
        // SAFETY: used only in functions with the features.
        unsafe {
            let (even, odd) = (_mm256_and_si256(keys, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(keys));
            let of_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(digits));
            let of_odd = _mm256_srai_epi16::<8>(digits);
            let sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, of_even));
            _mm256_add_epi32(sum, _mm256_madd_epi16(odd, of_odd))
        }
    }
}

/// The numbers that sums over digits are, in floats.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn joined<const D: usize>(sums: [__m512i; D]) -> __m512 {
    const { assert!(D == 2 || D == 3) }
    let (high, low) = (sums[0], sums[D - 1]);
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        if const { D == 2 } {
            return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
        }
        let high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), sums[1]));
        _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), _mm512_cvtepi32_ps(low))
    }
}

/// Words of four vectors, within quarters: the nth result has the nth words of each.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn transposed([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let (low, high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (first, second) = (_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
        let (low, high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        [first, second, _mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high)]
    }
}

/// Adds the products of a word of sixteen keys with the words of R rows of D digits.
///
/// # Safety
/// As many words of digits are readable; the CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn add_word<U: Dot, const R: usize, const D: usize>(
    unit: U,
    sums: &mut [[__m512i; D]; R],
    keys: __m512i,
    digits: *const [i8; 4],
) {
    for r in 0..R {
        for digit in 0..D {
            // SAFETY: the caller vouches for the word and the instruction.
            let word =
                unsafe { _mm512_set1_epi32(i32::from_ne_bytes(digits.add(r * D + digit).read().map(|x| x as u8))) };
            sums[r][digit] = unit.dot(sums[r][digit], keys, word);
        }
    }
}

/// Where the sums of R rows start, in all lanes.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn started<const R: usize, const D: usize>(start: &[[i32; D]; R]) -> [[__m512i; D]; R] {
    // SAFETY: the caller vouches for the instruction.
    let mut sums = [[unsafe { _mm512_setzero_si512() }; D]; R];
    for r in 0..R {
        for digit in 0..D {
            // SAFETY: the same.
            sums[r][digit] = unsafe { _mm512_set1_epi32(start[r][digit]) };
        }
    }
    sums
}
