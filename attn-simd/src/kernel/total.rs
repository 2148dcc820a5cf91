//! Sums over more keys than a few tiles: what [`GROUP`] tiles have added up joins a total of two floats.
//!
//! A running sum of n terms is off by as much as n/4 units, if all have one sign. A total is off by one or two,
//! whatever n is: it keeps what each addition rounds off and adds it to the next term ([`add_compensated`]).
//!
//! Groups lie at multiples of their size. A group of which a row sees no key adds zeros, which change no bit of its
//! total, so that a row does not depend on what its neighbours see. Where a row's maximum has grown since the last
//! group its total is multiplied by a factor; what that rounds off is kept too.

use crate::isa::Isa;
use crate::math::{add_compensated, exp2};
use crate::tiles::Tiles;

/// Tiles that are added up as they come before they join the total: four equal ones are added up without an error.
pub(crate) const GROUP: usize = 4;

/// Keys of a group.
pub(crate) const fn keys(tiles: &Tiles) -> usize {
    GROUP * tiles.kv_tile
}

/// The totals of a block: outputs, sums of weights, and the maxima that both are relative to.
pub(crate) struct Total<'w> {
    /// `[channel][query]`: the sum, and what is missing in it.
    pub(crate) out: [&'w mut [f32]; 2],
    /// `[query]`: the same of the weights.
    pub(crate) sum: [&'w mut [f32]; 2],
    /// `[query]`.
    pub(crate) max: &'w mut [f32],
}

impl Total<'_> {
    /// Takes what a group has added up, relative to `max`; the group's sums of weights begin anew. Without a total yet
    /// (`first`), that is what it becomes. `out` holds rows of `width` lanes.
    #[inline(never)]
    pub(crate) fn join<I: Isa>(
        &mut self,
        isa: I,
        to_log2: f32,
        (max, sum, out): (&[f32], &mut [f32], &[f32]),
        width: usize,
        first: bool,
    ) {
        isa.vectorize(
            #[inline(always)]
            || self.join_inlined(isa, to_log2, (max, &mut sum[..width], out), width, first),
        );
    }

    #[inline(always)]
    fn join_inlined<I: Isa>(
        &mut self,
        isa: I,
        to_log2: f32,
        (max, sum, out): (&[f32], &mut [f32], &[f32]),
        width: usize,
        first: bool,
    ) {
        if first {
            self.out[0][..out.len()].copy_from_slice(out);
            self.out[1][..out.len()].fill(0.0);
            self.sum[0][..width].copy_from_slice(sum);
            self.sum[1][..width].fill(0.0);
        } else {
            let (c, none, zero, one) =
                (isa.splat(to_log2), isa.splat(f32::NEG_INFINITY), isa.splat(0.0), isa.splat(1.0));
            for lane in (0..width).step_by(I::LANES) {
                let (old, max) = (isa.load(&self.max[lane..]), isa.load(&max[lane..]));
                let against = isa.select(isa.eq(max, none), zero, max);
                let factor = isa.select(isa.eq(old, max), one, exp2(isa, isa.mul(isa.sub(old, against), c)));
                let mut lanes = [1.0; 16];
                isa.store(factor, &mut lanes);
                let factor = lanes.iter().any(|&x| x != 1.0).then_some(factor);
                add(isa, factor, sum, &mut self.sum, (width, lane));
                add(isa, factor, out, &mut self.out, (width, lane));
            }
        }
        self.max[..width].copy_from_slice(&max[..width]);
        sum.fill(0.0);
    }
}

/// `whole + rest = (whole + rest)·factor + part`, for the vector at `lane` of every row.
#[inline(always)]
fn add<I: Isa>(
    isa: I,
    factor: Option<I::F>,
    part: &[f32],
    [whole, rest]: &mut [&mut [f32]; 2],
    (width, lane): (usize, usize),
) {
    let zero = isa.splat(0.0);
    // 0 as long as all sums are finite.
    let mut check = zero;
    let rows = whole.chunks_exact_mut(width).zip(rest.chunks_exact_mut(width));
    for (part, (whole, rest)) in part.chunks_exact(width).zip(rows) {
        let (part, whole, rest) =
            (&part[lane..][..I::LANES], &mut whole[lane..][..I::LANES], &mut rest[lane..][..I::LANES]);
        let (sum, missing) = add_compensated(isa, (isa.load(whole), isa.load(rest)), factor, isa.load(part));
        isa.store(sum, whole);
        isa.store(missing, rest);
        check = isa.mul_add(sum, zero, check);
    }
    let mut lanes = [0.0; 16];
    isa.store(check, &mut lanes);
    if lanes.iter().any(|&x| x != 0.0) {
        // Nothing is missing in an infinite sum.
        for row in rest.chunks_exact_mut(width) {
            row[lane..][..I::LANES].iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
        }
    }
}
