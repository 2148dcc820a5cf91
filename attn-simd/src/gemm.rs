//! The register-blocked micro-kernel that both products of many queries share, and the product of scores;
//! [`values()`] is the other one.
//!
//! Lanes are queries. Either product is `C[m][lane] = Σₖ A[m, k]·B[k][lane]`: `A` is read where the caller keeps it and
//! broadcast, `B` is packed with `NQ` vectors to a row, and `M × NQ` accumulators stay in registers.
//!
//! | product | A | m | k | B | C |
//! |---|---|---|---|---|---|
//! | scores `Sᵀ = K·Qᵀ` | keys | key | channel of the head | `q[channel][query]` | `s[key][query]` |
//! | values `Oᵀ = Vᵀ·Pᵀ` | values | channel of the value | key | `p[key][query]` | `o[channel][query]` |
//!
//! Each accumulator is a chain over `k`, in order ([`adds_pairs`] says what it adds). A score is a sum of some chains
//! (see `parts_of`), and so is an output (see `values`). The place of `k` alone decides which sums are added, so that a
//! score or an output depends on nothing but its own row. A last group of fewer than `M` rows reads its last row again,
//! so that it needs no code of its own; the results of the copies are stored into padding.
//!
//! Where the vectors multiply pairs (`Isa::WORD`), A and B hold words, and `k` counts those.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

mod added;
mod reach;
mod values;

pub(crate) use added::added;
pub(crate) use reach::{Reach, with_vectors};
pub(crate) use values::values;

use crate::isa::Isa;

/// Rows of floats inside a slice, a stride apart; the columns of a row lie side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel<'a> {
    /// The slice.
    pub(crate) data: &'a [f32],
    /// Index of the first element of row 0.
    pub(crate) start: usize,
    /// Elements from one row to the next; may be 0 or negative.
    pub(crate) row_stride: isize,
}

impl<'a> Panel<'a> {
    /// Rows packed one after the other.
    pub(crate) fn packed(data: &'a [f32], columns: usize) -> Self {
        Self { data, start: 0, row_stride: columns as isize }
    }

    /// Without the first `rows` rows.
    #[inline(always)]
    pub(crate) fn skip(self, rows: usize) -> Self {
        Self { start: self.start.wrapping_add_signed((rows as isize).wrapping_mul(self.row_stride)), ..self }
    }

    /// The first element of row 0, once all of `rows × columns` elements are known to lie inside the slice.
    #[inline(always)]
    fn checked(self, rows: usize, columns: usize) -> *const f32 {
        assert!(rows > 0 && columns > 0, "an empty panel has no first element");
        let last = (rows as isize - 1).checked_mul(self.row_stride).and_then(|s| (self.start as isize).checked_add(s));
        let Some(last) = last else { panic!("panel overflows") };
        let (low, high) = (last.min(self.start as isize), last.max(self.start as isize));
        assert!(low >= 0 && high as usize + columns <= self.data.len(), "panel reaches outside of its slice");
        // SAFETY: `start` lies inside the slice, as was just asserted.
        unsafe { self.data.as_ptr().add(self.start) }
    }
}

/// Nothing between two groups.
pub(crate) fn nothing() {}

/// Rows of `C` rounded up to whole groups of `M`.
pub(crate) const fn padded(rows: usize, m: usize) -> usize {
    rows.div_ceil(m) * m
}

/// `s[key][query] = Σ_c keys[key][c]·q[c][query]` for `rows` keys. `q`: `[depth][NQ·LANES]`; `s`: at least `rows`
/// rounded up to `M`, times `NQ·LANES`. Scores beyond a vector's reach are left as they were. `between` is called
/// once for each group of `M`.
///
/// A function of its own, as [`values()`] is: what the kernel around it keeps in registers is not in the way of its
/// loops.
#[inline(never)]
pub(crate) fn scores<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    keys: Panel<'_>,
    sizes: (usize, usize),
    reach: &Reach<NQ>,
    q: &[f32],
    s: &mut [f32],
    between: &mut dyn FnMut(),
) {
    isa.vectorize(
        #[inline(always)]
        || scores_inlined::<I, NQ, M>(isa, keys, sizes, reach, q, s, between),
    );
}

