//! The level of the build itself, through `wide`: SSE2 on stock x86-64, NEON on aarch64, simd128 on WASM, scalars
//! elsewhere.
//!
//! `wide` chooses its instructions when the crate is compiled. So this is the native level of any build target with
//! vectors, except x86, where it is the fallback. It has four lanes, because one register has as many in all of them.

#![allow(unsafe_code, reason = "the leaf: reads and writes through the pointers that `gemm` and `gemv` have checked")]

#[cfg(all(target_arch = "aarch64", not(miri)))]
use core::mem::MaybeUninit;

#[cfg(all(target_arch = "aarch64", not(miri)))]
use attn_core::half::{bf16, f16};
use wide::f32x4;

#[cfg(all(target_arch = "aarch64", not(miri)))]
use super::{Bytes, MAX_LANES, Order, Values, Weights, digits, dotprod, neon};
use super::{Isa, LEAST_POWER};

/// Proof of nothing: every machine has this level. With `DOT` proof of SDOT, made only by `level`, after asking the
/// CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Portable<const DOT: bool = false> {
    _proof: (),
}

/// Proof of SDOT.
#[cfg(all(target_arch = "aarch64", not(miri)))]
pub(crate) type Dotprod = Portable<true>;

impl Portable {
    /// The proof of nothing.
    pub(crate) const PROVEN: Self = Self { _proof: () };
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
impl Dotprod {
    /// The proof, for who has asked the CPU: [`level`](crate::level).
    pub(crate) const WHERE_FOUND: Self = Self { _proof: () };
}

#[inline(always)]
fn lanes(x: &[f32]) -> [f32; 4] {
    [x[0], x[1], x[2], x[3]]
}

impl<const DOT: bool> Isa for Portable<DOT> {
    type F = f32x4;
    type M = f32x4;
    /// The exponent, and the number that was split.
    type Pow = (f32x4, f32x4);
    const LANES: usize = 4;
    // Without fused multiply-adds each step rounds twice, so chains are shorter.
    const CHAIN: usize = 16;
    const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
    type Floats = Self;

    #[inline(always)]
    fn floats(self) -> Self {
        self
    }

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }

