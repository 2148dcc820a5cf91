//! Products of the bytes of keys: the trait, and how AVX512_VNNI makes them. [`pairs`](super::pairs) is the other way.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;

/// Products of the bytes of sixteen keys with the integers of R rows of D digits.
///
/// # Safety
/// The CPU has the instructions where a function is called.
pub(super) trait Dot: Copy {
    /// Whether a word is multiplied as soon as a square of keys has been transposed so far. If that takes many
    /// instructions, a square of 64 channels is transposed as a whole, and a short loop multiplies its words: all of
    /// them written out are more than a processor keeps decoded. (Blocks have half as many words, and write them out.)
    const AT_ONCE: bool;
    /// What is made of the digits of R rows beforehand.
    type Digits<const R: usize>;

    /// Of so many words of four channels: a multiple of 16.
    ///
    /// # Safety
    /// As many words of digits are readable, for all rows, as long as the result lives.
    unsafe fn digits<const R: usize, const D: usize>(self, digits: *const [i8; 4], words: usize) -> Self::Digits<R>;

    /// Where the sums of a row start, of those of its digits.
    fn start<const D: usize>(start: [i32; D]) -> [i32; D];

    /// Adds the products of a word of each key, whose bytes are 128 too large.
    ///
    /// # Safety
    /// There is such a word.
    unsafe fn add_word<const R: usize, const D: usize>(
        self,
        sums: &mut [[__m512i; D]; R],
        keys: __m512i,
        digits: (&Self::Digits<R>, usize),
    );

    /// The sums of a row's digits as one number for each lane.
    unsafe fn joined<const D: usize>(self, sums: [__m512i; D]) -> __m512;
}

/// By AVX512_VNNI: sums of each digit.
#[derive(Clone, Copy)]
pub(super) struct Vnni;

impl Dot for Vnni {
    const AT_ONCE: bool = true;
    type Digits<const R: usize> = *const [i8; 4];

    #[inline(always)]
    unsafe fn digits<const R: usize, const D: usize>(self, digits: *const [i8; 4], _: usize) -> *const [i8; 4] {
        digits
    }

    #[inline(always)]
    fn start<const D: usize>(start: [i32; D]) -> [i32; D] {
        start
    }

    #[inline(always)]
    unsafe fn add_word<const R: usize, const D: usize>(
        self,
        sums: &mut [[__m512i; D]; R],
        keys: __m512i,
        (digits, word): (&*const [i8; 4], usize),
    ) {
        for r in 0..R {
            for digit in 0..D {
                // SAFETY: the caller vouches for the word and the instructions.
                unsafe {
                    let digits = digits.add((word * R + r) * D + digit).read();
                    let digits = _mm512_set1_epi32(i32::from_ne_bytes(digits.map(|x| x as u8)));
                    sums[r][digit] = _mm512_dpbusd_epi32(sums[r][digit], keys, digits);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn joined<const D: usize>(self, sums: [__m512i; D]) -> __m512 {
        const { assert!(D == 2 || D == 3) }
        let (high, low) = (sums[0], sums[D - 1]);
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            if const { D == 2 } {
                return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
            }
            whole(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), sums[1]), low)
        }
    }
}

/// Where the sums of R rows start, in all lanes.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn started<U: Dot, const R: usize, const D: usize>(start: &[[i32; D]; R]) -> [[__m512i; D]; R] {
    // SAFETY: the caller vouches for the instruction.
    let mut sums = [[unsafe { _mm512_setzero_si512() }; D]; R];
    for (sums, start) in sums.iter_mut().zip(start) {
        for (sum, start) in sums.iter_mut().zip(U::start(*start)) {
            // SAFETY: the same.
            *sum = unsafe { _mm512_set1_epi32(start) };
        }
    }
    sums
}

/// `256·high + low`, both rounded before.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn whole(high: __m512i, low: __m512i) -> __m512 {
    // SAFETY: the caller vouches for the instructions.
    unsafe { _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0), _mm512_cvtepi32_ps(low)) }
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
