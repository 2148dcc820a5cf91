//! Rows of q, k and v become tiles of bf16 parts; rows with numbers that the parts cannot hold become 0 and are marked.
//!
//! A part is the nearest bfloat16 to what the parts before it have left over, so that two hold any f16 and three any f32 of ordinary
//! size, exactly. Rows beyond the last, and channels beyond the last, are 0 in both operands of a product: 0·NaN would be NaN.

use super::unit::{SIDE, Tile};
use crate::input::Input;
use crate::isa::Isa;
use crate::kernel::pack::read_row;

/// Sizes whose parts and products are normal numbers: 2⁻⁶⁰ up to 2⁴⁸, as bits. Zero is ordinary as well.
const ORDINARY: (u32, u32) = ((127 - 60) << 23, (127 + 48) << 23);

/// Whether a row holds nothing but ordinary numbers.
#[inline(always)]
fn is_ordinary(row: &[f32]) -> bool {
    let (least, most) = ORDINARY;
    row.iter().fold(true, |all, x| {
        let size = x.to_bits() & 0x7fff_ffff;
        all & ((size.wrapping_sub(least) <= most - least) | (size == 0))
    })
}

/// Which rows of a tensor: `count ≤ 32` of one head, from a first one on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// Reads rows into `stage[row][channel]`, `32·squares` apart, times `factor`; what is not there is 0. Returns one bit per row that is
/// not ordinary, and reads that one as 0.
#[inline(always)]
fn read<I: Isa>(isa: I, input: &Input<'_>, rows: Rows, channels: usize, factor: f32, stage: &mut [f32]) -> u32 {
    let squares = channels.div_ceil(SIDE);
    let mut odd = 0;
    for (n, line) in stage.chunks_exact_mut(squares * SIDE).enumerate().take(SIDE) {
        let (row, rest) = line.split_at_mut(channels);
        rest.fill(0.0);
        if n < rows.count {
            read_row(isa, input, [rows.batch, rows.head, rows.first + n], 0, row);
            if !is_ordinary(row) {
                odd |= 1 << n;
                row.fill(0.0);
            } else if factor != 1.0 {
                row.iter_mut().for_each(|x| *x *= factor);
            }
        } else {
            row.fill(0.0);
        }
    }
    odd
}

/// Takes the next part off every number of the stage: returns it through `take`, a vector at a time with its place.
#[inline(always)]
fn next_part<I: Isa>(isa: I, rest: &mut [f32], part: &mut [f32]) {
    for (rest, part) in rest.chunks_exact_mut(I::LANES).zip(part.chunks_exact_mut(I::LANES)) {
        let x = isa.load(rest);
        let rounded = isa.round_bf16(x);
        isa.store(rounded, part);
        isa.store(isa.sub(x, rounded), rest);
    }
}

/// Neighbouring channels of a row as words: sixteen words of 32 numbers, each of which is a bfloat16 already.
#[inline(always)]
fn pair_within(row: &[f32], words: &mut [f32]) {
    for (word, pair) in words.iter_mut().zip(row.chunks_exact(2)) {
        *word = f32::from_bits(pair[0].to_bits() >> 16 | pair[1].to_bits() & 0xffff_0000);
    }
}

/// Transposes sixteen rows of sixteen words.
#[inline(always)]
fn transpose<I: Isa>(isa: I, src: &[f32; 256], dst: &mut [f32; 256]) {
    for row in (0..16).step_by(I::LANES) {
        for column in (0..16).step_by(I::LANES) {
            isa.transpose(&src[row * 16 + column..], 16, &mut dst[column * 16 + row..], 16);
        }
    }
}

/// Packs rows whose channels the product runs over: keys as they are (`[32 channels][part][16 keys]`), or queries transposed, words of
/// two channels by queries. Returns the rows that are not ordinary.
#[inline(always)]
pub(crate) fn along_channels<I: Isa, const TRANSPOSED: bool>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    channels: usize,
    (parts, factor): (usize, f32),
    stage: &mut [f32],
    tiles: &mut [Tile],
) -> u32 {
    let squares = channels.div_ceil(SIDE);
    if squares == 0 {
        return 0;
    }
    let odd = read(isa, input, rows, channels, factor, stage);
    let mut line = [0.0; SIDE];
    for (square, tiles) in tiles.chunks_exact_mut(2 * parts).enumerate().take(squares) {
        for pair in tiles.chunks_exact_mut(2) {
            for (half, tile) in pair.iter_mut().enumerate() {
                let mut words = [0.0; 256];
                for (row, words) in words.chunks_exact_mut(16).enumerate() {
                    let at = (half * 16 + row) * squares * SIDE + square * SIDE;
                    next_part(isa, &mut stage[at..at + SIDE], &mut line);
                    pair_within(&line, words);
                }
                if TRANSPOSED {
                    transpose(isa, &words, &mut tile.0);
                } else {
                    tile.0 = words;
                }
            }
        }
    }
    odd
}

/// Packs values, whose rows the product runs over: tiles of sixteen channels by words of two keys. `place(square)` says where the tiles of
/// 32 channels start, `[part][16 channels]`. Returns the rows that are not ordinary.
#[inline(always)]
pub(crate) fn along_rows<I: Isa>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    (channels, parts): (usize, usize),
    stage: &mut [f32],
    tiles: &mut [Tile],
    place: impl Fn(usize) -> usize,
) -> u32 {
    let squares = channels.div_ceil(SIDE);
    if squares == 0 {
        return 0;
    }
    let odd = read(isa, input, rows, channels, 1.0, stage);
    let width = squares * SIDE;
    for square in 0..squares {
        for part in 0..parts {
            for half in 0..2 {
                let column = square * SIDE + half * 16;
                let mut words = [0.0; 256];
                for (pair, words) in words.chunks_exact_mut(16).enumerate() {
                    for lane in (0..16).step_by(I::LANES) {
                        let [even, odd] = [0, 1].map(
                            #[inline(always)]
                            |n| {
                                let rest = &mut stage[(2 * pair + n) * width + column + lane..][..I::LANES];
                                let x = isa.load(rest);
                                let rounded = isa.round_bf16(x);
                                isa.store(isa.sub(x, rounded), rest);
                                rounded
                            },
                        );
                        isa.store(isa.pair_bf16(even, odd), &mut words[lane..]);
                    }
                }
                transpose(isa, &words, &mut tiles[place(square) + part * 2 + half].0);
            }
        }
    }
    odd
}
