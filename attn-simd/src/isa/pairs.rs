//! Vectors whose products multiply pairs of bfloat16: everything else is that of other vectors.
//!
//! A word of a product is two bfloat16, the first in the lower half, and [`Isa::step`] adds both of its products to a
//! lane. `gemm` runs on words as it runs on floats: half as many steps.

#![allow(unsafe_code, reason = "hands the two operations on addresses on")]

use attn_core::half::{bf16, f16};

use super::Isa;
use crate::amx::dot::dot;

/// What multiplies pairs in the lanes of some vectors, and makes them.
pub(crate) trait PairUnit: Copy + Send + Sync + 'static {
    /// The vectors.
    type Vectors: Isa;
    /// [`Isa::IS_MODEL`].
    const IS_MODEL: bool = false;

    /// Proof of the vectors.
    fn vectors(self) -> Self::Vectors;
    /// Runs `f` compiled with the instructions of the vectors and of the unit.
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R;
    /// [`Isa::step`].
    fn step(self, a: Lanes<Self>, b: Lanes<Self>, c: Lanes<Self>) -> Lanes<Self>;
    /// [`Isa::narrow`].
    #[inline(always)]
    fn narrow(self, x: Lanes<Self>, dst: &mut [bf16]) {
        self.vectors().store_bf16(x, dst);
    }
    /// [`Isa::narrow_pair`].
    #[inline(always)]
    fn narrow_pair(self, even: Lanes<Self>, odd: Lanes<Self>) -> Lanes<Self> {
        self.vectors().narrow_pair(even, odd)
    }
}

/// A vector of a unit's vectors.
pub(crate) type Lanes<U> = <<U as PairUnit>::Vectors as Isa>::F;

/// The vectors of a unit, with its products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs<U>(pub(crate) U);

/// The unit in plain Rust: [`amx::dot`](crate::amx::dot) in the lanes of any vectors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairModel<V>(pub(crate) V);

impl<V: Isa> PairUnit for PairModel<V> {
    type Vectors = V;
    const IS_MODEL: bool = true;

    #[inline(always)]
    fn vectors(self) -> V {
        self.0
    }

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.vectorize(f)
    }

    #[inline(always)]
    fn step(self, a: Lanes<Self>, b: Lanes<Self>, c: Lanes<Self>) -> Lanes<Self> {
        let [a, b, mut sums] = [a, b, c].map(|x| self.0.lanes(x));
        for (sum, (a, b)) in sums.iter_mut().zip(a.into_iter().zip(b)).take(V::LANES) {
            *sum = dot(*sum, a, b);
        }
        self.0.load(&sums)
    }
}

/// Operations of the vectors.
macro_rules! of_the_vectors {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $type),*) -> $result {
            self.0.vectors().$name($($argument),*)
        }
    )*};
}

/// The same on addresses.
macro_rules! of_the_vectors_at {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller vouches for what the trait names.
            unsafe { self.0.vectors().$name($($argument),*) }
        }
    )*};
}

impl<U: PairUnit> Isa for Pairs<U> {
    type F = <U::Vectors as Isa>::F;
    type M = <U::Vectors as Isa>::M;
    type Pow = <U::Vectors as Isa>::Pow;
    type Floats = U::Vectors;
    const LANES: usize = U::Vectors::LANES;
    const CHAIN: usize = U::Vectors::CHAIN;
    const FUSED: bool = U::Vectors::FUSED;
    const WORD: usize = 2;
    const IS_MODEL: bool = U::IS_MODEL;

    #[inline(always)]
    fn floats(self) -> U::Vectors {
        self.0.vectors()
    }

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.vectorize(f)
    }

    #[inline(always)]
    fn step(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.0.step(a, b, c)
    }

    #[inline(always)]
    fn narrow(self, x: Self::F, dst: &mut [bf16]) {
        self.0.narrow(x, dst);
    }

    #[inline(always)]
    fn narrow_pair(self, even: Self::F, odd: Self::F) -> Self::F {
        self.0.narrow_pair(even, odd)
    }

    of_the_vectors! {
        splat(x: f32) -> Self::F;
        add(a: Self::F, b: Self::F) -> Self::F;
        sub(a: Self::F, b: Self::F) -> Self::F;
        mul(a: Self::F, b: Self::F) -> Self::F;
        div(a: Self::F, b: Self::F) -> Self::F;
        mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
        max(a: Self::F, b: Self::F) -> Self::F;
        abs(a: Self::F) -> Self::F;
        copysign(a: Self::F, sign: Self::F) -> Self::F;
        eq(a: Self::F, b: Self::F) -> Self::M;
        select(mask: Self::M, t: Self::F, f: Self::F) -> Self::F;
        mask_from_bits(bits: u64) -> Self::M;
        split(x: Self::F) -> (Self::Pow, Self::F);
        scale_by_pow2(p: Self::F, pow: Self::Pow) -> Self::F;
        store_f16(x: Self::F, dst: &mut [f16]) -> ();
        store_bf16(x: Self::F, dst: &mut [bf16]) -> ();
        round_bf16(x: Self::F) -> Self::F;
        pair_bf16(even: Self::F, odd: Self::F) -> Self::F;
        sum_fours(x: [Self::F; 4]) -> Self::F;
        join_fours(x: [Self::F; 4]) -> Self::F;
        max_across(x: Self::F) -> f32;
        pack_bools(keep: &[bool; 64]) -> u64;
    }

    of_the_vectors_at! {
        load_ptr(src: *const f32) -> Self::F;
        store_ptr(x: Self::F, dst: *mut f32);
        load_f16_ptr(src: *const f16) -> Self::F;
        load_bf16_ptr(src: *const bf16) -> Self::F;
        load_i8_ptr(src: *const i8) -> Self::F;
        load_nibbles_ptr(src: *const u8, shift: i32) -> Self::F;
        load_e4m3_ptr(src: *const u8) -> Self::F;
        load_e5m2_ptr(src: *const u8) -> Self::F;
        transpose_ptr(src: *const f32, src_stride: isize, dst: *mut f32, dst_stride: isize);
    }

    #[inline(always)]
    fn prefetch<const HINT: u8>(self, address: *const u8) {
        self.0.vectors().prefetch::<HINT>(address);
    }
}
