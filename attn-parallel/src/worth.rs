//! The number of threads that pays for a call: waking one costs some ten microseconds. No result depends on it.

use attn_core::AttnShape;

/// Work that pays for waking another thread, in FLOPs.
const FLOPS_PER_THREAD: f64 = 2e6;

/// Keys and values that pay for waking another thread, in bytes.
const BYTES_PER_THREAD: f64 = 256e3;

/// For a call that is bound by arithmetic, as if nothing were masked.
pub(crate) fn computing(shape: &AttnShape) -> usize {
    let pairs = shape.rows() as f64 * shape.kv_len as f64;
    let flops = 2.0 * pairs * (shape.head_dim as f64 + shape.value_dim as f64);
    (flops / FLOPS_PER_THREAD) as usize + 1 // a cast from float saturates
}

/// For a call with few queries, which does little more than read keys and values, as if nothing were masked. `element`:
/// bytes of one number.
pub(crate) fn reading(shape: &AttnShape, element: usize) -> usize {
    let rows = shape.batch as f64 * shape.kv_heads as f64 * shape.kv_len as f64;
    reading_bytes(rows * (shape.head_dim as f64 + shape.value_dim as f64) * element as f64)
}

/// For a call that reads so many bytes of a cache.
pub(crate) fn reading_bytes(bytes: f64) -> usize {
    (bytes / BYTES_PER_THREAD) as usize + 1
}

/// Of so many threads that could work, those that the pool has: the length of strips follows from it. A pool is not
/// started to be asked if one is enough.
pub(crate) fn in_pool(useful: usize) -> usize {
    if useful > 1 { useful.min(crate::threads::threads()) } else { useful }
}

#[cfg(test)]
mod tests {
    use super::in_pool;

    #[test]
    fn no_more_threads_are_counted_on_than_the_pool_has() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(pool.install(|| [usize::MAX, 4, 3, 2, 1, 0].map(in_pool)), [3, 3, 3, 2, 1, 0]);
    }
}
