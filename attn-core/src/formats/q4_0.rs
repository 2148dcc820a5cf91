//! ggml's `q4_0`: blocks of 32 numbers, each four bits less 8 times the block's f16.

use half::f16;

use super::blocks::BLOCK;

/// Bytes of a block: the scale, little-endian, and 16 bytes of two numbers. Byte `n` holds number `n` in its lower half
/// and number `n + 16` in its upper half.
pub(super) const BYTES: usize = 18;

/// The block that ggml makes: `d = m/−8`, m being the first element of the largest magnitude with its sign, and codes
/// `min(15, ⌊x·(1/d) + 8.5⌋)`; d is rounded to f16 afterwards. A NaN or ±∞ gives the scale NaN: the whole block becomes
/// NaN. A d beyond f16 is ±∞: the block becomes ±∞, and its zeros NaN.
#[inline]
pub(super) fn encode(x: &[f32; BLOCK], block: &mut [u8; BYTES]) {
    let largest = x.iter().fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m });
    let finite = x.iter().all(|x| x.is_finite());
    let d = if finite { largest / -8.0 } else { f32::NAN };
    let inverse = if finite && d != 0.0 { 1.0 / d } else { 0.0 };
    // Saturates below at 0, and makes 0 of a NaN.
    let code = |x: f32| ((x * inverse + 8.5) as u8).min(15);
    let [low, high, halves @ ..] = block;
    [*low, *high] = f16::from_f32(d).to_le_bytes();
    let (first, second) = x.split_at(BLOCK / 2);
    for (byte, (&a, &b)) in halves.iter_mut().zip(first.iter().zip(second)) {
        *byte = code(a) | code(b) << 4;
    }
}

/// The numbers of a block; exact.
#[inline(always)]
pub(super) fn decode(block: &[u8; BYTES], x: &mut [f32; BLOCK]) {
    let [low, high, halves @ ..] = block;
    let d = f16::from_le_bytes([*low, *high]).to_f32();
    let number = |code: u8| d * f32::from(code.cast_signed() - 8);
    let (first, second) = x.split_at_mut(BLOCK / 2);
    for ((a, b), &byte) in first.iter_mut().zip(second).zip(halves) {
        *a = number(byte & 15);
        *b = number(byte >> 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_formula_in_doubles() {
        let mut block = [0; BYTES];
        for bits in [0x3c00u16, 0x0001, 0x03ff, 0xb800, 0x7bff, 0x0000] {
            [block[0], block[1]] = bits.to_le_bytes();
            for start in (0..=255u8).step_by(16) {
                (0..16).for_each(|n| block[2 + usize::from(n)] = start + n);
                let mut x = [f32::NAN; BLOCK];
                decode(&block, &mut x);
                for (n, &x) in x.iter().enumerate() {
                    let byte = block[2 + n % 16];
                    let code = if n < 16 { byte % 16 } else { byte / 16 };
                    assert_eq!(f64::from(x), f16::from_bits(bits).to_f64() * (f64::from(code) - 8.0));
                }
            }
        }
    }

    #[test]
    fn the_largest_number_has_the_code_0() {
        let x: [f32; BLOCK] = core::array::from_fn(|n| if n == 20 { 8.0 } else { (n as f32 - 16.0) / 4.0 });
        let (mut block, mut back) = ([0; BYTES], [0.0; BLOCK]);
        encode(&x, &mut block);
        decode(&block, &mut back);
        assert_eq!((block[2 + 4] >> 4, back[20]), (0, 8.0));
        for (x, back) in x.into_iter().zip(back) {
            assert!((x - back).abs() <= 0.5, "{x} {back}");
        }
    }
}
