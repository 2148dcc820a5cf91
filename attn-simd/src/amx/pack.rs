//! Rows of q, k and v become operands of bf16 parts. Rows with numbers that parts cannot hold become 0 and are marked.
//!
//! A part is the nearest bfloat16 to the rest of the parts before it, so that two hold any f16 and three any f32 of
//! ordinary size, exactly. Contiguous rows of bf16 are one part as they are: their bits are copied.
//! Rows beyond the last, and channels beyond the last, are 0 in both operands of a product: 0·NaN would be NaN.
//!
//! # Sizes
//! AMX reads subnormal numbers as 0, and drops subnormal sums. A score loses nothing by that: with q and k up to 2⁴⁸,
//! at most 512 channels and three parts it is off by less than 2⁻⁶⁶, times a scale of at most 2³² in the exponent. That
//! is far below the 2⁻²² that f32 loses on any score. So q and k have an upper bound only. Values of f32 are stored 2²⁴
//! times as large: every bit of the smallest one is then a normal number, and none is lost. A product of a weight,
//! which is as much larger, and a value loses less than 2⁻¹⁷⁴, or 2⁻¹⁵⁰ if values are halves: less than any output of
//! their type shows. A bf16 value that is subnormal is marked.

use attn_core::half::bf16;
use attn_core::{Dtype, View};

use super::product::{Operand, SIDE};
use crate::dtype::Input;
use crate::isa::Isa;
use crate::math::RAISE;
use crate::pack::read_row;

/// Sizes of numbers that the parts of a tensor hold: `2^least ≤ |x| ≤ 2^most`, or 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// As bits; the smallest subnormal number if there is no bound.
    least: u32,
    /// As bits.
    most: u32,
}

impl Sizes {
    /// Of q and k: their products, added up and scaled, stay finite.
    pub(crate) const CHANNELS: Self = Self { least: 1, most: (127 + 48) << 23 };

    /// Any numbers, NaN and infinities too.
    pub(crate) const ANY: Self = Self { least: 0, most: u32::MAX };

    /// Of v, and of k, q and dy in the sums of gradients: as large as weights of 2⁸·2²⁴ leave room for, times 2³¹ keys.
    /// A bf16 is not raised, and must be normal by itself.
    const fn of_values(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => Self { least: 1 << 23, most: (127 + 64) << 23 },
            _ => Self { least: 1, most: (127 + 40) << 23 },
        }
    }

    /// Whether they hold numbers with these bits.
    #[inline(always)]
    fn hold(self, bits: impl Iterator<Item = u32>) -> bool {
        let Self { least, most } = self;
        bits.fold(true, |all, bits| {
            let size = bits & 0x7fff_ffff;
            all & ((size.wrapping_sub(least) <= most - least) | (size == 0))
        })
    }
}

impl Sizes {
    /// Whether they hold these bfloat16: the same question, of sixteen bits.
    #[inline(always)]
    fn hold_bf16(self, row: &[bf16]) -> bool {
        let mut bad = [0; SIDE];
        self.find_bf16(row, &mut bad);
        bad == [0; SIDE]
    }

    /// Marks the columns, modulo 32, of numbers that they do not hold. (A yes or no for each row would take longer than
    /// the packing.)
    #[inline(always)]
    fn find_bf16(self, row: &[bf16], bad: &mut [u16; SIDE]) {
        let (least, most) = ((self.least.div_ceil(1 << 16)) as u16, (self.most >> 16) as u16);
        let mark = |bad: &mut u16, x: &bf16| {
            let size = x.to_bits() & 0x7fff;
            *bad |= u16::from((size.wrapping_sub(least) > most - least) & (size != 0));
        };
        let (squares, rest) = row.as_chunks::<SIDE>();
        for square in squares {
            bad.iter_mut().zip(square).for_each(|(bad, x)| mark(bad, x));
        }
        bad.iter_mut().zip(rest).for_each(|(bad, x)| mark(bad, x));
    }
}

/// The factor of packed values of a type.
pub(crate) const fn value_factor(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 | Dtype::Bf16 => 1.0,
        _ => RAISE,
    }
}

