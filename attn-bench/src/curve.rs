//! The cost curve: time and memory of every engine against sequence length.
//!
//! For each length, first one call per engine on empty scratch gives its extra memory (and warms caches); then samples are
//! taken in rounds, *probe, naive, streaming, simd, probe, naive, …*, so that a slower or busier moment of the machine hits
//! all engines and the probe alike. The parallel engine has rounds of its own against a probe on all threads. An engine that
//! would take too long at a length, judged by its time at the length before and n², is not run there, and the curve says so.

use attn_simd::Level;
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};

use crate::case::{Case, Tensors};
use crate::clock::{Deadline, Repeat, Samples, calls_for, median, time};
use crate::crossover::Linear;
use crate::engine::{self, Engine, Runner};
use crate::fit::PowerLaw;
use crate::memory::{Heap, human};
use crate::probe;

/// What to measure, and how long to take.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The lengths, ascending.
    pub sizes: Vec<usize>,
    /// Everything but the length.
    pub case: Case,
    /// Engines to run.
    pub engines: Vec<Engine>,
    /// Level of the SIMD and parallel engines and of the probe.
    pub level: Level,
    /// How often to repeat at each length and engine.
    pub repeat: Repeat,
    /// Longest call that is started, in predicted seconds.
    pub longest_call: f64,
    /// Most scratch that the naive engine may allocate.
    pub most_memory: usize,
    /// After this, the points that remain get one sample each.
    pub deadline: Deadline,
    /// Seconds of each peak probe.
    pub probe_seconds: f64,
}

/// One engine at one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The engine.
    pub engine: Engine,
    /// Queries and keys.
    pub n: usize,
    /// Median seconds per call.
    pub seconds: f64,
    /// Most heap held during a first call beyond what was held before, in bytes.
    pub extra_bytes: usize,
    /// `flops / seconds / 1e9`.
    pub gflops: f64,
    /// Median over the rounds of rate / probe's rate.
    pub share_of_peak: f64,
    /// Calls that each sample is the mean of.
    pub calls_per_sample: u32,
    /// Seconds per call of each sample.
    pub samples: Samples,
    /// FLOP/s of the probe that ran beside each sample: of one core, or of all threads for the parallel engine.
    pub peaks: Vec<f64>,
}

/// A point that was not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// The engine.
    pub engine: Engine,
    /// Queries and keys.
    pub n: usize,
    /// Why not.
    pub why: String,
}

/// All points, with the case they belong to (its lengths are those of the largest point).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Sizes of the largest call.
    pub case: Case,
    /// What was measured.
    pub points: Vec<Point>,
    /// What was not.
    pub skipped: Vec<Skipped>,
}

/// Told how far a measurement is.
pub trait Progress {
    /// A part of the work begins, which will take this many steps.
    fn begin(&mut self, steps: usize);
    /// The next step begins.
    fn step(&mut self, what: &str);
    /// All is done.
    fn end(&mut self);
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _: usize) {}
    fn step(&mut self, _: &str) {}
    fn end(&mut self) {}
}

/// Measures the curve.
///
/// # Errors
/// A message where an engine refuses the case (which a valid [`Settings`] never makes it do).
pub fn measure(
    settings: &Settings,
    pool: &ThreadPool,
    heap: Heap,
    progress: &mut dyn Progress,
) -> Result<Curve, attn_core::AttnError> {
    let mut curve = Curve { case: settings.case, points: Vec::new(), skipped: Vec::new() };
    progress.begin(settings.sizes.len() * settings.engines.len());
    for &n in &settings.sizes {
        let mut tensors = Tensors::new(Case { q_len: n, kv_len: n, ..settings.case }, n as u64);
        let mut started = Vec::new();
        for &engine in &settings.engines {
            progress.step(&format!("{engine}, n = {n}"));
            match reason_to_skip(settings, &curve, engine, &tensors.case) {
                Some(why) => curve.skipped.push(Skipped { engine, n, why }),
                None => started.push(Started::new(engine, settings, pool, heap, &mut tensors)?),
            }
        }
        let (mut alone, mut together): (Vec<_>, Vec<_>) = started.into_iter().partition(|s| s.engine.one_thread());
        sample_rounds(settings, &mut alone, &mut tensors, pool, |seconds| probe::fma_peak(settings.level, seconds))?;
        sample_rounds(settings, &mut together, &mut tensors, pool, |seconds| {
            probe::fma_peak_of_pool(settings.level, pool, seconds)
        })?;
        for started in alone.into_iter().chain(together) {
            curve.points.push(started.finish(&tensors.case));
        }
        curve.case = tensors.case;
    }
    progress.end();
    Ok(curve)
}

