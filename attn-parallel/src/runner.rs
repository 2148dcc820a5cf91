//! The verbs `forward`, `attend_cache` and `backward`, and the [`Runner`] that says how they run: at which level, on
//! how many threads, in whose scratch.

use std::sync::atomic::AtomicBool;

use attn_core::backward::Gradients;
use attn_core::kv_cache::Queries;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Dtype, Element, Outputs, Result, View};
use attn_simd::backward::Inputs;
use attn_simd::decode::{DecodeCall, DecodePlan, Source};
use attn_simd::{KernelElement, Level, Plan, Work, Workspace, with_weights};

use crate::scratch::Scratch;
use crate::threads::on_threads;
use crate::{decode, gradients, weights, worth};

/// Computes attention on the threads of the current rayon pool, at the best level of this machine (or the one that
/// `ATTN_LEVEL` names). [`Runner`] sets level, threads and scratch.
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, `k`: `[batch, kv_heads, kv_len, head_dim]`, `v`:
/// `[batch, kv_heads, kv_len, value_dim]`, of one type, in any strides. `outputs` is a [`ViewMut`](attn_core::ViewMut)
/// or [`Outputs`], of the same type or another. Queries over keys and values of another type: [`attend_cache`].
///
/// [`Outputs::weights`] are for pictures and tests. The kernels do not hold them; the threads recompute them from the
/// lse afterwards, with a plain dot product for each visible key.
///
/// ```
/// use attn_parallel::{Attention, Outputs, View, ViewMut, forward};
/// let x: Vec<f32> = (0..5 * 8).map(|n| (n as f32).sin()).collect();
/// let x = View::matrix(&x, 5, 8)?;
/// let (mut out, mut weights) = ([0.0f32; 5 * 8], [0.0f32; 5 * 5]);
/// forward(&Attention::new(), x, x, x, Outputs::new(ViewMut::matrix(&mut out, 5, 8)?).weights(&mut weights))?;
/// assert!(weights.chunks(5).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5));
/// # Ok::<(), attn_parallel::AttnError>(())
/// ```
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<'o, T: KernelElement, O: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    Runner::new().forward(attn, q, k, v, outputs)
}

/// Attends with the last tokens of many sequences to one cache: decode steps and prefill chunks in one call, shared by
/// the threads of the current rayon pool. [`Runner`] sets level, threads and scratch.
///
/// `q`: `[batch, q_heads, q_len, head_dim]`, or packed (see [`Queries`]); the cache may hold another element type, int8
/// with scales ([`attn_core::int8::QuantizedView`]), or bytes in packed formats ([`attn_core::formats::StoredView`]).
/// Always causal; see [`attn_core::kv_cache`] for the options. The result has the same bits for every thread count,
/// every layout of the cache and every way to cut the stream into calls.
///
/// ```
/// use attn_core::kv_cache::{AppendCache, Queries};
/// use attn_core::{Attention, Layout, View, ViewMut};
/// use attn_parallel::attend_cache;
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
pub fn attend_cache<'c, 'o, Q: KernelElement, O: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    q: View<'_, Q>,
    queries: Queries<'c>,
    cache: impl Into<Source<'c>>,
    outputs: impl Into<Outputs<'o, O>>,
) -> Result<()> {
    Runner::new().attend_cache(attn, q, queries, cache, outputs)
}

