//! Products of the bytes of keys without AVX512_VNNI: of 16 bits, by VPMADDWD, in pairs of channels.
//!
//! Two digits are an integer of 16 bits, so that three digits are two of those, and two digits are one. The even
//! channels of a word of four are a pair, and the odd ones another: for each integer of a row a word takes two products
//! and two additions. The integers are made of the digits of all channels once for a tile of keys.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use super::dot::{Dot, whole};
use super::width::{Whole, Width};
use crate::isa::unseen::unseen_integers;

/// By products of 16 bits: sums of the upper digits, in the place of the first, and of the third.
#[derive(Clone, Copy)]
pub(super) struct Pairs;

/// Words of four channels: of at most 256.
const WORDS: usize = 64;

/// Pairs of integers of R rows: the upper digits of even channels and of odd ones, and the third digits.
pub(super) struct Planes<const R: usize>([[[MaybeUninit<i32>; R]; WORDS]; 4]);

impl Dot for Pairs {
    const AT_ONCE: bool = false;
    type Digits<const R: usize> = Planes<R>;

    #[inline(always)]
    unsafe fn digits<const R: usize, const D: usize>(self, digits: *const [i8; 4], words: usize) -> Planes<R> {
        const { assert!(D == 2 || D == 3) }
        assert!(words <= WORDS && words.is_multiple_of(16));
        let mut planes = Planes([[[MaybeUninit::uninit(); R]; WORDS]; 4]);
        let to = planes.0.each_mut().map(|plane| plane.as_mut_ptr().cast::<i32>());
        for from in (0..words * R).step_by(16) {
            // SAFETY: sixteen words of D digits, of so many rows, as the caller vouches for; a plane holds as many.
            unsafe {
                let of = apart::<D>(digits.add(from * D));
                let upper = _mm512_and_si512(of[0], _mm512_set1_epi16(0xff00_u16 as i16));
                let pairs = [
                    _mm512_add_epi16(_mm512_slli_epi16::<8>(of[0]), Whole::even(of[1])),
                    _mm512_add_epi16(upper, Whole::odd(of[1])),
                    Whole::even(of[2]),
                    Whole::odd(of[2]),
                ];
                for (to, pairs) in to.iter().zip(pairs).take(2 * D - 2) {
                    _mm512_storeu_si512(to.add(from).cast(), pairs);
                }
            }
        }
        planes
    }

    #[inline(always)]
    fn start<const D: usize>(mut start: [i32; D]) -> [i32; D] {
        start[0] = 256 * start[0] + start[1];
        start
    }

    #[inline(always)]
    unsafe fn add_word<const R: usize, const D: usize>(
        self,
        sums: &mut [[__m512i; D]; R],
        keys: __m512i,
        (planes, word): (&Planes<R>, usize),
    ) {
        // SAFETY: the caller vouches for the word, whose pairs are written, and for the instructions.
        unsafe {
            let (even, odd) = (_mm512_and_si512(keys, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(keys));
            for r in 0..R {
                for n in 0..D - 1 {
                    let of_even = _mm512_set1_epi32(planes.0[2 * n][word][r].assume_init());
                    let of_odd = _mm512_set1_epi32(planes.0[2 * n + 1][word][r].assume_init());
                    let sum = &mut sums[r][n * (D - 1)];
                    let both = _mm512_add_epi32(_mm512_madd_epi16(even, of_even), _mm512_madd_epi16(odd, of_odd));
                    *sum = unseen_integers(_mm512_add_epi32(*sum, both));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn joined<const D: usize>(self, sums: [__m512i; D]) -> __m512 {
        // SAFETY: the caller vouches for the instructions.
        unsafe { if const { D == 2 } { _mm512_cvtepi32_ps(sums[0]) } else { whole(sums[0], sums[D - 1]) } }
    }
}

/// The digits of sixteen words, which lie side by side; 0 for a third of two.
///
/// # Safety
/// As many are readable; the CPU has AVX-512F.
#[inline(always)]
unsafe fn apart<const D: usize>(digits: *const [i8; 4]) -> [__m512i; 3] {
    // SAFETY: the caller vouches for the digits and the instructions.
    unsafe {
        let mut all = [_mm512_setzero_si512(); D];
        for (n, all) in all.iter_mut().enumerate() {
            *all = _mm512_loadu_si512(digits.add(16 * n).cast());
        }
        let mut of = [_mm512_setzero_si512(); 3];
        for (digit, of) in of.iter_mut().enumerate().take(D) {
            let places = &const { [places(D, 0), places(D, 1), places(D, 2)] }[digit];
            *of = _mm512_permutex2var_epi32(all[0], _mm512_loadu_si512(places[0].as_ptr().cast()), all[1]);
            if const { D == 3 } {
                *of = _mm512_permutex2var_epi32(*of, _mm512_loadu_si512(places[1].as_ptr().cast()), all[D - 1]);
            }
        }
        of
    }
}

/// Where a digit of sixteen words is: in the first two vectors, and then in what is found there and the third one.
const fn places(digits: usize, digit: usize) -> [[i32; 16]; 2] {
    let (mut places, mut n) = ([[0; 16]; 2], 0);
    while n < 16 {
        let place = digits * n + digit;
        (places[0][n], places[1][n]) = if place < 32 { (place as i32, n as i32) } else { (0, place as i32 - 16) };
        n += 1;
    }
    places
}