fn reason_to_skip(settings: &Settings, curve: &Curve, engine: Engine, case: &Case) -> Option<String> {
    let n = case.q_len;
    if engine == Engine::Naive {
        let bytes = n.checked_mul(n).and_then(|scores| scores.checked_mul(size_of::<f32>()));
        match bytes {
            Some(bytes) if bytes <= settings.most_memory => {}
            Some(bytes) => return Some(format!("would allocate {}", human(bytes))),
            None => return Some("its matrix overflows".into()),
        }
    }
    let last = curve.of(engine).last()?;
    let predicted = last.seconds * (n as f64 / last.n as f64).powi(2);
    let limit = settings.longest_call.min(settings.deadline.remains().max(0.2));
    (predicted > limit).then(|| format!("predicted {} a call", seconds(predicted)))
}

/// An engine that has run once at a length.
struct Started<'p> {
    engine: Engine,
    runner: Runner<'p>,
    extra_bytes: usize,
    calls: u32,
    spent: f64,
    samples: Vec<f64>,
    peaks: Vec<f64>,
}

impl<'p> Started<'p> {
    fn new(
        engine: Engine,
        settings: &Settings,
        pool: &'p ThreadPool,
        heap: Heap,
        tensors: &mut Tensors,
    ) -> Result<Self, attn_core::AttnError> {
        let mut runner = Runner::new(settings.level, pool);
        let (first, extra_bytes) = match engine {
            // Workers keep their scratch from call to call: only threads that never ran one show what a call needs.
            Engine::Parallel => match engine::pool(pool.current_num_threads()) {
                Ok(fresh) => {
                    fresh.broadcast(|_| ()); // until all have started: a thread allocates as it starts
                    let mut runner = Runner::new(settings.level, &fresh);
                    heap.extra(|| time(1, || run(&mut runner, engine, tensors)))
                }
                Err(_) => heap.extra(|| time(1, || run(&mut runner, engine, tensors))),
            },
            _ => heap.extra(|| time(1, || run(&mut runner, engine, tensors))),
        };
        let mut this = Self {
            engine,
            runner,
            extra_bytes,
            calls: calls_for(first?),
            spent: 0.0,
            samples: Vec::new(),
            peaks: Vec::new(),
        };
        if this.calls > 1 || engine == Engine::Parallel {
            // The first call paid for page faults and cold caches: look again before choosing how many to take together.
            let warm = time(this.calls.min(16), || run(&mut this.runner, engine, tensors))?;
            this.calls = calls_for(warm);
        }
        Ok(this)
    }

    fn finish(self, case: &Case) -> Point {
        let seconds = median(&self.samples);
        let shares: Vec<f64> =
            self.samples.iter().zip(&self.peaks).map(|(seconds, peak)| case.flops() / seconds / peak).collect();
        Point {
            engine: self.engine,
            n: case.q_len,
            seconds,
            extra_bytes: self.extra_bytes,
            gflops: case.flops() / seconds / 1e9,
            share_of_peak: median(&shares),
            calls_per_sample: self.calls,
            samples: Samples(self.samples),
            peaks: self.peaks,
        }
    }
}

