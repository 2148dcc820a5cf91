//! Stored numbers and computed numbers. Each trait names the other, so that both are in one file.

use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f64 {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Which [`Element`] a tensor holds, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum Dtype {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of a single.
    Bf16,
}

impl Dtype {
    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name used in reports and options: `"f32"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// A number type that a tensor can hold. Sealed: `f64`, `f32`, [`half::f16`], [`half::bf16`].
#[diagnostic::on_unimplemented(
    message = "a tensor cannot hold `{Self}`",
    label = "no element type of a tensor",
    note = "tensors hold f64, f32, half::f16 or half::bf16; `attn_core::bits` reads halves from u16, and \
            `attn_core::int8` attends to i8"
)]
pub trait Element: Copy + Default + PartialEq + core::fmt::Debug + Send + Sync + sealed::Sealed + 'static {
    /// The type that the streaming engine computes in: `f64` for `f64`, `f32` for all others.
    type Compute: Real;
    /// Which type this is.
    const DTYPE: Dtype;
    /// Widens to double; exact.
    fn to_f64(self) -> f64;
    /// Rounds a double to nearest even.
    fn from_f64(x: f64) -> Self;
    /// Widens (exactly) to the type that engines compute in.
    fn widen(self) -> Self::Compute;
    /// Rounds from the type that engines compute in, to nearest even.
    fn narrow(x: Self::Compute) -> Self;
}

/// A real number type that engines compute in: `f32` or `f64`.
pub trait Real:
    Element<Compute = Self>
    + PartialOrd
    + core::ops::Add<Output = Self>
    + core::ops::Sub<Output = Self>
    + core::ops::Mul<Output = Self>
    + core::ops::Div<Output = Self>
    + core::ops::Neg<Output = Self>
    + core::ops::AddAssign
    + core::ops::MulAssign
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// −∞.
    const NEG_INFINITY: Self;
    /// eˣ.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// The largest finite number.
    const MAX: Self;
    /// Rounds a double to this type.
    fn of(x: f64) -> Self {
        Self::from_f64(x)
    }
    /// Rounds a double to this type, a finite one to a finite number: an option or a bias beyond the range of `f32` is
    /// very large there, not infinite, because ∞ means something else (and 0·∞ nothing at all).
    fn saturating(x: f64) -> Self {
        let max = Self::MAX.to_f64();
        match x {
            _ if !x.is_finite() => Self::of(x),
            _ if x > max => Self::MAX,
            _ if x < -max => -Self::MAX,
            _ => Self::of(x),
        }
    }
    /// The same numbers where this type is `f32`.
    #[doc(hidden)]
    fn singles(x: &[Self]) -> Option<&[f32]>;
    /// The same numbers where this type is `f64`.
    #[doc(hidden)]
    fn doubles(x: &[Self]) -> Option<&[f64]>;
    /// The same numbers where this type is `f32`.
    #[doc(hidden)]
    fn of_singles(x: &[f32]) -> Option<&[Self]>;
    /// The same numbers where this type is `f64`.
    #[doc(hidden)]
    fn of_doubles(x: &[f64]) -> Option<&[Self]>;
    /// The larger of two; NaN if either is NaN (unlike `f32::max`).
    fn max_nan(self, other: Self) -> Self {
        // A NaN on either side fails both comparisons but the last.
        if self >= other {
            self
        } else if other > self {
            other
        } else {
            self + other
        }
    }
}

macro_rules! real {
    ($t:ident, $dtype:ident, $exp:ident, $ln:ident, $tanh:ident, $sqrt:ident, $same:ident $of_same:ident, $other:ident $of_other:ident: $u:ident) => {
        impl Element for $t {
            type Compute = $t;
            const DTYPE: Dtype = Dtype::$dtype;
            #[inline]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline]
            fn widen(self) -> $t {
                self
            }
            #[inline]
            fn narrow(x: $t) -> Self {
                x
            }
        }

        impl Real for $t {
            const MAX: Self = $t::MAX;
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            #[inline]
            fn exp(self) -> Self {
                libm::$exp(self)
            }
            #[inline]
            fn ln(self) -> Self {
                libm::$ln(self)
            }
            #[inline]
            fn tanh(self) -> Self {
                libm::$tanh(self)
            }
            #[inline]
            fn sqrt(self) -> Self {
                libm::$sqrt(self)
            }
            #[inline]
            fn $same(x: &[Self]) -> Option<&[$t]> {
                Some(x)
            }
            #[inline]
            fn $other(_: &[Self]) -> Option<&[$u]> {
                None
            }
            #[inline]
            fn $of_same(x: &[$t]) -> Option<&[Self]> {
                Some(x)
            }
            #[inline]
            fn $of_other(_: &[$u]) -> Option<&[Self]> {
                None
            }
        }
    };
}

real!(f64, F64, exp, log, tanh, sqrt, doubles of_doubles, singles of_singles: f32);
real!(f32, F32, expf, logf, tanhf, sqrtf, singles of_singles, doubles of_doubles: f64);

macro_rules! half_float {
    ($t:ident, $dtype:ident) => {
        impl Element for $t {
            type Compute = f32;
            const DTYPE: Dtype = Dtype::$dtype;
            #[inline]
            fn to_f64(self) -> f64 {
                $t::to_f64(self)
            }
            #[inline]
            fn from_f64(x: f64) -> Self {
                // Not `half`'s own: it drops the lower 32 bits, so that a number just above a middle rounds down.
                $t::from_f32(round_to_odd(x))
            }
            #[inline]
            fn widen(self) -> f32 {
                $t::to_f32(self)
            }
            #[inline]
            fn narrow(x: f32) -> Self {
                $t::from_f32(x)
            }
        }
    };
}

half_float!(f16, F16);
half_float!(bf16, Bf16);

/// Narrows to `f32` so that rounding once more, to a type with at least two bits less, gives the correctly rounded
/// result: an inexact value becomes the neighbour whose last bit is 1, and so never looks like a middle (Boldo &
/// Melquiond 2008).
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    let back = f64::from(near);
    if back == x || x.is_nan() || near.is_infinite() {
        return near; // exact; or so large that every half type overflows as well
    }
    // The neighbour towards zero, then its last bit set.
    let bits = near.to_bits();
    let toward_zero = if back.abs() > x.abs() { bits - 1 } else { bits };
    f32::from_bits(toward_zero | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_keeps_a_nan_from_either_side() {
        assert!(1.0f32.max_nan(f32::NAN).is_nan());
        assert!(f32::NAN.max_nan(1.0).is_nan());
        assert_eq!(f32::NEG_INFINITY.max_nan(1.0), 1.0);
        assert_eq!(2.0f64.max_nan(1.0), 2.0);
    }

    #[test]
    fn halves_widen_exactly_and_round_once() {
        // Miri takes hundreds of times as long, and looks for something else.
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 251 } else { 1 }) {
            let x = f16::from_bits(bits);
            if !x.is_nan() {
                assert_eq!(<f16 as Element>::from_f64(Element::to_f64(x)).to_bits(), bits);
                assert_eq!(f16::narrow(x.widen()).to_bits(), bits);
            }
        }
        // Rounding through f32 would give 1.0: the exact value is just above the middle of two bf16 numbers.
        let x = 1.0 + 1.0 / 256.0 + 1e-12;
        assert_eq!(<bf16 as Element>::from_f64(x).to_f32(), 1.0 + 1.0 / 128.0);
    }
}