/// Computes the gradients of `Σ y·dy` by q, k, v, the sinks and a bias, with the options of the forward call that
/// made `out` and `lse`. [`Runner`] sets level, threads and scratch.
///
/// Sums are taken in an order that follows from shape and mask: the bits do not depend on the number of threads. Memory
/// is allocated for `dk` and `dv` of one head by each thread. A call of few long heads cuts them into parts, and also
/// allocates the gradients in `f32`, and sums for each of up to 16 parts if a mask leaves one part far more to do than
/// the others; threads keep up to 32 MiB of this for their next call. Memory grows with the length of the sequence, not
/// with its square.
///
/// ```
/// use attn_parallel::attn_core::backward::Gradients;
/// use attn_parallel::attn_simd::backward::Inputs;
/// use attn_parallel::{Attention, Outputs, View, ViewMut, backward, forward};
/// let (attn, x) = (Attention::new(), (0..40).map(|n| (n as f32).sin()).collect::<Vec<_>>());
/// let x = View::matrix(&x, 5, 8)?;
/// let (mut out, mut lse) = ([0.0f32; 40], [0.0f32; 5]);
/// forward(&attn, x, x, x, Outputs::new(ViewMut::matrix(&mut out, 5, 8)?).lse(&mut lse))?;
///
/// let dy = [1.0f32; 40];
/// let (out, dy) = (View::matrix(&out, 5, 8)?, View::matrix(&dy, 5, 8)?);
/// let [mut dq, mut dk, mut dv] = [[0.0f32; 40]; 3];
/// let [to_q, to_k, to_v] = [&mut dq, &mut dk, &mut dv].map(|to| ViewMut::matrix(to, 5, 8));
/// backward(&attn, Inputs { q: x, k: x, v: x, out, lse: &lse, dy }, Gradients::new(to_q?, to_k?, to_v?))?;
/// assert!((dv.iter().sum::<f32>() - 40.0).abs() < 1e-4); // each query spreads a weight of 1
/// # Ok::<(), attn_parallel::AttnError>(())
/// ```
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Unsupported`](attn_core::AttnError::Unsupported)
/// where a `score_mod` has no derivative (see [`Attention::score_mod_with`]).
pub fn backward<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    inputs: Inputs<'_, T, G>,
    gradients: Gradients<'_, O>,
) -> Result<()> {
    Runner::new().backward(attn, inputs, gradients)
}

/// How calls run: at which level, on at most how many threads, in whose scratch. No bit of a result depends on threads
/// or scratch.
///
/// By default a call runs at the best level of this machine, on all threads of the current rayon pool, and each thread
/// keeps scratch of its own for its next call.
///
/// ```
/// use attn_core::{Attention, AttnShape, Layout, View, ViewMut};
/// use attn_parallel::Runner;
/// use attn_simd::{Level, Plan, Workspace};
/// let sizes = [1, 2, 100, 64];
/// let (x, mut out) = (vec![0.5f32; 12_800], vec![0.0f32; 12_800]);
/// let x = View::new(&x, Layout::Bhsd, sizes)?;
/// let attn = Attention::new();
///
/// // At a level of your choice, on at most two threads.
/// let to = ViewMut::new(&mut out, Layout::Bhsd, sizes)?;
/// let portable = Level::by_name("portable").expect("every machine has it");
/// Runner::new().level(portable).threads(2).forward(&attn, x, x, x, to)?;
///
/// // A plan that is made once, on this thread only, in scratch that is kept: from the second call on nothing is
/// // allocated.
/// let plan = Plan::new(&attn, AttnShape::new(sizes, sizes, sizes)?, Level::detect())?;
/// let mut kept = [Workspace::new()];
/// let mut runner = Runner::new().workspaces(&mut kept);
/// for _ in 0..2 {
///     runner.forward_planned(&plan, x, x, x, ViewMut::new(&mut out, Layout::Bhsd, sizes)?)?;
/// }
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// Another rayon pool than the global one: `pool.install(|| runner.forward(..))`.
#[derive(Debug)]
pub struct Runner<'w> {
    level: Option<Level>,
    threads: usize,
    workspaces: Option<&'w mut [Workspace]>,
    stop: Option<&'w AtomicBool>,
}

impl Default for Runner<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'w> Runner<'w> {
    /// The defaults.
    pub const fn new() -> Self {
        Self { level: None, threads: usize::MAX, workspaces: None, stop: None }
    }