/// Which rows of a tensor: `count ≤ 32` of one head, from a first one on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// Reads rows into `stage[row][channel]`, `32·squares` apart, times `factor`; the rest is 0. Returns one bit per row
/// that `sizes` do not hold, and reads that row as 0.
#[inline(always)]
fn read<I: Isa>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    channels: usize,
    (sizes, factor): (Sizes, f32),
    stage: &mut [f32],
) -> u32 {
    let squares = channels.div_ceil(SIDE);
    let mut odd = 0;
    for (n, line) in stage.chunks_exact_mut(squares * SIDE).enumerate().take(SIDE) {
        let (row, rest) = line.split_at_mut(channels);
        rest.fill(0.0);
        if n < rows.count {
            read_row(isa, input, [rows.batch, rows.head, rows.first + n], 0, row);
            if !sizes.hold(row.iter().map(|x| x.to_bits())) {
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

/// The rows of a bf16 tensor in place; `None` unless channels lie side by side. Rows that `sizes` do not hold are
/// empty, and marked by a bit each. Rows beyond the last are empty too, without a mark.
#[inline(always)]
fn lying<'a>(input: &Input<'a>, rows: Rows, sizes: Sizes) -> Option<([&'a [bf16]; SIDE], u32)> {
    let Input::Bf16(view) = input else { return None };
    let (mut lines, mut odd): ([&[bf16]; SIDE], u32) = ([&[]; SIDE], 0);
    let mut bad = [0; SIDE];
    for (n, line) in lines.iter_mut().enumerate().take(rows.count) {
        *line = row_of(view, [rows.batch, rows.head, rows.first + n])?;
        sizes.find_bf16(line, &mut bad);
    }
    if bad != [0; SIDE] {
        for (n, line) in lines.iter_mut().enumerate() {
            if !sizes.hold_bf16(line) {
                (odd, *line) = (odd | 1 << n, &[]);
            }
        }
    }
    Some((lines, odd))
}

/// A row whose channels lie side by side.
#[inline(always)]
fn row_of<'a>(view: &View<'a, bf16>, [batch, head, seq]: [usize; 3]) -> Option<&'a [bf16]> {
    view.row(batch, head, seq).as_slice()
}

/// Up to `N` elements from `from` on; the rest is 0.
#[inline(always)]
fn some<const N: usize>(row: &[bf16], from: usize) -> [bf16; N] {
    let row = row.get(from..).unwrap_or(&[]);
    match row.first_chunk() {
        Some(all) => *all,
        None => {
            let mut some = [bf16::ZERO; N];
            some[..row.len()].copy_from_slice(row);
            some
        }
    }
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

/// The same of bfloat16.
#[inline(always)]
fn pair_bits(row: [bf16; SIDE], words: &mut [f32]) {
    for (word, pair) in words.iter_mut().zip(row.as_chunks::<2>().0) {
        *word = f32::from_bits(u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16);
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

/// Sixteen rows of words, which `fill` writes, as an operand.
#[inline(always)]
fn put<I: Isa, const TRANSPOSED: bool>(isa: I, operand: &mut Operand, mut fill: impl FnMut(usize, &mut [f32])) {
    let mut words = [0.0; 256];
    let rows = if TRANSPOSED { &mut words } else { &mut operand.0 };
    for (n, row) in rows.chunks_exact_mut(16).enumerate() {
        fill(n, row);
    }
    if TRANSPOSED {
        transpose(isa, &words, &mut operand.0);
    }
}

/// Packs rows whose channels the product runs over: keys as they are (`[32 channels][part][16 keys]`), or queries
/// transposed, words of two channels by queries. `numbers`: parts, a factor, and the sizes that parts hold. Returns the
/// rows that parts cannot hold. A function of its own, as [`along_rows`] is: a tile is long, and a kernel of pieces is
/// compiled in less time.
#[inline(never)]
pub(crate) fn along_channels<I: Isa, const TRANSPOSED: bool>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    channels: usize,
    numbers: (usize, f32, Sizes),
    stage: &mut [f32],
    operands: &mut [Operand],
) -> u32 {
    isa.vectorize(
        #[inline(always)]
        || along_channels_inlined::<I, TRANSPOSED>(isa, input, rows, channels, numbers, stage, operands),
    )
}

#[inline(always)]
fn along_channels_inlined<I: Isa, const TRANSPOSED: bool>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    channels: usize,
    (parts, factor, sizes): (usize, f32, Sizes),
    stage: &mut [f32],
    operands: &mut [Operand],
) -> u32 {
    let squares = channels.div_ceil(SIDE);
    if squares == 0 {
        return 0;
    }
    if parts == 1
        && factor == 1.0
        && let Some((lines, odd)) = lying(input, rows, sizes)
    {
        for (square, pair) in operands.chunks_exact_mut(2).enumerate().take(squares) {
            for (operand, lines) in pair.iter_mut().zip(lines.as_chunks::<16>().0) {
                put::<I, TRANSPOSED>(
                    isa,
                    operand,
                    #[inline(always)]
                    |row, words| pair_bits(some(lines[row], square * SIDE), words),
                );
            }
        }
        return odd;
    }
    let odd = read(isa, input, rows, channels, (sizes, factor), stage);
    let mut line = [0.0; SIDE];
    for (square, operands) in operands.chunks_exact_mut(2 * parts).enumerate().take(squares) {
        for pair in operands.chunks_exact_mut(2) {
            for (half, operand) in pair.iter_mut().enumerate() {
                put::<I, TRANSPOSED>(
                    isa,
                    operand,
                    #[inline(always)]
                    |row, words| {
                        let at = (half * 16 + row) * squares * SIDE + square * SIDE;
                        next_part(isa, &mut stage[at..at + SIDE], &mut line);
                        pair_within(&line, words);
                    },
                );
            }
        }
    }
    odd
}

/// Packs values, over whose rows the product runs: operands of sixteen channels by words of two keys, [`value_factor`]
/// times as large. `place(square)` is the index of the first operand of 32 channels, `[part][16 channels]`. Returns the
/// rows that parts cannot hold.
#[inline(never)]
pub(crate) fn along_rows<I: Isa>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    numbers: (usize, usize),
    stage: &mut [f32],
    operands: &mut [Operand],
    place: impl Fn(usize) -> usize,
) -> u32 {
    isa.vectorize(
        #[inline(always)]
        || along_rows_inlined(isa, input, rows, numbers, stage, operands, place),
    )
}

#[inline(always)]
fn along_rows_inlined<I: Isa>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    (channels, parts): (usize, usize),
    stage: &mut [f32],
    operands: &mut [Operand],
    place: impl Fn(usize) -> usize,
) -> u32 {
    let squares = channels.div_ceil(SIDE);
    if squares == 0 {
        return 0;
    }
    let (sizes, factor) = (Sizes::of_values(input.dtype()), value_factor(input.dtype()));
    let mut words = [0.0; 256];
    if parts == 1
        && let Some((lines, odd)) = lying(input, rows, sizes)
    {
        for square in 0..squares {
            for half in 0..2 {
                let column = square * SIDE + half * 16;
                for (pair, words) in lines.as_chunks::<2>().0.iter().zip(words.chunks_exact_mut(16)) {
                    let [even, odd]: [[bf16; 16]; 2] = pair.map(
                        #[inline(always)]
                        |line| some(line, column),
                    );
                    for lane in (0..16).step_by(I::LANES) {
                        let [even, odd] = [isa.load_bf16(&even[lane..]), isa.load_bf16(&odd[lane..])];
                        isa.store(isa.pair_bf16(even, odd), &mut words[lane..]);
                    }
                }
                transpose(isa, &words, &mut operands[place(square) + half].0);
            }
        }
        return odd;
    }
    let odd = read(isa, input, rows, channels, (sizes, factor), stage);
    let width = squares * SIDE;
    for square in 0..squares {
        for part in 0..parts {
            for half in 0..2 {
                let column = square * SIDE + half * 16;
                for (pair, words) in words.chunks_exact_mut(16).enumerate() {
                    for lane in (0..16).step_by(I::LANES) {
                        let mut rounded = [isa.splat(0.0); 2];
                        for (n, rounded) in rounded.iter_mut().enumerate() {
                            let rest = &mut stage[(2 * pair + n) * width + column + lane..][..I::LANES];
                            let x = isa.load(rest);
                            *rounded = isa.round_bf16(x);
                            isa.store(isa.sub(x, *rounded), rest);
                        }
                        isa.store(isa.pair_bf16(rounded[0], rounded[1]), &mut words[lane..]);
                    }
                }
                transpose(isa, &words, &mut operands[place(square) + part * 2 + half].0);
            }
        }
    }
    odd
}

/// Packs rows over which a product runs, as B: words of the rows `n` and `n + 16` by channels, `[square][16 channels]`
/// of each 32 channels. `place` is that of [`along_rows`]. Returns the rows that a part cannot hold. Of bf16 only.
#[inline(never)]
pub(crate) fn by_rows<I: Isa>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    channels: usize,
    stage: &mut [f32],
    operands: &mut [Operand],
    place: impl Fn(usize) -> usize,
) -> u32 {
    isa.vectorize(
        #[inline(always)]
        || by_rows_inlined(isa, input, rows, channels, stage, operands, place),
    )
}

