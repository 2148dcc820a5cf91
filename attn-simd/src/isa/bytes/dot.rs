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

/// The word of digits at an address, in all lanes.
///
/// # Safety
/// The word is readable; the CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn word_of(digits: *const [i8; 4]) -> __m512i {
    // SAFETY: the caller vouches for the word and the instruction.
    unsafe { _mm512_set1_epi32(i32::from_ne_bytes(digits.read().map(|x| x as u8))) }
}

/// The numbers that sums over digits are, in floats.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn joined<const D: usize>(sums: [__m512i; D]) -> __m512 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let high = if D == 3 { _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[0]), sums[1]) } else { sums[0] };
        let low = sums[D - 1];
        if D == 2 {
            return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
        }
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0), _mm512_cvtepi32_ps(low))
    }
}
