//! What the machine can do at best, measured beside every measurement that is set against it.

use attn_simd::Level;
use rayon::ThreadPool;

pub use attn_simd::probe::fma_peak;

/// The sum of [`fma_peak`] over all threads of a pool, running at once: cores that share a clock or a power budget are
/// slower together than alone.
pub fn fma_peak_of_pool(level: Level, pool: &ThreadPool, seconds: f64) -> f64 {
    pool.broadcast(|_| fma_peak(level, seconds)).iter().sum()
}