#[inline(always)]
fn scores_inlined<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    keys: Panel<'_>,
    (rows, depth): (usize, usize),
    reach: &Reach<NQ>,
    q: &[f32],
    s: &mut [f32],
    between: &mut dyn FnMut(),
) {
    let width = NQ * I::LANES;
    if depth == 0 {
        s[..rows * width].fill(0.0);
        return;
    }
    let a = keys.checked(rows, depth);
    assert!(q.len() >= depth * width && s.len() >= padded(rows, M) * width);
    let (b, c) = (q.as_ptr(), s.as_mut_ptr());
    let part = depth.div_ceil(parts_of::<I>(depth * I::WORD)).next_multiple_of(UNROLL);
    // SAFETY: every row index is below `rows` or clamped to `rows − 1`, so each pointer is the start of a row that
    // `checked` has bounded, with `depth` elements behind it. `q` holds `depth` rows of `NQ` vectors and `s` has room
    // for M rows from `first` on; both were asserted above.
    unsafe {
        let all = reach.is_all(rows);
        // Nearly all groups: whole, and needed by all vectors.
        let whole = if all { rows / M * M } else { 0 };
        let mut done = 0;
        while done < depth {
            let end = if const { I::LANES == 16 } && depth > SHALLOW { depth.min(done + 2 * part) } else { depth };
            for first in (0..whole).step_by(M) {
                if done == 0 {
                    between();
                }
                let start = a.offset(first as isize * keys.row_stride);
                let starts: [*const f32; M] = core::array::from_fn(|m| start.offset(m as isize * keys.row_stride));
                score_group::<I, NQ, M, 0, 0>(isa, &starts, b, (done..end, part), c.add(first * width));
            }
            done = end;
        }
        let mut first = whole;
        while first < rows {
            between();
            if let Some((front, back)) = reach.for_keys(first, M) {
                let starts: [*const f32; M] =
                    core::array::from_fn(|m| a.offset((first + m).min(rows - 1) as isize * keys.row_stride));
                with_vectors!(front, back, NQ, FRONT, BACK => {
                    score_group::<I, NQ, M, FRONT, BACK>(isa, &starts, b, (0..depth, part), c.add(first * width));
                });
            }
            first += M;
        }
    }
}

/// Most channels, or words of them, whose queries stay in the first cache, of levels that take blocks of 48: 30 KiB.
/// Of more, two chains at a time go over all keys of a tile. Measured on a Skylake server, this product alone at 192
/// and 256 channels: 1.1 times as fast; at 128 channels .95.
const SHALLOW: usize = 160;

/// Chains that a score is made of: of equal length, at most `Isa::CHAIN` additions, and three at least of all but the
/// smallest dims.
///
/// Where two weights compete, an output takes the whole error of a score. One chain of 64 or 128 exceeded `2u(2 + S)`
/// in one output of some thousands (1.4 times; a chain of 32 and another of 1 by 1.5); equal parts stay below, for 1 %
/// of the time.
const fn parts_of<I: Isa>(depth: usize) -> usize {
    let chain = if adds_pairs::<I>() { 2 * I::CHAIN } else { I::CHAIN };
    match (depth.div_ceil(chain), depth) {
        (1, ..5) => 1,
        (1, ..17) => 2,
        (1 | 2, _) => 3,
        (parts, _) => parts,
    }
}

