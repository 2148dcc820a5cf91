//! The roofs of the machine: arithmetic, and reading memory of each size; and the time of a call under them by the cost
//! model (Williams, Waterman, Patterson 2009, "Roofline", doi 10.1145/1498765.1498785).
//!
//! Every sample of a curve has an FMA probe beside it; here the roofs are measured once per run, for the report.

use attn_layers::cost;
use attn_simd::Level;
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};

use crate::case::{Case, Number};
use crate::curve::{Curve, Point, Who};
use crate::engine::Engine;
use crate::probe;

/// Bytes that are read over and over: sizes that fit into the caches of most processors, and one that fits into none.
pub const SIZES: [usize; 4] = [32 << 10, 512 << 10, 8 << 20, 256 << 20];

/// A rate of reading memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Read {
    /// Bytes that were read over and over, by each thread as many.
    pub bytes: usize,
    /// Bytes a second of one thread.
    pub one: f64,
    /// Bytes a second of all threads at once.
    pub all: f64,
}

/// The roofs of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Roofs {
    /// FLOP/s of f32 multiply-adds on one thread.
    pub fma_one: f64,
    /// On all threads at once.
    pub fma_all: f64,
    /// FLOP/s of bf16 products on one thread, by AMX or AVX512_BF16; `None` if it has none.
    pub bf16_one: Option<f64>,
    /// Reading, by size.
    pub reads: Vec<Read>,
}

impl Roofs {
    /// Measures them, for about `seconds` each.
    pub fn measure(level: Level, pool: &ThreadPool, seconds: f64) -> Self {
        let reads = SIZES
            .map(|bytes| Read {
                bytes,
                one: probe::read_rate(level, bytes, seconds),
                all: pool.broadcast(|_| probe::read_rate(level, bytes, seconds)).iter().sum(),
            })
            .to_vec();
        Self {
            fma_one: probe::fma_peak(level, seconds),
            fma_all: probe::fma_peak_of_pool(level, pool, seconds),
            bf16_one: probe::bf16_peak(level, seconds),
            reads,
        }
    }

    /// Bytes a second of one thread from memory that fits into no cache.
    pub fn memory_one(&self) -> Option<f64> {
        self.reads.last().map(|read| read.one)
    }
}

/// The cost model's time of a call, beside the measured one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The curve's name.
    pub curve: String,
    /// Who computed.
    #[serde(flatten)]
    pub who: Who,
    /// Queries and keys.
    pub n: usize,
    /// FLOPs, by [`attn_layers::cost::forward_flops`].
    pub flops: f64,
    /// Bytes moved from and to memory, by [`attn_layers::cost`]: [`naive_bytes`](cost::naive_bytes), or
    /// [`streaming_bytes`](cost::streaming_bytes) at the engine's block of queries.
    pub bytes: f64,
    /// The least time: `max(flops / peak, bytes / bandwidth)`, in seconds.
    pub least: f64,
    /// What it took, in seconds.
    pub measured: f64,
}

impl Prediction {
    /// FLOPs per byte.
    pub fn intensity(&self) -> f64 {
        self.flops / self.bytes
    }
}

/// Queries that pass over the keys together.
fn block(engine: Engine, level_lanes: usize) -> usize {
    match engine {
        Engine::Streaming => 1,
        _ => 3 * level_lanes, // attn-simd: three vectors of queries
    }
}

/// Bytes that a call moves if no key stays in a cache between blocks of queries.
fn bytes(engine: Engine, case: &Case, number: Number, lanes: usize) -> Option<f64> {
    let shape = case.shape().ok()?;
    let bytes = match engine {
        Engine::Naive => cost::naive_bytes(&shape, number.dtype()),
        Engine::Streaming | Engine::Simd | Engine::Parallel => {
            cost::streaming_bytes(&shape, number.dtype(), block(engine, lanes))
        }
        Engine::Windowed | Engine::Linear => return None,
    };
    Some(bytes as f64)
}

/// Predictions for every point of the exact engines on one thread.
pub fn predict(curve: &Curve, roofs: &Roofs, lanes: usize) -> Vec<Prediction> {
    let one = |p: &Point| {
        let case = Case { q_len: p.n, kv_len: p.n, ..curve.case };
        let (flops, bytes) = (p.who.engine.flops(&case), bytes(p.who.engine, &case, curve.number, lanes)?);
        let bandwidth = roofs.memory_one()?;
        // The roof of the moment: the probes that ran beside the samples.
        let peak = p.gflops * 1e9 / p.share_of_peak;
        let least = (flops / peak).max(bytes / bandwidth);
        Some(Prediction { curve: curve.name(), who: p.who, n: p.n, flops, bytes, least, measured: p.seconds })
    };
    curve.points.iter().filter(|p| p.who.engine.one_thread()).filter_map(one).collect()
}

/// Bytes of one thing at one length: measured, or from a closed form if it was not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    /// How many.
    pub bytes: u128,
    /// Whether they were counted in a run.
    pub measured: bool,
}

