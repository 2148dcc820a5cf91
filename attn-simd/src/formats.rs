//! Rows in packed formats, widened to `f32` by lanes: exact, with [`Format::widen`]'s numbers at every level.
//!
//! What the formats are is [`attn_core::formats`]'; where rows lie is the kernels'.

use attn_core::formats::Format;
use attn_core::half::{bf16, f16};

use crate::isa::{Isa, MAX_LANES};

/// Numbers that are widened together: a block of the formats that have blocks.
const BLOCK: usize = 32;

/// Writes the numbers of a row, as many as both hold, without the scale beside it.
#[inline(always)]
pub(crate) fn widen<I: Isa>(isa: I, format: Format, bytes: &[u8], to: &mut [f32]) {
    match format {
        Format::Q8_0 => blocks(isa, format, bytes, to, q8_0),
        Format::Q4_0 => blocks(isa, format, bytes, to, q4_0),
        Format::E4m3 => blocks(isa, format, bytes, to, e4m3),
        Format::E5m2 => blocks(isa, format, bytes, to, e5m2),
        Format::Int8 => blocks(isa, format, bytes, to, int8),
        Format::F16 => blocks(isa, format, bytes, to, float16),
        Format::Bf16 => blocks(isa, format, bytes, to, bfloat16),
    }
}

/// Whole blocks by `of`, and what is left of formats that have none by their own numbers.
#[inline(always)]
fn blocks<I: Isa, const N: usize>(
    isa: I,
    format: Format,
    bytes: &[u8],
    to: &mut [f32],
    of: impl Fn(I, &[u8; N], &mut [f32; BLOCK]),
) {
    let ((whole, rest), (numbers, tail)) = (bytes.as_chunks::<N>(), to.as_chunks_mut::<BLOCK>());
    let count = whole.len().min(numbers.len());
    for (block, x) in whole.iter().zip(&mut *numbers) {
        of(isa, block, x);
    }
    if count < whole.len() {
        format.widen(whole[count..].as_flattened(), tail);
    } else if count < numbers.len() {
        format.widen(rest, &mut numbers[count]);
    } else {
        format.widen(rest, tail);
    }
}

// Loops into arrays, here and below: `map` and `from_fn` are compiled as functions of their own, without the level's
// instructions.

#[inline(always)]
fn q8_0<I: Isa>(isa: I, &[low, high, ref bytes @ ..]: &[u8; 34], to: &mut [f32; BLOCK]) {
    let (d, mut codes) = (scale(isa, [low, high]), [0i8; BLOCK]);
    for (code, byte) in codes.iter_mut().zip(bytes) {
        *code = byte.cast_signed();
    }
    scaled(isa, d, &codes, to);
}

#[inline(always)]
fn q4_0<I: Isa>(isa: I, &[low, high, ref pairs @ ..]: &[u8; 18], to: &mut [f32; BLOCK]) {
    let (d, mut codes) = (scale(isa, [low, high]), [0i8; BLOCK]);
    let (first, second) = codes.split_at_mut(BLOCK / 2);
    for ((a, b), pair) in first.iter_mut().zip(second).zip(pairs) {
        *a = (pair & 15).cast_signed() - 8;
        *b = (pair >> 4).cast_signed() - 8;
    }
    scaled(isa, d, &codes, to);
}

/// The scale that a block begins with, in all lanes.
#[inline(always)]
fn scale<I: Isa>(isa: I, d: [u8; 2]) -> I::F {
    isa.load_f16(&[f16::from_le_bytes(d); MAX_LANES])
}

#[inline(always)]
fn scaled<I: Isa>(isa: I, d: I::F, codes: &[i8; BLOCK], to: &mut [f32; BLOCK]) {
    for (codes, x) in codes.chunks_exact(I::LANES).zip(to.chunks_exact_mut(I::LANES)) {
        isa.store(isa.mul(d, isa.load_i8(codes)), x);
    }
}

#[inline(always)]
fn int8<I: Isa>(isa: I, bytes: &[u8; BLOCK], to: &mut [f32; BLOCK]) {
    let mut codes = [0i8; BLOCK];
    for (code, byte) in codes.iter_mut().zip(bytes) {
        *code = byte.cast_signed();
    }
    for (codes, x) in codes.chunks_exact(I::LANES).zip(to.chunks_exact_mut(I::LANES)) {
        isa.store(isa.load_i8(codes), x);
    }
}

