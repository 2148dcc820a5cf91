//! Sums over more keys than a few tiles: groups of tiles, and a total of two floats that groups join.
//!
//! A running sum of n terms is off by as much as n/4 units, if all have one sign. A total is off by one or two,
//! whatever n is: it keeps what each addition rounds off and adds it to the next term ([`add_compensated`]). That takes
//! time, so [`GROUP`] tiles are added up plainly first, and then [`GROUPS`] groups: they wait in arrays of their own.
//!
//! Groups start at multiples of their size. If a row sees no key of a group, the group adds zeros, which change no bit
//! of its total: so a row does not depend on the keys that its neighbours see. If a row's maximum has grown since the
//! last group, its total is multiplied by a factor, and the rounding error of that is kept too.
//!
//! [`GROUP`]: crate::prefill::layout::GROUP
//! [`GROUPS`]: crate::prefill::layout::GROUPS

use crate::isa::{Isa, MAX_LANES};
use crate::math::{add_compensated, exp2};

/// Sums of a group of tiles.
#[derive(Clone, Copy)]
pub(crate) struct Part<'w> {
    /// `[channel][query]`.
    pub(crate) out: &'w [f32],
    /// Weights of each query.
    pub(crate) sum: &'w [f32],
    /// The maxima that both are relative to; they never decrease from one part to the next.
    pub(crate) max: &'w [f32],
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
    /// Adds the sums of some groups, in their order; if there is no total yet (`first`), they become it. Rows have
    /// `width` lanes.
    pub(crate) fn join<I: Isa>(&mut self, isa: I, log2_scale: f32, parts: &[Part<'_>], width: usize, first: bool) {
        match *parts {
            [a] => self.join_some(isa, log2_scale, [a], width, first),
            [a, b] => self.join_some(isa, log2_scale, [a, b], width, first),
            [a, b, c] => self.join_some(isa, log2_scale, [a, b, c], width, first),
            [a, b, c, d] => self.join_some(isa, log2_scale, [a, b, c, d], width, first),
            _ => unreachable!("between one group and all that wait"),
        }
    }

    #[inline(never)]
    fn join_some<I: Isa, const N: usize>(
        &mut self,
        isa: I,
        log2_scale: f32,
        parts: [Part<'_>; N],
        width: usize,
        first: bool,
    ) {
        isa.vectorize(
            #[inline(always)]
            || {
                for lane in (0..width).step_by(I::LANES) {
                    self.join_lanes(isa, log2_scale, &parts, (width, lane), first);
                }
            },
        );
    }

    /// The same for the vector at `lane` of every row.
    #[inline(always)]
    fn join_lanes<I: Isa, const N: usize>(
        &mut self,
        isa: I,
        log2_scale: f32,
        parts: &[Part<'_>; N],
        (width, lane): (usize, usize),
        first: bool,
    ) {
        let (one, mut grown) = (isa.splat(1.0), false);
        let (mut old, mut factors) = (isa.load(&self.max[lane..]), [one; N]);
        for (n, part) in parts.iter().enumerate() {
            let max = isa.load(&part.max[lane..]);
            if !(first && n == 0) {
                factors[n] = factor(isa, log2_scale, old, max);
                let mut lanes = [1.0; MAX_LANES];
                isa.store(factors[n], &mut lanes);
                grown |= lanes.iter().any(|&x| x != 1.0);
            }
            old = max;
        }
        isa.store(old, &mut self.max[lane..]);
        let factors = grown.then_some(&factors);
        add(isa, factors, parts.map(|part| part.sum), &mut self.sum, (width, lane), first);
        add(isa, factors, parts.map(|part| part.out), &mut self.out, (width, lane), first);
    }
}

/// The factor that makes a sum relative to one maximum relative to a later one.
#[inline(always)]
fn factor<I: Isa>(isa: I, log2_scale: f32, old: I::F, max: I::F) -> I::F {
    let base = isa.select(isa.eq(max, isa.splat(f32::NEG_INFINITY)), isa.splat(0.0), max);
    let factor = exp2(isa, isa.mul(isa.sub(old, base), isa.splat(log2_scale)));
    isa.select(isa.eq(old, max), isa.splat(1.0), factor)
}

/// `whole + rest = (whole + rest)·f₀·f₁ + (p₀·f₁ + p₁)`, and so on for more parts, for the vector at `lane` of every
/// row.
#[inline(always)]
fn add<I: Isa, const N: usize>(
    isa: I,
    factors: Option<&[I::F; N]>,
    parts: [&[f32]; N],
    [whole, rest]: &mut [&mut [f32]; 2],
    (width, lane): (usize, usize),
    first: bool,
) {
    let zero = isa.splat(0.0);
    // Of all parts together: their product.
    let factor = factors.map(|factors| {
        let mut all = factors[0];
        for &f in &factors[1..] {
            all = isa.mul(all, f);
        }
        all
    });
    // 0 as long as all sums are finite.
    let mut check = zero;
    let rows = parts[0].len() / width;
    let len = rows * width;
    let parts = parts.map(|part| &part[..len]);
    let (whole, rest) = (&mut whole[..len], &mut rest[..len]);
    for row in 0..rows {
        let at = row * width + lane;
        let mut part = isa.load(&parts[0][at..][..I::LANES]);
        for n in 1..N {
            let next = isa.load(&parts[n][at..][..I::LANES]);
            part = match factors {
                None => isa.add(part, next),
                Some(factors) => isa.mul_add(part, factors[n], next),
            };
        }
        let (whole, rest) = (&mut whole[at..][..I::LANES], &mut rest[at..][..I::LANES]);
        let (sum, missing) =
            if first { (part, zero) } else { add_compensated(isa, (isa.load(whole), isa.load(rest)), factor, part) };
        isa.store(sum, whole);
        isa.store(missing, rest);
        check = isa.mul_add(sum, zero, check);
    }
    let mut lanes = [0.0; MAX_LANES];
    isa.store(check, &mut lanes);
    if lanes.iter().any(|&x| x != 0.0) {
        // Nothing is missing in an infinite sum.
        for row in rest.chunks_exact_mut(width) {
            row[lane..][..I::LANES].iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
        }
    }
}
