//! All engines behind one call: the textbook form, streaming, SIMD and parallel. Beside them two methods that cost less
//! than n² and compute something else: a sliding window and linear attention.

use attn_core::backward::Gradients;
use attn_core::{Align, Attention, AttnError, AttnShape, Mask, Outputs, Result, View, streaming};
use attn_layers::cost;
use attn_layers::variants::linear::{LinearAttention, LinearState};
use attn_simd::backward::{self, Inputs};
use attn_simd::{KernelElement, Level, Workspace};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::naive;

/// Keys that a query sees with [`Engine::Windowed`]: so many before and after itself together.
pub const WINDOW: usize = 256;

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The textbook matrices, [`naive`].
    Naive,
    /// [`attn_core::streaming`]: one key at a time, no score row.
    Streaming,
    /// [`attn_simd`] on one thread.
    Simd,
    /// [`attn_parallel`] on all threads of the runner.
    Parallel,
    /// [`attn_simd`] on one thread with a window of [`WINDOW`] keys: another result, in O(n).
    Windowed,
    /// [`attn_layers::variants::linear::LinearAttention`], one state instead of n² weights: another formula, in O(n).
    Linear,
}

impl Engine {
    /// Those that compute exact attention, simplest first.
    pub const ALL: [Self; 4] = [Self::Naive, Self::Streaming, Self::Simd, Self::Parallel];

    /// Those that compute less.
    pub const CHEAPER: [Self; 2] = [Self::Windowed, Self::Linear];

    /// The name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Streaming => "streaming",
            Self::Simd => "simd",
            Self::Parallel => "parallel",
            Self::Windowed => "windowed",
            Self::Linear => "linear",
        }
    }

    /// FLOPs that it needs for a case: `4·B·H·Sq·Skv·D` (halved for causal squares) where it is exact, those of the
    /// visible pairs for a window, `4·B·H·n·D²` for linear attention (into the state and out of it).
    pub fn flops(self, case: &Case) -> f64 {
        match (self, case.shape()) {
            (Self::Windowed, Ok(shape)) => {
                cost::forward_flops(&shape, cost::visible_pairs(&windowed(case.mask()), &shape)) as f64
            }
            (Self::Linear, _) => {
                let pairs = case.kv_heads as f64 * case.kv_len as f64 + case.q_heads as f64 * case.q_len as f64;
                2.0 * case.batch as f64 * pairs * (case.head_dim as f64).powi(2)
            }
            _ => case.flops(),
        }
    }

    /// Whether it uses one thread whatever the pool.
    pub const fn one_thread(self) -> bool {
        !matches!(self, Self::Parallel)
    }
}

