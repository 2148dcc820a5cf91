//! AVX-512 (F, BW, DQ, VL): sixteen lanes, 32 registers, masks in registers of their own.

#![allow(unsafe_code, reason = "the leaf: intrinsics behind a token that proves the CPU has them")]

use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use attn_core::half::{bf16, f16};

use super::{Bytes, Isa, LEAST_POWER, MAX_LANES, Values, Weights, address_ops, bytes, hint, lane_ops};

/// Proof that the CPU has AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C. Made only by `level`, after asking the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx512 {
    /// Whether it has AVX512_VNNI too. No bit depends on it.
    pub(crate) vnni: bool,
    pub(crate) _proof: (),
}

impl Avx512 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn with_features<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
}

impl Isa for Avx512 {
    type F = __m512;
    type M = __mmask16;
    type Pow = (__m512, __mmask16);
    const LANES: usize = 16;
    const CHAIN: usize = 32;
    const FUSED: bool = true;
    const DIGITS: usize = 3;
    type Floats = Self;

    #[inline(always)]
    fn floats(self) -> Self {
        self
    }

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        // SAFETY: `self` proves the features that `with_features` enables.
        unsafe { Self::with_features(f) }
    }

    lane_ops! {
        splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        abs(a: __m512) -> __m512 = _mm512_abs_ps(a);
        copysign(a: __m512, sign: __m512) -> __m512 = {
            let bit = _mm512_set1_epi32(i32::MIN);
            // 0xca: if the first operand's bit is set take the second, else the third.
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xca>(
                bit,
                _mm512_castps_si512(sign),
                _mm512_castps_si512(a),
            ))
        };
        eq(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b);
        select(mask: __mmask16, t: __m512, f: __m512) -> __m512 = _mm512_mask_blend_ps(mask, f, t);
        split(x: __m512) -> ((__m512, __mmask16), __m512) = {
            // Immediate 8: no fraction bits, round to nearest even, no exceptions.
            let f = _mm512_reduce_ps::<8>(x);
            // Not less, or unordered.
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(LEAST_POWER));
            ((_mm512_sub_ps(x, f), keep), f)
        };
        scale_by_pow2(p: __m512, (n, keep): (__m512, __mmask16)) -> __m512 = _mm512_maskz_scalef_ps(keep, p, n);
        round_bf16(x: __m512) -> __m512 = {
            let rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
            _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
        };
        pair_bf16(even: __m512, odd: __m512) -> __m512 = {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(even));
            _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_castps_si512(odd)))
        };
        sum_fours([a, b, c, d]: [__m512; 4]) -> __m512 = {
            let pair = |a, b| _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
            let (ab, cd) = (pair(a, b), pair(c, d));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
        };
        join_fours([a, b, c, d]: [__m512; 4]) -> __m512 = {
            // Even quarters of both, and odd ones of both, are added; twice.
            let fold = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            fold(fold(a, b), fold(c, d))
        };
        max_across(x: __m512) -> f32 = _mm512_reduce_max_ps(x);
    }

    address_ops! {
        load_ptr(src: *const f32) -> __m512 = _mm512_loadu_ps(src);
        store_ptr(x: __m512, dst: *mut f32) = _mm512_storeu_ps(dst, x);
        load_f16_ptr(src: *const f16) -> __m512 = {
            // In the current rounding mode, which exact numbers do not meet: the form that suppresses exceptions, which
            // `_mm512_cvtph_ps` is, takes no address, but a load and an instruction more.
            _mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(_mm256_loadu_si256(src.cast()))
        };
        load_bf16_ptr(src: *const bf16) -> __m512 = {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        };
        load_i8_ptr(src: *const i8) -> __m512 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(src.cast())));
        load_nibbles_ptr(src: *const u8, shift: i32) -> __m512 = {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(src.cast()));
            let codes = _mm512_and_si512(_mm512_srlv_epi32(bytes, _mm512_set1_epi32(shift)), _mm512_set1_epi32(15));
            _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(8)))
        };
        load_two_nibbles_ptr(src: *const u8, scale: __m512) -> [__m512; 2] = {
            // Four bits choose one of sixteen numbers; the instruction ignores the bits above.
            let numbers = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
            );
            let (numbers, bytes) = (_mm512_mul_ps(scale, numbers), _mm512_cvtepu8_epi32(_mm_loadu_si128(src.cast())));
            let upper = _mm512_srli_epi32::<4>(bytes);
            [_mm512_permutexvar_ps(bytes, numbers), _mm512_permutexvar_ps(upper, numbers)]
        };
        load_e4m3_ptr(src: *const u8) -> __m512 = {
            // As below, of half as many.
            let bits = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(src.cast())));
            let nan = _mm256_and_si256(_mm256_add_epi16(bits, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
            _mm512_mul_ps(_mm512_cvtph_ps(_mm256_xor_si256(bits, nan)), _mm512_set1_ps(256.0))
        };
        load_two_e4m3_ptr(src: *const u8) -> [__m512; 2] = {
            // Reads the number as an f16 of the same exponent and mantissa, whose bias is larger by 8. Copies of the
            // sign fill the two bits above the code. Adding 1 to it carries into the lower one: of the largest code,
            // NaN, if it is positive, and of all others if it is negative. So that bit is set for NaN alone, whose
            // exponent is the largest then.
            let bits = _mm512_slli_epi16::<7>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(src.cast())));
            let nan = _mm512_and_si512(_mm512_add_epi16(bits, _mm512_set1_epi16(0x80)), _mm512_set1_epi16(0x4000));
            let bits = _mm512_xor_si512(bits, nan);
            let (low, high) = (_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64::<1>(bits));
            let bias = _mm512_set1_ps(256.0);
            [_mm512_mul_ps(_mm512_cvtph_ps(low), bias), _mm512_mul_ps(_mm512_cvtph_ps(high), bias)]
        };
        load_e5m2_ptr(src: *const u8) -> __m512 = {
            // The byte is the upper one of an f16.
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(src.cast()))))
        };
        load_two_e5m2_ptr(src: *const u8) -> [__m512; 2] = {
            let bits = _mm512_slli_epi16::<8>(_mm512_cvtepu8_epi16(_mm256_loadu_si256(src.cast())));
            [_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(bits))]
        };
        transpose_ptr(src: *const f32, src_stride: isize, dst: *mut f32, dst_stride: isize) = {
            // Four quarter-rows at a time: register (g, r) holds columns 4g..4g+4 of the rows r, r+4, r+8, r+12, one
            // per 128-bit lane, so that the 4×4 transposition inside lanes finishes the job.
            for g in 0..4 {
                let gather = |r: isize| {
                    let at = |row: isize| _mm_loadu_ps(src.offset(row * src_stride + 4 * g));
                    let x = _mm512_castps128_ps512(at(r));
                    let x = _mm512_insertf32x4::<1>(x, at(r + 4));
                    let x = _mm512_insertf32x4::<2>(x, at(r + 8));
                    _mm512_insertf32x4::<3>(x, at(r + 12))
                };
                let (a, b, c, d) = (gather(0), gather(1), gather(2), gather(3));
                let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let pair = |lo, hi| (_mm512_castps_pd(lo), _mm512_castps_pd(hi));
                let ((al, cl), (ah, ch)) = (pair(ab_low, cd_low), pair(ab_high, cd_high));
                let columns = [
                    _mm512_unpacklo_pd(al, cl),
                    _mm512_unpackhi_pd(al, cl),
                    _mm512_unpacklo_pd(ah, ch),
                    _mm512_unpackhi_pd(ah, ch),
                ];
                for (c, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_ps(dst.offset((4 * g + c as isize) * dst_stride), _mm512_castpd_ps(column));
                }
            }
        };
    }

    #[inline(always)]
    unsafe fn dot_bytes<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) {
        // SAFETY: the caller vouches for the bytes; the token proves the instructions.
        unsafe { bytes::dot_bytes(self.vnni, of) }
    }

    #[inline(always)]
    unsafe fn dot_blocks<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) -> u64 {
        // SAFETY: the caller vouches for the blocks; the token proves the instructions.
        unsafe { bytes::dot_blocks(self.vnni, of) }
    }

    #[inline(always)]
    fn most_weight(self, weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
        // SAFETY: the token proves the instructions.
        unsafe { bytes::values::most_weight(weights, scales, some) }
    }

    #[inline(always)]
    fn write_weights(self, weights: &[f32; 64], scale: f32, scales: Option<&[f32; 64]>, some: u64, to: &mut Weights) {
        // SAFETY: the token proves the instructions.
        unsafe { bytes::values::write_weights(weights, scale, scales, some, to) }
    }

    #[inline(always)]
    unsafe fn weigh_bytes<const R: usize, const C: usize>(
        self,
        of: &Values<'_>,
        weights: (&[Weights; R], &[f32; R]),
        out: &mut [[[MaybeUninit<[f32; MAX_LANES]>; 4]; R]; C],
    ) {
        // SAFETY: the caller vouches for the bytes; the token proves the instructions.
        unsafe { bytes::values::weigh(self.vnni, of, weights, out) }
    }

    #[inline(always)]
    fn mask_from_bits(self, bits: u64) -> __mmask16 {
        bits as __mmask16
    }

    #[inline(always)]
    fn store_f16(self, x: __m512, dst: &mut [f16]) {
        assert!(dst.len() >= 16);
        // SAFETY: sixteen halves were asserted above; the token proves AVX-512F. Immediate 0: round to nearest even.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_cvtps_ph::<0>(x)) }
    }

    #[inline(always)]
    fn store_bf16(self, x: __m512, dst: &mut [bf16]) {
        assert!(dst.len() >= 16);
        // SAFETY: sixteen elements of two bytes were asserted above; the token proves AVX-512F.
        unsafe {
            let bits = _mm512_castps_si512(x);
            let cut = _mm512_srli_epi32::<16>(bits);
            let half = _mm512_add_epi32(_mm512_and_si512(cut, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let rounded = _mm512_mask_or_epi32(rounded, nan, cut, _mm512_set1_epi32(0x40));
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(rounded));
        }
    }

    #[inline(always)]
    fn pack_bools(self, keep: &[bool; 64]) -> u64 {
        // SAFETY: a bool is one byte, 0 or 1, and there are 64; the token proves AVX-512BW.
        unsafe {
            let bytes = _mm512_loadu_si512(keep.as_ptr().cast());
            _mm512_test_epi8_mask(bytes, bytes)
        }
    }

    #[inline(always)]
    fn prefetch<const HINT: u8>(self, address: *const u8) {
        // SAFETY: a prefetch is a hint: it reads nothing and faults on no address.
        unsafe {
            match HINT {
                hint::WRITE => _mm_prefetch::<_MM_HINT_ET0>(address.cast()),
                hint::SECOND => _mm_prefetch::<_MM_HINT_T1>(address.cast()),
                _ => _mm_prefetch::<_MM_HINT_T0>(address.cast()),
            }
        }
    }
}
