//! What the machine can do at best, measured beside every measurement that is set against it.

use attn_simd::Level;
use rayon::ThreadPool;

/// Fused multiply-adds per second of one core, in FLOP/s, at the width of `level`, measured for about `seconds`.
pub fn fma_peak(level: Level, seconds: f64) -> f64 {
    // Placeholder until attn-simd offers chains of vector FMAs per level: separate multiplications and additions in the
    // vectors of the build, 12 independent chains.
    let _ = level;
    let (mut chains, factor, term) = ([[1.0f32; 8]; 12], [0.999_9f32; 8], [1e-4f32; 8]);
    let (start, mut rounds) = (std::time::Instant::now(), 0.0);
    while start.elapsed().as_secs_f64() < seconds {
        for _ in 0..1000 {
            for chain in &mut chains {
                for lane in 0..8 {
                    chain[lane] = chain[lane] * factor[lane] + term[lane];
                }
            }
        }
        chains = std::hint::black_box(chains);
        rounds += 1000.0;
    }
    rounds * 12.0 * 8.0 * 2.0 / start.elapsed().as_secs_f64()
}

/// The sum of [`fma_peak`] over all threads of a pool, running at once: cores that share a clock or a power budget are
/// slower together than alone.
pub fn fma_peak_of_pool(level: Level, pool: &ThreadPool, seconds: f64) -> f64 {
    pool.broadcast(|_| fma_peak(level, seconds)).iter().sum()
}
