//! Instruction sets: proof that the CPU has one, and its operations on lanes, in which the kernels are written.
//!
//! A value of an [`Isa`] type is proof that the CPU has the instructions. Only [`level`](crate::level) makes one, after
//! asking the CPU. Vectors of lanes are plain data; arithmetic on them needs the proof. Kernels are generic, safe and
//! `#[inline(always)]`, closures included. [`Isa::vectorize`] switches the target features on, once, and all code that
//! is inlined into it is compiled with them. A function that is not inlined there would be compiled without them.
//!
//! Here `unsafe` is in the leaves and on the two operations on addresses; ARCHITECTURE.md lists all modules that may
//! have it. AMX multiplies no vectors: its trait is `amx::product::AmxUnit`.

#![allow(unsafe_code, reason = "declares the two operations on addresses that the leaves implement")]

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512bf16;
#[cfg(target_arch = "x86_64")]
mod bytes;
#[cfg(all(target_arch = "x86_64", feature = "std"))]
pub(crate) mod cpuid;
mod digits;
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod dotprod;
mod fallback;
#[cfg(all(target_arch = "aarch64", not(miri)))]
pub(crate) mod neon;
pub(crate) mod pairs;
pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
mod request;
#[cfg(target_arch = "x86_64")]
mod unseen;
#[cfg(target_arch = "x86_64")]
mod words;

use core::fmt;
use core::mem::MaybeUninit;

use attn_core::half::{bf16, f16};

pub(crate) use digits::{BLOCK, BLOCK_BYTES, Bytes, Integer, Next, Order, Values, Weights};
pub(crate) use fallback::{MAX_LANES, narrow_bf16, widen_f16};

/// Why a level cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LevelError {
    /// No level has this name; the names are `portable`, `dotprod`, `avx2`, `avx512`, `avx512bf16`, `amx` and, for
    /// tests, `avx512bf16-model` and `amx-model`.
    Unknown,
    /// This machine lacks the level's instructions.
    Missing,
    /// The processor has the instructions, but the system has not turned them on, or has no call for permission.
    Disabled,
    /// The system refuses this process the use of the instructions. Reasons are a filter of system calls, an alternate
    /// signal stack that is too small, or a kernel that is too old.
    Refused,
}

impl fmt::Display for LevelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => {
                "no such level; the levels are portable, dotprod, avx2, avx512, avx512bf16, amx, avx512bf16-model and amx-model"
            }
            Self::Missing => "this machine lacks the instructions of that level",
            Self::Disabled => "this machine has the instructions of that level, but its system has not turned them on",
            Self::Refused => {
                "this machine has the instructions of that level, but its system refuses this process the use of them"
            }
        })
    }
}

impl core::error::Error for LevelError {}

/// The purposes of a prefetch.
pub(crate) mod hint {
    /// The line is read soon: into the first cache.
    pub(crate) const READ: u8 = 0;
    /// The line is written soon: into the first cache, owned.
    pub(crate) const WRITE: u8 = 1;
    /// The line is read later: into the second cache.
    pub(crate) const SECOND: u8 = 2;
}

