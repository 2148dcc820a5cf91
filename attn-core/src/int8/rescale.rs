//! Multiplication by a real number, in integers.

use crate::error::{AttnError, Result};

/// A real factor as an integer: `factor ≈ mantissa · 2⁻ˢʰⁱᶠᵗ` with 31 bits of mantissa, so that it is right to `2⁻³¹`
/// of itself.
///
/// What TensorFlow Lite calls a quantised multiplier (Jacob et al. 2018, arXiv 1712.05877, §2.2), rounded once, as its
/// single-rounding kernels do. [`Rescale::new`] reads the bits of the `f64` and is `const`: made in a constant, a
/// factor costs no floating-point instruction at run time.
///
/// ```
/// use attn_core::int8::Rescale;
/// let third = Rescale::new(1.0 / 3.0)?;
/// assert_eq!((third.apply(10), third.apply(-11), third.apply(i32::MAX)), (3, -4, i32::MAX / 3));
/// assert_eq!(Rescale::new(1e20)?.apply(-1), i32::MIN); // saturates
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rescale {
    /// 0, or `2³⁰ ≤ |mantissa| < 2³¹`.
    mantissa: i32,
    shift: i32,
}

impl Rescale {
    /// The factor 0.
    pub const ZERO: Self = Self { mantissa: 0, shift: 0 };

    /// The integer form of a finite factor. What is too small for any 32-bit result to notice becomes 0.
    ///
    /// # Errors
    /// [`AttnError::Option`] for NaN and ±∞.
    pub const fn new(factor: f64) -> Result<Self> {
        const FRACTION: u64 = (1 << 52) - 1;
        let bits = factor.to_bits();
        let exponent = (bits >> 52 & 0x7ff) as i32;
        if exponent == 0x7ff {
            return Err(AttnError::Option { name: "rescaling factor", must: "finite" });
        }
        if exponent < 1023 - 64 {
            return Ok(Self::ZERO); // below 2⁻⁶⁴: times 2³¹ this rounds to 0
        }
        // 53 bits to 31, to nearest.
        let mut mantissa = ((bits & FRACTION | 1 << 52) + (1 << 21)) >> 22;
        let mut shift = 1053 - exponent;
        if mantissa == 1 << 31 {
            mantissa >>= 1;
            shift -= 1;
        }
        let mantissa = if bits >> 63 != 0 { -(mantissa as i32) } else { mantissa as i32 };
        Ok(Self { mantissa, shift })
    }

    /// `x · factor`, rounded to nearest (a middle upwards), saturated.
    #[inline]
    pub const fn apply(self, x: i32) -> i32 {
        let product = x as i64 * self.mantissa as i64; // at most 2⁶²
        if self.shift > 62 {
            return 0; // below one half
        }
        let rounded = if self.shift > 0 {
            (product + (1 << (self.shift - 1))) >> self.shift
        } else if self.shift == 0 {
            product
        } else {
            // Doubled at least: any product but 0 is 2³¹ or more.
            product.saturating_mul(2)
        };
        if rounded > i32::MAX as i64 {
            i32::MAX
        } else if rounded < i32::MIN as i64 {
            i32::MIN
        } else {
            rounded as i32
        }
    }

    /// This factor, which must be above 0, divided by a positive integer below `2³¹`.
    ///
    /// Restoring division, one bit a round: 32 rounds for each row of an output cost less than a 64-bit division
    /// routine in flash.
    pub(super) const fn over(self, divisor: u32) -> Self {
        if divisor == 0 || divisor >> 31 != 0 || self.mantissa <= 0 {
            return Self::ZERO;
        }
        let up = divisor.leading_zeros() - 1;
        let divisor = divisor << up; // in [2³⁰, 2³¹), as the mantissa is: their quotient lies in (½, 2)
        let mut rest = self.mantissa as u32;
        let mut quotient = 0u32;
        let mut bits = 0;
        while quotient < 1 << 30 {
            quotient <<= 1;
            if rest >= divisor {
                rest -= divisor;
                quotient |= 1;
            }
            rest <<= 1; // below 2³²: the rest was below the divisor
            bits += 1;
        }
        // `bits` digits, the first of which means 1.
        Self { mantissa: quotient as i32, shift: self.shift + bits - 1 - up as i32 }
    }
}
