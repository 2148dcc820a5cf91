//! AVX2 with FMA and F16C: eight lanes, 16 registers.

#![allow(unsafe_code, reason = "the leaf: intrinsics behind a token that proves the CPU has them")]

use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use attn_core::half::{bf16, f16};

use super::unseen::unseen;
use super::{Bytes, Isa, LEAST_POWER, MAX_LANES, Order, Values, Weights, address_ops, hint, lane_ops, words};

/// Proof that the CPU has AVX2, FMA and F16C. Made only by `level`, after asking the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx2 {
    pub(crate) _proof: (),
}

impl Avx2 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn with_features<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
}

/// Added to a number, it rounds to an integer and leaves the exponent of its power of two in the low bits.
const ROUND: f32 = 12_582_912.0 + 127.0;

impl Isa for Avx2 {
    type F = __m256;
    type M = __m256;
    type Pow = __m256;
    const LANES: usize = 8;
    const CHAIN: usize = 32;
    const FUSED: bool = true;
    const DIGITS: usize = 2;
    const ORDER: Order = Order::Whole;
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
        splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        abs(a: __m256) -> __m256 = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        copysign(a: __m256, sign: __m256) -> __m256 = {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_and_ps(bit, sign), _mm256_andnot_ps(bit, a))
        };
        eq(a: __m256, b: __m256) -> __m256 = _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b);
        select(mask: __m256, t: __m256, f: __m256) -> __m256 = _mm256_blendv_ps(f, t, mask);
        mask_from_bits(bits: u64) -> __m256 = {
            let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), bit);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit))
        };
        split(y: __m256) -> (__m256, __m256) = {
            // Smaller powers vanish in any case. So nothing is infinite here, and no later product is subnormal. A NaN
            // stays.
            let x = _mm256_max_ps(_mm256_set1_ps(LEAST_POWER), y);
            // Between 2²³ and 2²⁴ floats are integers: the addition rounds, and its low bits are n + 127.
            let n = _mm256_add_ps(x, _mm256_set1_ps(ROUND));
            // n + 127 becomes an exponent. The power is computed here, so that y and n need no registers any longer.
            let pow = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(n)));
            let keep = _mm256_cmp_ps::<_CMP_NLT_UQ>(y, _mm256_set1_ps(LEAST_POWER));
            (_mm256_and_ps(keep, pow), _mm256_sub_ps(x, _mm256_sub_ps(n, _mm256_set1_ps(ROUND))))
        };
        scale_by_pow2(p: __m256, pow: __m256) -> __m256 = _mm256_mul_ps(p, pow);
        sum_fours([a, b, c, d]: [__m256; 4]) -> __m256 = {
            let pair = |a, b| _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
            let (ab, cd) = (pair(a, b), pair(c, d));
            let (low, high) = (_mm256_unpacklo_pd(ab, cd), _mm256_unpackhi_pd(ab, cd));
            _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high))
        };
        join_fours([a, b, _, _]: [__m256; 4]) -> __m256 = {
            let (low, high) = (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            _mm256_add_ps(low, high)
        };
        max_across(x: __m256) -> f32 = {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        };
    }

    address_ops! {
        load_ptr(src: *const f32) -> __m256 = _mm256_loadu_ps(src);
        store_ptr(x: __m256, dst: *mut f32) = _mm256_storeu_ps(dst, x);
        load_f16_ptr(src: *const f16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(src.cast()));
        load_bf16_ptr(src: *const bf16) -> __m256 = {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        load_i8_ptr(src: *const i8) -> __m256 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(src.cast())));
        load_nibbles_ptr(src: *const u8, shift: i32) -> __m256 = {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(src.cast()));
            let codes = _mm256_and_si256(_mm256_srlv_epi32(bytes, _mm256_set1_epi32(shift)), _mm256_set1_epi32(15));
            _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)))
        };
        load_nibbles_twice_ptr(src: *const u8, shift: i32) -> [__m256; 2] = {
            let codes = _mm_srl_epi16(_mm_loadu_si128(src.cast()), _mm_cvtsi32_si128(shift));
            let numbers = _mm_sub_epi8(_mm_and_si128(codes, _mm_set1_epi8(15)), _mm_set1_epi8(8));
            let first = _mm256_cvtepi8_epi32(numbers);
            [_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(numbers)))]
        };
        load_e4m3_ptr(src: *const u8) -> __m256 = {
            // As below, of half as many.
            let bits = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(src.cast())));
            let nan = _mm_and_si128(_mm_add_epi16(bits, _mm_set1_epi16(0x80)), _mm_set1_epi16(0x4000));
            _mm256_mul_ps(_mm256_cvtph_ps(_mm_xor_si128(bits, nan)), _mm256_set1_ps(256.0))
        };
        load_two_e4m3_ptr(src: *const u8) -> [__m256; 2] = {
            // Reads the number as an f16 of the same exponent and mantissa, whose bias is larger by 8. Copies of the
            // sign fill the two bits above the code. Adding 1 to it carries into the lower one: of the largest code,
            // NaN, if it is positive, and of all others if it is negative. So that bit is set for NaN alone, whose
            // exponent is the largest then.
            let bits = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(src.cast())));
            let nan = _mm256_and_si256(_mm256_add_epi16(bits, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
            let bits = _mm256_xor_si256(bits, nan);
            let (low, high) = (_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
            let bias = _mm256_set1_ps(256.0);
            [_mm256_mul_ps(_mm256_cvtph_ps(low), bias), _mm256_mul_ps(_mm256_cvtph_ps(high), bias)]
        };
        load_e5m2_ptr(src: *const u8) -> __m256 = {
            // The byte is the upper one of an f16.
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(_mm_cvtepu8_epi16(_mm_loadl_epi64(src.cast()))))
        };
        load_two_e5m2_ptr(src: *const u8) -> [__m256; 2] = {
            let bits = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(src.cast())));
            [_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(bits))]
        };
        transpose_ptr(src: *const f32, src_stride: isize, dst: *mut f32, dst_stride: isize) = {
            // As in AVX-512: lane 0 holds row r, lane 1 row r + 4, columns 4g..4g+4; then 4×4 inside lanes.
            for g in 0..2 {
                let gather = |r: isize| {
                    let at = |row: isize| _mm_loadu_ps(src.offset(row * src_stride + 4 * g));
                    _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(at(r)), at(r + 4))
                };
                let (a, b, c, d) = (gather(0), gather(1), gather(2), gather(3));
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                let pair = |lo, hi| (_mm256_castps_pd(lo), _mm256_castps_pd(hi));
                let ((al, cl), (ah, ch)) = (pair(ab_low, cd_low), pair(ab_high, cd_high));
                let columns = [
                    _mm256_unpacklo_pd(al, cl),
                    _mm256_unpackhi_pd(al, cl),
                    _mm256_unpacklo_pd(ah, ch),
                    _mm256_unpackhi_pd(ah, ch),
                ];
                for (c, column) in columns.into_iter().enumerate() {
                    _mm256_storeu_ps(dst.offset((4 * g + c as isize) * dst_stride), _mm256_castpd_ps(column));
                }
            }
        };
    }

    #[inline(always)]
    unsafe fn dot_bytes<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) {
        // SAFETY: the caller vouches for the bytes; the token proves the instructions.
        unsafe { words::dot_bytes(of) }
    }

    #[inline(always)]
    unsafe fn dot_blocks<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) -> u64 {
        // SAFETY: the caller vouches for the blocks; the token proves the instructions.
        unsafe { words::dot_blocks(of) }
    }

    #[inline(always)]
    fn most_weight(self, weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
        // SAFETY: the token proves the instructions.
        unsafe { words::values::most_weight(weights, scales, some) }
    }

    #[inline(always)]
    fn write_weights(self, weights: &[f32; 64], scale: f32, scales: Option<&[f32; 64]>, some: u64, to: &mut Weights) {
        // SAFETY: the token proves the instructions.
        unsafe { words::values::write_weights(weights, scale, scales, some, to) }
    }

    #[inline(always)]
    unsafe fn weigh_bytes<const R: usize, const C: usize>(
        self,
        of: &Values<'_>,
        weights: (&[Weights; R], &[f32; R]),
        out: &mut [[[MaybeUninit<[f32; MAX_LANES]>; 4]; R]; C],
    ) {
        // SAFETY: the caller vouches for the bytes; the token proves the instructions.
        unsafe { words::values::weigh(of, weights, out) }
    }

    #[inline(always)]
    fn replace(self, keep: __m256, x: &mut [f32], other: __m256) {
        // Where compilers see what is stored they make a masked store of it, which takes AMD's processors 18 cycles.
        // SAFETY: the token proves AVX2.
        let replaced = unsafe { unseen(self.select(keep, self.load(x), other)) };
        self.store(replaced, x);
    }

    #[inline(always)]
    fn store_f16(self, x: __m256, dst: &mut [f16]) {
        assert!(dst.len() >= 8);
        // SAFETY: eight halves were asserted above; the token proves F16C. Immediate 0: round to nearest even.
        unsafe { _mm_storeu_si128(dst.as_mut_ptr().cast(), _mm256_cvtps_ph::<0>(x)) }
    }

    #[inline(always)]
    fn store_bf16(self, x: __m256, dst: &mut [bf16]) {
        assert!(dst.len() >= 8);
        // SAFETY: eight elements of two bytes were asserted above; the token proves AVX2.
        unsafe {
            let bits = _mm256_castps_si256(x);
            let cut = _mm256_srli_epi32::<16>(bits);
            let half = _mm256_add_epi32(_mm256_and_si256(cut, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(cut, _mm256_set1_epi32(0x40)), nan);
            // 16-bit words, within each half of the vector: the first and the third quarter hold the eight.
            let packed = _mm256_permute4x64_epi64::<0b10_00>(_mm256_packus_epi32(rounded, rounded));
            _mm_storeu_si128(dst.as_mut_ptr().cast(), _mm256_castsi256_si128(packed));
        }
    }

    #[inline(always)]
    fn pack_bools(self, keep: &[bool; 64]) -> u64 {
        // SAFETY: a bool is one byte, 0 or 1, and there are 64; the token proves AVX2.
        unsafe {
            let half = |at: usize| {
                let bytes = _mm256_loadu_si256(keep.as_ptr().add(at).cast());
                // The lowest bit of each byte becomes its highest, which the instruction gathers.
                u64::from(_mm256_movemask_epi8(_mm256_slli_epi16::<7>(bytes)) as u32)
            };
            half(0) | half(32) << 32
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
