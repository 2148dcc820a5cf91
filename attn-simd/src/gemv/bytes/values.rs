//! Sums of the int8 values of some tiles, weighted by integers, where lanes are channels.
//!
//! The weights of a tile, times the scales of the values, are rounded to integers up to 65535: the largest of the tile,
//! and of a block of channels if those have scales. So an output is off by half a unit times the sum of the sizes of
//! all bytes of its channel. Only `Precision::Fast` does that. Rows with weights below 0 (of a scale below 0), or not
//! finite, or all huge or tiny, are left to floats; which way a row goes depends on its own weights in that tile.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use core::mem::MaybeUninit;
use core::ops::Range;

use attn_core::half::f16;

use super::{BLOCKS, WIDEST, block, requests};
use crate::gemv::ahead::Ahead;
use crate::gemv::weighted::{TileSums, add_tile, weighted as by_floats};
use crate::gemv::{Integers, Rows, Stored, Sums, TILE};
use crate::isa::{BLOCK, BLOCK_BYTES, Isa, Next, Order, Values, Weights};

/// The largest number of rows.
const MOST: usize = 8;

/// The largest weights of rows that are held: units are normal numbers, and so are their reciprocals.
const HELD: Range<f32> = 1e-33..1e30;

/// The integers of up to four rows, for each block of a value; of bytes without blocks the first is for all.
type Integers4 = [[Weights; 4]; BLOCKS];

/// Room for integers, and for the scales of blocks.
struct Room {
    weights: Integers4,
    scales: [[f32; TILE]; BLOCKS],
}

impl Room {
    /// Fresh room: it is made once for many tiles.
    const FRESH: Self = Self { weights: [[Weights::ZERO; 4]; BLOCKS], scales: [[0.0; TILE]; BLOCKS] };
}

/// Whether values of so many columns are weighted by integers.
pub(crate) const fn fit<T: Stored>(columns: usize) -> bool {
    T::INTEGERS.is_some() && columns <= WIDEST
}

