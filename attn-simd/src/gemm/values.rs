//! The product of values and weights: chains of some keys, added up in halves of a tile.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use super::reach::{Reach, with_vectors};
use super::{Panel, UNROLL, padded, steps};
use crate::isa::Isa;
use crate::scoring::KV_TILE;

/// `o[c][query] = o[c][query]·factor[query] + Σ_key values[key][c]·p[key][query]` for `columns` channels and `depth`
/// keys; without factors as if `o` held zeros, whatever it does. `p`: `[depth][NQ·LANES]`, of which each vector's reach
/// is read; `factor`: `[NQ·LANES]`; `o`: at least `columns` rounded up to `M`, times `NQ·LANES`. The first key is the
/// `phase`-th of its tile. `between` is called before each group of `M`.
#[inline(never)]
pub(crate) fn values<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    values: Panel<'_>,
    sizes: (usize, usize),
    (phase, reach): (usize, &Reach<NQ>),
    weights: (&[f32], Option<&[f32]>),
    o: &mut [f32],
    between: impl FnMut(),
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
    mut between: impl FnMut(),
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
    let factors: Option<[I::F; NQ]> = factor.map(|factor| core::array::from_fn(|n| isa.load(&factor[n * I::LANES..])));
    let all = reach.is_all(depth);
    let mut first = 0;
    while first < columns {
        between();
        // SAFETY: every column is below `columns` or clamped to `columns − 1`, so each pointer lies in row 0 of the
        // panel and reaches, in steps of the row stride, only elements that `checked` has bounded. `p` holds `depth`
        // rows of `NQ` vectors and `o` has room for M rows from `first` on; both were asserted above, and that no reach
        // is beyond `depth`, and that the keys are those of one tile.
        unsafe {
            let o = c.add(first * width);
            // Several ways to the same bits: where no vector stops short, and no row is read twice, the loops are
            // simpler.
            let sizes = (b, depth);
            if all && first + M <= columns {
                let starts: [*const f32; M] = core::array::from_fn(|m| a.add(first + m));
                value_group::<I, NQ, M>(isa, &starts, values.row_stride, sizes, (phase, None), &factors, o);
            } else if all && M > 4 && first + 4 == columns {
                let starts: [*const f32; 4] = core::array::from_fn(|m| a.add(first + m));
                value_group::<I, NQ, 4>(isa, &starts, values.row_stride, sizes, (phase, None), &factors, o);
            } else {
                let starts: [*const f32; M] = core::array::from_fn(|m| a.add((first + m).min(columns - 1)));
                let reach = (!all).then_some(reach);
                value_group::<I, NQ, M>(isa, &starts, values.row_stride, sizes, (phase, reach), &factors, o);
            }
        }
        first += M;
    }
}

/// Keys of a chain of multiply-adds of an output. Equal products are what errs most, because every addition rounds the
/// same way: a chain of 12 is off by 3.3u at most, one of 64 by 16.5u. (16: 4.5u, more than may be.)
const PART: usize = 12;
/// Keys of half a tile.
const HALF: usize = KV_TILE / 2;
const _: () = assert!(PART.is_multiple_of(UNROLL) && HALF.is_multiple_of(UNROLL));

/// The end of the part of a half that starts at `from`, the `phase + from`-th key of its tile: 12, 12 and 8 keys.
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

