//! The product of values and weights: chains of some keys, whose sums are added up. Levels do that in three ways:
//! 32 long registers by [`halves`] of a tile, AVX2 with channels that take [`turns`], short registers in [`parts`].
//!
//! Here are the door and the groups of channels.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

mod halves;
mod parts;
mod tile;
mod turns;

use self::halves::half_by_half;
use self::parts::part_by_part;
use self::tile::{Tile, add_to};
use super::reach::Reach;
use super::{Panel, padded};
use crate::isa::Isa;

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
        // beyond `depth`.
        unsafe {
            let (a, o) = (a.add(first), c.add(first * width));
            // Constant conditions, here and below, so that no code of other levels is compiled.
            if const { I::LANES < 8 } {
                let end = columns.min(first + parts::CHANNELS);
                part_by_part::<I, NQ, M>(isa, &tile, first..end, factors, o, between);
                first = end;
            } else if const { I::LANES == 16 } {
                let end = columns.min(first + halves::GROUPS * M);
                half_by_half::<I, NQ, M>(isa, &tile, first..end, factors, o, between);
                first = end;
            } else {
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
            None => turns::sums::<I, NQ, M, OFTEN>(isa, a, tile),
            Some(reach) => turns::sums_within(isa, a, tile, reach),
        };
        add_to(isa, &sum, factors, o);
    }
    M
}
