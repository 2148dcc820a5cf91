//! The eight-bit float e5m2: five bits of exponent, two of mantissa; the upper byte of an f16.

use super::small_float::SmallFloat;

const FORMAT: SmallFloat = SmallFloat { mantissa: 2, bias: 15, max: 0x7b, nan: 0x7e };

/// A number in e5m2, the format of the OCP 8-bit floating-point specification: bias 15, largest number 57344, smallest
/// normal 2⁻¹⁴, smallest subnormal 2⁻¹⁶. The codes 0x7c and 0xfc are ±∞, what is above them is NaN.
///
/// ```
/// use attn_core::formats::E5m2;
/// assert_eq!(E5m2::from_f32(1.0).0, 0x3c);
/// assert_eq!(E5m2::from_f32(1.125).to_f32(), 1.0); // of two nearest numbers the even code
/// assert_eq!(E5m2::from_f32(1e9).to_f32(), 57344.0);
/// assert_eq!(E5m2(0xfc).to_f32(), f32::NEG_INFINITY);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct E5m2(
    /// The code.
    pub u8,
);

impl E5m2 {
    /// The largest number.
    pub const MAX: f32 = 57344.0;

    /// Rounds to nearest, of two to the even code. Numbers beyond ±57344, ±∞ too, become ±57344 (the specification's
    /// saturating conversion; an infinity in a cache comes from others). A NaN stays one, with its sign.
    #[inline]
    pub const fn from_f32(x: f32) -> Self {
        Self(FORMAT.encode(x))
    }

    /// Widens; exact.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        let sign = if self.0 < 0x80 { 1.0f32 } else { -1.0 };
        match self.0 & 0x7f {
            0x7c => f32::INFINITY.copysign(sign),
            0x7d..=0x7f => f32::NAN.copysign(sign),
            _ => FORMAT.decode(self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::tests::{check_codes, check_rounding};
    use half::f16;

    /// The number of a code: of an f16 whose lower byte is 0.
    fn by_table(code: u8) -> f64 {
        f16::from_bits(u16::from(code) << 8).to_f64()
    }

    #[test]
    fn all_codes_are_the_numbers_of_the_table() {
        check_codes(|code| E5m2(code).to_f32(), |x| E5m2::from_f32(x).0, by_table);
        assert_eq!(by_table(0x7b), f64::from(E5m2::MAX));
    }

    #[test]
    fn numbers_between_codes_round_to_the_nearest() {
        check_rounding(0x7b, |x| E5m2::from_f32(x).0, by_table);
    }

    #[test]
    fn what_lies_beyond_saturates() {
        for (x, code) in [(6e4, 0x7b), (1e38, 0x7b), (f32::INFINITY, 0x7b), (-1e5, 0xfb), (f32::NEG_INFINITY, 0xfb)] {
            assert_eq!(E5m2::from_f32(x).0, code, "{x}");
        }
        assert!(E5m2(E5m2::from_f32(f32::NAN).0).to_f32().is_nan() && E5m2::from_f32(-0.0).0 == 0x80);
    }
}
