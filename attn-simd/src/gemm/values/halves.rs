//! Values for levels of 32 long registers, which hold accumulators of a part and of half a tile at once.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use super::tile::{HALF, PART, Tile, part, part_within};
use crate::gemm::add_all;
use crate::gemm::reach::Reach;
use crate::isa::Isa;

/// The end of the part that starts at `from`, the `phase + from`-th key of its tile: a half has parts of 12, 12 and 8.
#[inline(always)]
fn part_end(phase: usize, from: usize, depth: usize) -> usize {
    let place = (phase + from) % HALF;
    let end = if place < PART {
        PART
    } else if place < 2 * PART {
        2 * PART
    } else {
        HALF
    };
    depth.min(from + end - place)
}

/// The sums of all keys, for levels of 32 long registers, which hold accumulators of a part and of half a tile at once.
///
/// An addition takes the place of a multiply-add on Intel, and none on AMD: parts of 12 instead of 8 make a whole call
/// 3 to 4 % faster on Granite Rapids.
///
/// # Safety
/// As [`value_group`](super::value_group).
#[inline(always)]
pub(super) unsafe fn sums<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
) -> [[I::F; NQ]; M] {
    let (depth, middle) = (tile.depth, tile.depth.min(HALF.saturating_sub(tile.phase)));
    // SAFETY: the caller vouches for these addresses; both halves are below `depth`.
    unsafe {
        let mut sum = half::<I, NQ, M>(isa, a, tile, 0..middle);
        if middle < depth {
            let second = half::<I, NQ, M>(isa, a, tile, middle..depth);
            add_all(isa, &mut sum, &second);
        }
        sum
    }
}

/// The same where not all vectors need all keys. A function of its own: such tiles are few, and its many cases are
/// compiled once.
///
/// # Safety
/// As [`value_group`](super::value_group).
#[inline(never)]
pub(super) unsafe fn sums_within<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
    reach: &Reach<NQ>,
) -> [[I::F; NQ]; M] {
    isa.vectorize(
        #[inline(always)]
        || {
            let (depth, middle) = (tile.depth, tile.depth.min(HALF.saturating_sub(tile.phase)));
            // -0 is what changes no bit of a sum, not even the sign of a zero. No keys count as 0.
            let mut total = [[isa.splat(if middle == 0 { 0.0 } else { -0.0 }); NQ]; M];
            for keys in [0..middle, middle..depth] {
                let (mut sum, mut from) = ([[isa.splat(-0.0); NQ]; M], keys.start);
                while from < keys.end {
                    let to = part_end(tile.phase, from, keys.end);
                    // SAFETY: the caller vouches for these addresses; both halves are below `depth`.
                    let acc = unsafe { part_within::<I, NQ, M>(isa, a, tile, reach, from..to) };
                    add_all(isa, &mut sum, &acc);
                    from = to;
                }
                // After a half without keys, -0 again.
                add_all(isa, &mut total, &sum);
            }
            total
        },
    )
}

/// Half a tile: parts, added up in order.
///
/// # Safety
/// As [`value_group`](super::value_group), for these keys.
#[inline(always)]
unsafe fn half<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
    keys: core::ops::Range<usize>,
) -> [[I::F; NQ]; M] {
    let mut from = part_end(tile.phase, keys.start, keys.end);
    // SAFETY: the caller vouches for these addresses.
    let mut sum = unsafe { part::<I, NQ, M>(isa, a, tile, keys.start..from) };
    while from < keys.end {
        let to = part_end(tile.phase, from, keys.end);
        // SAFETY: the caller vouches for these addresses.
        let acc = unsafe { part::<I, NQ, M>(isa, a, tile, from..to) };
        add_all(isa, &mut sum, &acc);
        from = to;
    }
    sum
}
