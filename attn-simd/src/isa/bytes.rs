//! Products of integers with the bytes of sixteen keys, by AVX512_VNNI or, with the same sums, by AVX512BW.
//!
//! VPDPBUSD adds four products of bytes to each lane: 64 a cycle on Zen 4, where a fused multiply-add has sixteen. A
//! lane is a key, so that no sum goes across lanes. For that a square of 16 keys × 64 channels is transposed as words
//! of four channels: 64 shuffles, which run beside the products. The instruction takes unsigned bytes of keys: they are
//! 128 too large, and the sums start 128 times the sum of the digits too small.
//!
//! [`digits`](super::digits) does the same in plain Rust.

#![allow(unsafe_code, reason = "the leaf: intrinsics that the caller's token proves")]

use core::arch::x86_64::*;
use core::sync::atomic::{Ordering, compiler_fence};

use super::Bytes;

/// Adds the products of four unsigned bytes with four signed ones to each lane.
trait Dot: Copy {
    fn dot(self, sum: __m512i, keys: __m512i, digits: __m512i) -> __m512i;
}

/// By AVX512_VNNI.
#[derive(Clone, Copy)]
struct Vnni;

impl Dot for Vnni {
    #[inline(always)]
    fn dot(self, sum: __m512i, keys: __m512i, digits: __m512i) -> __m512i {
        // SAFETY: made only in `with_vnni`, which has the features.
        unsafe { _mm512_dpbusd_epi32(sum, keys, digits) }
    }
}

/// By products of pairs of 16 bits: even bytes, then odd ones.
#[derive(Clone, Copy)]
struct Pairs;

impl Dot for Pairs {
    #[inline(always)]
    fn dot(self, sum: __m512i, keys: __m512i, digits: __m512i) -> __m512i {
        // SAFETY: made only in `without_vnni`, which has the features.
        unsafe {
            let (even, odd) = (_mm512_and_si512(keys, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(keys));
            let of_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(digits));
            let of_odd = _mm512_srai_epi16::<8>(digits);
            let sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, of_even));
            _mm512_add_epi32(sum, _mm512_madd_epi16(odd, of_odd))
        }
    }
}

/// As [`Isa::dot_bytes`](super::Isa::dot_bytes).
///
/// # Safety
/// As there; and the CPU has AVX-512 F, BW, DQ, VL, and AVX512_VNNI if `vnni` says so.
#[inline(always)]
pub(super) unsafe fn dot_bytes<const R: usize>(vnni: bool, of: Bytes<'_, R>) {
    // SAFETY: the caller vouches for the features, and for the bytes.
    unsafe { if vnni { with_vnni(of) } else { without_vnni(of) } }
}

/// # Safety
/// As [`dot_bytes`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")]
unsafe fn with_vnni<const R: usize>(of: Bytes<'_, R>) {
    // SAFETY: this function has the features; the caller vouches for the bytes.
    unsafe { sums(Vnni, of) }
}

/// # Safety
/// As [`dot_bytes`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn without_vnni<const R: usize>(of: Bytes<'_, R>) {
    // SAFETY: this function has the features; the caller vouches for the bytes.
    unsafe { sums(Pairs, of) }
}