impl std::fmt::Display for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// The keys within half a [`WINDOW`], of those that a mask shows.
fn windowed(mask: Mask<'_>) -> Mask<'_> {
    mask.and(Mask::window(WINDOW / 2, WINDOW / 2, Align::BottomRight))
}

/// A pool of `threads` threads (0 = one per core). One per core stay each on its own: a system that now and then lets
/// two of them share a core would be measured, not the engine.
///
/// # Errors
/// A message if the threads cannot be started.
pub fn pool(threads: usize) -> std::result::Result<ThreadPool, String> {
    let cores = if own_cores(threads) { core_affinity::get_core_ids().unwrap_or_default() } else { Vec::new() };
    let stay = move |thread: usize| {
        if let Some(core) = cores.get(thread) {
            core_affinity::set_for_current(*core); // where it may not, the system decides as before
        }
    };
    let builder = ThreadPoolBuilder::new().num_threads(threads).start_handler(stay);
    builder.build().map_err(|e| format!("cannot start {threads} threads: {e}"))
}

/// Whether so many threads (0 = one per core) are held to a core each: fewer than there are would have to know which
/// cores are halves of one, more have none of their own, and one has nobody to share with.
pub fn own_cores(threads: usize) -> bool {
    let cores = core_affinity::get_core_ids().map_or(0, |cores| cores.len());
    cores > 1 && (threads == 0 || threads == cores)
}

/// Runs `call` with a pool of `threads` new threads that have all started, and returns after they have ended: what they
/// start and end with is not mistaken for something of another call.
///
/// # Errors
/// As [`pool`].
pub fn with_fresh_pool<R>(threads: usize, call: impl FnOnce(&ThreadPool) -> R) -> std::result::Result<R, String> {
    let mut handles = Vec::new();
    let pool = ThreadPoolBuilder::new().num_threads(threads).spawn_handler(|thread| {
        handles.push(std::thread::Builder::new().spawn(|| thread.run())?);
        Ok(())
    });
    let pool = pool.build().map_err(|e| format!("cannot start {threads} threads: {e}"))?;
    pool.broadcast(|_| ());
    let result = call(&pool);
    drop(pool); // tells them to end
    for handle in handles {
        let _ = handle.join();
    }
    Ok(result)
}

/// Runs `call` where the engine is used: on the caller's thread, or for the parallel engine on one of the pool's, so
/// that calls back to back do not each pay for handing over to the pool.
pub fn inside<R: Send>(engine: Engine, pool: &ThreadPool, call: impl FnOnce() -> R + Send) -> R {
    if engine.one_thread() { call() } else { pool.install(call) }
}

/// Runs engines at one level and on one pool, keeping their scratch between calls.
#[derive(Debug)]
pub struct Runner<'p> {
    level: Level,
    pool: &'p ThreadPool,
    workspace: Workspace,
    scratch: Vec<f32>,
}

impl<'p> Runner<'p> {
    /// A runner without any scratch yet.
    pub fn new(level: Level, pool: &'p ThreadPool) -> Self {
        Self { level, pool, workspace: Workspace::new(), scratch: Vec::new() }
    }

