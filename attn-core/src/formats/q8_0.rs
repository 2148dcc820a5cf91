//! ggml's `q8_0`: blocks of 32 numbers, each an int8 times the block's f16.

use half::f16;

use super::blocks::BLOCK;

/// Bytes of a block: the scale, little-endian, and 32 integers.
pub(super) const BYTES: usize = 34;

/// The nearest block, with ggml's arithmetic: `d = max|x|/127`, integers `round(x·(1/d))`, half away from zero, and d
/// rounded to f16 afterwards. A NaN or ±∞ gives the scale NaN: the whole block becomes NaN. A d beyond f16 is ∞: the
/// block becomes ±∞, and its zeros NaN.
#[inline]
pub(super) fn encode(x: &[f32; BLOCK], block: &mut [u8; BYTES]) {
    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let finite = x.iter().all(|x| x.is_finite());
    let d = if finite { largest / 127.0 } else { f32::NAN };
    let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
    let ([low, high], integers) = split_mut(block);
    [*low, *high] = f16::from_f32(d).to_le_bytes();
    for (byte, &x) in integers.iter_mut().zip(x) {
        // `as` saturates, and makes 0 of a NaN.
        *byte = (libm::roundf(x * inverse) as i8).cast_unsigned();
    }
}

/// The numbers of a block; exact.
#[inline(always)]
pub(super) fn decode(block: &[u8; BYTES], x: &mut [f32; BLOCK]) {
    let [low, high, integers @ ..] = block;
    let d = f16::from_le_bytes([*low, *high]).to_f32();
    for (x, &byte) in x.iter_mut().zip(integers) {
        *x = d * f32::from(byte.cast_signed());
    }
}

/// Scale and integers.
#[inline(always)]
fn split_mut(block: &mut [u8; BYTES]) -> ([&mut u8; 2], &mut [u8]) {
    let [low, high, integers @ ..] = block;
    ([low, high], integers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_formula_in_doubles() {
        let mut block = [0; BYTES];
        for bits in [0x3c00u16, 0x0001, 0x03ff, 0xb800, 0x7bff, 0x0000] {
            [block[0], block[1]] = bits.to_le_bytes();
            for start in (0..=255u8).step_by(32) {
                (0..32).for_each(|n| block[2 + usize::from(n)] = start + n);
                let mut x = [f32::NAN; BLOCK];
                decode(&block, &mut x);
                for (n, &x) in x.iter().enumerate() {
                    let want = f16::from_bits(bits).to_f64() * f64::from(block[2 + n].cast_signed());
                    assert_eq!(f64::from(x), want);
                }
            }
        }
    }

    #[test]
    fn numbers_are_off_by_half_a_scale_and_its_rounding() {
        let x: [f32; BLOCK] = core::array::from_fn(|n| ((n * 37 % 29) as f32 - 13.5) * 0.73);
        let (mut block, mut back) = ([0; BYTES], [0.0; BLOCK]);
        encode(&x, &mut block);
        decode(&block, &mut back);
        let scale = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
        for (x, back) in x.into_iter().zip(back) {
            // Half a step, and 127 steps of a scale that is rounded to eleven bits.
            assert!((x - back).abs() <= scale * (0.5 + 127.0 / 2048.0), "{x} {back}");
        }
    }
}
