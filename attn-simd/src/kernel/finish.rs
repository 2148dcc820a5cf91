//! The end of a block: divide by the sums, take the sink in, transpose back, round once, write.

use crate::isa::Isa;
use crate::job::Job;
use crate::output::Claim;
use crate::tiles::MAX_Q_TILE;

/// Writes the rows of a block from `o[channel][query]`, rows `width` apart. Sums are multiplied by `sums` first and outputs by `outputs`,
/// powers of two: what a kernel has kept larger than it is.
#[inline(always)]
pub(crate) fn write<I: Isa>(
    isa: I,
    job: &Job<'_>,
    (max, sum): (&[f32], &[f32]),
    (sums, outputs): (f32, f32),
    out: &mut [f32],
    width: usize,
    claim: &mut Claim<'_, '_>,
) {
    let rows = claim.rows();
    let kept = job.dropout.factor();
    let mut factors = [0.0f32; MAX_Q_TILE];
    let sink = job.sinks.map(|sinks| f64::from(sinks[rows.head]));
    for (lane, factor) in factors.iter_mut().enumerate().take(rows.count) {
        let (max, sum) = (max[lane], sum[lane] * sums);
        let (row_factor, lse) = match sink {
            None if !claim.wants_lse() && job.dropout.is_none() => (if sum == 0.0 { 0.0 } else { 1.0 / sum }, 0.0),
            _ => close(f64::from(max) * job.to_ln, f64::from(sum), sink, kept),
        };
        *factor = row_factor;
        if claim.wants_lse() {
            claim.set_lse(lane, lse);
        }
    }
    let lanes = I::LANES;
    let channels = job.shape.value_dim;
    for row in out.chunks_exact_mut(width).take(channels) {
        for (x, factor) in row.chunks_exact_mut(lanes).zip(factors.chunks_exact(lanes)) {
            let exact = isa.mul(isa.load(x), isa.load(factor));
            isa.store(if outputs == 1.0 { exact } else { isa.mul(exact, isa.splat(outputs)) }, x);
        }
    }
    let mut stage = [0.0f32; 16 * 16];
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

/// The factor on a row's accumulated output and its log-sum-exp, with a sink in the denominator if there is one.
pub(crate) fn close(max: f64, sum: f64, sink: Option<f64>, kept: f64) -> (f32, f32) {
    match sink {
        _ if max.is_nan() || sum.is_nan() => (f32::NAN, f32::NAN),
        None if sum == 0.0 => (0.0, f32::NEG_INFINITY),
        None => ((kept / sum) as f32, (max + libm::log(sum)) as f32),
        Some(sink) if sum == 0.0 => (0.0, sink as f32),
        Some(sink) => {
            let top = max.max(sink);
            let scale = libm::exp(max - top);
            let sum = sum * scale + libm::exp(sink - top);
            ((kept * scale / sum) as f32, (top + libm::log(sum)) as f32)
        }
    }
}
