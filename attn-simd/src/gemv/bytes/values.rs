//! Sums of the int8 values of some tiles, weighted by integers, where lanes are channels.
//!
//! The weights of a tile, times the scales of the values, are rounded to integers up to 65535: the largest of the tile.
//! So an output is off by half a unit times the sum of the sizes of all bytes of its channel. Only `Precision::Fast`
//! does that. Rows with weights below 0 (of a scale below 0), or not finite, or all huge or tiny, are added as floats;
//! which way a row goes depends on its own weights in that tile.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use core::mem::MaybeUninit;
use core::ops::Range;

use super::{BLOCKS, WIDEST, block, requests};
use attn_core::half::f16;

use crate::gemv::ahead::Ahead;
use crate::gemv::weighted::{TileSums, add_tile, weighted as by_floats};
use crate::gemv::{Integers, Rows, Stored, Sums, TILE, Tile};
use crate::isa::{BLOCK, BLOCK_BYTES, Integer, Isa, MAX_LANES, Values, Weights};

/// The integers of up to four rows, for the blocks of a value; of bytes without blocks the first is for all.
type Integers4 = [[Weights; 4]; BLOCKS];

/// Whether values of so many columns are weighted by integers.
pub(crate) const fn fit<T: Stored>(columns: usize) -> bool {
    T::INTEGERS.is_some() && columns <= WIDEST
}

