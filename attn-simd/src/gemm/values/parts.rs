//! Values for levels of short registers: part of the keys by part, for all channels.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use super::tile::{Tile, join, part, part_len, part_within};
use crate::isa::Isa;

/// Some columns of the output from all keys, for levels of short registers: all columns of a part of the keys before
/// the next part; sums of the parts before wait in memory.
///
/// So the rows of a part are read from one end to the other. Measured on Zen 3, portable, on a host with busy
/// neighbours: with groups that go through all keys, whole calls take 3 to 11 % longer; on a quiet one as long.
///
/// # Safety
/// The rows of the tile are readable at these channels, its weights for `depth` rows of `NQ` vectors, and no reach goes
/// beyond; `factors` for `NQ` vectors; `o` is readable and writable for `NQ` vectors of each channel, rounded up to
/// whole groups of `M`.
#[inline(always)]
pub(super) unsafe fn part_by_part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    tile: &Tile<'_, NQ>,
    channels: core::ops::Range<usize>,
    factors: Option<*const f32>,
    o: *mut f32,
    between: &mut dyn FnMut(),
) {
    const { assert!(I::LANES >= 8 || (CHANNELS.is_multiple_of(M) && NQ * I::LANES <= WIDTH)) };
    let mut waiting = Waiting([core::mem::MaybeUninit::uninit(); _]);
    let waiting: *mut f32 = waiting.0.as_mut_ptr().cast();
    let mut from = 0;
    while from < tile.depth {
        let keys = from..tile.depth.min(from + part_len::<I>() - (tile.phase + from) % part_len::<I>());
        from = keys.end;
        let mut first = 0;
        while first < channels.len() {
            if keys.end == tile.depth {
                between();
            }
            let left = channels.len() - first;
            // SAFETY: the caller vouches for these addresses, and `Waiting` has room for whole groups of M.
            unsafe {
                let a = tile.a.add(channels.start + first);
                let (waiting, o) = (waiting.add(first * NQ * I::LANES), o.add(first * NQ * I::LANES));
                // A call of its own for each, as above.
                if left >= M {
                    let starts: [*const f32; M] = core::array::from_fn(|m| a.add(m));
                    value_part::<I, NQ, M>(isa, &starts, tile, keys.clone(), factors, (waiting, o));
                } else {
                    let starts: [*const f32; M] = core::array::from_fn(|m| a.add(m.min(left - 1)));
                    value_part::<I, NQ, M>(isa, &starts, tile, keys.clone(), factors, (waiting, o));
                }
            }
            first += M;
        }
    }
}

/// Sums of the parts before, of some channels.
#[repr(C, align(64))]
struct Waiting([core::mem::MaybeUninit<f32>; CHANNELS * WIDTH]);

/// Channels that wait at once: whole groups, and all of most models. Rows and sums of a part stay in the first cache.
pub(super) const CHANNELS: usize = 192;
/// Floats of two vectors of four lanes; on AArch64, which has registers for them, of four.
const WIDTH: usize = if cfg!(target_arch = "aarch64") { 16 } else { 8 };

/// A part of the keys for `M` columns: added to the sums that wait, and the last part to the output.
///
/// # Safety
/// As [`value_group`](super::value_group); the sums that wait are readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn value_part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
    keys: core::ops::Range<usize>,
    factors: Option<*const f32>,
    (waiting, o): (*mut f32, *mut f32),
) {
    let (is_first, is_last) = (keys.start == 0, keys.end == tile.depth);
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let sum = match tile.reach {
            None => part::<I, NQ, M>(isa, a, tile, keys),
            Some(reach) => part_within::<I, NQ, M>(isa, a, tile, reach, keys),
        };
        join(isa, sum, (is_first, is_last), factors, (waiting, o));
    }
}
