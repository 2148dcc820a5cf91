//! The weights of a call, recomputed from its lse: heads on the threads of the pool.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use attn_core::score_mod::Mods;
use attn_core::weights::{RowAt, head, row};
use attn_core::{AttnError, AttnShape, Result, View};
use attn_simd::{KernelElement, Plan};

use crate::threads::on_threads;
use crate::worth;

/// Writes all weights, on at most `threads` threads, unless `stop` is set. Each takes heads one by one.
pub(crate) fn fill<T: KernelElement, M: Mods + Sync>(
    plan: &Plan<'_, '_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    lse: &[f32],
    weights: &mut [f32],
    (threads, stop): (usize, Option<&AtomicBool>),
) -> Result<()> {
    let AttnShape { q_heads, q_len, kv_len, .. } = *plan.shape();
    let heads = Mutex::new(weights.chunks_exact_mut((q_len * kv_len).max(1)).enumerate());
    let next = || heads.lock().unwrap_or_else(PoisonError::into_inner).next();
    on_threads(threads.min(worth::computing(plan.shape())), &|| {
        while let Some((n, part)) = next() {
            let at = RowAt { batch: n / q_heads, head: n % q_heads, query: 0 };
            let Some(stop) = stop else {
                head(plan.attn(), q, k, at, lse, part)?;
                continue;
            };
            for (query, part) in part.chunks_exact_mut(kv_len.max(1)).enumerate() {
                if stop.load(Ordering::Relaxed) {
                    return Err(AttnError::Stopped);
                }
                row(plan.attn(), q, k, RowAt { query, ..at }, lse, part)?;
            }
        }
        Ok(())
    })
}