#[inline(always)]
fn by_rows_inlined<I: Isa>(
    isa: I,
    input: &Input<'_>,
    rows: Rows,
    channels: usize,
    stage: &mut [f32],
    operands: &mut [Operand],
    place: impl Fn(usize) -> usize,
) -> u32 {
    let (squares, sizes) = (channels.div_ceil(SIDE), Sizes::of_values(Dtype::Bf16));
    if squares == 0 {
        return 0;
    }
    let lying = lying(input, rows, sizes);
    let odd = lying.map_or_else(|| read(isa, input, rows, channels, (sizes, 1.0), stage), |(_, odd)| odd);
    for square in 0..squares {
        for half in 0..2 {
            let column = square * SIDE + half * 16;
            let operand = &mut operands[place(square) + half].0;
            for (n, words) in operand.chunks_exact_mut(16).enumerate() {
                if let Some((lines, _)) = &lying {
                    let [low, high]: [[bf16; 16]; 2] = [some(lines[n], column), some(lines[n + 16], column)];
                    for lane in (0..16).step_by(I::LANES) {
                        let [low, high] = [isa.load_bf16(&low[lane..]), isa.load_bf16(&high[lane..])];
                        isa.store(isa.pair_bf16(low, high), &mut words[lane..]);
                    }
                } else {
                    let [low, high] = [n, n + 16].map(|row| &stage[row * squares * SIDE + column..][..16]);
                    for lane in (0..16).step_by(I::LANES) {
                        let [low, high] = [isa.load(&low[lane..]), isa.load(&high[lane..])];
                        isa.store(isa.pair_bf16(low, high), &mut words[lane..]);
                    }
                }
            }
        }
    }
    odd
}