/// As [`weighted`](crate::gemv::weighted), of all rows; the values are made of int8 and [fit](fit).
#[inline(always)]
pub(crate) fn weighted<I: Isa, T: Stored>(
    isa: I,
    rows: usize,
    (values, tiles): (&Rows<'_, T>, Range<usize>),
    [(p, p_stride), (factor, factor_stride)]: [(&[f32], usize); 2],
    mut sums: Sums<'_>,
) {
    let columns = values.columns();
    assert!(columns.is_multiple_of(I::LANES) && sums.o.len().min(sums.rest.len()) >= rows * columns);
    let ahead = Ahead::of::<I, T, 4>(values, false).at_least(I::LANES);
    let mut weights: Integers4 = [[Weights::ZERO; 4]; BLOCKS];
    for (n, tile) in tiles.enumerate() {
        let (p, factor) = (&p[n * p_stride..][..rows * TILE], &factor[n * factor_stride..][..rows]);
        let mut at = OneTile { values: values.tile(tile), ahead: &ahead, columns, weights: &mut weights };
        let mut first = 0;
        while first < rows {
            let count = block(rows - first);
            let of = (&p[first * TILE..], &factor[first..]);
            let done = match count {
                1 => at.add::<I, 1>(isa, of, sums.from(first * columns)),
                2 => at.add::<I, 2>(isa, of, sums.from(first * columns)),
                _ => at.add::<I, 4>(isa, of, sums.from(first * columns)),
            };
            for r in if done { 0..0 } else { first..first + count } {
                let of = (&p[r * TILE..], &factor[r..]);
                if !at.add::<I, 1>(isa, of, sums.from(r * columns)) {
                    let weights = [(of.0, 0), (of.1, 0)];
                    by_floats(isa, 1, (values, tile..tile + 1), weights, sums.from(r * columns));
                }
            }
            first += count;
        }
    }
}

/// A tile of values.
struct OneTile<'a, 'r, T> {
    values: Tile<'r, T>,
    ahead: &'a Ahead,
    columns: usize,
    weights: &'a mut Integers4,
}

impl<T: Stored> OneTile<'_, '_, T> {
    /// Adds the tile to the sums of R rows. Returns false, and adds nothing, if the weights of one are none of
    /// integers.
    #[inline(always)]
    fn add<I: Isa, const R: usize>(&mut self, isa: I, (p, factor): (&[f32], &[f32]), sums: Sums<'_>) -> bool {
        let Self { values, ahead, columns, weights } = self;
        let (columns, len) = (*columns, values.len());
        let at = values.addresses();
        let blocks = T::INTEGERS == Some(Integers::Blocks);
        let count = if blocks { columns / BLOCK } else { 1 };
        let mut scales = [[0.0; TILE]; BLOCKS];
        let scales = &mut scales[..if blocks { count } else { 0 }];
        // SAFETY: rows of whole blocks, which `Rows` has checked.
        unsafe { read_scales(isa, &at, len, scales) };
        let scales = &*scales;
        let (p, mut units) = (&p.as_chunks::<TILE>().0[..R], [0.0; R]);
        for (p, unit) in p.iter().zip(&mut units) {
            match isa.most_weight(p, scales, len) {
                Some(0.0) => *unit = 1.0,
                Some(most) if Integer::HELD.contains(&most) => *unit = most * (1.0 / Weights::MOST),
                _ => return false,
            }
        }
        for (nth, weights) in weights.iter_mut().enumerate().take(count) {
            for ((p, unit), to) in p.iter().zip(&units).zip(weights) {
                isa.write_weights(p, 1.0 / unit, scales.get(nth), len, to);
            }
        }
        let ahead = requests(isa, values, ahead);
        let (o, rest) = (sums.o.as_mut_ptr(), sums.rest.as_mut_ptr());
        let of_block = |block: usize| (weights[block].first_chunk::<R>().expect("up to four rows"), &units);
        // One row reads two lines of a value at once: lines in the order of memory come faster.
        let mut from = 0;
        while const { R == 1 } && !blocks && columns - from >= 128 {
            let of = Values { values: &at, len, at: from, bytes: 128, ahead };
            let mut tiles: [TileSums<R, 4>; 2] = [[[MaybeUninit::uninit(); 4]; R]; 2];
            // SAFETY: as below.
            unsafe {
                isa.weigh_bytes(&of, of_block(0), &mut tiles);
                for (n, tile) in tiles.iter().enumerate() {
                    let to = (o.add(from + 64 * n), rest.add(from + 64 * n));
                    add_tile::<I, R, 4>(isa, tile, factor.as_ptr(), to, columns);
                }
            }
            from += 128;
        }
        let step = if blocks { BLOCK } else { 64 };
        for from in (from..columns).step_by(step) {
            let bytes = (columns - from).min(step);
            let (place, block) = if blocks { (from / BLOCK * BLOCK_BYTES + 2, from / BLOCK) } else { (from, 0) };
            let of = Values { values: &at, len, at: place, bytes, ahead };
            let mut tile: [TileSums<R, 4>; 1] = [[[MaybeUninit::uninit(); 4]; R]];
            // SAFETY: the bytes of rows that `Rows` has checked; factors and sums of R rows, whose columns are whole
            // vectors.
            unsafe {
                isa.weigh_bytes(&of, of_block(block), &mut tile);
                let ([tile], to) = (&tile, (o.add(from), rest.add(from)));
                if bytes == 64 {
                    add_tile::<I, R, 4>(isa, tile, factor.as_ptr(), to, columns);
                } else {
                    for n in 0..bytes / MAX_LANES {
                        let mut one: TileSums<R, 1> = [[MaybeUninit::uninit(); 1]; R];
                        for r in 0..R {
                            one[r][0] = tile[r][n];
                        }
                        let to = (to.0.add(n * MAX_LANES), to.1.add(n * MAX_LANES));
                        add_tile::<I, R, 1>(isa, &one, factor.as_ptr(), to, columns);
                    }
                }
            }
        }
        true
    }
}

/// Reads the scales of a tile's blocks, from all values.
///
/// # Safety
/// Each value has as many blocks.
#[inline(always)]
unsafe fn read_scales<I: Isa>(isa: I, values: &[*const i8; TILE], len: usize, scales: &mut [[f32; TILE]]) {
    // First all halves, and then all vectors of them: a vector must wait until its halves are written.
    let mut halves = [[f16::ZERO; TILE]; BLOCKS];
    for (n, value) in values.iter().enumerate().take(len) {
        for (block, halves) in halves.iter_mut().enumerate().take(scales.len()) {
            // SAFETY: the caller vouches for the block.
            let bits = unsafe { value.add(block * BLOCK_BYTES).cast::<u16>().read_unaligned() };
            halves[n] = f16::from_bits(u16::from_le(bits));
        }
    }
    for (halves, scales) in halves.iter().zip(scales) {
        for (half, scale) in halves.chunks_exact(I::LANES).zip(scales.chunks_exact_mut(I::LANES)) {
            isa.store(isa.load_f16(half), scale);
        }
    }
}