    /// Runs at this level. (A plan runs at the level that it was made for.)
    pub const fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }

    /// Runs on at most so many threads of the current pool; 0 counts as 1, which is the caller's thread.
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Computes in scratch of the caller's, one workspace for each thread, and on no more threads than there are
    /// workspaces (none: [`AttnError::TooShort`]). A workspace that is large enough is not allocated again: with one,
    /// or after a first call, a forward call allocates nothing but what the pool takes to wake its threads. Gradients
    /// are summed in memory of the threads' own.
    pub const fn workspaces(mut self, workspaces: &'w mut [Workspace]) -> Self {
        self.workspaces = Some(workspaces);
        self
    }

    /// Ends a call with [`AttnError::Stopped`] soon after another thread has set the flag, which must then stay set: a
    /// user has pressed Ctrl-C, a client has hung up. A thread notices it at its next tile of keys. Rows of an output
    /// or of a gradient that were written have their results, and the others are as they were.
    ///
    /// ```
    /// use std::sync::atomic::AtomicBool;
    /// use attn_parallel::{Attention, AttnError, Runner, View, ViewMut};
    /// let (x, mut out) = ([1.0f32; 40], [0.0f32; 40]);
    /// let (x, to) = (View::matrix(&x, 5, 8)?, ViewMut::matrix(&mut out, 5, 8)?);
    /// let stop = AtomicBool::new(true); // another thread would set it later
    /// let result = Runner::new().stop_when(&stop).forward(&Attention::new(), x, x, x, to);
    /// assert_eq!(result, Err(AttnError::Stopped));
    /// # Ok::<(), AttnError>(())
    /// ```
    pub const fn stop_when(mut self, flag: &'w AtomicBool) -> Self {
        self.stop = Some(flag);
        self
    }

    /// As [`forward`].
    ///
    /// # Errors
    /// As [`forward`]; [`AttnError::TooShort`] if no workspace was given.
    pub fn forward<'o, T: KernelElement, O: KernelElement, M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<()> {
        let plan = Plan::new(attn, AttnShape::new(q.sizes(), k.sizes(), v.sizes())?, self.level_or_best())?;
        self.forward_planned(&plan, q, k, v, outputs)
    }

    /// As [`forward`], by a plan that was made before.
    ///
    /// # Errors
    /// As [`Plan::run`]; [`AttnError::TooShort`] if no workspace was given.
    pub fn forward_planned<'o, T: KernelElement, O: KernelElement, M: Mods + Sync>(
        &mut self,
        plan: &Plan<'_, '_, M>,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<()> {
        let (threads, stop) = (self.most_threads()?, self.stop);
        let run = |outputs: Outputs<'_, O>| {
            let work = match (plan.work(q, k, v, outputs)?, stop) {
                (Work::Blocks(blocks), Some(stop)) => Work::Blocks(blocks.stop_when(stop)),
                (Work::Split(call), Some(stop)) => Work::Split(call.stop_when(stop)),
                (work, None) => work,
            };
            run_work(self.scratch(), threads, plan, work, (T::DTYPE, O::DTYPE))
        };
        let fill = |lse: &[f32], weights: &mut [f32]| weights::fill(plan, q, k, lse, weights, (threads, stop));
        with_weights(plan.shape(), outputs.into(), run, fill)
    }

    /// As [`attend_cache`].
    ///
    /// # Errors
    /// As [`attend_cache`]; [`AttnError::TooShort`] if no workspace was given.
    pub fn attend_cache<'c, 'o, Q: KernelElement, O: KernelElement, M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        q: View<'_, Q>,
        queries: Queries<'c>,
        cache: impl Into<Source<'c>>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<()> {
        let plan = DecodePlan::new(attn, q.sizes(), queries, cache, self.level_or_best())?;
        self.attend_cache_planned(&plan, q, outputs)
    }

    /// As [`attend_cache`], by a plan that was made before.
    ///
    /// ```
    /// use attn_core::kv_cache::{CacheView, Queries};
    /// use attn_core::{Attention, View, ViewMut};
    /// use attn_parallel::{DecodePlan, Runner};
    /// use attn_simd::Level;
    /// let (q, kv, mut out) = ([1.0f32; 16], [0.25f32; 7 * 16], [0.0f32; 16]);
    /// let (q, kv) = (View::matrix(&q, 1, 16)?, View::matrix(&kv, 7, 16)?); // one query, seven tokens
    /// let attn = Attention::new();
    /// let plan = DecodePlan::new(&attn, q.sizes(), Queries::All, CacheView::of_tensors(kv, kv)?, Level::detect())?;
    /// Runner::new().attend_cache_planned(&plan, q, ViewMut::matrix(&mut out, 1, 16)?)?;
    /// assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6));
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DecodePlan::split`]; [`AttnError::TooShort`] if no workspace was given.
    pub fn attend_cache_planned<'o, Q: KernelElement, O: KernelElement, M: Mods + Sync>(
        &mut self,
        plan: &DecodePlan<'_, '_, '_, M>,
        q: View<'_, Q>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<()> {
        let threads = self.most_threads()?;
        let mut call = plan.split(q, outputs)?;
        if let Some(stop) = self.stop {
            call = call.stop_when(stop);
        }
        let threads = threads.min(worth::reading_bytes(plan.bytes() as f64 * plan.passes() as f64));
        run_call(self.scratch(), threads, call)
    }

    /// As [`backward`].
    ///
    /// # Errors
    /// As [`backward`]; [`AttnError::TooShort`] if no workspace was given.
    pub fn backward<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        inputs: Inputs<'_, T, G>,
        gradients: Gradients<'_, O>,
    ) -> Result<()> {
        let (level, threads, stop) = (self.level_or_best(), self.most_threads()?, self.stop);
        gradients::run((level, threads, stop, self.scratch()), attn, inputs, gradients)
    }

    fn scratch(&mut self) -> Scratch<'_> {
        self.workspaces.as_deref_mut().map_or(Scratch::Own, Scratch::Given)
    }

    fn level_or_best(&self) -> Level {
        self.level.unwrap_or_else(Level::detect)
    }

    /// How many threads may work.
    fn most_threads(&self) -> Result<usize> {
        match &self.workspaces {
            None => Ok(self.threads),
            Some(workspaces) => {
                AttnError::check_len("workspaces", 1, workspaces.len())?;
                Ok(self.threads.min(workspaces.len()))
            }
        }
    }
}

/// Runs what a plan has cut, on at most `threads` threads. The pool is used (and started) only if it pays.
fn run_work<M: Mods + Sync>(
    mut scratch: Scratch<'_>,
    threads: usize,
    plan: &Plan<'_, '_, M>,
    work: Work<'_>,
    (input, output): (Dtype, Dtype),
) -> Result<()> {
    let lines = plan.workspace_lines_for(input, output);
    match work {
        Work::Blocks(blocks) => {
            let useful = worth::in_pool(threads.min(blocks.count()).min(worth::computing(plan.shape())));
            let blocks = blocks.shared_by(useful);
            let scratch = scratch.round();
            on_threads(useful, &|| scratch.with(lines, |lines| blocks.run(lines)))
        }
        Work::Split(call) => run_call(scratch, threads.min(worth::reading(plan.shape(), input.bytes())), call),
    }
}

/// Runs a decode call on at most `threads` threads.
fn run_call(scratch: Scratch<'_>, threads: usize, call: DecodeCall<'_>) -> Result<()> {
    // Of the pool's threads: a call that is cut for more has smaller pieces than it needs.
    let useful = worth::in_pool(threads.min(call.pieces_at_most()));
    decode::run(call, useful, scratch)
}