/// Defines the lane operations of a leaf's `impl Isa`: `name(arguments) -> result = intrinsics;`.
#[cfg(target_arch = "x86_64")]
macro_rules! lane_ops {
    ($($name:ident($($argument:tt: $type:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: the token proves the instructions, none of which touches memory.
            unsafe { $body }
        }
    )*};
}

/// Does the same for operations on addresses.
#[cfg(target_arch = "x86_64")]
macro_rules! address_ops {
    ($($name:ident($($argument:tt: $type:ty),*) $(-> $result:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller vouches for the elements that the trait names; the token proves the instructions.
            unsafe { $body }
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
use {address_ops, lane_ops};

/// Smaller powers of two count as 0: weights below 2⁻¹⁰⁰ of their row's largest (the reference of weights may be twice
/// as large). So neither weights nor their products with values of usual sizes are subnormal: Intel's processors are
/// very slow at an instruction that makes or reads such a number. With −126, where f32 ends, a call whose scores spread
/// by 20 took 3.4 times as long on Skylake (2048 × 64, AVX-512), and 1.9 times at AVX2.
pub(crate) const LEAST_POWER: f32 = -101.0;

/// Proof that an instruction set is present, and its operations on lanes of `f32`.
pub(crate) trait Isa: Copy + Send + Sync + 'static {
    /// A vector of `LANES` floats.
    type F: Copy;
    /// One truth value per lane.
    type M: Copy;
    /// A power of two per lane, or 0.
    type Pow: Copy;
    /// The number of lanes of a vector; at most [`MAX_LANES`].
    const LANES: usize;
    /// The longest chain of multiply-adds of a score. A longer dot product is cut into equal parts, so that its
    /// rounding errors add up over the parts and not over the whole. Each part costs one addition in memory.
    const CHAIN: usize;

    /// Whether [`mul_add`](Self::mul_add) rounds once.
    const FUSED: bool;
    /// Numbers in a word of a product: 2 where [`step`](Self::step) multiplies pairs of bfloat16.
    const WORD: usize = 1;
    /// Whether an instruction is computed in plain Rust, for tests: then nobody waits for speed.
    const IS_MODEL: bool = false;

    /// The same vectors, with products of floats.
    type Floats: Isa<F = Self::F, M = Self::M>;
    /// See [`Floats`](Self::Floats).
    fn floats(self) -> Self::Floats;

    /// Runs `f` compiled with this instruction set.
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R;
    /// Does the same as a function of its own, for work of a microsecond or more. What a compiler needs for a function
    /// grows faster than the function: with all products of decoding inlined into their callers, the crate took three
    /// times as long to build.
    #[inline(never)]
    fn apart<R>(self, f: impl FnOnce() -> R) -> R {
        self.vectorize(f)
    }

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// The first `LANES` elements.
    #[inline(always)]
    fn load(self, src: &[f32]) -> Self::F {
        assert!(src.len() >= Self::LANES);
        // SAFETY: as many elements were just asserted.
        unsafe { self.load_ptr(src.as_ptr()) }
    }
    /// Writes the first `LANES` elements.
    #[inline(always)]
    fn store(self, x: Self::F, dst: &mut [f32]) {
        assert!(dst.len() >= Self::LANES);
        // SAFETY: as many elements were just asserted.
        unsafe { self.store_ptr(x, dst.as_mut_ptr()) }
    }
    /// All lanes as an array, whose rest is 0.
    #[inline(always)]
    fn lanes(self, x: Self::F) -> [f32; MAX_LANES] {
        let mut lanes = [0.0; MAX_LANES];
        self.store(x, &mut lanes);
        lanes
    }
    /// Reads `LANES` floats from any address.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` floats.
    unsafe fn load_ptr(self, src: *const f32) -> Self::F;
    /// Writes `LANES` floats to any address.
    ///
    /// # Safety
    /// `dst` is valid for writing `LANES` floats.
    unsafe fn store_ptr(self, x: Self::F, dst: *mut f32);

    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a − b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`, fused where the instruction set fuses.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c + a·b`, where a lane of `a` and `b` is a word of a product: a float, or a pair of bfloat16 whose products are
    /// both added. Of pairs, numbers below 2⁻¹²⁶ count as 0, and so do such sums.
    #[inline(always)]
    fn step(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.mul_add(a, b, c)
    }
    /// The larger; where `b` is NaN, or `a` is, any of the two.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Absolute value.
    fn abs(self, a: Self::F) -> Self::F;
    /// The size of `a` with the sign of `sign`.
    fn copysign(self, a: Self::F, sign: Self::F) -> Self::F;
    /// `a = b`, false for NaN.
    fn eq(self, a: Self::F, b: Self::F) -> Self::M;
    /// `t` where the mask is true, `f` elsewhere.
    fn select(self, mask: Self::M, t: Self::F, f: Self::F) -> Self::F;
    /// Of the first `LANES` elements replaces those whose mask is false.
    #[inline(always)]
    fn replace(self, keep: Self::M, x: &mut [f32], other: Self::F) {
        self.store(self.select(keep, self.load(x), other), x);
    }
    /// Lane `n` is true where bit `n` is set.
    fn mask_from_bits(self, bits: u64) -> Self::M;
    /// `x = n + f` with `n` the nearest integer and `|f| ≤ ½`: `2ⁿ`, or 0 for `x <` [`LEAST_POWER`], and `f`.
    /// `x < 2²²`.
    fn split(self, x: Self::F) -> (Self::Pow, Self::F);
    /// `p·2ⁿ` for `n ≤ 127` from [`split`](Self::split); exactly 0 where `x <` [`LEAST_POWER`] was split.
    /// A NaN in `p` stays one.
    fn scale_by_pow2(self, p: Self::F, pow: Self::Pow) -> Self::F;

    /// Widens the first `LANES` elements; exact.
    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> Self::F {
        assert!(src.len() >= Self::LANES);
        // SAFETY: as many elements were just asserted.
        unsafe { self.load_f16_ptr(src.as_ptr()) }
    }
    /// Widens the first `LANES` elements; exact.
    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> Self::F {
        assert!(src.len() >= Self::LANES);
        // SAFETY: as many elements were just asserted.
        unsafe { self.load_bf16_ptr(src.as_ptr()) }
    }
    /// Rounds to nearest even and writes the first `LANES` elements.
    #[inline(always)]
    fn store_f16(self, x: Self::F, dst: &mut [f16]) {
        fallback::store_f16(&self.lanes(x), &mut dst[..Self::LANES]);
    }
    /// Rounds to nearest even and writes the first `LANES` elements; a NaN stays one.
    #[inline(always)]
    fn store_bf16(self, x: Self::F, dst: &mut [bf16]) {
        fallback::store_bf16(&self.lanes(x), &mut dst[..Self::LANES]);
    }

    /// Rounds to the nearest bfloat16, ties away from zero, and leaves it as a float. Infinity stays; a NaN stays one
    /// unless all bits of its payload are set.
    #[inline(always)]
    fn round_bf16(self, x: Self::F) -> Self::F {
        self.load(&fallback::round_bf16(self.lanes(x)))
    }
    /// The upper halves of the lanes of `even` and `odd`, side by side: as words `odd << 16 | even`, that is pairs of
    /// bfloat16. The result is a vector of words; arithmetic on it has no meaning.
    #[inline(always)]
    fn pair_bf16(self, even: Self::F, odd: Self::F) -> Self::F {
        self.load(&fallback::pair_bf16(self.lanes(even), self.lanes(odd)))
    }

    /// As [`store_bf16`](Self::store_bf16), for products of pairs: numbers below 2⁻¹²⁶ may become 0.
    #[inline(always)]
    fn narrow(self, x: Self::F, dst: &mut [bf16]) {
        self.store_bf16(x, dst);
    }
    /// Rounds as [`narrow`](Self::narrow), and joins the lanes of both as [`pair_bf16`](Self::pair_bf16) does.
    #[inline(always)]
    fn narrow_pair(self, even: Self::F, odd: Self::F) -> Self::F {
        self.load(&fallback::narrow_pair(self.lanes(even), self.lanes(odd)))
    }

    /// Widens `LANES` halves at any address; exact.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` elements.
    #[inline(always)]
    unsafe fn load_f16_ptr(self, src: *const f16) -> Self::F {
        // SAFETY: the caller vouches for as many elements.
        self.load(&fallback::load_f16(unsafe { core::slice::from_raw_parts(src, Self::LANES) }))
    }
    /// Widens `LANES` bfloat16 at any address; exact.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` elements.
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, src: *const bf16) -> Self::F {
        // SAFETY: the caller vouches for as many elements.
        self.load(&fallback::load_bf16(unsafe { core::slice::from_raw_parts(src, Self::LANES) }))
    }
    /// Widens `LANES` signed bytes at any address; exact.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` elements.
    #[inline(always)]
    unsafe fn load_i8_ptr(self, src: *const i8) -> Self::F {
        // SAFETY: the caller vouches for as many elements.
        self.load(&fallback::load_i8(unsafe { core::slice::from_raw_parts(src, Self::LANES) }))
    }

    /// Widens four bits of each of `LANES` bytes at any address, less 8: those from a bit on.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` bytes.
    #[inline(always)]
    unsafe fn load_nibbles_ptr(self, src: *const u8, shift: i32) -> Self::F {
        // SAFETY: the caller vouches for as many elements.
        self.load(&fallback::load_nibbles(unsafe { core::slice::from_raw_parts(src, Self::LANES) }, shift))
    }
    /// The same of `2·LANES` bytes.
    ///
    /// # Safety
    /// `src` is valid for reading `2·LANES` bytes.
    #[inline(always)]
    unsafe fn load_nibbles_twice_ptr(self, src: *const u8, shift: i32) -> [Self::F; 2] {
        // SAFETY: the caller vouches for as many bytes.
        unsafe { [self.load_nibbles_ptr(src, shift), self.load_nibbles_ptr(src.add(Self::LANES), shift)] }
    }
    /// The lower four bits of each of `LANES` bytes at any address, and then the upper ones: less 8, times a scale.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` bytes.
    #[inline(always)]
    unsafe fn load_two_nibbles_ptr(self, src: *const u8, scale: Self::F) -> [Self::F; 2] {
        // SAFETY: the caller vouches for as many bytes.
        let [lower, upper] = unsafe { [self.load_nibbles_ptr(src, 0), self.load_nibbles_ptr(src, 4)] };
        [self.mul(scale, lower), self.mul(scale, upper)]
    }
    /// Widens `LANES` numbers in e4m3fn at any address; exact.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` bytes.
    #[inline(always)]
    unsafe fn load_e4m3_ptr(self, src: *const u8) -> Self::F {
        // SAFETY: the caller vouches for as many elements.
        self.load(&fallback::load_e4m3(unsafe { core::slice::from_raw_parts(src, Self::LANES) }))
    }
    /// The same of `2·LANES` numbers.
    ///
    /// # Safety
    /// `src` is valid for reading `2·LANES` bytes.
    #[inline(always)]
    unsafe fn load_two_e4m3_ptr(self, src: *const u8) -> [Self::F; 2] {
        // SAFETY: the caller vouches for as many bytes.
        unsafe { [self.load_e4m3_ptr(src), self.load_e4m3_ptr(src.add(Self::LANES))] }
    }
    /// Widens `LANES` numbers in e5m2 at any address; exact.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` bytes.
    #[inline(always)]
    unsafe fn load_e5m2_ptr(self, src: *const u8) -> Self::F {
        // SAFETY: the caller vouches for as many elements.
        self.load(&fallback::load_e5m2(unsafe { core::slice::from_raw_parts(src, Self::LANES) }))
    }
    /// The same of `2·LANES` numbers.
    ///
    /// # Safety
    /// `src` is valid for reading `2·LANES` bytes.
    #[inline(always)]
    unsafe fn load_two_e5m2_ptr(self, src: *const u8) -> [Self::F; 2] {
        // SAFETY: the caller vouches for as many bytes.
        unsafe { [self.load_e5m2_ptr(src), self.load_e5m2_ptr(src.add(Self::LANES))] }
    }

    /// The most digits of integers whose products with bytes are faster than those of floats: 3 of any precision, 2
    /// under `Precision::Fast` alone; 0 if none.
    const DIGITS: usize = 0;
    /// How the digits of rows lie in memory.
    const ORDER: Order = Order::Words;
    /// Writes `unit·n` for each row and key, where `n` is the sum over the channels of the integers times the key's: of
    /// three digits `256·x + y` with `x = Σ(256·a + b)·k` and `y = Σ c·k`. Integers are exact; `x` and `y` are rounded,
    /// and so is `256·x + y`. Of two digits `n` is an integer, and is rounded.
    ///
    /// # Safety
    /// `columns` bytes of each key are readable, and digits for them, of R rows, up to a multiple of 64.
    #[inline(always)]
    unsafe fn dot_bytes<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) {
        // SAFETY: the caller vouches for the same.
        unsafe { digits::dot_bytes(of) }
    }

    /// The same of keys in blocks of 32, each behind its scale: `n` of each block, or of each lane's numbers of a
    /// block, times the scale, joins the sum of those before by one fused multiply-add. Returns the keys with scales
    /// that are not finite, as bits.
    ///
    /// # Safety
    /// `columns` is a multiple of 32, and as many numbers of each key are readable with their scales; digits for them,
    /// of R rows, up to a multiple of 64.
    #[inline(always)]
    unsafe fn dot_blocks<const R: usize, const D: usize>(self, of: Bytes<'_, R, D>) -> u64 {
        // SAFETY: the caller vouches for the same.
        unsafe { digits::dot_blocks(of) }
    }

    /// The largest of the weights of some values, whose bits are set, each times its scale if there are scales. `None`
    /// if one is below 0 or not finite.
    #[inline(always)]
    fn most_weight(self, weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
        digits::most_weight(weights, scales, some)
    }

    /// Writes the weights of some values, whose bits are set, each times `scale` and then by its own scale if there are
    /// some, as integers, and 0 for the others. Rounding may lift one by less than half above [`Weights::MOST`]: it
    /// becomes that.
    #[inline(always)]
    fn write_weights(self, weights: &[f32; 64], scale: f32, scales: Option<&[f32; 64]>, some: u64, to: &mut Weights) {
        digits::write_weights(weights, scale, scales, some, to);
    }

    /// Writes the sums of bytes of values over a tile, times the integers of R rows: exact, then rounded, times the
    /// row's unit. `LANES` bytes are a vector; vectors after the last byte hold anything. If C is above 1, the bytes
    /// are C times `4·LANES`.
    ///
    /// # Safety
    /// As many bytes are readable of all values, those after the last too.
    #[inline(always)]
    unsafe fn weigh_bytes<const R: usize, const C: usize>(
        self,
        of: &Values<'_>,
        (weights, units): (&[Weights; R], &[f32; R]),
        out: &mut [[[MaybeUninit<[f32; MAX_LANES]>; 4]; R]; C],
    ) {
        for (c, out) in out.iter_mut().enumerate() {
            for ((weights, unit), out) in weights.iter().zip(units).zip(out) {
                let (mut sums, all) = ([0.0; 64], 4 * Self::LANES);
                let bytes = if C > 1 { all } else { of.bytes };
                // SAFETY: the caller vouches for the bytes.
                unsafe { digits::weigh(&Values { at: of.at + all * c, bytes, ..*of }, weights, *unit, &mut sums) };
                for (sums, out) in sums.chunks(Self::LANES).zip(out) {
                    out.write([0.0; MAX_LANES])[..Self::LANES].copy_from_slice(sums);
                }
            }
        }
    }

    /// Adds lanes that are four apart, of four vectors: lanes `4i + n` of the result, over all `i`, still have to be
    /// added to give the sum of vector `n`.
    fn sum_fours(self, x: [Self::F; 4]) -> Self::F;
    /// Finishes the sums of the first `LANES/4` of these: lane `4i + n` is the sum of vector `n` of the `i`-th
    /// [`sum_fours`](Self::sum_fours). Every vector is added up in the same order, whichever its place.
    fn join_fours(self, x: [Self::F; 4]) -> Self::F;
    /// The largest lane; where one is NaN, any.
    #[inline(always)]
    fn max_across(self, x: Self::F) -> f32 {
        fallback::max_across(&self.lanes(x)[..Self::LANES])
    }

    /// 64 bools as bits, the first in the lowest.
    #[inline(always)]
    fn pack_bools(self, keep: &[bool; 64]) -> u64 {
        attn_core::engine::pack_bools(keep)
    }

    /// Requests a cache line, as a [`hint`] says. Any address may be given.
    #[inline(always)]
    fn prefetch<const HINT: u8>(self, _address: *const u8) {}

    /// Transposes a square of `LANES × LANES`: `dst[c·dst_stride + r] = src[r·src_stride + c]`.
    #[inline(always)]
    fn transpose(self, src: &[f32], src_stride: usize, dst: &mut [f32], dst_stride: usize) {
        let reach = |stride: usize| (Self::LANES - 1).checked_mul(stride).and_then(|n| n.checked_add(Self::LANES));
        assert!(reach(src_stride).is_some_and(|n| n <= src.len()), "transpose reads past its source");
        assert!(reach(dst_stride).is_some_and(|n| n <= dst.len()), "transpose writes past its target");
        // SAFETY: LANES rows of LANES floats, a stride apart, lie inside either slice, as was just asserted.
        unsafe { self.transpose_ptr(src.as_ptr(), src_stride as isize, dst.as_mut_ptr(), dst_stride as isize) }
    }
    /// As [`transpose`](Self::transpose), between any addresses.
    ///
    /// # Safety
    /// `LANES` rows of `LANES` floats, a stride apart, are readable from `src` on and writable from `dst` on.
    unsafe fn transpose_ptr(self, src: *const f32, src_stride: isize, dst: *mut f32, dst_stride: isize);
}
