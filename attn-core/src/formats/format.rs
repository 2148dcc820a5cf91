//! The formats, as values: the size of their blocks, and encoding and decoding of rows.

use half::{bf16, f16};

use super::blocks::{BLOCK, decode_blocks, decode_pairs, encode_blocks, encode_pairs};
use super::e4m3::E4m3;
use super::e5m2::E5m2;
use super::{q4_0, q8_0};
use crate::error::{AttnError, Result};

/// How a row of numbers is stored in bytes.
///
/// | format | block | bytes | number | scale |
/// |---|---|---|---|---|
/// | `Q8_0` | 32 | 34 | int8 · d | d in the block: f16, little-endian, then 32 integers |
/// | `Q4_0` | 32 | 18 | (four bits − 8) · d | d in the block: f16, then byte `n` with numbers `n` (low) and `n + 16` |
/// | `E4m3` | 1 | 1 | [`E4m3`] · scale | beside the bytes |
/// | `E5m2` | 1 | 1 | [`E5m2`] · scale | beside the bytes |
/// | `Int8` | 1 | 1 | int8 · scale | beside the bytes |
/// | `F16` | 1 | 2 | f16, little-endian | none |
/// | `Bf16` | 1 | 2 | bfloat16, little-endian | none |
///
/// `Q8_0` and `Q4_0` are ggml's, byte by byte.
///
/// ```
/// use attn_core::formats::Format;
/// assert_eq!((Format::Q8_0.row_bytes(128)?, Format::Q4_0.row_bytes(128)?), (136, 72));
/// assert!(Format::Q4_0.row_bytes(40).is_err()); // no whole number of blocks
/// let (x, mut bytes, mut back) = ([1.0f32, -0.5, 0.25, 447.0], [0; 4], [0.0; 4]);
/// Format::E4m3.encode(&x, &mut bytes)?;
/// Format::E4m3.decode(&bytes, &mut back)?;
/// assert_eq!(back, [1.0, -0.5, 0.25, 448.0]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum Format {
    /// ggml's blocks of 32 int8.
    Q8_0,
    /// ggml's blocks of 32 numbers of four bits.
    Q4_0,
    /// OCP's e4m3fn, times a scale.
    E4m3,
    /// OCP's e5m2, times a scale.
    E5m2,
    /// int8, times a scale.
    Int8,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 7] = [Self::Q8_0, Self::Q4_0, Self::E4m3, Self::E5m2, Self::Int8, Self::F16, Self::Bf16];

    /// Its name in texts: `"q8_0"`, `"fp8_e4m3fn"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::E4m3 => "fp8_e4m3fn",
            Self::E5m2 => "fp8_e5m2",
            Self::Int8 => "int8",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Numbers of a block.
    pub const fn block(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 => BLOCK,
            _ => 1,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q8_0 => q8_0::BYTES,
            Self::Q4_0 => q4_0::BYTES,
            Self::E4m3 | Self::E5m2 | Self::Int8 => 1,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Whether its numbers are multiplied by scales beside the bytes.
    pub const fn is_scaled(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2 | Self::Int8)
    }

    /// The largest number before the scale, of formats that [have](Self::is_scaled) one: a scale that is chosen is the
    /// largest magnitude of a row divided by it.
    pub const fn largest(self) -> Option<f32> {
        match self {
            Self::E4m3 => Some(E4m3::MAX),
            Self::E5m2 => Some(E5m2::MAX),
            Self::Int8 => Some(127.0),
            _ => None,
        }
    }

    /// Bytes of a row of `dim` numbers.
    ///
    /// # Errors
    /// [`AttnError::Size`] if the row is no whole number of blocks, [`AttnError::Overflow`].
    pub const fn row_bytes(self, dim: usize) -> Result<usize> {
        let blocks = dim / self.block();
        if blocks * self.block() != dim {
            let what = "numbers of a stored row (a whole number of blocks)";
            return Err(AttnError::Size { what, expected: blocks * self.block(), found: dim });
        }
        match blocks.checked_mul(self.block_bytes()) {
            Some(bytes) => Ok(bytes),
            None => Err(AttnError::Overflow { what: "bytes of a stored row" }),
        }
    }

    /// Numbers of a row of so many bytes.
    ///
    /// # Errors
    /// [`AttnError::Size`] if the bytes are no whole number of blocks, [`AttnError::Overflow`].
    pub const fn row_dim(self, bytes: usize) -> Result<usize> {
        let blocks = bytes / self.block_bytes();
        if blocks * self.block_bytes() != bytes {
            let what = "bytes of a stored row (a whole number of blocks)";
            return Err(AttnError::Size { what, expected: blocks * self.block_bytes(), found: bytes });
        }
        match blocks.checked_mul(self.block()) {
            Some(dim) => Ok(dim),
            None => Err(AttnError::Overflow { what: "numbers of a stored row" }),
        }
    }

    /// Writes the nearest numbers of the format. What is not finite, or beyond the format: see [`E4m3::from_f32`],
    /// [`E5m2::from_f32`]; a block of `Q8_0` or `Q4_0` with a NaN or ±∞ becomes NaN; `Int8` saturates at ±127 and has 0
    /// for a NaN.
    ///
    /// # Errors
    /// [`AttnError::Size`] if the row is no whole number of blocks, or the bytes are not its
    /// [bytes](Self::row_bytes).
    #[inline]
    pub fn encode(self, x: &[f32], bytes: &mut [u8]) -> Result<()> {
        AttnError::check_size("bytes of a stored row", self.row_bytes(x.len())?, bytes.len())?;
        self.narrow(x.iter().copied(), bytes);
        Ok(())
    }

    /// As [`encode`](Self::encode), as many numbers as both hold.
    #[inline]
    pub(super) fn narrow(self, x: impl Iterator<Item = f32>, bytes: &mut [u8]) {
        match self {
            Self::Q8_0 => encode_blocks(x, bytes, q8_0::encode),
            Self::Q4_0 => encode_blocks(x, bytes, q4_0::encode),
            Self::F16 => encode_pairs(x, bytes, |x| f16::from_f32(x).to_le_bytes()),
            Self::Bf16 => encode_pairs(x, bytes, |x| bf16::from_f32(x).to_le_bytes()),
            Self::E4m3 | Self::E5m2 | Self::Int8 => {
                bytes.iter_mut().zip(x).for_each(|(byte, x)| *byte = self.code(x));
            }
        }
    }

    /// The byte of a number, of formats with a byte for each.
    #[inline]
    pub(super) fn code(self, x: f32) -> u8 {
        match self {
            Self::E4m3 => E4m3::from_f32(x).0,
            Self::E5m2 => E5m2::from_f32(x).0,
            _ => (libm::roundf(x).clamp(-127.0, 127.0) as i8).cast_unsigned(),
        }
    }

    /// Writes the numbers of a row, without the scale beside it. Exact.
    ///
    /// # Errors
    /// [`AttnError::Size`] if the bytes are no whole number of blocks, or `x` has another length than their
    /// [numbers](Self::row_dim).
    #[inline]
    pub fn decode(self, bytes: &[u8], x: &mut [f32]) -> Result<()> {
        AttnError::check_size("numbers of a stored row", self.row_dim(bytes.len())?, x.len())?;
        self.widen(bytes, x);
        Ok(())
    }

    /// As [`decode`](Self::decode), of as many numbers as both hold.
    #[doc(hidden)]
    #[inline(always)]
    pub fn widen(self, bytes: &[u8], x: &mut [f32]) {
        match self {
            Self::Q8_0 => decode_blocks(bytes, x, q8_0::decode),
            Self::Q4_0 => decode_blocks(bytes, x, q4_0::decode),
            Self::E4m3 => x.iter_mut().zip(bytes).for_each(|(x, &byte)| *x = E4m3(byte).to_f32()),
            Self::E5m2 => x.iter_mut().zip(bytes).for_each(|(x, &byte)| *x = E5m2(byte).to_f32()),
            Self::Int8 => x.iter_mut().zip(bytes).for_each(|(x, &byte)| *x = f32::from(byte.cast_signed())),
            Self::F16 => decode_pairs(bytes, x, |pair| f16::from_le_bytes(pair).to_f32()),
            Self::Bf16 => decode_pairs(bytes, x, |pair| bf16::from_le_bytes(pair).to_f32()),
        }
    }

    /// Calls `f` with the numbers of a row, some blocks at a time.
    #[inline]
    pub(super) fn for_each_piece(self, bytes: &[u8], mut f: impl FnMut(&[f32])) {
        // A whole number of blocks in each format.
        let step = match self {
            Self::Q8_0 | Self::Q4_0 => self.block_bytes(),
            _ => self.block_bytes() * BLOCK,
        };
        for piece in bytes.chunks(step) {
            let mut x = [0.0; BLOCK];
            self.widen(piece, &mut x);
            let len = if self.block() == 1 { piece.len() / self.block_bytes() } else { BLOCK };
            f(x.get(..len).unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    #[test]
    fn rows_are_read_in_pieces_as_they_are_decoded() {
        for format in Format::ALL {
            for blocks in [0, 1, 3] {
                let dim = if format.block() == 1 { blocks * 25 } else { blocks * BLOCK };
                let x: Vec<f32> = (0..dim).map(|n| libm::sinf(n as f32) * 40.0).collect();
                let mut bytes = vec![0; format.row_bytes(dim).unwrap()];
                format.encode(&x, &mut bytes).unwrap();
                let (mut whole, mut pieces) = (vec![0.0; dim], Vec::new());
                format.decode(&bytes, &mut whole).unwrap();
                format.for_each_piece(&bytes, |piece| pieces.extend_from_slice(piece));
                assert_eq!(whole, pieces, "{format:?} {dim}");
                let worst = x.iter().zip(&whole).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                // Of 40: half a step in e5m2, which has two bits of mantissa, and a step in q4_0 at the other end.
                assert!(worst <= 5.01, "{format:?}: {worst}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_makes_its_block_nan() {
        for format in [Format::Q8_0, Format::Q4_0] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let (mut x, mut bytes, mut back) = ([1.0; 2 * BLOCK], [0; 68], [0.0; 2 * BLOCK]);
                x[7] = bad;
                let bytes = &mut bytes[..2 * format.block_bytes()];
                format.encode(&x, bytes).unwrap();
                format.decode(bytes, &mut back).unwrap();
                let (first, second) = back.split_at(BLOCK);
                assert!(first.iter().all(|x| x.is_nan()), "{format:?} {bad}");
                assert!(second.iter().all(|x| (x - 1.0).abs() < 0.01), "{format:?} {bad}: {second:?}");
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        let text = |e: Result<()>| std::string::ToString::to_string(&e.unwrap_err());
        assert_eq!(
            text(Format::Q8_0.encode(&[0.0; 40], &mut [0; 34])),
            "numbers of a stored row (a whole number of blocks): expected 32, found 40"
        );
        assert_eq!(
            text(Format::Q4_0.decode(&[0; 37], &mut [0.0; 64])),
            "bytes of a stored row (a whole number of blocks): expected 36, found 37"
        );
        assert_eq!(text(Format::E4m3.decode(&[0; 3], &mut [0.0; 4])), "numbers of a stored row: expected 3, found 4");
        assert!(Format::F16.row_bytes(usize::MAX).is_err() && Format::Q4_0.row_dim(usize::MAX / 18 * 18).is_err());
    }
}
