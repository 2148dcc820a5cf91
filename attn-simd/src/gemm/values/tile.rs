//! A tile of values with its weights: chains over some of its keys, sums that wait in memory, and the output.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use crate::gemm::reach::{Reach, with_vectors};
use crate::gemm::{UNROLL, adds_pairs, steps};
use crate::isa::Isa;
use crate::scoring::KV_TILE;

/// The values of a tile, and its weights.
pub(super) struct Tile<'a, const NQ: usize> {
    /// The first row of values.
    pub(super) a: *const f32,
    /// Elements from one row to the next.
    pub(super) stride: isize,
    /// `[depth][NQ·LANES]`.
    pub(super) p: *const f32,
    /// Keys.
    pub(super) depth: usize,
    /// Place of the first key in its tile.
    pub(super) phase: usize,
    /// `None` where all vectors need all keys.
    pub(super) reach: Option<&'a Reach<NQ>>,
}

/// Keys of a chain of multiply-adds of an output. Equal products err most, because every addition rounds the same way:
/// a chain of 12 is off by 3.3u at most, one of 64 by 16.5u. (16: 4.5u, more than is allowed.)
pub(super) const PART: usize = 12;
/// The same in pairs: ten additions.
const PART_OF_PAIRS: usize = 20;
/// Keys of half a tile.
pub(super) const HALF: usize = KV_TILE / 2;
const _: () = assert!(PART.is_multiple_of(UNROLL) && HALF.is_multiple_of(UNROLL) && PART_OF_PAIRS.is_multiple_of(2));

/// Keys of a part at a level.
pub(super) const fn part_len<I: Isa>() -> usize {
    if adds_pairs::<I>() { PART_OF_PAIRS } else { PART }
}

/// A chain over some keys, for all vectors.
///
/// # Safety
/// As [`value_group`](super::value_group), for these keys.
#[inline(always)]
pub(super) unsafe fn part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, phase, .. }: &Tile<'_, NQ>,
    part: core::ops::Range<usize>,
) -> [[I::F; NQ]; M] {
    let mut acc = [[isa.splat(0.0); NQ]; M];
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        // A loop whose length is known. A whole part begins a pair.
        if part.len() == part_len::<I>() {
            steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + part_len::<I>(), &mut acc);
        } else {
            chain::<I, NQ, M, 0, 0>(isa, a, stride, p, (phase, part), &mut acc);
        }
    }
    acc
}

/// A chain over some keys, for the vectors that need them.
///
/// # Safety
/// As [`value_group`](super::value_group), for these keys.
#[inline(always)]
pub(super) unsafe fn part_within<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, phase, .. }: &Tile<'_, NQ>,
    reach: &Reach<NQ>,
    part: core::ops::Range<usize>,
) -> [[I::F; NQ]; M] {
    let (mut acc, mut key) = ([[isa.splat(0.0); NQ]; M], part.start);
    while key < part.end {
        let (end, front, back) = reach.run_from(key, part.end);
        with_vectors!(front, back, NQ, FRONT, BACK => {
            // SAFETY: the caller vouches for these addresses.
            unsafe { chain::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, (phase, key..end), &mut acc) }
        });
        key = end;
    }
    acc
}

/// A chain, or some of it. Where chains add pairs, their places in the tile are even and odd: a first key at an odd
/// place stands alone.
///
/// # Safety
/// As [`value_group`](super::value_group), for these keys.
#[inline(always)]
unsafe fn chain<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    p: *const f32,
    (phase, mut keys): (usize, core::ops::Range<usize>),
    acc: &mut [[I::F; NQ]; M],
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        if adds_pairs::<I>() && (phase + keys.start) % 2 == 1 && !keys.is_empty() {
            steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, keys.start..keys.start + 1, acc);
            keys.start += 1;
        }
        steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, keys, acc);
    }
}

/// Writes sums to memory.
///
/// # Safety
/// `to` is writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn store_all<I: Isa, const NQ: usize, const M: usize>(isa: I, sum: &[[I::F; NQ]; M], to: *mut f32) {
    for m in 0..M {
        for n in 0..NQ {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            unsafe { isa.store_ptr(sum[m][n], to.add((m * NQ + n) * I::LANES)) }
        }
    }
}

/// `sum = from + sum`.
///
/// # Safety
/// `from` is readable for `M·NQ` vectors.
#[inline(always)]
pub(super) unsafe fn add_stored<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    sum: &mut [[I::F; NQ]; M],
    from: *const f32,
) {
    for m in 0..M {
        for n in 0..NQ {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            let before = unsafe { isa.load_ptr(from.add((m * NQ + n) * I::LANES)) };
            sum[m][n] = isa.add(before, sum[m][n]);
        }
    }
}

/// `o[m][n] = o[m][n]·factor[n] + acc[m][n]`; without factors as if `o` held zeros.
///
/// # Safety
/// `factors` are readable for `NQ` vectors; `o` is readable and writable for `M·NQ`.
#[inline(always)]
pub(super) unsafe fn add_to<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    acc: &[[I::F; NQ]; M],
    factors: Option<*const f32>,
    o: *mut f32,
) {
    for (m, row) in acc.iter().enumerate() {
        for (n, x) in row.iter().enumerate() {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            unsafe {
                let slot = o.add((m * NQ + n) * I::LANES);
                let sum = match factors {
                    Some(factors) => isa.mul_add(isa.load_ptr(slot), isa.load_ptr(factors.add(n * I::LANES)), *x),
                    // What a row of zeros would give: never −0.
                    None => isa.add(*x, isa.splat(0.0)),
                };
                isa.store_ptr(sum, slot);
            }
        }
    }
}

/// Adds sums to those that wait, unless they are the first, and keeps them waiting, or adds the last to the output.
///
/// # Safety
/// As [`add_to`]; the sums that wait are readable and writable for `M·NQ` vectors.
#[inline(always)]
pub(super) unsafe fn join<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    mut sum: [[I::F; NQ]; M],
    (is_first, is_last): (bool, bool),
    factors: Option<*const f32>,
    (waiting, o): (*mut f32, *mut f32),
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        if !is_first {
            add_stored(isa, &mut sum, waiting);
        }
        if is_last {
            add_to(isa, &sum, factors, o);
        } else {
            store_all(isa, &sum, waiting);
        }
    }
}
