//! Calls of our kernels, as they are timed.

use attn_core::{Attention, AttnError};
use attn_simd::KernelElement;
use rayon::ThreadPool;

use crate::case::Views;
use crate::clock::both;
use crate::engine::{self, Engine, Runner};

/// Our engine, and its pool.
pub(super) struct Ours<'o, 'p> {
    pub(super) engine: Engine,
    pub(super) pool: &'p ThreadPool,
    pub(super) runner: &'o mut Runner<'p>,
}

impl Ours<'_, '_> {
    /// Seconds per forward call: the wall's and the thread's.
    pub(super) fn time<T: KernelElement>(
        self,
        attn: &Attention<'_>,
        (q, k, v, mut out): Views<'_, T>,
        calls: u32,
    ) -> Result<(f64, f64), AttnError> {
        let Self { engine, pool, runner } = self;
        engine::inside(engine, pool, || both(calls, || runner.run(engine, attn, q, k, v, out.reborrow())))
    }
}
