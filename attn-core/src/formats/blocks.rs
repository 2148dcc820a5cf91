//! Rows as blocks: the loops that encode and decode them, for any format.

/// Numbers of a block of ggml's formats.
pub(super) const BLOCK: usize = 32;

/// Writes numbers block by block.
#[inline]
pub(super) fn encode_blocks<const N: usize>(
    mut x: impl Iterator<Item = f32>,
    bytes: &mut [u8],
    encode: impl Fn(&[f32; BLOCK], &mut [u8; N]),
) {
    for block in bytes.as_chunks_mut::<N>().0 {
        let mut numbers = [0.0; BLOCK];
        numbers.iter_mut().zip(&mut x).for_each(|(number, x)| *number = x);
        encode(&numbers, block);
    }
}

/// Writes two bytes for each number.
#[inline]
pub(super) fn encode_pairs(x: impl Iterator<Item = f32>, bytes: &mut [u8], encode: impl Fn(f32) -> [u8; 2]) {
    bytes.as_chunks_mut::<2>().0.iter_mut().zip(x).for_each(|(pair, x)| *pair = encode(x));
}

/// Reads numbers block by block.
#[inline(always)]
pub(super) fn decode_blocks<const N: usize>(bytes: &[u8], x: &mut [f32], decode: impl Fn(&[u8; N], &mut [f32; BLOCK])) {
    for (block, x) in bytes.as_chunks::<N>().0.iter().zip(x.as_chunks_mut::<BLOCK>().0) {
        decode(block, x);
    }
}

/// Reads a number from each two bytes.
#[inline(always)]
pub(super) fn decode_pairs(bytes: &[u8], x: &mut [f32], decode: impl Fn([u8; 2]) -> f32) {
    x.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(x, &pair)| *x = decode(pair));
}
