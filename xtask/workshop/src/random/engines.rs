//! The engines that a random call goes through.

use attn_core::Dtype;
use attn_core::kv_cache::Queries;
use attn_parallel::Runner;
use attn_simd::Level;
use attn_simd::decode::DecodePlan;
use attn_testing::random::{Call, Target};
use attn_testing::{Engine, engine_calls, step_calls};
use rayon::ThreadPool;

use crate::simd::{Simd, slack};

/// Multiplications that the model of AMX computes, if it is one engine of several.
const MODEL_WORK: usize = 300_000;
/// One call of so many goes to it.
const MODEL_SHARE: u64 = 10;
/// Threads at most.
const THREADS: usize = 3;

/// The kernels over a pool of some threads.
struct Parallel(Level, ThreadPool);

impl Engine for Parallel {
    fn name(&self) -> &'static str {
        ["parallel on 1 thread", "parallel on 2 threads", "parallel on 3 threads"]
            [self.1.current_num_threads().clamp(1, THREADS) - 1]
    }
    fn level(&self) -> Option<&'static str> {
        Some(self.0.name())
    }
    fn supports_dtype(&self, dtype: Dtype) -> bool {
        dtype != Dtype::F64
    }
    fn half_slack(&self) -> f64 {
        slack(self.0)
    }
    engine_calls!(f32, f16, bf16; |this, call| {
        this.1.install(|| Runner::new().level(this.0).forward(call.attn, call.q, call.k, call.v, call.outputs))
    });
    step_calls!(|this, call| {
        let plan = DecodePlan::new(call.attn, call.q.sizes(), Queries::All, call.cache, this.0)?;
        this.1.install(|| Runner::new().attend_cache_planned(&plan, call.q, call.outputs))
    });
}

/// All of them.
pub(super) struct Engines {
    every: Vec<Simd>,
    threaded: Vec<Parallel>,
    models: Vec<Simd>,
}

impl Engines {
    /// Those that `--level` leaves.
    pub(super) fn new(level: Option<&str>) -> Result<Self, String> {
        let wanted = |name: &str| level.is_none_or(|level| level == name);
        let every: Vec<Level> = Level::available().filter(|level| wanted(level.name())).collect();
        let models: Vec<Simd> = Level::model_names()
            .filter(|name| wanted(name))
            .filter_map(|name| Level::by_name(name).ok())
            .map(Simd)
            .collect();
        if every.is_empty() && models.is_empty() {
            let here: Vec<&str> = Level::available().map(Level::name).chain(Level::model_names()).collect();
            return Err(format!("this machine has no level {}: {}", level.unwrap_or_default(), here.join(", ")));
        }
        let pools = every.iter().flat_map(|&level| (1..=THREADS).map(move |threads| (level, threads)));
        let pool = |(level, threads)| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|e| e.to_string())?;
            Ok(Parallel(level, pool))
        };
        let threaded = pools.map(pool).collect::<Result<_, String>>()?;
        Ok(Self { every: every.into_iter().map(Simd).collect(), threaded, models })
    }

    /// Those that a call goes through, the same each time.
    pub(super) fn of(&self, call: &Call) -> Vec<&dyn Target> {
        let mut all: Vec<&dyn Target> = self.every.iter().map(|engine| engine as &dyn Target).collect();
        let lot = (call.lot >> 8) as usize;
        all.extend(self.threaded.get(lot % self.threaded.len().max(1)).map(|engine| engine as &dyn Target));
        let (alone, few) = (self.every.is_empty(), call.lot.is_multiple_of(MODEL_SHARE));
        if alone || (few && call.work() <= MODEL_WORK) {
            let model = (call.lot / MODEL_SHARE) as usize % self.models.len().max(1);
            all.extend(self.models.get(model).map(|engine| engine as &dyn Target));
        }
        all
    }
}
