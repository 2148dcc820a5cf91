//! Operations on lanes in plain Rust, for levels that lack an instruction for them. The lanes go through an array.

use attn_core::half::{bf16, f16};

/// The lanes of the longest vectors: the size of an array that holds a vector of any level.
pub(crate) const MAX_LANES: usize = 16;

/// Widens an f16 without a branch, so that compilers vectorize a loop over it (`half` converts one at a time). A
/// subtraction makes the numbers below the normal ones: a shift alone would make numbers that some modes of the
/// processor flush to 0.
#[inline(always)]
pub(crate) fn widen_f16(x: f16) -> f32 {
    const BIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(x.to_bits());
    let (exponent, shifted) = (bits & 0x7c00, (bits & 0x7fff) << 13);
    let above = if exponent == 0x7c00 { BIAS } else { 0 }; // ∞ and NaN keep the largest exponent
    let normal = shifted + BIAS + above;
    let smallest = BIAS + (1 << 23);
    let below = (f32::from_bits(shifted + smallest) - f32::from_bits(smallest)).to_bits();
    f32::from_bits(if exponent == 0 { below } else { normal } | (bits & 0x8000) << 16)
}

/// Rounds to nearest even by integer arithmetic, which a compiler vectorizes.
#[inline(always)]
pub(crate) fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A carry must not turn a NaN into infinity or a number.
    bf16::from_bits(if x.is_nan() { (bits >> 16) as u16 | 0x0040 } else { rounded as u16 })
}

#[inline(always)]
pub(super) fn load_f16(src: &[f16]) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    for (x, h) in lanes.iter_mut().zip(src) {
        *x = widen_f16(*h);
    }
    lanes
}

#[inline(always)]
pub(super) fn load_bf16(src: &[bf16]) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    for (x, h) in lanes.iter_mut().zip(src) {
        *x = f32::from_bits(u32::from(h.to_bits()) << 16);
    }
    lanes
}

#[inline(always)]
pub(super) fn load_i8(src: &[i8]) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    for (x, n) in lanes.iter_mut().zip(src) {
        *x = f32::from(*n);
    }
    lanes
}

#[inline(always)]
pub(super) fn load_nibbles(src: &[u8], shift: i32) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    for (x, byte) in lanes.iter_mut().zip(src) {
        *x = f32::from(byte >> shift & 15) - 8.0;
    }
    lanes
}

/// Reads the number as an f16 of the same exponent and mantissa, whose bias is larger by 8. No result is subnormal in
/// `f32`.
#[inline(always)]
pub(super) fn load_e4m3(src: &[u8]) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    for (x, &code) in lanes.iter_mut().zip(src) {
        let (sign, magnitude) = (u16::from(code & 0x80) << 8, u16::from(code & 0x7f));
        *x = widen_f16(f16::from_bits(sign | if magnitude == 0x7f { 0x7e00 } else { magnitude << 7 })) * 256.0;
    }
    lanes
}

/// The byte is the upper one of an f16.
#[inline(always)]
pub(super) fn load_e5m2(src: &[u8]) -> [f32; MAX_LANES] {
    let mut lanes = [0.0; MAX_LANES];
    for (x, &code) in lanes.iter_mut().zip(src) {
        *x = widen_f16(f16::from_bits(u16::from(code) << 8));
    }
    lanes
}

#[inline(always)]
pub(super) fn store_f16(lanes: &[f32; MAX_LANES], dst: &mut [f16]) {
    for (h, x) in dst.iter_mut().zip(lanes) {
        *h = f16::from_f32(*x);
    }
}

#[inline(always)]
pub(super) fn store_bf16(lanes: &[f32; MAX_LANES], dst: &mut [bf16]) {
    for (h, x) in dst.iter_mut().zip(lanes) {
        *h = narrow_bf16(*x);
    }
}

#[inline(always)]
pub(super) fn round_bf16(mut lanes: [f32; MAX_LANES]) -> [f32; MAX_LANES] {
    for x in &mut lanes {
        *x = f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000);
    }
    lanes
}

#[inline(always)]
pub(super) fn narrow_pair(even: [f32; MAX_LANES], odd: [f32; MAX_LANES]) -> [f32; MAX_LANES] {
    let bits = |x: f32| u32::from(narrow_bf16(x).to_bits());
    core::array::from_fn(|n| f32::from_bits(bits(odd[n]) << 16 | bits(even[n])))
}

#[inline(always)]
pub(super) fn pair_bf16(mut even: [f32; MAX_LANES], odd: [f32; MAX_LANES]) -> [f32; MAX_LANES] {
    for (low, high) in even.iter_mut().zip(odd) {
        *low = f32::from_bits(low.to_bits() >> 16 | high.to_bits() & 0xffff_0000);
    }
    even
}

#[inline(always)]
pub(super) fn max_across(lanes: &[f32]) -> f32 {
    lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;

    /// Every level rounds to halves as `half` does, whatever the number.
    #[test]
    fn halves_are_rounded_to_nearest_even_everywhere() {
        struct Narrow<'n>(&'n [f32; MAX_LANES], &'n mut [bf16; MAX_LANES], &'n mut [f16; MAX_LANES]);
        impl crate::level::Run<()> for Narrow<'_> {
            #[inline(always)]
            fn run<I: Isa>(self, isa: I) {
                for (n, src) in self.0.chunks_exact(I::LANES).enumerate() {
                    isa.store_bf16(isa.load(src), &mut self.1[n * I::LANES..]);
                    isa.store_f16(isa.load(src), &mut self.2[n * I::LANES..]);
                }
            }
        }
        for level in crate::level::Level::available() {
            for bits in (0..=u32::MAX).step_by(if cfg!(miri) { 40_000_003 } else { 65_521 }) {
                let src = std::array::from_fn(|n| f32::from_bits(bits.wrapping_add(n as u32 * 0x8000 / 4)));
                let (mut brain, mut half) = ([bf16::ZERO; MAX_LANES], [f16::ZERO; MAX_LANES]);
                level.run(Narrow(&src, &mut brain, &mut half));
                for (n, x) in src.into_iter().enumerate() {
                    let (got, want) = (brain[n], bf16::from_f32(x));
                    assert!(got == want || got.is_nan() && want.is_nan(), "{level:?} {x:e}: {got}, not {want}");
                    let (got, want) = (half[n], f16::from_f32(x));
                    assert!(got == want || got.is_nan() && want.is_nan(), "{level:?} {x:e}: {got}, not {want}");
                }
            }
        }
    }

    #[test]
    fn every_f16_widens_exactly() {
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 97 } else { 1 }) {
            let (got, want) = (widen_f16(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#06x}: {got}, not {want}");
        }
    }
}