/// `M` columns of the output from all keys, a part of them at a time. `phase` is the place of the first in its tile.
///
/// Where there are 32 long registers, accumulators of a part and of half a tile are in them at once; elsewhere sums of
/// parts wait in memory. An addition takes the place of a multiply-add on Intel, and none on AMD: parts of 12 instead
/// of 8 make a whole call 3 to 4 % faster on Granite Rapids. Measured on Zen 4 with AVX-512 and parts of 8, shares of
/// the rate of one chain: in registers 0.99, in memory 0.9. With AVX2 in memory 0.95 to 0.97, and with parts of 8 0.88
/// to 0.91.
///
/// # Safety
/// Each of `a` is readable, and so are the `depth − 1` places `stride` further each; `p` for `depth` rows of `NQ`
/// vectors, and no reach goes beyond; `o` is readable and writable for `M` of them.
#[inline(always)]
unsafe fn value_group<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    (p, depth): (*const f32, usize),
    (phase, reach): (usize, Option<&Reach<NQ>>),
    factors: &Option<[I::F; NQ]>,
    o: *mut f32,
) {
    // SAFETY: the caller vouches for these addresses; parts and halves are below `depth`, and `Waiting` holds what is
    // stored there.
    unsafe {
        if I::LANES < 16 {
            const { assert!(I::LANES == 16 || NQ * M * I::LANES <= Waiting::LEN) };
            let mut waiting = Waiting([core::mem::MaybeUninit::uninit(); Waiting::LEN]);
            let waiting: *mut f32 = waiting.0.as_mut_ptr().cast();
            let mut to = depth.min(PART - phase % PART);
            let mut sum = part::<I, NQ, M>(isa, a, stride, p, 0..to, reach);
            while to < depth {
                store_all(isa, &sum, waiting);
                let from = to;
                to = depth.min(from + PART);
                sum = part::<I, NQ, M>(isa, a, stride, p, from..to, reach);
                // Opaque, so that the sums before are loaded here and not kept in registers that there are not.
                add_stored(isa, &mut sum, core::hint::black_box(waiting));
            }
            return add_to(isa, &sum, factors, o);
        }
        let middle = depth.min(HALF.saturating_sub(phase));
        let mut sum = half::<I, NQ, M>(isa, a, stride, p, 0..middle, (phase, reach));
        if middle < depth {
            let second = half::<I, NQ, M>(isa, a, stride, p, middle..depth, (phase, reach));
            add_all(isa, &mut sum, &second);
        }
        add_to(isa, &sum, factors, o);
    }
}

/// Sums of the parts before, an accumulator after the other.
#[repr(C, align(64))]
struct Waiting([core::mem::MaybeUninit<f32>; Self::LEN]);

impl Waiting {
    /// Floats of the most accumulators of a level with short vectors: 6 × 2 of 8.
    const LEN: usize = 96;
}

/// Half a tile: parts, added up in order.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn half<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    p: *const f32,
    keys: core::ops::Range<usize>,
    (phase, reach): (usize, Option<&Reach<NQ>>),
) -> [[I::F; NQ]; M] {
    let mut from = part_end(phase, keys.start, keys.end);
    // SAFETY: the caller vouches for these addresses.
    let mut sum = unsafe { part::<I, NQ, M>(isa, a, stride, p, keys.start..from, reach) };
    while from < keys.end {
        let to = part_end(phase, from, keys.end);
        // SAFETY: the caller vouches for these addresses.
        let acc = unsafe { part::<I, NQ, M>(isa, a, stride, p, from..to, reach) };
        add_all(isa, &mut sum, &acc);
        from = to;
    }
    sum
}

/// A chain over some keys.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    p: *const f32,
    part: core::ops::Range<usize>,
    reach: Option<&Reach<NQ>>,
) -> [[I::F; NQ]; M] {
    let mut acc = [[isa.splat(0.0); NQ]; M];
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        match reach {
            // Loops whose length is known.
            None if part.len() == PART => {
                steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + PART, &mut acc)
            }
            None if I::LANES == 16 && part.len() == HALF % PART => {
                steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + HALF % PART, &mut acc)
            }
            None => steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part, &mut acc),
            Some(reach) => reach.runs(
                #[inline(always)]
                |keys, front, back| {
                    let keys = keys.start.max(part.start)..keys.end.min(part.end);
                    with_vectors!(front, back, NQ, FRONT, BACK => {
                        steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, keys, &mut acc);
                    });
                },
            ),
        }
    }
    acc
}

/// `sum += acc`.
#[inline(always)]
fn add_all<I: Isa, const NQ: usize, const M: usize>(isa: I, sum: &mut [[I::F; NQ]; M], acc: &[[I::F; NQ]; M]) {
    for (sum, acc) in sum.iter_mut().zip(acc) {
        for (sum, x) in sum.iter_mut().zip(acc) {
            *sum = isa.add(*sum, *x);
        }
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
/// `o` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn add_to<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    acc: &[[I::F; NQ]; M],
    factors: &Option<[I::F; NQ]>,
    o: *mut f32,
) {
    for (m, row) in acc.iter().enumerate() {
        for (n, x) in row.iter().enumerate() {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            unsafe {
                let slot = o.add((m * NQ + n) * I::LANES);
                let sum = match factors {
                    Some(factors) => isa.mul_add(isa.load_ptr(slot), factors[n], *x),
                    // What a row of zeros would give: never −0.
                    None => isa.add(*x, isa.splat(0.0)),
                };
                isa.store_ptr(sum, slot);
            }
        }
    }
}
