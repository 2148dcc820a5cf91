//! The product of values and weights: chains of some keys, whose sums are added up. Levels do that in three ways:
//! 32 long registers by [`halves`] of a tile, AVX2 with channels that take [`turns`], short registers in [`parts`].
//!
//! Here are the door, the groups of channels, the chains, and how an output takes their sum.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

mod halves;
mod parts;
mod turns;

use self::parts::part_by_part;
use super::reach::{Reach, with_vectors};
use super::{Panel, UNROLL, adds_pairs, padded, steps};
use crate::isa::Isa;
use crate::scoring::KV_TILE;

/// `o[c][query] = o[c][query]·factor[query] + Σ_key values[key][c]·p[key][query]` for `columns` channels and `depth`
/// keys; without factors as if `o` held zeros. `p`: `[depth][NQ·LANES]`, of which each vector's reach is read;
/// `factor`: `[NQ·LANES]`; `o`: at least `columns` rounded up to `M`, times `NQ·LANES`. The first key is the `phase`-th
/// of its tile. `between` is called once for each group of channels.
#[inline(never)]
pub(crate) fn values<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    values: Panel<'_>,
    sizes: (usize, usize),
    (phase, reach): (usize, &Reach<NQ>),
    weights: (&[f32], Option<&[f32]>),
    o: &mut [f32],
    between: &mut dyn FnMut(),
) {
    isa.vectorize(
        #[inline(always)]
        || values_inlined::<I, NQ, M>(isa, values, sizes, (phase, reach), weights, o, between),
    );
}

#[inline(always)]
fn values_inlined<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    values: Panel<'_>,
    (depth, columns): (usize, usize),
    (phase, reach): (usize, &Reach<NQ>),
    (p, factor): (&[f32], Option<&[f32]>),
    o: &mut [f32],
    between: &mut dyn FnMut(),
) {
    let width = NQ * I::LANES;
    if columns == 0 {
        return;
    }
    let a = values.checked(depth, columns);
    assert!(
        p.len() >= depth * width && factor.is_none_or(|f| f.len() >= width) && o.len() >= padded(columns, M) * width
    );
    assert!(reach.end.iter().all(|&end| end <= depth));
    let (b, c) = (p.as_ptr(), o.as_mut_ptr());
    let factors = factor.map(<[f32]>::as_ptr);
    let (stride, reach) = (values.row_stride, (!reach.is_all(depth)).then_some(reach));
    let tile = Tile { a, stride, p: b, depth, phase, reach };
    let mut first = 0;
    while first < columns {
        let left = columns - first;
        // SAFETY: every column is below `columns` or clamped to the last, so each pointer lies in row 0 of the panel
        // and reaches, in steps of the row stride, only elements that `checked` has bounded. `p` holds `depth` rows of
        // `NQ` vectors and `o` has room for whole groups of M rows; both were asserted above, and that no reach is
        // beyond `depth`, and that the keys are those of one tile.
        unsafe {
            let (a, o) = (a.add(first), c.add(first * width));
            if I::LANES < 8 {
                let end = columns.min(first + parts::CHANNELS);
                part_by_part::<I, NQ, M>(isa, &tile, first..end, factors, o, between);
                first = end;
                continue;
            }
            between();
            // A call of its own for each: with one for all kinds of places, each costs a register or a load. Eight
            // channels at the end are two groups of four, so that no group reads a row twice.
            first += if M > 4 && (left == 4 || left == 8) {
                value_group::<I, NQ, 4, true>(isa, &core::array::from_fn(|m| a.add(m)), &tile, factors, o)
            } else if left >= M {
                value_group::<I, NQ, M, true>(isa, &core::array::from_fn(|m| a.add(m)), &tile, factors, o)
            } else {
                let starts = core::array::from_fn(|m| a.add(m.min(left - 1)));
                value_group::<I, NQ, M, false>(isa, &starts, &tile, factors, o)
            };
        }
    }
}

/// The values of a tile, and its weights.
struct Tile<'a, const NQ: usize> {
    /// The first row of values.
    a: *const f32,
    /// Elements from one row to the next.
    stride: isize,
    /// `[depth][NQ·LANES]`.
    p: *const f32,
    /// Keys.
    depth: usize,
    /// Place of the first key in its tile.
    phase: usize,
    /// `None` where all vectors need all keys.
    reach: Option<&'a Reach<NQ>>,
}

/// Keys of a chain of multiply-adds of an output. Equal products err most, because every addition rounds the same way:
/// a chain of 12 is off by 3.3u at most, one of 64 by 16.5u. (16: 4.5u, more than is allowed.)
const PART: usize = 12;
/// The same in pairs: ten additions.
const PART_OF_PAIRS: usize = 20;
/// Keys of half a tile.
const HALF: usize = KV_TILE / 2;
const _: () = assert!(PART.is_multiple_of(UNROLL) && HALF.is_multiple_of(UNROLL) && PART_OF_PAIRS.is_multiple_of(2));

/// Keys of a part at a level.
const fn part_len<I: Isa>() -> usize {
    if adds_pairs::<I>() { PART_OF_PAIRS } else { PART }
}

/// `M` columns of the output from all keys. Returns `M`. Only what is OFTEN called has a loop for whole tiles.
///
/// # Safety
/// Each of `a` is readable, and so are the `depth − 1` places `stride` further each; `p` for `depth` rows of `NQ`
/// vectors, and no reach goes beyond; `factors` for `NQ` vectors; `o` is readable and writable for `M` of them.
#[inline(always)]
unsafe fn value_group<I: Isa, const NQ: usize, const M: usize, const OFTEN: bool>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
    factors: Option<*const f32>,
    o: *mut f32,
) -> usize {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let sum = match tile.reach {
            None if I::LANES == 16 => halves::sums(isa, a, tile),
            None => turns::sums::<I, NQ, M, OFTEN>(isa, a, tile),
            Some(reach) if I::LANES == 16 => halves::sums_within(isa, a, tile, reach),
            Some(reach) => turns::sums_within(isa, a, tile, reach),
        };
        add_to(isa, &sum, factors, o);
    }
    M
}

/// A chain over some keys, for all vectors.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, phase, .. }: &Tile<'_, NQ>,
    part: core::ops::Range<usize>,
) -> [[I::F; NQ]; M] {
    let mut acc = [[isa.splat(0.0); NQ]; M];
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        // Loops whose length is known. A whole part begins a pair.
        if part.len() == part_len::<I>() {
            steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + part_len::<I>(), &mut acc);
        } else if I::LANES == 16 && part.len() == HALF % PART {
            steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + HALF % PART, &mut acc);
        } else {
            chain::<I, NQ, M, 0, 0>(isa, a, stride, p, (phase, part), &mut acc);
        }
    }
    acc
}

/// A chain over some keys, for the vectors that need them.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn part_within<I: Isa, const NQ: usize, const M: usize>(
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
/// As [`value_group`], for these keys.
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
unsafe fn add_stored<I: Isa, const NQ: usize, const M: usize>(isa: I, sum: &mut [[I::F; NQ]; M], from: *const f32) {
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
unsafe fn add_to<I: Isa, const NQ: usize, const M: usize>(
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
