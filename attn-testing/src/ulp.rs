//! Distances in units in the last place.

/// How many `f32` numbers there are from `a` to `b`; 0 for two NaNs, `u32::MAX` for one.
///
/// ```
/// use attn_testing::ulp::distance;
/// assert_eq!(distance(1.0, 1.0 + f32::EPSILON), 1);
/// assert_eq!(distance(0.0, -0.0), 0);
/// assert_eq!(distance(f32::MAX, f32::INFINITY), 1);
/// ```
pub fn distance(a: f32, b: f32) -> u32 {
    // Magnitudes below and above zero on one line.
    fn key(x: f32) -> i64 {
        let bits = i64::from(x.to_bits() & 0x7fff_ffff);
        if x.is_sign_negative() { -bits } else { bits }
    }
    match (a.is_nan(), b.is_nan()) {
        (true, true) => 0,
        (false, false) => (key(a) - key(b)).unsigned_abs() as u32,
        _ => u32::MAX,
    }
}

/// The error of `got` in units of the last place of `want`, the spacing of `f32` at the correctly rounded value; the
/// spacing of the smallest normal number below that.
///
/// ```
/// use attn_testing::ulp::error;
/// assert_eq!(error(1.0, 1.0 + f64::from(f32::EPSILON) / 2.0), 0.5);
/// ```
pub fn error(got: f32, want: f64) -> f64 {
    if want.is_nan() || got.is_nan() {
        return if want.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if f64::from(got) == want {
        return 0.0;
    }
    let magnitude = want.abs().clamp(f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
    let exponent = ((magnitude.to_bits() >> 52) as i64 - 1023) as f64;
    (f64::from(got) - want).abs() / (exponent - 23.0).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_cross_zero() {
        let tiny = f32::from_bits(1);
        assert_eq!(distance(tiny, -tiny), 2);
        assert_eq!(distance(f32::NAN, 0.0), u32::MAX);
        assert_eq!(distance(-1.0, 1.0), 2 * 1.0f32.to_bits());
    }

    #[test]
    fn errors_use_the_spacing_of_the_binade() {
        assert_eq!(error(2.0 + 2.0 * f32::EPSILON, 2.0), 1.0);
        assert_eq!(error(f32::from_bits(0x3f7f_ffff), 1.0), 0.5); // below 1 the spacing is half
        assert!(error(f32::INFINITY, 1.0).is_infinite() && error(f32::NAN, 1.0).is_infinite());
    }
}
