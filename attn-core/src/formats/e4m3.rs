//! The eight-bit float e4m3fn: four bits of exponent, three of mantissa, no infinity.

use super::small_float::SmallFloat;

const FORMAT: SmallFloat = SmallFloat { mantissa: 3, bias: 7, max: 0x7e, nan: 0x7f };

/// A number in e4m3fn, the format of the OCP 8-bit floating-point specification: bias 7, largest number 448, smallest
/// normal 2⁻⁶, smallest subnormal 2⁻⁹. The codes 0x7f and 0xff are NaN, and there is no infinity.
///
/// ```
/// use attn_core::formats::E4m3;
/// assert_eq!(E4m3::from_f32(1.0).0, 0x38);
/// assert_eq!(E4m3::from_f32(1.0625).to_f32(), 1.0); // of two nearest numbers the even code
/// assert_eq!(E4m3::from_f32(-1e9).to_f32(), -448.0);
/// assert!(E4m3::from_f32(f32::NAN).to_f32().is_nan());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct E4m3(
    /// The code.
    pub u8,
);

impl E4m3 {
    /// The largest number.
    pub const MAX: f32 = 448.0;

    /// Rounds to nearest, of two to the even code. Numbers beyond ±448, ±∞ too, become ±448 (the specification's
    /// saturating conversion). A NaN stays one, with its sign.
    #[inline]
    pub const fn from_f32(x: f32) -> Self {
        Self(FORMAT.encode(x))
    }

    /// Widens; exact.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        if self.0 & 0x7f == 0x7f { f32::NAN.copysign(sign(self.0)) } else { FORMAT.decode(self.0) }
    }
}

const fn sign(code: u8) -> f32 {
    if code < 0x80 { 1.0 } else { -1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::tests::{check_codes, check_rounding};

    /// The number of a code, by the specification's table.
    fn by_table(code: u8) -> f64 {
        let (sign, e, m) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match e {
            _ if code & 0x7f == 0x7f => f64::NAN,
            0 => m / 8.0 * libm::exp2(-6.0),
            _ => (1.0 + m / 8.0) * libm::exp2(f64::from(e - 7)),
        };
        if sign == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn all_codes_are_the_numbers_of_the_table() {
        check_codes(|code| E4m3(code).to_f32(), |x| E4m3::from_f32(x).0, by_table);
        assert_eq!(by_table(0x7e), f64::from(E4m3::MAX));
    }

    #[test]
    fn numbers_between_codes_round_to_the_nearest() {
        check_rounding(0x7e, |x| E4m3::from_f32(x).0, by_table);
    }

    #[test]
    fn what_lies_beyond_saturates() {
        for (x, code) in [(449.0, 0x7e), (1e38, 0x7e), (f32::INFINITY, 0x7e), (-480.0, 0xfe), (f32::NEG_INFINITY, 0xfe)]
        {
            assert_eq!(E4m3::from_f32(x).0, code, "{x}");
        }
        assert_eq!((E4m3::from_f32(f32::NAN).0 & 0x7f, E4m3::from_f32(-0.0).0), (0x7f, 0x80));
    }
}
