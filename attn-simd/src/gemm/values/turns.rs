//! Values for levels of few registers: sums of parts wait in memory, and the channels take turns.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use core::sync::atomic::{Ordering, compiler_fence};

use super::tile::{PART, Tile, add_stored};
use crate::gemm::reach::{Reach, with_vectors};
use crate::gemm::{steps, steps_from};
use crate::isa::Isa;

/// The sums of all keys, for levels of few registers: sums of parts wait in memory, and the channels take turns. The
/// parts of two end at a place of the tile, those of the next two four keys later.
///
/// Measured on Zen 3 at AVX2, this product alone: 12 stores side by side after every twelfth key take 20 % of its time,
/// four after every fourth key 5 %. Which keys are a part depends on a channel's place, never on a query's. Turns of
/// two keys are no faster and err more: constants by 4.7u instead of 4.1u at most.
///
/// # Safety
/// As [`value_group`](super::value_group).
#[inline(always)]
pub(super) unsafe fn sums<I: Isa, const NQ: usize, const M: usize, const OFTEN: bool>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
) -> [[I::F; NQ]; M] {
    let (mut waiting, mut acc) = (Turns::new::<I, NQ, M>(), [[isa.splat(0.0); NQ]; M]);
    let waiting = waiting.opaque();
    // SAFETY: the caller vouches for the addresses of the tile, and `Turns` has room for `M·NQ` vectors.
    unsafe {
        if OFTEN && tile.phase == 0 {
            rounds(isa, a, tile, waiting, &mut acc);
        } else {
            chains::<I, NQ, M, 0, 0>(isa, a, tile, 0..tile.depth, waiting, &mut acc);
        }
        add_stored(isa, &mut acc, waiting);
    }
    acc
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
            let (mut waiting, mut acc) = (Turns::new::<I, NQ, M>(), [[isa.splat(0.0); NQ]; M]);
            let (waiting, mut key) = (waiting.opaque(), 0);
            while key < tile.depth {
                let (end, front, back) = reach.run_from(key, tile.depth);
                with_vectors!(front, back, NQ, FRONT, BACK => {
                    // SAFETY: as above.
                    unsafe { chains::<I, NQ, M, FRONT, BACK>(isa, a, tile, key..end, waiting, &mut acc) }
                });
                key = end;
            }
            // SAFETY: as above.
            unsafe { add_stored(isa, &mut acc, waiting) };
            acc
        },
    )
}

/// The chains of [`sums`], over all keys from the first of a tile on.
///
/// # Safety
/// As [`chains`], for all keys.
#[inline(always)]
unsafe fn rounds<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, depth, .. }: &Tile<'_, NQ>,
    waiting: *mut f32,
    acc: &mut [[I::F; NQ]; M],
) {
    let (mut at, mut row, mut left) = (0, p, depth);
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        macro_rules! turns {
            ($($turn:literal)*) => { loop { $(
                    if left < EVERY {
                        break $turn;
                    }
                    end_part(isa, $turn, acc, waiting);
                    for _ in 0..2 {
                        // Nothing crosses this line: else the compiler would mix so many keys that registers do not
                        // suffice.
                        compiler_fence(Ordering::SeqCst);
                        let keys = EVERY / 2;
                        steps_from::<I, NQ, M, 0, 0>(isa, a, stride, (at, row), keys, acc);
                        at = at.wrapping_add(keys as isize * stride);
                        row = row.wrapping_add(keys * NQ * I::LANES);
                    }
                    left -= EVERY;
            )* } };
        }
        let turn = turns!(0 1 2);
        if left > 0 {
            end_part(isa, turn, acc, waiting);
            steps_from::<I, NQ, M, 0, 0>(isa, a, stride, (at, row), left, acc);
        }
    }
}

/// Some keys of the chains of [`sums`].
///
/// # Safety
/// As [`value_group`](super::value_group), for these keys; `waiting` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn chains<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, phase, .. }: &Tile<'_, NQ>,
    keys: core::ops::Range<usize>,
    waiting: *mut f32,
    acc: &mut [[I::F; NQ]; M],
) {
    let mut key = keys.start;
    while key < keys.end {
        let (turn, past) = ((phase + key) / EVERY % TURNS, (phase + key) % EVERY);
        let next = keys.end.min(key + EVERY - past);
        // SAFETY: the caller vouches for these addresses.
        unsafe {
            if past == 0 {
                end_part(isa, turn, acc, waiting);
            }
            steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, key..next, acc);
        }
        key = next;
    }
}

/// Channels of the largest group.
const CHANNELS: usize = 6;

/// Turns of a part: in each end the parts of two channels.
const TURNS: usize = 3;
/// Keys of a turn.
const EVERY: usize = PART / TURNS;
const _: () = assert!(CHANNELS == 2 * TURNS && PART == TURNS * EVERY && EVERY.is_multiple_of(2));

/// The parts whose turn it is end: their sums wait, and the next parts begin.
///
/// # Safety
/// `waiting` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn end_part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    turn: usize,
    acc: &mut [[I::F; NQ]; M],
    waiting: *mut f32,
) {
    // No closure: it would not get the level's features, unless it were always inlined.
    macro_rules! end {
        ($($m:literal)*) => {{ $(
            if $m < M {
                // SAFETY: the channel is one of M, and the caller vouches for these vectors.
                unsafe { end_channel(isa, $m, acc, waiting) }
            }
        )* }};
    }
    // A jump, after which each channel has registers of its own.
    match turn {
        0 => end!(0 3),
        1 => end!(1 4),
        _ => end!(2 5),
    }
}

/// The part of one channel ends.
///
/// # Safety
/// `waiting` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn end_channel<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    m: usize,
    acc: &mut [[I::F; NQ]; M],
    waiting: *mut f32,
) {
    for n in 0..NQ {
        // SAFETY: a channel of `acc` is one of M, n < NQ, and the caller vouches for these vectors.
        unsafe {
            let slot = waiting.add((m * NQ + n) * I::LANES);
            isa.store_ptr(isa.add(isa.load_ptr(slot), acc[m][n]), slot);
        }
        acc[m][n] = isa.splat(0.0);
    }
}

/// Sums of the parts before, of a group.
#[repr(C, align(64))]
struct Turns([f32; Self::FLOATS]);

impl Turns {
    /// Two vectors of eight for each channel.
    const FLOATS: usize = CHANNELS * 16;

    /// Zeros, with room for a group.
    #[inline(always)]
    fn new<I: Isa, const NQ: usize, const M: usize>() -> Self {
        const { assert!(M <= CHANNELS && M * NQ * I::LANES <= Self::FLOATS || I::LANES != 8) };
        Self([0.0; _])
    }

    /// Their address, opaque: else sums that wait would be kept in some of the few registers as well.
    #[inline(always)]
    fn opaque(&mut self) -> *mut f32 {
        core::hint::black_box(self.0.as_mut_ptr())
    }
}
