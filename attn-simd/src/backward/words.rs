//! Operands of products of pairs: numbers rounded to bfloat16, two to a word, along either side of an array.
//!
//! ```text
//! S = K·Qᵀ  dP = V·dYᵀ     pairs of channels: words of k and v, and of q and dy transposed
//! dV += P·dY  dK += dS·Q   pairs of queries: words of weights and gradients, and rows of dy and q
//! dQᵀ += Kᵀ·dS             pairs of keys: rows of k, and of gradients of scores
//! ```
//! Inputs are bfloat16, so that the first two products err as those of floats do. The other three round weights and
//! gradients of scores to 8 bits: only `Precision::Fast` computes them from words.

use attn_core::half::bf16;

use crate::dtype::Input;
use crate::isa::Isa;
use crate::pack;
use crate::workspace::{Cutter, elements_of};

/// Arrays of words of a tile, for `Precision::Fast` all of them. Sizes in floats; see [`Words`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WordSizes {
    /// Of k and v by channels.
    pub(crate) channels: [usize; 2],
    /// Of k by keys.
    pub(crate) keys: usize,
    /// Of weights and gradients by queries, and of gradients by keys.
    pub(crate) tile: usize,
}

/// Arrays of words of a tile.
pub(super) struct Words<'w> {
    /// `k[key][channel/2]` and `v[key][channel/2]`.
    pub(super) channels: [&'w mut [f32]; 2],
    /// `k[key/2][channel]`.
    pub(super) keys: &'w mut [f32],
    /// Weights and gradients of scores, `[key][query/2]`.
    pub(super) queries: [&'w mut [f32]; 2],
    /// Gradients of scores, `[key/2][query]`.
    pub(super) gradients: &'w mut [f32],
}

impl WordSizes {
    /// For tiles of `keys` keys and `width` queries.
    pub(crate) fn of(keys: usize, width: usize, [head_dim, value_dim]: [usize; 2], fast: bool) -> Self {
        let channels = [head_dim, value_dim].map(|dim| keys * dim.div_ceil(2));
        if fast {
            Self { channels, keys: keys.div_ceil(2) * head_dim, tile: keys.div_ceil(2) * width }
        } else {
            Self { channels, ..Self::default() }
        }
    }

    /// Each array's.
    pub(crate) fn all(self) -> [usize; 6] {
        let Self { channels: [k, v], keys, tile } = self;
        [k, v, keys, tile, tile, tile]
    }
}

impl<'w> Words<'w> {
    pub(super) fn new(cutter: &mut Cutter<'w>, sizes: WordSizes) -> Self {
        Self {
            channels: sizes.channels.map(|len| cutter.floats(len)),
            keys: cutter.floats(sizes.keys),
            queries: [cutter.floats(sizes.tile), cutter.floats(sizes.tile)],
            gradients: cutter.floats(sizes.tile),
        }
    }

    /// Rounds weights and gradients of a tile, rows by key: for the products that only `Precision::Fast` computes from
    /// words.
    #[inline(always)]
    pub(super) fn of_tile<I: Isa>(
        &mut self,
        isa: I,
        (weights, gradients): (&[f32], &[f32]),
        (keys, queries, width): (usize, usize, usize),
    ) {
        rows(isa, gradients, (keys, width), self.gradients);
        for (from, to) in [weights, gradients].into_iter().zip(&mut self.queries) {
            neighbours(isa, from, (keys, width), to);
            if queries % 2 == 1 {
                clear_column(to, (keys, width), queries);
            }
        }
    }
}

/// Words of neighbours in rows of `columns` numbers: `to[row][column/2]`. The last word of an odd row has a 0.
#[inline(always)]
pub(super) fn neighbours<I: Isa>(isa: I, from: &[f32], (rows, columns): (usize, usize), to: &mut [f32]) {
    if columns == 0 {
        return;
    }
    let words = columns.div_ceil(2);
    let to = &mut to[..rows * words];
    for (from, to) in from.chunks_exact(columns).zip(elements_of(to).chunks_exact_mut(2 * words)) {
        let whole = columns - columns % I::LANES;
        for n in (0..whole).step_by(I::LANES) {
            isa.narrow(isa.load(&from[n..]), &mut to[n..]);
        }
        for n in whole..2 * words {
            to[n] = if n < columns { bf16::from_f32(from[n]) } else { bf16::ZERO };
        }
    }
    if cfg!(target_endian = "big") {
        to.iter_mut().for_each(|word| *word = f32::from_bits(word.to_bits().rotate_left(16)));
    }
}

/// The same of rows of an input, as many as `to` has room for, if they can be read where they lie. Says whether.
#[inline(always)]
pub(super) fn neighbours_of(input: &Input<'_>, first: [usize; 3], columns: usize, to: &mut [f32]) -> bool {
    let Some((data, mut start, stride)) = pack::halves(input, first).filter(|_| cfg!(target_endian = "little")) else {
        return false;
    };
    for to in elements_of(to).chunks_exact_mut(2 * columns.div_ceil(2).max(1)) {
        let from = &data[start..start + columns];
        let (from, rest) = from.as_chunks::<32>();
        let (whole, others) = to.split_at_mut(32 * from.len());
        whole.as_chunks_mut::<32>().0.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        if !others.is_empty() {
            others[..rest.len()].copy_from_slice(rest);
            others[rest.len()..].fill(bf16::ZERO);
        }
        start = start.wrapping_add_signed(stride);
    }
    true
}

/// Words of one row and the next of an input, `to[row/2][column]`, if its rows can be read where they lie. Says
/// whether.
#[inline(always)]
pub(super) fn rows_of<I: Isa>(
    isa: I,
    input: &Input<'_>,
    first: [usize; 3],
    (rows, columns): (usize, usize),
    to: &mut [f32],
) -> bool {
    let Some((data, start, stride)) = pack::halves(input, first).filter(|_| columns.is_multiple_of(I::LANES)) else {
        return false;
    };
    let row = |n: usize| &data[start.wrapping_add_signed(n as isize * stride)..][..columns];
    for (n, to) in to.chunks_exact_mut(columns.max(1)).enumerate().take(rows.div_ceil(2)) {
        let (even, odd) = (row(2 * n), (2 * n + 1 < rows).then(|| row(2 * n + 1)));
        for at in (0..columns).step_by(I::LANES) {
            let next = odd.map_or(isa.splat(0.0), |odd| isa.load_bf16(&odd[at..]));
            isa.store(isa.pair_bf16(isa.load_bf16(&even[at..]), next), &mut to[at..]);
        }
    }
    true
}

/// Whether words of neighbours, `words` to a row, are finite in those rows that not every query sees.
#[inline(always)]
pub(super) fn is_finite(array: &[f32], words: usize, bits: &[u64]) -> bool {
    let rows = array.chunks_exact(words.max(1)).zip(bits).filter(|(_, bits)| **bits != u64::MAX);
    // The exponents of NaN and infinities are all ones; adding one carries into the sign.
    let above = |word: u32| ((word & 0x7fff_7fff) + 0x0080_0080) & 0x8000_8000;
    rows.fold(0, |any, (row, _)| row.iter().fold(any, |any, word| any | above(word.to_bits()))) == 0
}

/// Words of one row and the next: `to[row/2][column]`. The last row of an odd number is paired with zeros.
#[inline(always)]
pub(super) fn rows<I: Isa>(isa: I, from: &[f32], (rows, columns): (usize, usize), to: &mut [f32]) {
    for row in (0..rows).step_by(2) {
        let even = &from[row * columns..][..columns];
        let odd = (row + 1 < rows).then(|| &from[(row + 1) * columns..][..columns]);
        let to = &mut to[row / 2 * columns..][..columns];
        let whole = columns - columns % I::LANES;
        for n in (0..whole).step_by(I::LANES) {
            let next = odd.map_or(isa.splat(0.0), |odd| isa.load(&odd[n..]));
            isa.store(isa.narrow_pair(isa.load(&even[n..]), next), &mut to[n..]);
        }
        for n in whole..columns {
            let half = |x: f32| u32::from(bf16::from_f32(x).to_bits());
            to[n] = f32::from_bits(half(odd.map_or(0.0, |odd| odd[n])) << 16 | half(even[n]));
        }
    }
}

/// The same in place: the first half of the array.
#[inline(always)]
pub(super) fn rows_in_place<I: Isa>(isa: I, array: &mut [f32], (rows, columns): (usize, usize)) {
    for row in (0..rows).step_by(2) {
        for n in (0..columns).step_by(I::LANES) {
            let (even, odd) = (row * columns + n, (row + 1) * columns + n);
            let next = if row + 1 < rows { isa.load(&array[odd..]) } else { isa.splat(0.0) };
            let words = isa.narrow_pair(isa.load(&array[even..]), next);
            isa.store(words, &mut array[row / 2 * columns + n..]);
        }
    }
}

/// Clears an odd column of `words[row][column/2]`: a lane without a query, which may hold anything.
pub(super) fn clear_column(words: &mut [f32], (rows, columns): (usize, usize), column: usize) {
    for row in words[..rows * columns / 2].chunks_exact_mut(columns / 2) {
        row[column / 2] = f32::from_bits(row[column / 2].to_bits() & 0xffff);
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;
    use crate::isa::pairs::{PairModel, Pairs};
    use crate::isa::portable::Portable;

    const ISA: Pairs<PairModel<Portable>> = Pairs(PairModel(<Portable>::PROVEN));

    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|n| (n as f32 * 0.37).sin()).collect()
    }

    fn halves_of(word: f32) -> [bf16; 2] {
        [word.to_bits() as u16, (word.to_bits() >> 16) as u16].map(bf16::from_bits)
    }

    /// Every word is the two numbers that it should be, rounded; where there is none, a zero.
    #[test]
    fn words_hold_their_neighbours() {
        for (rows_count, columns) in [(1, 1), (3, 2), (2, 5), (5, 16), (4, 33), (7, 48), (0, 4), (3, 0)] {
            let from = numbers(rows_count * columns);
            let at = |row: usize, column: usize| {
                let there = row < rows_count && column < columns;
                if there { bf16::from_f32(from[row * columns + column]) } else { bf16::ZERO }
            };
            let words = columns.div_ceil(2);
            let mut to = vec![f32::NAN; rows_count * words];
            neighbours(ISA, &from, (rows_count, columns), &mut to);
            for (n, &word) in to.iter().enumerate() {
                let (row, column) = (n / words, n % words * 2);
                assert_eq!(halves_of(word), [at(row, column), at(row, column + 1)], "{rows_count} x {columns}: {n}");
            }
            let mut to = vec![f32::NAN; rows_count.div_ceil(2) * columns];
            rows(ISA, &from, (rows_count, columns), &mut to);
            for (n, &word) in to.iter().enumerate() {
                let (row, column) = (n / columns * 2, n % columns);
                assert_eq!(halves_of(word), [at(row, column), at(row + 1, column)], "{rows_count} x {columns}: {n}");
            }
            if columns % <Portable>::LANES == 0 {
                let mut array = from.clone();
                rows_in_place(ISA, &mut array, (rows_count, columns));
                assert!(array.iter().zip(&to).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }

    #[test]
    fn a_cleared_column_is_0_and_its_neighbour_stays() {
        let mut words = vec![0.0; 2 * 4];
        neighbours(ISA, &numbers(16), (2, 8), &mut words);
        let before = words.clone();
        clear_column(&mut words, (2, 8), 5);
        for (n, (&now, &then)) in words.iter().zip(&before).enumerate() {
            let [even, odd] = halves_of(then);
            assert_eq!(halves_of(now), [even, if n % 4 == 2 { bf16::ZERO } else { odd }]);
        }
    }
}
