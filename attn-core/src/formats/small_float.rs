//! Rounding to and widening from floats of eight bits, in integers, for e4m3fn and e5m2.
//!
//! A float of `M` mantissa bits and bias `B` is the code `sign, exponent, mantissa`; codes of one sign are ordered as
//! their values are. Both functions are exact models of the format and use no operation whose result depends on the
//! processor's handling of subnormal numbers.

/// A format of eight bits: a sign, an exponent and a mantissa.
pub(super) struct SmallFloat {
    /// Bits of the mantissa.
    pub(super) mantissa: u32,
    /// What is subtracted from the exponent's bits.
    pub(super) bias: u32,
    /// The code of the largest finite number.
    pub(super) max: u32,
    /// The code of a NaN.
    pub(super) nan: u8,
}

impl SmallFloat {
    /// The nearest code, of two the even one. Larger numbers become the largest number, infinities too.
    #[inline]
    pub(super) const fn encode(&self, x: f32) -> u8 {
        let (bits, m) = (x.to_bits(), self.mantissa);
        let (sign, magnitude) = (((bits >> 24) & 0x80) as u8, bits & 0x7fff_ffff);
        if magnitude > 0x7f80_0000 {
            return sign | self.nan;
        }
        // The bits of an f32 as a fixed-point number of exponent and mantissa, moved to this format's bias.
        let exponent = (magnitude >> 23) + self.bias;
        let shift = if exponent > 127 { 23 - m } else { (23 - m).saturating_add(128 - exponent) };
        if shift > 25 {
            return sign; // less than half of the smallest number
        }
        // A subnormal result keeps its leading one among the mantissa's bits.
        let whole = if exponent > 127 {
            magnitude - ((127 - self.bias) << 23)
        } else {
            (magnitude & 0x007f_ffff) | 0x0080_0000
        };
        let (kept, half) = (whole >> shift, 1 << (shift - 1));
        let rest = whole & ((1 << shift) - 1);
        let up = rest > half || (rest == half && kept & 1 == 1);
        let code = kept + up as u32;
        sign | if code < self.max { code as u8 } else { self.max as u8 }
    }

    /// The number of a finite code; anything for others.
    #[inline]
    pub(super) const fn decode(&self, code: u8) -> f32 {
        let (sign, magnitude) = (((code & 0x80) as u32) << 24, (code & 0x7f) as u32);
        let wide = if magnitude >> self.mantissa == 0 {
            // A whole number of the smallest ones.
            let unit = f32::from_bits((128 - self.bias - self.mantissa) << 23);
            (magnitude as f32 * unit).to_bits()
        } else {
            (magnitude << (23 - self.mantissa)) + ((127 - self.bias) << 23)
        };
        f32::from_bits(sign | wide)
    }
}
