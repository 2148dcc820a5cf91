//! Two to the power of a negative fixed-point number, in integers.
//!
//! The whole part is a shift, as in I-BERT (Kim et al. 2021, arXiv 2101.01321, §3.4), which takes a parabola for the
//! fraction and is off by 1.9·10⁻³. Here sixteen constants come before the parabola, which then has a sixteenth of the
//! way to go: 64 bytes of table for 6·10⁻⁷ ([`RELATIVE_ERROR`], checked for every fraction).

/// `2³¹ · 2^(−i/16)`.
const SIXTEENTHS: [u32; 16] = [
    0x8000_0000,
    0x7a92_be8b,
    0x7560_6374,
    0x7066_6f76,
    0x6ba2_7e65,
    0x6712_460b,
    0x62b3_9509,
    0x5e84_51d0,
    0x5a82_799a,
    0x56ac_1f75,
    0x52ff_6b55,
    0x4f7a_9930,
    0x4c1b_f829,
    0x48e1_e9ba,
    0x45ca_e0f2,
    0x42d5_61b4,
];

/// `1 − a·ρ + b·ρ²` is `2^(−ρ)` for `0 ≤ ρ < 1/16` with the smallest relative error, 5.2·10⁻⁷: `a·2¹⁹`.
const LINEAR: u32 = 363_360;
/// `b·2¹⁹`; see [`LINEAR`].
const SQUARE: u32 = 123_439;

/// How far [`exp2_neg`] may be off before it is rounded to an integer, relatively.
#[cfg(test)]
const RELATIVE_ERROR: f64 = 6.0e-7;

/// Fractional bits of the argument.
pub(super) const FRACTION_BITS: u32 = 16;
/// What a weight of 1 is.
pub(super) const ONE_BITS: u32 = 22;

/// `2²² · 2^(−x / 2¹⁶)`, rounded to nearest.
#[inline]
pub(super) fn exp2_neg(x: u32) -> u32 {
    let down = (31 - ONE_BITS) + (x >> FRACTION_BITS);
    if down > 31 {
        return 0;
    }
    ((fraction(x & 0xffff) >> (down - 1)) + 1) >> 1
}

/// `2³¹ · 2^(−x / 2¹⁶)` for `x < 2¹⁶`: in `(2³⁰, 2³¹]`.
#[inline]
fn fraction(x: u32) -> u32 {
    let rho = x & 0xfff; // units of 2⁻¹⁶, below 1/16
    // All products of the parabola fit in 32 bits, the width of a Cortex-M0's product.
    let parabola = (1 << 31) - ((rho * (LINEAR - ((rho * SQUARE) >> 16))) >> 4);
    let sixteenth = SIXTEENTHS.get((x >> 12 & 15) as usize).copied().unwrap_or(0);
    ((u64::from(sixteenth) * u64::from(parabola) + (1 << 30)) >> 31) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fraction_is_within_its_error() {
        // Miri takes hundreds of times as long, and looks for something else.
        for x in (0..1 << 16).step_by(if cfg!(miri) { 257 } else { 1 }) {
            let exact = (-f64::from(x) / 65536.0).exp2();
            let error = (f64::from(fraction(x)) / f64::from(1u32 << 31) / exact - 1.0).abs();
            assert!(error <= RELATIVE_ERROR, "{x}: {error:e}");
        }
    }

    #[test]
    fn whole_parts_shift_and_round() {
        assert_eq!(exp2_neg(0), 1 << 22);
        for x in (0..24 << 16).step_by(if cfg!(miri) { 33_331 } else { 777 }) {
            let exact = (22.0 - f64::from(x) / 65536.0).exp2();
            let error = (f64::from(exp2_neg(x)) - exact).abs();
            assert!(error <= 0.5 + exact * RELATIVE_ERROR + 1e-3, "{x}: {error}");
        }
        assert_eq!([22 << 16, 23 << 16, 40 << 16, u32::MAX].map(exp2_neg), [1, 0, 0, 0]);
    }
}
