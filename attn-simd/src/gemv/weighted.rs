//! Sums of the values of a tile, weighted by some rows of weights.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use core::ops::Range;

use super::{Rows, Stored, TILE, in_line, with_rows};
use crate::gemm::PART;
use crate::isa::Isa;
use crate::math::{add_compensated, finite_or_zero};

/// Outputs of some rows: `[rows][columns]` each.
pub(crate) struct Sums<'s> {
    /// The sums.
    pub(crate) o: &'s mut [f32],
    /// What they have lost to rounding.
    pub(crate) rest: &'s mut [f32],
    /// Sums of some values of a tile that wait for those of the next: of one, two and four parts.
    pub(crate) waiting: [&'s mut [f32]; 3],
}

impl<'s> Sums<'s> {
    /// From the rows that begin at an element on.
    pub(crate) fn from(&mut self, at: usize) -> Sums<'_> {
        let waiting = self.waiting.each_mut().map(|array| &mut array[at..]);
        Sums { o: &mut self.o[at..], rest: &mut self.rest[at..], waiting }
    }
}

/// `o[r][c] = o[r][c]·factor[r] + Σ_j p[r][j]·value_j[c]` for `rows` rows. `p`: `[rows][TILE]`; sums:
/// `[rows][columns]`. `columns` is a multiple of `LANES`.
///
/// A tile is added up in a tree: chains of eight values, pairs of those, pairs of pairs, halves; what comes out joins a
/// compensated sum. The chains are what errs most, by 2.5u at most (see [`PART`]).
#[inline(always)]
pub(crate) fn weighted<I: Isa, T: Stored>(
    isa: I,
    rows: usize,
    values: Rows<'_, T>,
    (p, factor): (&[f32], &[f32]),
    sums: Sums<'_>,
) {
    let columns = values.columns;
    let Sums { o, rest, waiting: [one, two, four] } = sums;
    let arrays = [o, rest, one, two, four];
    assert!(columns.is_multiple_of(I::LANES) && arrays.iter().all(|array| array.len() >= rows * columns));
    assert!(p.len() >= rows * TILE && factor.len() >= rows);
    let o = arrays.map(|array| array.as_mut_ptr());
    with_rows!(I, rows, [R, _K, _S, C] => {
        // SAFETY: the assertions above: R rows of weights, factors and outputs in whole vectors; the values are checked
        // by `Rows`.
        unsafe {
            let (p, factor) = (p.as_ptr(), factor.as_ptr());
            weighted_of::<I, T, R, C>(isa, values, p, factor, o)
        }
    });
}

/// Values whose weighted sum is added to the outputs at once. Where rows and channels are too many for the registers,
/// several blocks pass over the same values; with few values at a time all but the first find them in the nearest
/// cache, and memory is asked as steadily as it can answer.
const SUM: usize = PART;

/// # Safety
/// `p` is readable for R rows of TILE floats, `factor` for R; the arrays `o` readable and writable for R rows of
/// `columns` floats, a multiple of LANES.
#[inline(always)]
unsafe fn weighted_of<I: Isa, T: Stored, const R: usize, const C: usize>(
    isa: I,
    values: Rows<'_, T>,
    p: *const f32,
    factor: *const f32,
    o: [*mut f32; 5],
) {
    let columns = values.columns;
    let vectors = columns / I::LANES;
    for first in (0..values.len()).step_by(SUM) {
        let some = first..values.len().min(first + SUM);
        let mut done = 0;
        // SAFETY: each block of vectors lies below `columns`, and the caller vouches for the rest.
        unsafe {
            while vectors - done >= C {
                block::<I, T, R, C>(isa, values, some.clone(), p, factor, o, done * I::LANES);
                done += C;
            }
            if C > 4 && vectors - done >= 4 {
                block::<I, T, R, 4>(isa, values, some.clone(), p, factor, o, done * I::LANES);
                done += 4;
            }
            while C > 1 && vectors > done {
                block::<I, T, R, 1>(isa, values, some.clone(), p, factor, o, done * I::LANES);
                done += 1;
            }
        }
    }
}

/// While the `j`-th of some values is read by the block of C vectors from `from` on: the part of all their rows that is
/// then due, if 2^`blocks` blocks go through them, one after another, and all is asked for once, in the order of
/// memory.
///
/// # Safety
/// `j` is one of the values, and the block one of those that make up their columns.
#[inline(always)]
unsafe fn in_order<I: Isa, T: Stored, const C: usize>(
    values: &Rows<'_, T>,
    some: &Range<usize>,
    blocks: u32,
    from: usize,
    j: usize,
) -> *const T {
    let width = C * I::LANES;
    let nth = from / width * some.len() + (j - some.start);
    // SAFETY: the quotient is below the number of those values, and the part inside their columns.
    unsafe { values.at(some.start + (nth >> blocks)).add((nth & ((1 << blocks) - 1)) * width) }
}