/// The scores of `M` keys over some channels, for all vectors but FRONT at the front and BACK at the back, in chains of
/// `part`. They join those of the channels before.
///
/// # Safety
/// Each of `starts` is readable for these elements, `q` for these rows of `NQ` vectors, and `s` is readable and
/// writable for `M` of them.
#[inline(always)]
unsafe fn score_group<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    starts: &[*const f32; M],
    q: *const f32,
    (channels, part): (core::ops::Range<usize>, usize),
    s: *mut f32,
) {
    let depth = channels.end;
    // 32 long registers hold the sums of the chains before, too. Measured on Zen 4: four rows so, instead of eight with
    // sums in memory, make the whole call 2 to 8 % faster. One loop for both kinds would cost AVX2 2 to 11 %.
    if I::LANES == 16 {
        let (mut chain, mut sums) = (channels.start, [[isa.splat(0.0); NQ]; M]);
        // SAFETY: the caller vouches for these addresses.
        unsafe {
            if chain == 0 {
                chain = part.min(depth);
                steps::<I, NQ, M, FRONT, BACK>(isa, starts, 1, q, 0..chain, &mut sums);
            } else {
                for (m, row) in sums.iter_mut().enumerate() {
                    for (n, x) in row.iter_mut().enumerate().take(NQ - BACK).skip(FRONT) {
                        *x = isa.load_ptr(s.add((m * NQ + n) * I::LANES));
                    }
                }
            }
            while chain < depth {
                let end = depth.min(chain + part);
                let mut acc = [[isa.splat(0.0); NQ]; M];
                steps::<I, NQ, M, FRONT, BACK>(isa, starts, 1, q, chain..end, &mut acc);
                add_all(isa, &mut sums, &acc);
                chain = end;
            }
            for (m, row) in sums.iter().enumerate() {
                for (n, x) in row.iter().enumerate().take(NQ - BACK).skip(FRONT) {
                    isa.store_ptr(*x, s.add((m * NQ + n) * I::LANES));
                }
            }
        }
        return;
    }
    let mut chain = channels.start;
    while chain < depth {
        let end = depth.min(chain + part);
        let mut acc = [[isa.splat(0.0); NQ]; M];
        // SAFETY: the caller vouches for these addresses.
        unsafe {
            steps::<I, NQ, M, FRONT, BACK>(isa, starts, 1, q, chain..end, &mut acc);
            // Opaque: else the sums of the chains before would be kept in some of the few registers as well.
            let s = core::hint::black_box(s);
            for (m, row) in acc.iter().enumerate() {
                for (n, x) in row.iter().enumerate().take(NQ - BACK).skip(FRONT) {
                    let slot = s.add((m * NQ + n) * I::LANES);
                    let sum = if chain == 0 { *x } else { isa.add(isa.load_ptr(slot), *x) };
                    isa.store_ptr(sum, slot);
                }
            }
        }
        chain = end;
    }
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

/// Steps of the hot loop between two branches: enough that a branch predictor foresees the end of a short loop, and
/// that few of its instructions move the M places on. Measured on Zen 5 with AVX-512: 4 takes 4 to 5 % off the whole
/// call at head_dim 64. On Zen 3 with AVX2, instead of 1: 11 to 13 % off the product of scores. (On Zen 4 with AVX2, 1
/// had been 1 to 3 % better, when each channel of the product of values had a place of its own.)
const UNROLL: usize = 4;

/// `acc[m][n] += Σₖ a[m][k·step]·b[k][n]` over a range of k, for all vectors but FRONT at the front and BACK at the
/// back. Where chains [add pairs](adds_pairs), the first k begins one.
///
/// # Safety
/// `a[m] + k·step` is readable for every `m < M` and k of the range, and `b` for the vectors of those rows.
#[inline(always)]
unsafe fn steps<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    step: isize,
    b: *const f32,
    range: core::ops::Range<usize>,
    acc: &mut [[I::F; NQ]; M],
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        // Places that move on, not multiples of k: four multiplications less at the start of each short chain.
        let places = (range.start as isize * step, b.add(range.start * NQ * I::LANES));
        steps_from::<I, NQ, M, FRONT, BACK>(isa, a, step, places, range.len(), acc);
    }
}

