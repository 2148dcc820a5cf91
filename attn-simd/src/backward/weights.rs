//! From scores and `dy·v` of a tile to weights and gradients of scores.

use super::buffers::Constants;
use crate::isa::Isa;
use crate::math::{exp2, exp2_each};

/// Dropout of a tile.
pub(super) struct Kept<'b> {
    /// A bit for each query whose weight is kept, a word for each key.
    pub(super) bits: &'b [u64],
    /// The factor of kept weights.
    pub(super) factor: f32,
}

/// `s = p·m` and `d = p·(m·d − δ)` with `p = 2^(s·log2_scale − lse)`, in rows of `NQ` vectors; both 0 where `visible`
/// has no bit. `m` is what dropout makes of a weight of 1.
#[inline(always)]
pub(super) fn gradients<I: Isa, const NQ: usize>(
    isa: I,
    log2_scale: f32,
    Constants { lse, delta }: &Constants,
    (scores, dots): (&mut [f32], &mut [f32]),
    visible: Option<&[u64]>,
    kept: Option<Kept<'_>>,
) {
    let (width, zero, scale) = (NQ * I::LANES, isa.splat(0.0), isa.splat(log2_scale));
    let (mut shift, mut missing, mut offset) = ([zero; NQ], [zero; NQ], [zero; NQ]);
    for n in 0..NQ {
        shift[n] = isa.sub(zero, isa.load(&lse[0][n * I::LANES..]));
        // One rounding of all weights of a row: without it, dv errs 1.3 times as much as torch's.
        missing[n] = isa.load(&lse[1][n * I::LANES..]);
        offset[n] = isa.load(&delta[n * I::LANES..]);
    }
    let rows = scores.chunks_exact_mut(width).zip(dots.chunks_exact_mut(width));
    for (key, (s, d)) in rows.enumerate() {
        let mut y = [zero; NQ];
        for n in 0..NQ {
            y[n] = isa.sub(isa.mul_add(isa.load(&s[n * I::LANES..]), scale, shift[n]), missing[n]);
        }
        let [p] = exp2_each(isa, [y]);
        for n in 0..NQ {
            let at = n * I::LANES;
            let (mut p, mut dot) = (p[n], isa.load(&d[at..]));
            if let Some(visible) = visible {
                p = isa.select(isa.mask_from_bits(visible[key] >> at), p, zero);
            }
            let mut weight = p;
            if let Some(Kept { bits, factor }) = &kept {
                let (kept, factor) = (isa.mask_from_bits(bits[key] >> at), isa.splat(*factor));
                weight = isa.select(kept, isa.mul(weight, factor), zero);
                dot = isa.select(kept, isa.mul(dot, factor), zero);
            }
            let mut difference = isa.sub(dot, offset[n]);
            if let Some(visible) = visible {
                // It may be -inf where no product was taken: times a weight of 0 that is an invalid operation.
                difference = isa.select(isa.mask_from_bits(visible[key] >> at), difference, zero);
            }
            isa.store(weight, &mut s[at..]);
            isa.store(isa.mul(p, difference), &mut d[at..]);
        }
    }
}

/// The derivative of the soft-cap at each product: `1 − tanh²x = 4e/(1 + e)²` with `e = exp(−2|x|)`, which keeps its
/// digits where the cap saturates. `in_caps` turns a product into `x`.
#[inline(always)]
pub(super) fn cap_slopes<I: Isa>(isa: I, in_caps: f32, products: &[f32], slopes: &mut [f32]) {
    let (one, factor) = (isa.splat(1.0), isa.splat(-2.0 * core::f32::consts::LOG2_E));
    let in_caps = isa.splat(in_caps);
    for (s, slope) in products.chunks_exact(I::LANES).zip(slopes.chunks_exact_mut(I::LANES)) {
        let e = exp2(isa, isa.mul(isa.abs(isa.mul(isa.load(s), in_caps)), factor));
        let sum = isa.add(one, e);
        isa.store(isa.div(isa.mul(isa.splat(4.0), e), isa.mul(sum, sum)), slope);
    }
}

/// `a *= b`.
#[inline(always)]
pub(super) fn multiply<I: Isa>(isa: I, a: &mut [f32], b: &[f32]) {
    for (a, b) in a.chunks_exact_mut(I::LANES).zip(b.chunks_exact(I::LANES)) {
        isa.store(isa.mul(isa.load(a), isa.load(b)), a);
    }
}