/// # Safety
/// As [`dot_bytes`]; compiled into a function with the features of `unit`.
#[inline(always)]
unsafe fn sums<D: Dot, const R: usize>(unit: D, of: Bytes<'_, R>) {
    let Bytes { keys, columns, digits, start, unit: units, ahead, s, stride } = of;
    for (n, keys) in keys.as_chunks::<16>().0.iter().enumerate() {
        // SAFETY: 64 bytes of each key below `columns`, or as many as the mask has bits; words of digits up to a
        // multiple of 64 columns, for all rows. The caller vouches for both.
        unsafe {
            let flip = _mm512_set1_epi8(-128);
            let mut sums = [[flip; 3]; R];
            for r in 0..R {
                for digit in 0..3 {
                    sums[r][digit] = _mm512_set1_epi32(start[r][digit]);
                }
            }
            for from in (0..columns).step_by(64) {
                let mut x = [flip; 16];
                if columns - from >= 64 {
                    for k in 0..16 {
                        x[k] = _mm512_xor_si512(_mm512_loadu_si512(keys[k].add(from).cast()), flip);
                    }
                } else {
                    let some = (1 << (columns - from)) - 1;
                    for k in 0..16 {
                        x[k] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, keys[k].add(from)), flip);
                    }
                }
                // Within quarters: x[4k + n] becomes the nth words of all quarters, each of the keys 4k to 4k + 3.
                for k in 0..4 {
                    let [a, b, c, d] = [x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]];
                    let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
                    x[4 * k] = _mm512_unpacklo_epi64(ab, cd);
                    x[4 * k + 1] = _mm512_unpackhi_epi64(ab, cd);
                    let (ab, cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
                    x[4 * k + 2] = _mm512_unpacklo_epi64(ab, cd);
                    x[4 * k + 3] = _mm512_unpackhi_epi64(ab, cd);
                }
                let digits = digits.add(from / 4 * R * 3);
                // Quarters: the words n, 4 + n, 8 + n and 12 + n of all keys. Written out by a macro, so that the
                // square stays in registers.
                macro_rules! words {
                    ($($n:literal)*) => {$(
                        let [a, b, c, d] = [x[$n], x[4 + $n], x[8 + $n], x[12 + $n]];
                        let low = [_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d)];
                        let high = [_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d)];
                        let words = [
                            _mm512_shuffle_i32x4::<0x88>(low[0], low[1]),
                            _mm512_shuffle_i32x4::<0xdd>(low[0], low[1]),
                            _mm512_shuffle_i32x4::<0x88>(high[0], high[1]),
                            _mm512_shuffle_i32x4::<0xdd>(high[0], high[1]),
                        ];
                        for g in 0..4 {
                            let key = keys[4 * $n + g].wrapping_add(from);
                            _mm_prefetch::<_MM_HINT_T1>(key.wrapping_add(ahead[1]));
                            _mm_prefetch::<_MM_HINT_T0>(key.wrapping_add(ahead[0]));
                            // The fence keeps the prefetches here: in a burst, the processor would drop some.
                            compiler_fence(Ordering::SeqCst);
                            let digits = digits.add((4 * g + $n) * R * 3);
                            for r in 0..R {
                                for digit in 0..3 {
                                    let word = i32::from_ne_bytes(digits.add(r * 3 + digit).read().map(|x| x as u8));
                                    sums[r][digit] = unit.dot(sums[r][digit], words[g], _mm512_set1_epi32(word));
                                }
                            }
                        }
                    )*};
                }
                words!(0 1 2 3);
            }
            for r in 0..R {
                let [a, b, c] = sums[r];
                let high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(a), b));
                let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0), _mm512_cvtepi32_ps(c));
                let line = &mut s[r * stride + 16 * n..][..16];
                _mm512_storeu_ps(line.as_mut_ptr(), _mm512_mul_ps(sum, _mm512_set1_ps(units[r])));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::isa::digits;
    use crate::level::Level;

    /// Both ways beside plain Rust, over all bytes, and digits of every size.
    #[test]
    fn both_instructions_sum_what_plain_rust_sums() {
        let Some(Level::Avx512(isa)) = Level::by_name("avx512").ok() else {
            assert!(!attn_testing::is_demanded("avx512"));
            std::eprintln!("no AVX-512 here: nothing was compared");
            return;
        };
        let mut seed = 3u64;
        let mut byte = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as i8
        };
        for columns in [1, 16, 48, 63, 64, 65, 80, 128, 208, 256] {
            for extreme in [false, true] {
                let mut any = |n: usize| -> Vec<i8> { (0..n).map(|_| if extreme { -128 } else { byte() }).collect() };
                let (data, padded) = (any(16 * columns), columns.next_multiple_of(64));
                let mut digits: Vec<[i8; 4]> =
                    any(padded * 6).chunks_exact(4).map(|x| [x[0], x[1], x[2], x[3]].map(|x| x.max(-127))).collect();
                let mut start = [[0i32; 3]; 2];
                for (n, word) in digits.iter_mut().enumerate() {
                    for (i, x) in word.iter_mut().enumerate() {
                        *x = if n / 6 * 4 + i < columns { *x } else { 0 };
                        start[n / 3 % 2][n % 3] -= 128 * i32::from(*x);
                    }
                }
                let keys: Vec<*const i8> = (0..32).map(|k| data[k % 16 * columns..].as_ptr()).collect();
                let unit = [0.5, 3.0];
                let run = |by: &dyn Fn(Bytes<'_, 2>)| {
                    let (mut s, stride) = (std::vec![f32::NAN; 2 * 40], 40);
                    let (keys, digits, start, unit) = (keys.as_slice(), digits.as_ptr(), &start, &unit);
                    by(Bytes { keys, columns, digits, start, unit, ahead: [0, 0], s: &mut s, stride });
                    s.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                // SAFETY: 32 keys of `columns` bytes, digits for 64 columns at a time; the token proves AVX-512, and
                // says whether there is AVX512_VNNI.
                let want = run(&|of| unsafe { digits::dot_bytes(of) });
                for vnni in [false, isa.vnni] {
                    // SAFETY: the same.
                    let got = run(&|of| unsafe { dot_bytes(vnni, of) });
                    assert_eq!(got, want, "{columns} {extreme} {vnni}");
                }
            }
        }
    }
}
