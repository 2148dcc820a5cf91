//! The engines under one roof: the same call for the textbook form, streaming, SIMD and parallel.

use attn_core::{Attention, AttnError, Outputs, Result, View, streaming};
use attn_simd::{KernelElement, Level, Workspace};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};

use crate::naive;

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
}

impl Engine {
    /// All, simplest first.
    pub const ALL: [Self; 4] = [Self::Naive, Self::Streaming, Self::Simd, Self::Parallel];

    /// The name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Streaming => "streaming",
            Self::Simd => "simd",
            Self::Parallel => "parallel",
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

/// A pool of `threads` threads (0 = one per core).
///
/// # Errors
/// A message where the threads cannot be started.
pub fn pool(threads: usize) -> std::result::Result<ThreadPool, String> {
    ThreadPoolBuilder::new().num_threads(threads).build().map_err(|e| format!("cannot start {threads} threads: {e}"))
}

/// Runs `call` where the engine is used: on the caller's thread, or for the parallel engine on one of the pool's, so that
/// calls back to back do not each pay for handing over to the pool.
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
        outputs: impl Into<Outputs<'o, O>> + Send,
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
                let outputs = outputs.into();
                self.pool.install(|| attn_parallel::forward_at(level, attn, q, k, v, outputs))
            }
        }
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
    fn all_engines_agree() {
        let pool = pool(2).unwrap();
        for causal in [false, true] {
            let case = Case { q_heads: 2, causal, ..Case::square(70, 24) };
            let attn = case.attention();
            let mut runner = Runner::new(Level::detect(), &pool);
            let outs = Engine::ALL.map(|engine| {
                let mut t = Tensors::new(Case { kv_heads: 2, ..case }, 1);
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
