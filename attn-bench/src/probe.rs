//! The machine's peaks, each measured beside the measurements that are compared with it.

use std::hint::black_box;
use std::time::Instant;

use attn_core::{Attention, AttnError};
use attn_simd::{Level, Workspace};
use rayon::ThreadPool;

use crate::case::{Case, Tensors};

pub use attn_simd::probe::{bf16_peak, fma_peak};

/// The largest rate of reading the same `bytes` over and over, seen in about `seconds` and at least three times, in
/// bytes a second.
pub fn read_rate(level: Level, bytes: usize, seconds: f64) -> f64 {
    // Ones, not zeros: pages that were never written may all be one.
    let data = vec![1.0f32; bytes.div_ceil(size_of::<f32>()).max(1)];
    // Small buffers are read often enough for the clock.
    let times = ((1 << 20) / bytes.max(1)).max(1);
    let (start, mut best, mut rounds) = (Instant::now(), f64::INFINITY, 0);
    while rounds < 3 || start.elapsed().as_secs_f64() < seconds {
        let piece = Instant::now();
        for _ in 0..times {
            black_box(attn_simd::probe::read(level, black_box(&data)));
        }
        best = best.min(piece.elapsed().as_secs_f64() / times as f64);
        rounds += 1;
    }
    (data.len() * size_of::<f32>()) as f64 / best
}

/// The sum of [`fma_peak`] over all threads of a pool, running at once: cores that share a clock or a power budget are
/// slower together than alone.
pub fn fma_peak_of_pool(level: Level, pool: &ThreadPool, seconds: f64) -> f64 {
    pool.broadcast(|_| fma_peak(level, seconds)).iter().sum()
}

/// The median rate of a small call over about `seconds`, in pieces of some tens of microseconds, as a share of the
/// best. A busy thread of the same core slows calls, which load as they multiply, more than it slows a peak.
pub fn steadiness(level: Level, seconds: f64) -> f64 {
    let mut tensors: Tensors = Tensors::new(Case::square(64, 64), 1);
    let (attn, mut workspace) = (Attention::new(), Workspace::new());
    let mut piece = || -> Result<f64, AttnError> {
        let (q, k, v, out) = tensors.views()?;
        let start = Instant::now();
        attn_simd::forward_at(level, &attn, q, k, v, out, &mut workspace)?;
        Ok(start.elapsed().as_secs_f64())
    };
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.is_empty() || start.elapsed().as_secs_f64() < seconds {
        let Ok(time) = piece() else { return 1.0 }; // no call of these sizes fails
        // The clock rises first.
        if start.elapsed().as_secs_f64() > 0.2 * seconds {
            times.push(time);
        }
    }
    times.sort_by(f64::total_cmp);
    times[0] / times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_at_most_the_best() {
        let share = steadiness(Level::detect(), 0.001);
        assert!(share > 0.0 && share <= 1.0, "{share}");
    }
}
