//! The end of a block: takes the sink in, divides by the sums, transposes back, rounds once, writes.

use super::job::Job;
use super::layout::MAX_Q_TILE;
use crate::isa::{Isa, MAX_LANES};
use crate::queue::Claim;
use crate::scoring::finish_row;

/// State of a block's rows at its end, a lane each.
pub(crate) struct State<'s> {
    /// The maximum that weights are relative to.
    pub(crate) max: &'s [f32],
    /// Sums of the weights.
    pub(crate) sum: &'s [f32],
    /// What is missing in them.
    pub(crate) rest: Option<&'s [f32]>,
}

/// Writes the rows of a block from `o[channel][query]`, rows `width` apart, and what is missing in it. `sums` and
/// `outputs` are powers of two: factors of the sums and of the outputs, for a kernel that stores either larger.
#[inline(always)]
pub(crate) fn write<I: Isa>(
    isa: I,
    job: &Job<'_>,
    state: State<'_>,
    (out, rest): (&mut [f32], Option<&[f32]>),
    (sums, outputs): (f32, f32),
    width: usize,
    claim: &mut Claim<'_, '_>,
) {
    let rows = claim.rows();
    let kept = job.dropout.factor();
    // With fused operations factors in two floats, so that an output is rounded once; without, divisors.
    let mut factors = [[if I::FUSED { 0.0f32 } else { 1.0 }; MAX_Q_TILE]; 2];
    let sink = job.sinks.map(|sinks| f64::from(sinks[rows.head]));
    for lane in 0..rows.count {
        let sum = (f64::from(state.sum[lane]) + state.rest.map_or(0.0, |rest| f64::from(rest[lane]))) * f64::from(sums);
        let (factor, lse) = match sink {
            None if !claim.wants_lse() && job.dropout.is_none() => (if sum == 0.0 { 0.0 } else { 1.0 / sum }, 0.0),
            _ => finish_row(f64::from(state.max[lane]) * job.ln_scale, sum, sink, kept),
        };
        if !I::FUSED {
            // One rounding too, because the divisor is a float. A row without weight is divided by infinity.
            factors[0][lane] = (1.0 / factor) as f32;
        } else {
            let nearest = factor as f32;
            factors[0][lane] = nearest;
            factors[1][lane] = (factor - f64::from(nearest)) as f32;
        }
        if claim.wants_lse() {
            claim.set_lse(lane, lse);
        }
    }
    let lanes = I::LANES;
    let channels = job.shape.value_dim;
    for (channel, row) in out.chunks_exact_mut(width).take(channels).enumerate() {
        for (n, x) in row.chunks_exact_mut(lanes).enumerate() {
            let at = n * lanes;
            let (o, factor) = (isa.load(x), isa.load(&factors[0][at..]));
            let rest = rest.map(|rest| isa.load(&rest[channel * width + at..]));
            let exact = if I::FUSED {
                let mut small = isa.mul(o, isa.load(&factors[1][at..]));
                if let Some(rest) = rest {
                    small = isa.mul_add(rest, factor, small);
                }
                let exact = isa.mul_add(o, factor, small);
                // An infinite output has no small part.
                isa.select(isa.eq(exact, exact), exact, isa.mul(o, factor))
            } else {
                isa.div(rest.map_or(o, |rest| isa.add(o, rest)), factor)
            };
            isa.store(if outputs == 1.0 { exact } else { isa.mul(exact, isa.splat(outputs)) }, x);
        }
    }
    let mut stage = [0.0f32; MAX_LANES * MAX_LANES];
    for channel in (0..channels).step_by(lanes) {
        let there = (channels - channel).min(lanes);
        for first in (0..rows.count).step_by(lanes) {
            let src = &out[channel * width + first..];
            let whole = there == lanes && first + lanes <= rows.count;
            if !(whole && claim.write_square(isa, [first, channel], src, width)) {
                isa.transpose(src, width, &mut stage, lanes);
                if whole && claim.write_halves(isa, [first, channel], &stage) {
                    continue;
                }
                for lane in first..(first + lanes).min(rows.count) {
                    claim.write(isa, lane, channel, &stage[(lane - first) * lanes..][..there]);
                }
            }
        }
    }
}