    /// One call of one engine.
    ///
    /// # Errors
    /// What the engine refuses.
    pub fn run<'o, T: KernelElement, O: KernelElement>(
        &mut self,
        engine: Engine,
        attn: &Attention<'_>,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<()> {
        self.run_into(engine, attn, (q, k, v), outputs.into())
    }

    /// [`run`](Self::run) for one type of outputs, so that the compiler makes each engine once per element type.
    fn run_into<T: KernelElement, O: KernelElement>(
        &mut self,
        engine: Engine,
        attn: &Attention<'_>,
        (q, k, v): (View<'_, T>, View<'_, T>, View<'_, T>),
        mut outputs: Outputs<'_, O>,
    ) -> Result<()> {
        match engine {
            Engine::Naive => {
                let len = naive::scratch_len(q, k, v).ok_or(AttnError::Overflow { what: "naive scratch" })?;
                self.grow(len);
                naive::forward(attn, q, k, v, outputs, &mut self.scratch)
            }
            Engine::Streaming => {
                let [.., value_dim] = v.sizes();
                self.grow(value_dim);
                streaming::forward(attn, q, k, v, outputs, &mut self.scratch)
            }
            Engine::Simd => attn_simd::forward_at(self.level, attn, q, k, v, outputs, &mut self.workspace),
            Engine::Parallel => {
                let level = self.level;
                self.pool.install(|| attn_parallel::Runner::new().level(level).forward(attn, q, k, v, outputs))
            }
            Engine::Windowed => {
                let attn = attn.mask(windowed(*attn.get_mask()));
                attn_simd::forward_at(self.level, &attn, q, k, v, outputs, &mut self.workspace)
            }
            Engine::Linear => {
                let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
                let (s_len, z_len) = LinearAttention::state_len(&shape)?;
                self.grow(s_len + z_len + LinearAttention::scratch_len(&shape));
                let (state, scratch) = self.scratch.split_at_mut(s_len + z_len);
                state.fill(0.0);
                let (s, z) = state.split_at_mut(s_len);
                let linear = LinearAttention::new();
                let linear = if attn.get_mask().is_none() { linear } else { linear.causal(Align::BottomRight) };
                linear.forward(q, k, v, &mut outputs.out, LinearState { s, z }, scratch)
            }
        }
    }

    /// One backward call by the kernels: on one thread, or [`Engine::Parallel`].
    ///
    /// # Errors
    /// What the kernels refuse.
    pub fn backward<T: KernelElement, O: KernelElement>(
        &mut self,
        engine: Engine,
        attn: &Attention<'_>,
        inputs: Inputs<'_, T, T>,
        gradients: Gradients<'_, O>,
    ) -> Result<()> {
        let level = self.level;
        if engine.one_thread() {
            return backward::gradients_at(level, attn, inputs, gradients, &mut self.workspace);
        }
        self.pool.install(|| attn_parallel::Runner::new().level(level).backward(attn, inputs, gradients))
    }

    fn grow(&mut self, len: usize) {
        if self.scratch.len() < len {
            self.scratch = Vec::new(); // before the new buffer, so that the two are never held at once
            self.scratch.resize(len, 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Tensors};

    #[test]
    fn a_fresh_pool_has_ended_with_all_that_its_threads_held() {
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        static ENDED: AtomicUsize = AtomicUsize::new(0);
        struct Held;
        impl Drop for Held {
            fn drop(&mut self) {
                std::thread::sleep(std::time::Duration::from_millis(5));
                ENDED.fetch_add(1, SeqCst);
            }
        }
        thread_local!(static HELD: Held = const { Held });
        let threads = with_fresh_pool(3, |pool| pool.broadcast(|_| HELD.with(|_| ())).len()).unwrap();
        assert_eq!((threads, ENDED.load(SeqCst)), (3, 3));
    }

    #[test]
    fn a_window_over_everything_is_exact_and_what_is_cheaper_counts_less() {
        let pool = pool(1).unwrap();
        let run = |engine, n: usize| {
            let mut t = Tensors::<f32>::new(Case::square(n, 8), 1);
            let (q, k, v, out) = t.views().unwrap();
            let mut runner = Runner::new(Level::detect(), &pool);
            runner.run(engine, &Attention::new(), q, k, v, out).unwrap();
            t.out
        };
        assert_eq!(run(Engine::Windowed, WINDOW / 2), run(Engine::Simd, WINDOW / 2));
        assert_ne!(run(Engine::Windowed, WINDOW * 2), run(Engine::Simd, WINDOW * 2));
        // Weights of linear attention are positive and sum to one: its result stays within the values.
        assert!(run(Engine::Linear, 100).iter().all(|x| x.abs() < 5.0) && run(Engine::Linear, 100)[0] != 0.0);
        let flops = |engine: Engine, n| engine.flops(&Case::square(n, 64));
        assert_eq!(flops(Engine::Simd, 4096), 4.0 * 4096.0 * 4096.0 * 64.0);
        assert_eq!(flops(Engine::Linear, 4096), 4.0 * 4096.0 * 64.0 * 64.0);
        let per_token = flops(Engine::Windowed, 4096) / 4096.0;
        assert!(per_token < 4.0 * 257.0 * 64.0 && per_token > 4.0 * 245.0 * 64.0, "{per_token}");
    }

    #[test]
    fn all_engines_agree() {
        let pool = pool(2).unwrap();
        for causal in [false, true] {
            let case = Case { q_heads: 2, causal, ..Case::square(70, 24) };
            let attn = case.attention();
            let mut runner = Runner::new(Level::detect(), &pool);
            let outs = Engine::ALL.map(|engine| {
                let mut t = Tensors::<f32>::new(Case { kv_heads: 2, ..case }, 1);
                let (q, k, v, out) = t.views().unwrap();
                runner.run(engine, &attn, q, k, v, out).unwrap();
                t.out
            });
            for (engine, out) in Engine::ALL.iter().zip(&outs) {
                let worst = out.iter().zip(&outs[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 2e-6, "{engine}: {worst}");
                assert!(out.iter().any(|&x| x != 0.0));
            }
        }
    }
}
