//! Steps over caches on the threads of the current rayon pool.

use attn_core::{Attention, Modifier, Outputs, Result, View};
use attn_simd::decode::{Queries, Source, Step};
use attn_simd::{KernelElement, Level};

use crate::run::{BYTES_PER_THREAD, Own};
use crate::split;

/// Attends with the last tokens of many sequences to one cache: decode steps and prefill chunks in one call, shared by
/// the threads of the current rayon pool.
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, or packed (see [`Queries`]); the cache may hold another element type, or
/// int8 with scales ([`attn_core::int8::QuantizedView`]). Always causal; see [`attn_core::kv_cache`] for the options.
/// The result has the same bits for every thread count, every layout of the cache and every way to cut the stream into
/// calls.
///
/// ```
/// use attn_core::kv_cache::AppendCache;
/// use attn_core::{Attention, Layout, View, ViewMut};
/// use attn_parallel::{Queries, attend_cache};
/// // Two sequences of 7 and 4 tokens; the first decodes one token, the second prefills all of its four.
/// let (mut k, mut v, mut lens) = (vec![0.5f32; 2 * 8 * 16], vec![0.25f32; 2 * 8 * 16], [7, 4]);
/// let view = |x| ViewMut::new(x, Layout::Bhsd, [2, 1, 8, 16]);
/// let cache = AppendCache::new(view(&mut k)?, view(&mut v)?, &mut lens)?;
/// let (q, mut out) = (vec![1.0f32; 5 * 16], vec![0.0f32; 5 * 16]);
/// let q = View::new(&q, Layout::Bhsd, [1, 1, 5, 16])?;
/// let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 1, 5, 16])?;
/// attend_cache(&Attention::new(), q, Queries::Packed(&[0, 1, 5]), cache.view(), to)?;
/// assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn attend_cache<'c, 'o, Q: KernelElement, O: KernelElement, M: Modifier + Sync>(
    attn: &Attention<'_, M>,
    q: View<'_, Q>,
    queries: Queries<'c>,
    cache: impl Into<Source<'c>>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    run_step(&Step::new(attn, q.sizes(), queries, cache, Level::detect())?, q, outputs)
}

/// Runs a step that was made before.
///
/// # Errors
/// As [`Step::split`].
pub fn run_step<'o, Q: KernelElement, O: KernelElement, M: Modifier + Sync>(
    step: &Step<'_, '_, '_, M>,
    q: View<'_, Q>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    run_step_on(usize::MAX, step, q, outputs)
}

/// As [`run_step`], on no more than `threads` threads of the pool (and on one where `threads` is 0). The result is the
/// same bits for any number.
///
/// ```
/// use attn_core::kv_cache::CacheView;
/// use attn_core::{Attention, Layout, View, ViewMut};
/// use attn_parallel::{Queries, Step, run_step_on};
/// use attn_simd::Level;
/// let (q, kv, mut out) = ([1.0f32; 16], [0.25f32; 7 * 16], [0.0f32; 16]);
/// let (q, kv) = (View::matrix(&q, 1, 16)?, View::matrix(&kv, 7, 16)?); // one query, seven tokens
/// let attn = Attention::new();
/// let step = Step::new(&attn, q.sizes(), Queries::All, CacheView::of_tensors(kv, kv)?, Level::detect())?;
/// run_step_on(1, &step, q, ViewMut::matrix(&mut out, 1, 16)?)?; // this thread only
/// assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// # Errors
/// As [`Step::split`].
pub fn run_step_on<'o, Q: KernelElement, O: KernelElement, M: Modifier + Sync>(
    threads: usize,
    step: &Step<'_, '_, '_, M>,
    q: View<'_, Q>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    let call = step.split(q, outputs)?;
    // A cast from float saturates.
    let worth = (step.bytes() as f64 * step.passes() as f64 / BYTES_PER_THREAD) as usize + 1;
    let useful = threads.min(call.parts_at_most()).min(worth);
    split::run(call, useful, &Own)
}
