//! Values for levels of 32 long registers, which hold accumulators of a part and of half a tile at once.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use super::tile::{HALF, PART, Tile, add_to, join, part_within};
use crate::gemm::reach::Reach;
use crate::gemm::{add_all, steps_from};
use crate::isa::Isa;

/// The end of the part that has a place of half a tile: a half has parts of 12, 12 and 8.
#[inline(always)]
const fn part_end(place: usize) -> usize {
    if place < PART {
        PART
    } else if place < 2 * PART {
        2 * PART
    } else {
        HALF
    }
}

/// Some columns of the output from all keys, for levels of 32 long registers, which hold accumulators of a part and of
/// half a tile at once: all columns of half the keys before the other half; sums of the first half wait in memory.
///
/// An addition takes the place of a multiply-add on Intel, and none on AMD: parts of 12 instead of 8 make a whole call
/// 3 to 4 % faster on Granite Rapids.
///
/// # Safety
/// At most [`GROUPS`] times `M` channels: the rows of the tile are readable there, its weights for `depth` rows of `NQ`
/// vectors, and no reach goes beyond; `factors` for `NQ` vectors; `o` is readable and writable for `NQ` vectors of each
/// channel, rounded up to whole groups of `M`.
#[inline(always)]
pub(super) unsafe fn half_by_half<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    tile: &Tile<'_, NQ>,
    channels: core::ops::Range<usize>,
    factors: Option<*const f32>,
    o: *mut f32,
    between: &mut dyn FnMut(),
) {
    let mut waiting = Waiting([core::mem::MaybeUninit::uninit(); _]);
    const { assert!(I::LANES != 16 || GROUPS * M * NQ * 16 <= WAITING) };
    let waiting: *mut f32 = waiting.0.as_mut_ptr().cast();
    let middle = tile.depth.min(HALF.saturating_sub(tile.phase));
    let whole = if tile.reach.is_none() { channels.len() / M * M } else { 0 };
    // SAFETY: the caller vouches for these addresses, and `Waiting` has room for the groups.
    unsafe {
        let a = tile.a.add(channels.start);
        let (mut keys, mut is_first) = (0..middle, true);
        loop {
            let is_last = keys.end == tile.depth;
            for first in (0..whole).step_by(M) {
                if is_last {
                    between();
                }
                let starts: [*const f32; M] = core::array::from_fn(|m| a.add(first + m));
                let (waiting, o) = (waiting.add(first * NQ * I::LANES), o.add(first * NQ * I::LANES));
                let sum = half::<I, NQ, M>(isa, &starts, tile, keys.clone());
                join(isa, sum, (is_first, is_last), factors, (waiting, o));
            }
            if is_last {
                break;
            }
            (keys, is_first) = (keys.end..tile.depth, false);
        }
        for first in (whole..channels.len()).step_by(M) {
            between();
            let last = channels.len() - first - 1;
            let starts: [*const f32; M] = core::array::from_fn(|m| a.add(first + m.min(last)));
            let all = Reach::all(tile.depth);
            let sum = sums_within::<I, NQ, M>(isa, &starts, tile, tile.reach.unwrap_or(&all));
            add_to(isa, &sum, factors, o.add(first * NQ * I::LANES));
        }
    }
}

/// Groups whose halves wait: of four channels each, so that a line of 16 floats is read four times in a row.
///
/// Measured on a Skylake server, this product alone at 128 channels, whose rows meet in eight of 64 sets of the first
/// cache: 1.16 times as fast as all keys before the next group.
pub(super) const GROUPS: usize = 4;
/// Floats that wait: groups of four channels of up to three vectors.
const WAITING: usize = GROUPS * 4 * 3 * 16;

/// Sums of the first half.
#[repr(C, align(64))]
struct Waiting([core::mem::MaybeUninit<f32>; WAITING]);

/// Half a tile: parts, added up in order.
///
/// A loop of four keys, of a length that the compiler does not know, does nearly all of it. Unrolled it is 7 KiB, and
/// processors of Intel's up to Skylake keep 4 KiB decoded where two hardware threads share a core: this product alone
/// then takes 1.2 to 1.3 times as long.
///
/// # Safety
/// As [`value_group`](super::value_group), for these keys.
#[inline(always)]
unsafe fn half<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, phase, .. }: &Tile<'_, NQ>,
    keys: core::ops::Range<usize>,
) -> [[I::F; NQ]; M] {
    let mut from = (keys.start as isize * stride, p.wrapping_add(keys.start * NQ * I::LANES));
    let (place, mut left) = ((phase + keys.start) % HALF, keys.len());
    // -0 is what changes no bit of a sum, not even the sign of a zero. No keys count as 0.
    let mut sum = [[isa.splat(if left == 0 { 0.0 } else { -0.0 }); NQ]; M];
    let mut end = part_end(place);
    let mut len = end - place;
    while left > 0 {
        let keys = left.min(len);
        let mut acc = [[isa.splat(0.0); NQ]; M];
        // SAFETY: the caller vouches for these addresses.
        from = unsafe { steps_from::<I, NQ, M, 0, 0>(isa, a, stride, from, keys, &mut acc) };
        add_all(isa, &mut sum, &acc);
        left -= keys;
        (len, end) = if end == PART { (PART, 2 * PART) } else { (HALF - 2 * PART, HALF) };
    }
    sum
}

/// The sums of all keys of a tile where not all vectors need all keys, and of the last channels, fewer than `M`. A
/// function of its own: such groups are few, and its many cases are compiled once.
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
                    let place = (tile.phase + from) % HALF;
                    let to = keys.end.min(from + part_end(place) - place);
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