/// As [`steps`], for `left` steps from a place of `a` and a row of `b` on. Returns those after the last.
///
/// # Safety
/// As [`steps`], for these steps.
#[inline(always)]
unsafe fn steps_from<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    step: isize,
    (mut at, mut row): (isize, *const f32),
    mut left: usize,
    acc: &mut [[I::F; NQ]; M],
) -> (isize, *const f32) {
    // SAFETY: every place that is passed on is that of one of these steps, and the caller vouches for those addresses.
    unsafe {
        while adds_pairs::<I>() && left >= 2 {
            step_twice::<I, NQ, M, FRONT, BACK>(isa, a, (at, step), row, acc);
            (at, row) = (at.wrapping_add(2 * step), row.wrapping_add(2 * NQ * I::LANES));
            left -= 2;
        }
        while left >= UNROLL {
            for _ in 0..UNROLL {
                step_once::<I, NQ, M, FRONT, BACK>(isa, a, at, row, acc);
                (at, row) = (at.wrapping_add(step), row.wrapping_add(NQ * I::LANES));
            }
            left -= UNROLL;
        }
        while left > 0 {
            step_once::<I, NQ, M, FRONT, BACK>(isa, a, at, row, acc);
            (at, row) = (at.wrapping_add(step), row.wrapping_add(NQ * I::LANES));
            left -= 1;
        }
    }
    (at, row)
}

/// Whether chains add pairs: sums of the products of two k. Where multiply-adds are not fused, that takes no more
/// instructions, and a chain errs by half as many additions, so that it may be twice as long.
pub(crate) const fn adds_pairs<I: Isa>() -> bool {
    !I::FUSED && I::WORD == 1
}

/// `acc[m][n] += a[m][at]·b[n] + a[m][at + step]·b[NQ + n]`.
///
/// # Safety
/// As [`step_once`], for two of its steps.
#[inline(always)]
unsafe fn step_twice<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    (at, step): (isize, isize),
    b: *const f32,
    acc: &mut [[I::F; NQ]; M],
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let rows = [row::<I, NQ, FRONT, BACK>(isa, b), row::<I, NQ, FRONT, BACK>(isa, b.add(NQ * I::LANES))];
        for m in 0..M {
            let (x, y) = (isa.splat(*a[m].offset(at)), isa.splat(*a[m].offset(at + step)));
            for n in FRONT..NQ - BACK {
                acc[m][n] = isa.add(acc[m][n], isa.add(isa.mul(x, rows[0][n]), isa.mul(y, rows[1][n])));
            }
        }
    }
}

/// `acc[m][n] += a[m][at]·b[n]` for all vectors but FRONT at the front and BACK at the back.
///
/// # Safety
/// `a[m] + at` is readable for every `m < M`, and `b` for its vectors.
#[inline(always)]
unsafe fn step_once<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    at: isize,
    b: *const f32,
    acc: &mut [[I::F; NQ]; M],
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let row = row::<I, NQ, FRONT, BACK>(isa, b);
        for m in 0..M {
            let x = isa.splat(*a[m].offset(at));
            for n in FRONT..NQ - BACK {
                acc[m][n] = isa.step(x, row[n], acc[m][n]);
            }
        }
    }
}

/// The vectors of a row of B but FRONT at the front and BACK at the back.
///
/// # Safety
/// `b` is readable for those vectors.
#[inline(always)]
unsafe fn row<I: Isa, const NQ: usize, const FRONT: usize, const BACK: usize>(isa: I, b: *const f32) -> [I::F; NQ] {
    core::array::from_fn(
        #[inline(always)]
        |n| {
            if n < FRONT || n >= NQ - BACK {
                isa.splat(0.0)
            } else {
                // SAFETY: the caller vouches for this vector.
                unsafe { isa.load_ptr(b.add(n * I::LANES)) }
            }
        },
    )
}