/// Takes samples round by round until each engine has enough.
fn sample_rounds(
    settings: &Settings,
    started: &mut [Started<'_>],
    tensors: &mut Tensors,
    pool: &ThreadPool,
    peak: impl Fn(f64) -> f64,
) -> Result<(), attn_core::AttnError> {
    loop {
        let late = settings.deadline.passed();
        let wants = |s: &Started<'_>| settings.repeat.goes_on(s.samples.len(), s.spent, late);
        if !started.iter().any(wants) {
            return Ok(());
        }
        let mut before = peak(settings.probe_seconds);
        for s in started.iter_mut().filter(|s| wants(s)) {
            let (runner, engine, calls) = (&mut s.runner, s.engine, s.calls);
            let seconds = engine::inside(engine, pool, || time(calls, || run(runner, engine, tensors)))?;
            let after = peak(settings.probe_seconds);
            s.spent += seconds * f64::from(s.calls);
            s.samples.push(seconds);
            s.peaks.push(0.5 * (before + after));
            before = after;
        }
    }
}

fn run(runner: &mut Runner<'_>, engine: Engine, tensors: &mut Tensors) -> Result<(), attn_core::AttnError> {
    let attn = tensors.case.attention();
    let (q, k, v, out) = tensors.views()?;
    runner.run(engine, &attn, q, k, v, out)
}

impl Curve {
    /// The points of one engine, by ascending length.
    pub fn of(&self, engine: Engine) -> impl Iterator<Item = &Point> {
        self.points.iter().filter(move |p| p.engine == engine)
    }

    /// The engines that have points, simplest first.
    pub fn engines(&self) -> Vec<Engine> {
        Engine::ALL.into_iter().filter(|&engine| self.of(engine).next().is_some()).collect()
    }

    /// The lengths, ascending.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.points.iter().map(|p| p.n).chain(self.skipped.iter().map(|s| s.n)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// How the time of an engine grows over the larger lengths.
    pub fn time_law(&self, engine: Engine) -> Option<PowerLaw> {
        PowerLaw::fit_large(&self.of(engine).map(|p| (p.n, p.seconds)).collect::<Vec<_>>())
    }

    /// How the extra memory of an engine grows over the larger lengths; `None` where it needs none at all.
    pub fn memory_law(&self, engine: Engine) -> Option<PowerLaw> {
        PowerLaw::fit_large(&self.of(engine).map(|p| (p.n, p.extra_bytes as f64)).collect::<Vec<_>>())
    }

    /// Attention against the linear parts of a layer, from the SIMD engine's curve and its rate at the largest length.
    pub fn linear(&self) -> Option<Linear> {
        let attention = self.time_law(Engine::Simd)?;
        let rate = self.of(Engine::Simd).last()?.gflops * 1e9;
        Some(Linear { attention, measured_width: self.case.q_heads * self.case.head_dim, rate })
    }

    /// At the largest length that both have: how many times faster `fast` is than `slow`.
    pub fn speedup(&self, fast: Engine, slow: Engine) -> Option<(usize, f64)> {
        let slow = self.of(slow).last()?;
        let fast = self.of(fast).find(|p| p.n == slow.n)?;
        Some((slow.n, slow.seconds / fast.seconds))
    }
}

/// A time in the unit that reads best: `"1.23 ms"`.
pub fn seconds(t: f64) -> String {
    let (value, unit) = match t {
        t if t.is_nan() => return "–".into(),
        t if t < 1e-6 => (t * 1e9, "ns"),
        t if t < 1e-3 => (t * 1e6, "µs"),
        t if t < 1.0 => (t * 1e3, "ms"),
        t => (t, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pool;

    fn settings() -> Settings {
        Settings {
            sizes: vec![16, 32, 64, 128],
            case: Case::square(0, 8),
            engines: Engine::ALL.to_vec(),
            level: Level::detect(),
            repeat: Repeat { at_least: 2, at_most: 3, seconds: 0.0 },
            longest_call: 1e9,
            most_memory: usize::MAX,
            deadline: Deadline::after(-1.0),
            probe_seconds: 1e-4,
        }
    }

    #[test]
    fn every_engine_gets_a_point_at_every_length() {
        let pool = pool(2).unwrap();
        let curve = measure(&settings(), &pool, Heap::NOT_COUNTED, &mut Silent).unwrap();
        assert_eq!((curve.points.len(), curve.skipped.len()), (16, 0));
        assert_eq!((curve.engines(), curve.sizes()), (Engine::ALL.to_vec(), vec![16, 32, 64, 128]));
        for p in &curve.points {
            assert_eq!((p.samples.0.len(), p.peaks.len()), (2, 2));
            let flops = Case::square(p.n, 8).flops();
            assert!(p.seconds > 0.0 && (p.gflops * 1e9 * p.seconds / flops - 1.0).abs() < 1e-9);
            assert!(p.share_of_peak > 0.0);
        }
        assert_eq!(curve.case.q_len, 128);
        assert!(curve.time_law(Engine::Simd).is_some() && curve.linear().is_some());
        assert!(curve.speedup(Engine::Simd, Engine::Naive).is_some());
    }

    #[test]
    fn what_would_take_too_long_or_too_much_is_named() {
        let pool = pool(1).unwrap();
        let limits = Settings { longest_call: 1e-12, most_memory: 10_000, ..settings() };
        let curve = measure(&limits, &pool, Heap::NOT_COUNTED, &mut Silent).unwrap();
        // The first length always runs (nothing is known yet); from the second on the prediction is above the limit.
        assert_eq!(curve.points.iter().map(|p| p.n).max(), Some(16));
        assert_eq!(curve.skipped.len(), 12);
        let why = |n, engine| &curve.skipped.iter().find(|s| s.n == n && s.engine == engine).unwrap().why;
        assert!(why(32, Engine::Streaming).starts_with("predicted"));
        assert!(why(64, Engine::Naive).starts_with("would allocate"), "{}", why(64, Engine::Naive));
    }

    #[test]
    fn times_read_well() {
        assert_eq!(
            [2.5e-9, 1.234e-6, 45.67e-6, 0.0123, 0.5, 12.0].map(seconds),
            ["2.50 ns", "1.23 µs", "45.7 µs", "12.3 ms", "500 ms", "12.0 s"]
        );
    }
}
