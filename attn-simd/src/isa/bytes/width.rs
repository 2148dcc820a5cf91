//! Vectors of bytes of values: 64 of a value, or the 32 of a block.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;

use crate::isa::unseen::{unseen, unseen_integers};

/// Vectors of the products of one width. Of four values, their bytes are interleaved within quarters.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL where a function is called, and AVX512_VNNI where [`dot`](Self::dot) is.
pub(super) trait Width: Copy {
    /// Bytes.
    type V: Copy;

    /// Bytes from an address on: as many as are readable, or those of a block.
    unsafe fn load(from: *const i8, bytes: usize) -> Self::V;
    /// Bytes of both in turn, within quarters: of their lower halves, or of the upper ones.
    unsafe fn bytes<const UPPER: bool>(a: Self::V, b: Self::V) -> Self::V;
    /// The same of pairs of bytes.
    unsafe fn pairs<const UPPER: bool>(a: Self::V, b: Self::V) -> Self::V;
    /// A word in all lanes.
    unsafe fn splat(word: i32) -> Self::V;
    /// Adds the products of four unsigned bytes with four signed ones to each word: AVX512_VNNI.
    unsafe fn dot(sum: Self::V, weights: Self::V, values: Self::V) -> Self::V;
    /// The first and the third byte of each word, with their signs, in 16 bits.
    unsafe fn even(words: Self::V) -> Self::V;
    /// The second and the fourth byte of each word, with their signs, in 16 bits.
    unsafe fn odd(words: Self::V) -> Self::V;
    /// The products of two pairs of 16 bits, added, of each word.
    unsafe fn products(a: Self::V, b: Self::V) -> Self::V;
    /// Sums of words.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// Sums of 16 bits.
    unsafe fn add_halves(a: Self::V, b: Self::V) -> Self::V;
    /// The same, of which compilers know nothing.
    unsafe fn unseen(x: Self::V) -> Self::V;
    /// Words, times a power of two.
    unsafe fn shift<const BITS: u32>(words: Self::V) -> Self::V;
    /// The sums in floats, sixteen channels in a vector: of as many as the width has bytes in a value.
    unsafe fn channels(sums: [Self::V; 4]) -> [__m512; 4];
}

/// Operations on vectors of a width, an instruction or two each.
macro_rules! ops {
    ($($name:ident $(<$n:ident: $t:ty>)? ($($x:ident),*) = $value:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name$(<const $n: $t>)?($($x: Self::V),*) -> Self::V {
            // SAFETY: the caller vouches for the instructions.
            unsafe { $value }
        }
    )*};
}

/// 64 bytes of a value.
#[derive(Clone, Copy)]
pub(super) struct Whole;

impl Width for Whole {
    type V = __m512i;

    #[inline(always)]
    unsafe fn load(from: *const i8, bytes: usize) -> __m512i {
        // SAFETY: as many bytes are readable; the caller vouches for that and for the instructions.
        unsafe {
            if bytes < 64 { _mm512_maskz_loadu_epi8((1 << bytes) - 1, from) } else { _mm512_loadu_si512(from.cast()) }
        }
    }

    ops! {
        bytes<UPPER: bool>(a, b) = if UPPER { _mm512_unpackhi_epi8(a, b) } else { _mm512_unpacklo_epi8(a, b) };
        pairs<UPPER: bool>(a, b) = if UPPER { _mm512_unpackhi_epi16(a, b) } else { _mm512_unpacklo_epi16(a, b) };
        dot(sum, weights, values) = _mm512_dpbusd_epi32(sum, weights, values);
        even(words) = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(words));
        odd(words) = _mm512_srai_epi16::<8>(words);
        products(a, b) = _mm512_madd_epi16(a, b);
        add(a, b) = _mm512_add_epi32(a, b);
        add_halves(a, b) = _mm512_add_epi16(a, b);
        unseen(x) = unseen_integers(x);
        shift<BITS: u32>(words) = _mm512_sll_epi32(words, _mm_cvtsi32_si128(BITS as i32));
    }

    #[inline(always)]
    unsafe fn splat(word: i32) -> __m512i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm512_set1_epi32(word) }
    }

    #[inline(always)]
    unsafe fn channels(sums: [__m512i; 4]) -> [__m512; 4] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let mut x = sums;
            for x in &mut x {
                *x = _mm512_castps_si512(_mm512_cvtepi32_ps(*x));
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
pub(super) struct Half;

impl Width for Half {
    type V = __m256i;

    #[inline(always)]
    unsafe fn load(from: *const i8, _: usize) -> __m256i {
        // SAFETY: 32 bytes are readable; the caller vouches for that and for the instructions.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    ops! {
        bytes<UPPER: bool>(a, b) = if UPPER { _mm256_unpackhi_epi8(a, b) } else { _mm256_unpacklo_epi8(a, b) };
        pairs<UPPER: bool>(a, b) = if UPPER { _mm256_unpackhi_epi16(a, b) } else { _mm256_unpacklo_epi16(a, b) };
        dot(sum, weights, values) = _mm256_dpbusd_epi32(sum, weights, values);
        even(words) = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(words));
        odd(words) = _mm256_srai_epi16::<8>(words);
        products(a, b) = _mm256_madd_epi16(a, b);
        add(a, b) = _mm256_add_epi32(a, b);
        add_halves(a, b) = _mm256_add_epi16(a, b);
        unseen(x) = _mm256_castps_si256(unseen(_mm256_castsi256_ps(x)));
        shift<BITS: u32>(words) = _mm256_sll_epi32(words, _mm_cvtsi32_si128(BITS as i32));
    }

    #[inline(always)]
    unsafe fn splat(word: i32) -> __m256i {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm256_set1_epi32(word) }
    }

    #[inline(always)]
    unsafe fn channels(sums: [__m256i; 4]) -> [__m512; 4] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let mut x = [_mm512_setzero_si512(); 2];
            for n in 0..2 {
                let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(sums[2 * n]), sums[2 * n + 1]);
                x[n] = _mm512_castps_si512(_mm512_cvtepi32_ps(both));
            }
            // The first and third quarters of both are the first sixteen channels.
            let zero = _mm512_setzero_ps();
            let first = _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0x88>(x[0], x[1]));
            [first, _mm512_castsi512_ps(_mm512_shuffle_i32x4::<0xdd>(x[0], x[1])), zero, zero]
        }
    }
}