/// As [`weighted`](crate::gemv::weighted), of any number of rows; values are made of int8 and [fit]. Rows that are none
/// of integers in a tile are added as floats there.
#[inline(always)]
pub(crate) fn weighted<I: Isa, T: Stored>(
    isa: I,
    rows: usize,
    (values, tiles): (&Rows<'_, T>, Range<usize>),
    [(p, p_stride), (factor, factor_stride)]: [(&[f32], usize); 2],
    mut sums: Sums<'_>,
) {
    let (columns, mut room) = (values.columns(), Room::FRESH);
    for (n, tile) in tiles.enumerate() {
        for first in (0..rows).step_by(MOST) {
            let count = (rows - first).min(MOST);
            let (p, factor) = (&p[n * p_stride + first * TILE..], &factor[n * factor_stride + first..]);
            let to = (&mut room, sums.from(first * columns));
            let refused = of_tile(isa, count, (values, tile, u64::MAX), (p, factor), to);
            for r in (0..count).filter(|r| refused >> r & 1 == 1) {
                let weights = [(&p[r * TILE..], 0), (&factor[r..], 0)];
                by_floats(isa, 1, (values, tile..tile + 1), weights, sums.from((first + r) * columns));
            }
        }
    }
}

/// Adds the values of a tile whose bits are set in `seen` to one row; the others may hold anything. Returns false, and
/// adds nothing, if the row is none of integers.
#[inline(always)]
pub(crate) fn add_seen<I: Isa, T: Stored>(
    isa: I,
    (values, tile, seen): (&Rows<'_, T>, usize, u64),
    weights: (&[f32], &[f32]),
    sums: Sums<'_>,
) -> bool {
    let mut room = Room::FRESH;
    of_tile(isa, 1, (values, tile, seen), weights, (&mut room, sums)) == 0
}

/// Adds the values of a tile whose bits are set to the rows that are held, of up to eight. Returns the other rows, as
/// bits, which are as they were.
#[inline(always)]
fn of_tile<I: Isa, T: Stored>(
    isa: I,
    rows: usize,
    (values, tile, seen): (&Rows<'_, T>, usize, u64),
    (p, factor): (&[f32], &[f32]),
    (room, mut sums): (&mut Room, Sums<'_>),
) -> u32 {
    let columns = values.columns();
    assert!(columns.is_multiple_of(I::LANES) && fit::<T>(columns) && rows <= MOST);
    assert!(sums.o.len().min(sums.rest.len()) >= rows * columns);
    let (ahead, values) = (Ahead::of::<I, T, 4>(values, false).at_least(I::LANES), values.tile(tile, 0));
    // There every value requests a line of another row of the tile: those of the next tile.
    let ahead = if const { matches!(I::ORDER, Order::Whole) } { ahead.at_least(TILE) } else { ahead };
    let ahead = requests(isa, &values, &ahead);
    let (at, seen) = (values.addresses(), seen & u64::MAX >> (TILE - values.len()));
    let is_blocks = T::INTEGERS == Some(Integers::Blocks);
    let blocks = if is_blocks { columns / BLOCK } else { 1 };
    let Room { weights, scales } = room;
    if is_blocks {
        // SAFETY: rows of whole blocks, which `Rows` has checked.
        unsafe { read_scales(isa, &at, values.len(), &mut scales[..blocks]) };
    }
    let scales = |block: usize| is_blocks.then_some(&scales[block]);
    let (p, mut units, mut refused) = (&p.as_chunks::<TILE>().0[..rows], [[0.0; MOST]; BLOCKS], 0u32);
    for (r, p) in p.iter().enumerate() {
        for (block, units) in units.iter_mut().enumerate().take(blocks) {
            match isa.most_weight(p, scales(block), seen) {
                Some(0.0) => units[r] = 1.0,
                Some(most) if HELD.contains(&most) => units[r] = most * (1.0 / Weights::MOST),
                _ => refused |= 1 << r,
            }
        }
    }
    let mut first = 0;
    while first < rows {
        let held = (!refused >> first).trailing_ones() as usize;
        if held == 0 {
            first += 1;
            continue;
        }
        let count = block(held.min(rows - first));
        for (block, weights) in weights.iter_mut().enumerate().take(blocks) {
            for (r, to) in (first..first + count).zip(weights) {
                isa.write_weights(&p[r], 1.0 / units[block][r], scales(block), seen, to);
            }
        }
        let of = OneTile { at: &at, len: values.len(), ahead, columns, is_blocks, weights, units: &units, first };
        let (factor, to) = (&factor[first..rows], sums.from(first * columns));
        macro_rules! add {
            ($R:literal) => {
                isa.apart(
                    #[inline(always)]
                    || of.add::<I, $R>(isa, factor, to),
                )
            };
        }
        match count {
            1 => add!(1),
            2 => add!(2),
            _ => add!(4),
        }
        first += count;
    }
    refused
}

/// A tile of values, and the integers of some rows.
struct OneTile<'a> {
    at: &'a [*const i8; TILE],
    len: usize,
    ahead: [usize; 2],
    columns: usize,
    is_blocks: bool,
    weights: &'a Integers4,
    /// The units of all rows of the tile, and the first of these.
    units: &'a [[f32; MOST]; BLOCKS],
    first: usize,
}

impl OneTile<'_> {
    /// Adds the tile to the sums of R rows.
    #[inline(always)]
    fn add<I: Isa, const R: usize>(&self, isa: I, factor: &[f32], sums: Sums<'_>) {
        let Self { at, len, ahead, columns, is_blocks, weights, units, first } = *self;
        assert!(factor.len() >= R);
        let (o, rest) = (sums.o.as_mut_ptr(), sums.rest.as_mut_ptr());
        let of_block = |block: usize| {
            let (weights, units) = (weights[block].first_chunk::<R>(), units[block][first..].first_chunk::<R>());
            (weights.expect("up to four rows"), units.expect("up to eight rows"))
        };
        // One row reads twice as much of a value at once: lines in the order of memory come faster.
        let (whole, mut from) = (4 * I::LANES, 0);
        let parts = columns.div_ceil(whole);
        let next = |from: usize| {
            let (part, step) = (TILE * (from / whole), if is_blocks { BLOCK_BYTES } else { whole });
            Next { row: part / parts, part: part % parts, parts, step }
        };
        while const { R == 1 } && !is_blocks && columns - from >= 2 * whole {
            let next = next(from);
            let of = Values { values: at, len, at: from, bytes: 2 * whole, ahead, next };
            let mut tiles: [TileSums<R, 4>; 2] = [[[MaybeUninit::uninit(); 4]; R]; 2];
            // SAFETY: as below.
            unsafe {
                isa.weigh_bytes(&of, of_block(0), &mut tiles);
                for (n, tile) in tiles.iter().enumerate() {
                    let to = (o.add(from + whole * n), rest.add(from + whole * n));
                    add_tile::<I, R, 4>(isa, tile, factor.as_ptr(), to, columns);
                }
            }
            from += 2 * whole;
        }
        let step = if is_blocks { BLOCK.min(whole) } else { whole };
        for from in (from..columns).step_by(step) {
            let bytes = (columns - from).min(step);
            let block = if is_blocks { from / BLOCK } else { 0 };
            let place = if is_blocks { block * BLOCK_BYTES + 2 + from % BLOCK } else { from };
            let of = Values { values: at, len, at: place, bytes, ahead, next: next(from) };
            let mut tile: [TileSums<R, 4>; 1] = [[[MaybeUninit::uninit(); 4]; R]];
            // SAFETY: the bytes of rows that `Rows` has checked; factors and sums of R rows, whose columns are whole
            // vectors.
            unsafe {
                isa.weigh_bytes(&of, of_block(block), &mut tile);
                let ([tile], to) = (&tile, (o.add(from), rest.add(from)));
                if bytes == whole {
                    add_tile::<I, R, 4>(isa, tile, factor.as_ptr(), to, columns);
                } else {
                    for n in 0..bytes / I::LANES {
                        let mut one: TileSums<R, 1> = [[MaybeUninit::uninit(); 1]; R];
                        for r in 0..R {
                            one[r][0] = tile[r][n];
                        }
                        let to = (to.0.add(n * I::LANES), to.1.add(n * I::LANES));
                        add_tile::<I, R, 1>(isa, &one, factor.as_ptr(), to, columns);
                    }
                }
            }
        }
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