/// Values that one lead serves.
const GROUP: usize = 4;

/// C vectors of channels from `from` on, of some values of a tile.
///
/// # Safety
/// As [`weighted_of`]; the vectors lie below `columns`, the values in the tile.
#[inline(always)]
unsafe fn block<I: Isa, T: Stored, const R: usize, const C: usize>(
    isa: I,
    values: Rows<'_, T>,
    some: Range<usize>,
    p: *const f32,
    factor: *const f32,
    o: [*mut f32; 5],
    from: usize,
) {
    let columns = values.columns;
    // Blocks ask for what they read themselves, but of f32, whose rows are long, for their part in the order of memory.
    // (Measured on Zen 5: 1.06 times as fast; halves 0.97.)
    let blocks = columns / (C * I::LANES);
    let shared = I::LANES == 16
        && size_of::<T>() == 4
        && C > 1
        && columns.is_multiple_of(C * I::LANES)
        && blocks.is_power_of_two()
        && blocks > 1;
    let blocks = blocks.max(1).trailing_zeros();
    let mut acc = [[isa.splat(0.0); C]; R];
    let [far, near, pages] = values.distances();
    // SAFETY: rows of values in whole vectors are checked by `Rows`; the caller vouches for weights, factors and
    // outputs.
    unsafe {
        for first in some.clone().step_by(GROUP) {
            let ahead = values.ahead(first, [far, near]);
            if from == 0 {
                values.prefetch_page(isa, first, pages);
            }
            for j in first..some.end.min(first + GROUP) {
                let value = values.at(j).add(from);
                // Of blocks that share a line, the first asks for it.
                if C >= in_line::<T>(I::LANES) || (from * size_of::<T>()).is_multiple_of(64) {
                    let line_start = if shared { in_order::<I, _, C>(&values, &some, blocks, from, j) } else { value };
                    for c in (0..C).step_by(const { in_line::<T>(I::LANES) }) {
                        let line = line_start.add(c * I::LANES).cast::<u8>();
                        ahead.of(isa, line);
                    }
                }
                let weight: [I::F; R] = core::array::from_fn(
                    #[inline(always)]
                    |r| isa.splat(*p.add(r * TILE + j)),
                );
                for c in 0..C {
                    let x = T::load(isa, value.add(c * I::LANES));
                    for r in 0..R {
                        acc[r][c] = isa.mul_add(weight[r], x, acc[r][c]);
                    }
                }
            }
        }
        // The n-th part ends as many nodes of the tree as n has ones at its end, and the last one all.
        let [o, rest, waiting @ ..] = o;
        let (nth, last) = (some.start / SUM, some.end == values.len());
        let ends = nth.trailing_ones() as usize;
        for (level, slots) in waiting.into_iter().enumerate() {
            if nth >> level & 1 == 1 && (last || level < ends) {
                for r in 0..R {
                    for c in 0..C {
                        let slot = slots.add(r * columns + from + c * I::LANES);
                        acc[r][c] = isa.add(isa.load_ptr(slot), acc[r][c]);
                    }
                }
            }
        }
        if !last {
            for r in 0..R {
                for c in 0..C {
                    isa.store_ptr(acc[r][c], waiting[ends].add(r * columns + from + c * I::LANES));
                }
            }
            return;
        }
        // Through memory: what follows is too long to be unrolled, and an index that is not a constant would keep the
        // accumulators in memory while they add up.
        let mut tile = [[core::mem::MaybeUninit::<[f32; 16]>::uninit(); C]; R];
        for r in 0..R {
            for c in 0..C {
                isa.store_ptr(acc[r][c], tile[r][c].as_mut_ptr().cast());
            }
        }
        for r in 0..R {
            let factor = isa.splat(*factor.add(r));
            for c in 0..C {
                let at = r * columns + from + c * I::LANES;
                let (o, rest) = (o.add(at), rest.add(at));
                let before = (isa.load_ptr(o), isa.load_ptr(rest));
                let part = isa.load_ptr(tile[r][c].as_ptr().cast());
                let (sum, missing) = add_compensated(isa, before, Some(factor), part);
                isa.store_ptr(sum, o);
                isa.store_ptr(finite_or_zero(isa, missing), rest);
            }
        }
    }
}
