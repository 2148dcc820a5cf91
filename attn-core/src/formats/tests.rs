//! Helpers for the tests of both eight-bit floats: all 256 codes, and numbers between them.

/// Every code widens to its number, and rounds back to itself.
pub(super) fn check_codes(decode: impl Fn(u8) -> f32, encode: impl Fn(f32) -> u8, want: impl Fn(u8) -> f64) {
    for code in 0..=255u8 {
        let (x, want) = (decode(code), want(code));
        assert!(f64::from(x) == want || (x.is_nan() && want.is_nan()), "{code:#x}: {x}, {want}");
        assert_eq!(x.is_sign_negative(), code >= 0x80, "{code:#x}");
        if x.is_finite() {
            assert_eq!(encode(x), code, "{x}");
        } else if x.is_nan() {
            assert!(decode(encode(x)).is_nan());
        }
    }
}

/// Between two neighbouring codes, up to `max`: middles go to the even one, their neighbours to the nearer one.
pub(super) fn check_rounding(max: u8, encode: impl Fn(f32) -> u8, number: impl Fn(u8) -> f64) {
    for code in 0..max {
        let (low, high) = (number(code), number(code + 1));
        let middle = ((low + high) / 2.0) as f32;
        assert_eq!(f64::from(middle) * 2.0, low + high, "a middle is a number of f32");
        let even = code + (code & 1);
        for (x, code) in [
            (middle, even),
            (middle.next_down(), code),
            (middle.next_up(), code + 1),
            ((low * 0.75 + high * 0.25) as f32, code),
            ((low * 0.25 + high * 0.75) as f32, code + 1),
        ] {
            assert_eq!((encode(x), encode(-x)), (code, code | 0x80), "{x}");
        }
    }
    // Far below the smallest.
    assert_eq!((encode(f32::from_bits(1)), encode(1e-30), encode(-1e-20)), (0, 0, 0x80));
}