/// As an f16 of the same exponent and mantissa, whose bias is larger by 8. None of the numbers is subnormal in `f32`.
#[inline(always)]
fn e4m3<I: Isa>(isa: I, codes: &[u8; BLOCK], to: &mut [f32; BLOCK]) {
    let mut numbers = [f16::ZERO; BLOCK];
    for (number, &code) in numbers.iter_mut().zip(codes) {
        let (sign, magnitude) = (u16::from(code & 0x80) << 8, u16::from(code & 0x7f));
        *number = f16::from_bits(sign | if magnitude == 0x7f { 0x7e00 } else { magnitude << 7 });
    }
    for (numbers, x) in numbers.chunks_exact(I::LANES).zip(to.chunks_exact_mut(I::LANES)) {
        isa.store(isa.mul(isa.load_f16(numbers), isa.splat(256.0)), x);
    }
}

/// The upper byte of an f16.
#[inline(always)]
fn e5m2<I: Isa>(isa: I, codes: &[u8; BLOCK], to: &mut [f32; BLOCK]) {
    let mut numbers = [f16::ZERO; BLOCK];
    for (number, &code) in numbers.iter_mut().zip(codes) {
        *number = f16::from_bits(u16::from(code) << 8);
    }
    for (numbers, x) in numbers.chunks_exact(I::LANES).zip(to.chunks_exact_mut(I::LANES)) {
        isa.store(isa.load_f16(numbers), x);
    }
}

#[inline(always)]
fn float16<I: Isa>(isa: I, bytes: &[u8; 2 * BLOCK], to: &mut [f32; BLOCK]) {
    let mut numbers = [f16::ZERO; BLOCK];
    for (number, &pair) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        *number = f16::from_le_bytes(pair);
    }
    for (numbers, x) in numbers.chunks_exact(I::LANES).zip(to.chunks_exact_mut(I::LANES)) {
        isa.store(isa.load_f16(numbers), x);
    }
}

#[inline(always)]
fn bfloat16<I: Isa>(isa: I, bytes: &[u8; 2 * BLOCK], to: &mut [f32; BLOCK]) {
    let mut numbers = [bf16::ZERO; BLOCK];
    for (number, &pair) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        *number = bf16::from_le_bytes(pair);
    }
    for (numbers, x) in numbers.chunks_exact(I::LANES).zip(to.chunks_exact_mut(I::LANES)) {
        isa.store(isa.load_bf16(numbers), x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::level::{Level, Run};

    struct Widen<'a>(Format, &'a [u8], &'a mut [f32]);
    impl Run<()> for Widen<'_> {
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) {
            widen(isa, self.0, self.1, self.2);
        }
    }

    /// Every code in every place of a block, with scales of all kinds, and rows that end inside of a block.
    #[test]
    fn numbers_are_those_of_the_core_at_every_level() {
        let scales = [0x3c00u16, 0x0001, 0x83ff, 0xb801, 0x7bff, 0x0000, 0x8000, 0x7c00, 0x7e00];
        for (level, format) in Level::available().flat_map(|l| Format::ALL.map(|f| (l, f))) {
            for (numbers, first) in [(96, 0), (1, 3), (31, 7), (33, 100), (75, 200), (0, 0)] {
                let numbers = numbers / format.block() * format.block();
                for start in (0..=255u8).step_by(if cfg!(miri) { 85 } else { 1 }) {
                    let row = format.row_bytes(numbers).unwrap();
                    let mut bytes: Vec<u8> = (0..row).map(|n| start.wrapping_add((n * 7 + first) as u8)).collect();
                    if format.block() > 1 {
                        for (n, block) in bytes.chunks_exact_mut(format.block_bytes()).enumerate() {
                            let scale = scales[(usize::from(start) + n) % scales.len()];
                            block[..2].copy_from_slice(&scale.to_le_bytes());
                        }
                    }
                    let (mut got, mut want) = (vec![7.0; numbers], vec![7.0; numbers]);
                    level.run(Widen(format, &bytes, &mut got));
                    format.decode(&bytes, &mut want).unwrap();
                    for (got, want) in got.iter().zip(&want) {
                        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                        assert!(same, "{} {format:?} {start}: {got:e}, not {want:e}", level.name());
                    }
                }
            }
        }
    }

    #[test]
    fn of_two_lengths_the_smaller_counts() {
        let bytes: Vec<u8> = (1..=80).collect();
        for level in Level::available() {
            for len in [0, 5, 31, 32, 33, 64, 79, 80, 81, 130] {
                let (mut got, mut want) = (vec![7.0; len], vec![7.0; len]);
                level.run(Widen(Format::Int8, &bytes, &mut got));
                Format::Int8.widen(&bytes, &mut want);
                assert_eq!(got, want);
            }
        }
    }
}