    #[inline(always)]
    fn splat(self, x: f32) -> f32x4 {
        f32x4::splat(x)
    }
    #[inline(always)]
    fn load(self, src: &[f32]) -> f32x4 {
        f32x4::new(lanes(src))
    }
    #[inline(always)]
    fn store(self, x: f32x4, dst: &mut [f32]) {
        dst[..4].copy_from_slice(&x.to_array());
    }
    #[inline(always)]
    unsafe fn load_ptr(self, src: *const f32) -> f32x4 {
        // SAFETY: the caller vouches for four readable floats; an array of floats needs no more alignment than they do.
        f32x4::new(unsafe { src.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store_ptr(self, x: f32x4, dst: *mut f32) {
        // SAFETY: the caller vouches for four writable floats.
        unsafe { dst.cast::<[f32; 4]>().write_unaligned(x.to_array()) }
    }

    #[inline(always)]
    fn add(self, a: f32x4, b: f32x4) -> f32x4 {
        a + b
    }
    #[inline(always)]
    fn sub(self, a: f32x4, b: f32x4) -> f32x4 {
        a - b
    }
    #[inline(always)]
    fn mul(self, a: f32x4, b: f32x4) -> f32x4 {
        a * b
    }
    #[inline(always)]
    fn div(self, a: f32x4, b: f32x4) -> f32x4 {
        a / b
    }
    #[inline(always)]
    fn mul_add(self, a: f32x4, b: f32x4, c: f32x4) -> f32x4 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    fn max(self, a: f32x4, b: f32x4) -> f32x4 {
        a.fast_max(b)
    }
    #[inline(always)]
    fn abs(self, a: f32x4) -> f32x4 {
        a.abs()
    }
    #[inline(always)]
    fn copysign(self, a: f32x4, sign: f32x4) -> f32x4 {
        let bit = f32x4::splat(-0.0);
        bit.bitselect(sign, a)
    }
    #[inline(always)]
    fn eq(self, a: f32x4, b: f32x4) -> f32x4 {
        a.simd_eq(b)
    }
    #[inline(always)]
    fn select(self, mask: f32x4, t: f32x4, f: f32x4) -> f32x4 {
        mask.bitselect(t, f)
    }
    #[inline(always)]
    fn mask_from_bits(self, bits: u64) -> f32x4 {
        f32x4::new([0, 1, 2, 3].map(|n| f32::from_bits(if bits >> n & 1 == 1 { u32::MAX } else { 0 })))
    }
    #[inline(always)]
    fn split(self, y: f32x4) -> ((f32x4, f32x4), f32x4) {
        // Smaller powers vanish in any case. So nothing is infinite here, and no later product is subnormal, which most
        // processors compute slowly. A NaN is restored at the end.
        let x = f32x4::splat(LEAST_POWER).fast_max(y);
        // Adding 1.5·2²³ leaves no bits for a fraction, so that the sum rounds to an integer.
        let magic = f32x4::splat(12_582_912.0);
        let n = (x + magic) - magic;
        ((n, y), x - n)
    }
    #[inline(always)]
    fn scale_by_pow2(self, p: f32x4, (n, y): (f32x4, f32x4)) -> f32x4 {
        // 127 is the exponent's bias.
        let pow: f32x4 = wide::bytemuck::cast((n + f32x4::splat(127.0)).fast_trunc_int() << 23);
        let scaled = p * pow;
        let scaled = y.simd_lt(f32x4::splat(LEAST_POWER)).bitselect(f32x4::ZERO, scaled);
        y.simd_ge(y).bitselect(scaled, y)
    }

    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    unsafe fn load_f16_ptr(self, src: *const f16) -> f32x4 {
        // SAFETY: the caller vouches for four elements.
        f32x4::new(neon::widen_f16(unsafe { &*src.cast() }))
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, src: *const bf16) -> f32x4 {
        // SAFETY: the caller vouches for four elements.
        f32x4::new(neon::widen_bf16(unsafe { &*src.cast() }))
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    fn store_f16(self, x: f32x4, dst: &mut [f16]) {
        neon::narrow_f16(x.to_array(), &mut dst.as_chunks_mut().0[0]);
    }

    #[cfg(all(target_arch = "aarch64", not(miri)))]
    const DIGITS: usize = if DOT { 3 } else { 0 };
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    const ORDER: Order = if DOT { Order::Apart } else { Order::Words };
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    unsafe fn dot_bytes<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) {
        // SAFETY: the caller vouches for the bytes; the token proves SDOT.
        unsafe { if const { DOT } { dotprod::dot_bytes(of) } else { digits::dot_bytes(of) } }
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    unsafe fn dot_blocks<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) -> u64 {
        // SAFETY: the caller vouches for the blocks; the token proves SDOT.
        unsafe { if const { DOT } { dotprod::dot_blocks(of) } else { digits::dot_blocks(of) } }
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    fn most_weight(self, weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
        dotprod::values::most_weight(weights, scales, some)
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    fn write_weights(self, weights: &[f32; 64], scale: f32, scales: Option<&[f32; 64]>, some: u64, to: &mut Weights) {
        let write = if const { DOT } { dotprod::values::write_weights } else { digits::write_weights };
        write(weights, scale, scales, some, to);
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[inline(always)]
    unsafe fn weigh_bytes<const R: usize, const C: usize>(
        self,
        of: &Values<'_>,
        weights: (&[Weights; R], &[f32; R]),
        out: &mut [[[MaybeUninit<[f32; MAX_LANES]>; 4]; R]; C],
    ) {
        assert!(DOT, "a level without products of bytes");
        // SAFETY: the caller vouches for the bytes; the token proves SDOT.
        unsafe { dotprod::values::weigh(of, weights, out) }
    }

    #[inline(always)]
    fn sum_fours(self, x: [f32x4; 4]) -> f32x4 {
        let [a, b, c, d] = f32x4::transpose(x);
        (a + c) + (b + d)
    }
    #[inline(always)]
    fn join_fours(self, [a, _, _, _]: [f32x4; 4]) -> f32x4 {
        a
    }

    #[inline(always)]
    unsafe fn transpose_ptr(self, src: *const f32, src_stride: isize, dst: *mut f32, dst_stride: isize) {
        // SAFETY: the caller vouches for 4 rows of 4 floats on either side.
        unsafe {
            let rows = [0, 1, 2, 3].map(|r| self.load_ptr(src.offset(r * src_stride)));
            for (c, row) in f32x4::transpose(rows).into_iter().enumerate() {
                self.store_ptr(row, dst.offset(c as isize * dst_stride));
            }
        }
    }
}
