//! Products with keys in blocks of 32 int8 behind a scale, ggml's q8_0.
//!
//! As those with plain rows, block by block: a square of 16 keys × 32 numbers, 24 shuffles.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;

use super::dot::{Dot, started, transposed};
use crate::isa::digits::{BLOCK, BLOCK_BYTES, Bytes};
use crate::isa::request::request;

/// # Safety
/// As [`Isa::dot_blocks`](crate::isa::Isa::dot_blocks); compiled into a function with the features of `unit`.
#[inline(always)]
pub(super) unsafe fn sums<U: Dot, const R: usize, const D: usize>(unit: U, of: Bytes<'_, R, D>) -> u64 {
    let Bytes { keys, columns, digits, start, unit: units, ahead, s, stride } = of;
    let (start, mut odd) = (&start[..columns / BLOCK], 0);
    // SAFETY: words of digits up to a multiple of 64 columns, for all rows; the caller vouches for them.
    let digits = unsafe { unit.digits::<R, D>(digits, columns.next_multiple_of(64) / 4) };
    for (n, keys) in keys.as_chunks::<16>().0.iter().enumerate() {
        // Opaque: else a compiler would broadcast all digits beforehand, and keep those in memory.
        let digits = core::hint::black_box(&digits);
        // SAFETY: the blocks of each key, which the caller vouches for; there are words of digits for all of them.
        unsafe {
            let flip = _mm512_set1_epi8(-128);
            let mut scores = [_mm512_setzero_ps(); R];
            for (block, start) in start.iter().enumerate() {
                let at = block * BLOCK_BYTES;
                let scales = scales(keys, at);
                // NaN of both kinds, and infinities.
                odd |= u64::from(_mm512_fpclass_ps_mask::<0x99>(scales)) << (16 * n);
                // Keys of four: of the lower half the first and the third, of the upper half the second and the fourth.
                let mut x = [flip; 8];
                for k in 0..8 {
                    let (low, high) = (keys[k / 4 * 8 + k % 4].add(at + 2), keys[k / 4 * 8 + 4 + k % 4].add(at + 2));
                    let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
                    // The lower half of the mask's lanes is not read.
                    let both = _mm512_mask_loadu_epi32(low, 0xff00, high.wrapping_sub(32).cast());
                    x[k] = _mm512_xor_si512(both, flip);
                }
                // Within quarters: x[4k + n] becomes the nth words of four keys in each quarter.
                for k in 0..2 {
                    let four = transposed([x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]]);
                    for n in 0..4 {
                        x[4 * k + n] = four[n];
                    }
                }
                let mut sums = started::<U, R, D>(start);
                // Written out by a macro, so that the square stays in registers.
                macro_rules! words {
                    ($($n:literal)*) => {$(
                        let words = [
                            _mm512_shuffle_i32x4::<0x88>(x[$n], x[4 + $n]),
                            _mm512_shuffle_i32x4::<0xdd>(x[$n], x[4 + $n]),
                        ];
                        for g in 0..2 {
                            request(keys[4 * $n + g].wrapping_add(at), ahead);
                            request(keys[4 * $n + 2 + g].wrapping_add(at), ahead);
                            unit.add_word(&mut sums, words[g], (digits, block * BLOCK / 4 + 4 * g + $n));
                        }
                    )*};
                }
                words!(0 1 2 3);
                for r in 0..R {
                    scores[r] = _mm512_fmadd_ps(unit.joined(sums[r]), scales, scores[r]);
                }
            }
            for r in 0..R {
                let line = &mut s[r * stride + 16 * n..][..16];
                _mm512_storeu_ps(line.as_mut_ptr(), _mm512_mul_ps(scores[r], _mm512_set1_ps(units[r])));
            }
        }
    }
    odd
}

/// The scales of sixteen keys' blocks.
///
/// # Safety
/// Two bytes of each key are readable from `at` on; the CPU has AVX-512F.
#[inline(always)]
unsafe fn scales(keys: &[*const i8; 16], at: usize) -> __m512 {
    // SAFETY: the caller vouches for the bytes and the instructions.
    unsafe {
        macro_rules! eight {
            ($from:literal: $($n:literal)*) => {{
                let mut x = _mm_setzero_si128();
                $(x = _mm_insert_epi16::<$n>(x, i32::from(keys[$from + $n].add(at).cast::<u16>().read_unaligned()));)*
                x
            }};
        }
        let (low, high) = (eight!(0: 0 1 2 3 4 5 6 7), eight!(8: 0 1 2 3 4 5 6 7));
        _mm512_cvtph_ps(_mm256_set_m128i(high, low))
    }
}