/// Memory beside inputs and output at one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// Queries and keys.
    pub n: usize,
    /// Of the naive engine, which stores a head's n×n scores.
    pub matrix: Bytes,
    /// Of the SIMD engine.
    pub ours: Bytes,
}

/// Lengths for which memory is said, measured or not.
const FOOTPRINTS: [usize; 7] = [1024, 4096, 8192, 16_384, 32_768, 65_536, 100_000];

/// Memory up to 100 000 tokens: measured where the curve has the length, from [`cost::weights_bytes`] and the plan's
/// size of the workspace elsewhere.
pub fn footprints(curve: &Curve, level: Level) -> Vec<Footprint> {
    let counted = |engine, n| {
        let point = curve.at(Who::alone(engine), n)?;
        Some(Bytes { bytes: point.extra_bytes as u128, measured: true })
    };
    let one = |n: usize| {
        // The naive engine keeps one head's scores at a time.
        let case = Case { q_len: n, kv_len: n, ..curve.case };
        let head = Case { q_heads: 1, kv_heads: 1, ..case }.shape().ok()?;
        let attn = case.attention();
        let plan = attn_simd::Plan::new(&attn, case.shape().ok()?, level).ok()?;
        let predicted = |bytes: u128| Bytes { bytes, measured: false };
        let dtype = curve.number.dtype();
        let lines = plan.workspace_lines_for(dtype, dtype) as u128 * size_of::<attn_simd::Line>() as u128;
        Some(Footprint {
            n,
            matrix: counted(Engine::Naive, n)
                .unwrap_or_else(|| predicted(cost::weights_bytes(&head, attn_core::Dtype::F32))),
            ours: counted(Engine::Simd, n).unwrap_or_else(|| predicted(lines)),
        })
    };
    FOOTPRINTS.into_iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve_report::tests::report;
    use crate::engine::pool;

    #[test]
    fn roofs_are_measured() {
        let pool = pool(2).unwrap();
        let roofs = Roofs::measure(Level::detect(), &pool, 1e-4);
        assert!(roofs.fma_one > 1e8 && roofs.fma_all > 1e8);
        assert_eq!(roofs.reads.iter().map(|r| r.bytes).collect::<Vec<_>>(), SIZES);
        assert!(roofs.reads.iter().all(|r| r.one > 1e6 && r.all > 1e6), "{roofs:?}");
        assert_eq!(roofs.memory_one(), roofs.reads.last().map(|r| r.one));
    }

    #[test]
    fn the_least_time_is_the_higher_roof() {
        let report = report();
        let curve = &report.curves[0];
        let roofs = |memory| Roofs { reads: vec![Read { bytes: 1, one: memory, all: memory }], ..Roofs::default() };
        let of = |roofs: &Roofs, engine, n| {
            let all = predict(curve, roofs, 16);
            all.into_iter().find(|p| p.who.engine == engine && p.n == n).unwrap()
        };
        // A memory without limit: FLOPs over the peak of 200 GFLOP/s.
        let fast = of(&roofs(1e18), Engine::Simd, 1024);
        assert_eq!(fast.flops, 4.0 * 1024.0 * 1024.0 * 64.0);
        assert!((fast.least / (fast.flops / 200e9) - 1.0).abs() < 1e-9, "{fast:?}");
        // 48 queries a block: 22 passes over keys and values of 64 floats each, and q and the output once.
        assert_eq!(fast.bytes, (22.0 * 1024.0 * 128.0 + 1024.0 * 128.0) * 4.0);
        // A very slow one: bytes over its rate, and the naive form moves the matrix four times.
        let slow = of(&roofs(1e6), Engine::Naive, 1024);
        assert!((slow.least / (slow.bytes / 1e6) - 1.0).abs() < 1e-9);
        assert_eq!(slow.bytes, (4.0 * 1024.0 * 1024.0 + 4.0 * 1024.0 * 64.0) * 4.0);
        assert!(slow.intensity() < fast.intensity());
        assert!(predict(curve, &roofs(1.0), 16).iter().all(|p| p.who.engine != Engine::Parallel));
    }

    #[test]
    fn memory_is_measured_where_it_was_run_and_predicted_elsewhere() {
        let report = report();
        let prints = footprints(&report.curves[0], Level::detect());
        let at = |n| *prints.iter().find(|p| p.n == n).unwrap();
        assert_eq!(at(1024).matrix, Bytes { bytes: 4 << 20, measured: true });
        assert_eq!(at(100_000).matrix, Bytes { bytes: 40_000_000_000, measured: false });
        assert_eq!(at(1024).ours, Bytes { bytes: 100_000, measured: true });
        let far = at(100_000).ours;
        assert!(!far.measured && far.bytes > 1 << 10 && far.bytes < 4 << 20, "{far:?}");
        assert_eq!(at(65_536).ours, far, "the workspace does not grow");
    }
}
