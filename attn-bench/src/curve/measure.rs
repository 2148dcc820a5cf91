//! Takes the samples of a cost curve.
//!
//! The measurement passes over the whole grid of cases several times, so that the samples of one case are minutes
//! apart: comparisons take the distance of its passes for noise. Within a pass, at each length, it takes samples in
//! rounds, *probe, naive, streaming, simd, probe, naive, …*, so that a slower or busier moment of the machine hits all
//! engines and the probe alike. The parallel engine has its own rounds against a probe on all of its threads. Each of
//! its samples follows a call that does not count: as in a model, whose layers follow each other. The first pass begins
//! each case with one call on empty scratch, which gives its extra memory. If an engine would take too long at a
//! length, by its time at the length before and its growth, it is not run there, and the curve says so.

use attn_core::AttnError;
use attn_core::half::{bf16, f16};
use attn_simd::Level;
use rayon::ThreadPool;

use super::{Curve, Found, Point, Skipped, Who, seconds};
use crate::case::{Case, Number, Stored, Tensors};
use crate::clock::{Deadline, Repeat, Samples, both, calls_for, time};
use crate::engine::{self, Engine, Runner};
use crate::filter::Filter;
use crate::journal::Journal;
use crate::memory::{Heap, human, resident};
use crate::probe;
use crate::progress::Progress;

/// What to measure, and how long to take.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The lengths, ascending.
    pub sizes: Vec<usize>,
    /// A curve each: everything but the length, and how numbers are stored.
    pub variants: Vec<(Case, Number)>,
    /// A line each.
    pub lines: Vec<Who>,
    /// The cases to measure, by their names.
    pub filter: Filter,
    /// Level of the SIMD and parallel engines and of the probe.
    pub level: Level,
    /// How often to repeat each case, over all passes.
    pub repeat: Repeat,
    /// How many times to go through the grid.
    pub passes: usize,
    /// Longest call that is started, in predicted seconds.
    pub longest_call: f64,
    /// Most scratch that the naive engine may allocate.
    pub most_memory: usize,
    /// After this, cases of the first pass get one sample each, and those of later passes none.
    pub deadline: Deadline,
    /// Seconds of each peak probe.
    pub probe_seconds: f64,
}

/// What measuring is done with.
pub struct Tools<'t> {
    /// A pool for each number of threads among the lines; the first serves the engines on one thread.
    pub pools: &'t [ThreadPool],
    /// Counts allocations.
    pub heap: Heap,
    /// Remembers finished steps.
    pub journal: &'t mut Journal,
    /// Is told how far it is.
    pub progress: &'t mut dyn Progress,
}

/// Why measuring ended early.
#[derive(Debug)]
#[non_exhaustive]
pub enum MeasureError {
    /// An engine refused a case.
    Engine(AttnError),
    /// The journal cannot be written.
    Journal(std::io::Error),
    /// No pool has so many threads.
    Threads(usize),
}

impl std::fmt::Display for MeasureError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Engine(error) => write!(f, "an engine refused a case: {error}"),
            Self::Journal(error) => write!(f, "the journal of the run: {error}"),
            Self::Threads(threads) => write!(f, "no pool of {threads} threads"),
        }
    }
}

impl std::error::Error for MeasureError {}

impl From<AttnError> for MeasureError {
    fn from(error: AttnError) -> Self {
        Self::Engine(error)
    }
}

impl Settings {
    /// The names of all cases that the filter accepts.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for &(case, number) in &self.variants {
            let curve = Curve::new(case, number);
            let all = self.sizes.iter().flat_map(|&n| self.lines.iter().map(move |&who| (who, n)));
            names.extend(all.map(|(who, n)| curve.case_name(who, n)).filter(|name| self.filter.accepts(name)));
        }
        names
    }

    /// The lines to measure at a length.
    fn wanted(&self, curve: &Curve, n: usize, filter: &Filter) -> Vec<Who> {
        let name = |who: &Who| curve.case_name(*who, n);
        self.lines.iter().copied().filter(|who| self.filter.accepts(&name(who)) && filter.accepts(&name(who))).collect()
    }

    /// About how long one pass takes at a length, for the display of the time left.
    fn expected(&self, curve: &Curve, n: usize, filter: &Filter) -> f64 {
        let repeat = self.repeat.split(self.passes);
        let one = |who: Who| {
            let rate = match who.engine {
                Engine::Naive => 8e9,
                Engine::Streaming => 1.5e9,
                Engine::Linear => 1e9,
                _ => 100e9 * who.threads as f64,
            };
            let call = who.engine.flops(&Case { q_len: n, kv_len: n, ..curve.case }) / rate;
            let run = call <= self.longest_call && (who.engine != Engine::Naive || 4 * n * n <= self.most_memory);
            if run { (call * (1 + repeat.at_least) as f64).max(repeat.seconds) + 0.01 } else { 0.0 }
        };
        self.wanted(curve, n, filter).into_iter().map(one).sum()
    }
}

/// Measures the curves, one per variant; those for which the filter leaves nothing are left out.
///
/// # Errors
/// [`MeasureError`]; finished steps are in the journal.
pub fn measure(settings: &Settings, tools: &mut Tools<'_>) -> Result<Vec<Curve>, MeasureError> {
    let mut curves: Vec<Curve> = settings.variants.iter().map(|&(case, number)| Curve::new(case, number)).collect();
    let passes = settings.passes.max(1);
    let expected: Vec<f64> = (0..passes)
        .flat_map(|_| &curves)
        .flat_map(|curve| settings.sizes.iter().map(|&n| settings.expected(curve, n, &Filter::ALL)))
        .collect();
    tools.progress.begin(&expected);
    for pass in 0..passes {
        one_pass(settings, tools, &mut curves, &Filter::ALL, pass)?;
    }
    tools.progress.end();
    curves.retain(|curve| !curve.points.is_empty() || !curve.skipped.is_empty());
    Ok(curves)
}

/// Measures some cases of the curves once more, as pass number `pass`.
///
/// # Errors
/// [`MeasureError`].
pub fn again(
    settings: &Settings,
    tools: &mut Tools<'_>,
    curves: &mut [Curve],
    filter: &Filter,
    pass: usize,
) -> Result<(), MeasureError> {
    let expected: Vec<f64> =
        curves.iter().flat_map(|curve| settings.sizes.iter().map(|&n| settings.expected(curve, n, filter))).collect();
    tools.progress.begin(&expected);
    one_pass(settings, tools, curves, filter, pass)?;
    tools.progress.end();
    Ok(())
}

fn one_pass(
    settings: &Settings,
    tools: &mut Tools<'_>,
    curves: &mut [Curve],
    filter: &Filter,
    pass: usize,
) -> Result<(), MeasureError> {
    for curve in curves {
        for &n in &settings.sizes {
            let mut lines = settings.wanted(curve, n, filter);
            if pass > 0 {
                lines.retain(|&who| curve.at(who, n).is_some());
            }
            let step = format!("{}/n{n}/pass{pass}", curve.name());
            if lines.is_empty() || (pass > 0 && pass < settings.passes && settings.deadline.passed()) {
                tools.progress.known();
            } else if let Some(found) = tools.journal.get::<Found>(&step) {
                tools.progress.known();
                curve.take(found);
            } else {
                tools.progress.step(&step);
                let found = match curve.number {
                    Number::F32 => at::<f32>(settings, tools, curve, &lines, n, pass),
                    Number::F16 => at::<f16>(settings, tools, curve, &lines, n, pass),
                    Number::Bf16 => at::<bf16>(settings, tools, curve, &lines, n, pass),
                }?;
                tools.journal.put(&step, &found).map_err(MeasureError::Journal)?;
                curve.take(found);
            }
        }
    }
    Ok(())
}

/// All lines at one length.
fn at<T: Stored>(
    settings: &Settings,
    tools: &Tools<'_>,
    curve: &Curve,
    lines: &[Who],
    n: usize,
    pass: usize,
) -> Result<Found, MeasureError> {
    let mut tensors = Tensors::<T>::new(Case { q_len: n, kv_len: n, ..curve.case }, n as u64);
    let (mut found, mut started) = (Found::default(), Vec::new());
    for &who in lines {
        let skip = if pass == 0 { reason_to_skip(settings, curve, who, &tensors.case) } else { None };
        match skip {
            Some(why) => found.skipped.push(Skipped { who, n, why }),
            None => started.push(Started::new(who, settings, tools, pass, &mut tensors)?),
        }
    }
    let (mut alone, mut together): (Vec<_>, Vec<_>) = started.into_iter().partition(|s| s.who.engine.one_thread());
    sample_rounds(settings, &mut alone, &mut tensors, pass, |s| probe::fma_peak(settings.level, s))?;
    // A group of rounds per number of threads: each has a probe of its own.
    for line in &mut together {
        let pool = line.pool;
        let group = std::slice::from_mut(line);
        sample_rounds(settings, group, &mut tensors, pass, |s| probe::fma_peak_of_pool(settings.level, pool, s))?;
    }
    found.points = alone.into_iter().chain(together).map(|started| started.point).collect();
    Ok(found)
}

fn reason_to_skip(settings: &Settings, curve: &Curve, who: Who, case: &Case) -> Option<String> {
    let n = case.q_len;
    if who.engine == Engine::Naive {
        let bytes = n.checked_mul(n).and_then(|scores| scores.checked_mul(size_of::<f32>()));
        match bytes {
            Some(bytes) if bytes <= settings.most_memory => {}
            Some(bytes) => return Some(format!("would allocate {}", human(bytes))),
            None => return Some("its matrix overflows".into()),
        }
    }
    let last = curve.of(who).last()?;
    let before = who.engine.flops(&Case { q_len: last.n, kv_len: last.n, ..*case });
    let predicted = last.seconds * who.engine.flops(case) / before;
    let limit = settings.longest_call.min(settings.deadline.remains().max(0.2));
    (predicted > limit).then(|| format!("predicted {} a call", seconds(predicted)))
}

/// An engine that has run once at a length.
struct Started<'p> {
    who: Who,
    pool: &'p ThreadPool,
    runner: Runner<'p>,
    spent: f64,
    point: Point,
}

impl<'p> Started<'p> {
    fn new<T: Stored>(
        who: Who,
        settings: &Settings,
        tools: &Tools<'p>,
        pass: usize,
        tensors: &mut Tensors<T>,
    ) -> Result<Self, MeasureError> {
        let fits = |pool: &&ThreadPool| who.engine.one_thread() || pool.current_num_threads() == who.threads;
        let pool = tools.pools.iter().find(fits).ok_or(MeasureError::Threads(who.threads))?;
        let mut runner = Runner::new(settings.level, pool);
        // The heap is looked at inside: reading the resident set allocates.
        let counted = |runner: &mut Runner<'_>, tensors: &mut Tensors<T>| {
            resident(|| tools.heap.extra(|| time(1, || run(runner, who.engine, tensors))))
        };
        // Workers keep their scratch from call to call: only threads that never ran one show what a call needs.
        let apart = who.engine == Engine::Parallel && pass == 0;
        let fresh = |tensors: &mut Tensors<T>| {
            engine::with_fresh_pool(who.threads, |fresh| counted(&mut Runner::new(settings.level, fresh), tensors)).ok()
        };
        let ((first, extra_bytes), resident_bytes) = match if apart { fresh(tensors) } else { None } {
            Some(counts) => counts,
            None => counted(&mut runner, tensors),
        };
        let mut calls = calls_for(first?);
        if calls > 1 || who.engine == Engine::Parallel {
            // The first call paid for page faults and cold caches: look again before choosing how many to take
            // together.
            calls = calls_for(time(calls.min(16), || run(&mut runner, who.engine, tensors))?);
        }
        let point = Point {
            who,
            n: tensors.case.q_len,
            seconds: 0.0,
            extra_bytes,
            resident_bytes,
            gflops: 0.0,
            share_of_peak: 0.0,
            calls_per_sample: calls,
            samples: Samples::default(),
            thread: Vec::new(),
            peaks: Vec::new(),
            passes: Vec::new(),
        };
        Ok(Self { who, pool, runner, spent: 0.0, point })
    }
}

/// Takes samples round by round until each line has enough for this pass.
fn sample_rounds<T: Stored>(
    settings: &Settings,
    started: &mut [Started<'_>],
    tensors: &mut Tensors<T>,
    pass: usize,
    peak: impl Fn(f64) -> f64,
) -> Result<(), AttnError> {
    let repeat = settings.repeat.split(settings.passes);
    loop {
        let late = settings.deadline.passed() && pass < settings.passes;
        let wants = |s: &Started<'_>| repeat.goes_on(s.point.samples.0.len(), s.spent, late);
        if !started.iter().any(wants) {
            return Ok(());
        }
        let mut before = peak(settings.probe_seconds);
        for s in started.iter_mut().filter(|s| wants(s)) {
            let (runner, who, calls) = (&mut s.runner, s.who, s.point.calls_per_sample);
            let (wall, thread) = engine::inside(who.engine, s.pool, || {
                if !who.engine.one_thread() {
                    // The pool sleeps: that the system wakes it, and perhaps on one core first, is not the engine's
                    // time.
                    run(runner, who.engine, tensors)?;
                }
                both(calls, || run(runner, who.engine, tensors))
            })?;
            let after = peak(settings.probe_seconds);
            s.spent += wall * f64::from(calls);
            s.point.samples.0.push(wall);
            if who.engine.one_thread() {
                s.point.thread.push(thread);
            }
            s.point.peaks.push(0.5 * (before + after));
            s.point.passes.push(pass);
            before = after;
        }
    }
}

fn run<T: Stored>(runner: &mut Runner<'_>, engine: Engine, tensors: &mut Tensors<T>) -> Result<(), AttnError> {
    let attn = tensors.case.attention();
    let (q, k, v, out) = tensors.views()?;
    runner.run(engine, &attn, q, k, v, out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pool;
    use crate::progress::Silent;

    fn settings() -> Settings {
        let mut lines = Engine::ALL.map(Who::alone).to_vec();
        lines[3].threads = 2;
        lines.extend(Engine::CHEAPER.map(Who::alone));
        Settings {
            sizes: vec![16, 32, 64, 128],
            variants: vec![(Case::square(0, 8), Number::F32), (Case::square(0, 8), Number::Bf16)],
            lines,
            filter: Filter::ALL,
            level: Level::detect(),
            repeat: Repeat { at_least: 4, at_most: 6, seconds: 0.0 },
            passes: 2,
            longest_call: 1e9,
            most_memory: usize::MAX,
            deadline: Deadline::after(-1.0),
            probe_seconds: 1e-4,
        }
    }

    fn run_with(settings: &Settings, journal: &mut Journal) -> Result<Vec<Curve>, MeasureError> {
        let pools = [pool(1).unwrap(), pool(2).unwrap()];
        measure(settings, &mut Tools { pools: &pools, heap: Heap::NOT_COUNTED, journal, progress: &mut Silent })
    }

    #[test]
    fn every_line_gets_a_point_at_every_length() {
        let curves = run_with(&settings(), &mut Journal::none()).unwrap();
        assert_eq!(curves.iter().map(|c| c.number).collect::<Vec<_>>(), [Number::F32, Number::Bf16]);
        for curve in &curves {
            assert_eq!((curve.points.len(), curve.skipped.len()), (24, 0));
            assert_eq!((curve.lines(), curve.sizes()), (settings().lines, vec![16, 32, 64, 128]));
            for p in &curve.points {
                assert_eq!((p.samples.0.len(), p.peaks.len(), &p.passes), (4, 4, &vec![0, 0, 1, 1]));
                assert_eq!(p.thread.len(), if p.who.engine.one_thread() { 4 } else { 0 });
                let flops = p.who.engine.flops(&Case::square(p.n, 8));
                assert!(p.seconds > 0.0 && (p.gflops * 1e9 * p.seconds / flops - 1.0).abs() < 1e-9);
                assert!(p.share_of_peak > 0.0);
            }
            assert_eq!(curve.case.q_len, 128);
            assert!(curve.time_law(Who::alone(Engine::Simd)).is_some());
            assert!(curve.speedup(Engine::Simd, Engine::Naive).is_some());
        }
    }

    #[test]
    fn what_would_take_too_long_or_too_much_is_named() {
        let limits = Settings { longest_call: 1e-12, most_memory: 10_000, ..settings() };
        let curve = run_with(&limits, &mut Journal::none()).unwrap().remove(0);
        // The first length always runs (nothing is known yet); from the second on the prediction is above the limit.
        assert_eq!(curve.points.iter().map(|p| p.n).max(), Some(16));
        assert_eq!(curve.skipped.len(), 18);
        let why = |n, engine| &curve.skipped.iter().find(|s| s.n == n && s.who.engine == engine).unwrap().why;
        assert!(why(32, Engine::Streaming).starts_with("predicted"));
        assert!(why(64, Engine::Naive).starts_with("would allocate"), "{}", why(64, Engine::Naive));
    }

    #[test]
    fn a_filter_leaves_the_rest_alone() {
        let filter = Filter::new("/f32/.*(simd|naive)/t1/n(16|64)$").unwrap();
        let settings = Settings { filter, ..settings() };
        assert_eq!(settings.names().len(), 4);
        let curves = run_with(&settings, &mut Journal::none()).unwrap();
        assert_eq!(curves.len(), 1);
        let mut names: Vec<String> = curves[0].points.iter().map(|p| curves[0].case_name(p.who, p.n)).collect();
        names.sort_unstable();
        let mut wanted = settings.names();
        wanted.sort_unstable();
        assert_eq!(names, wanted);
    }

    #[test]
    fn finished_steps_are_not_taken_again() {
        let path = std::env::temp_dir().join(format!("attn-bench-measure-{}", std::process::id()));
        let few = Settings { sizes: vec![16, 32], ..settings() };
        let first = run_with(&few, &mut Journal::open(&path, "key", true).unwrap()).unwrap();
        let more = settings();
        let second = run_with(&more, &mut Journal::open(&path, "key", false).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        for curve in &second {
            let known = first.iter().find(|c| c.number == curve.number).unwrap();
            for p in curve.points.iter().filter(|p| p.n <= 32) {
                assert_eq!(known.at(p.who, p.n), Some(p), "measured twice");
            }
            assert_eq!(curve.points.len(), 24);
        }
    }

    #[test]
    fn chosen_cases_are_measured_once_more() {
        let settings = Settings { variants: vec![(Case::square(0, 8), Number::F16)], ..settings() };
        let mut curves = run_with(&settings, &mut Journal::none()).unwrap();
        let filter = Filter::names(["curve/d8/f16/simd/t1/n32"]);
        let pools = [pool(1).unwrap(), pool(2).unwrap()];
        let mut journal = Journal::none();
        let mut tools = Tools { pools: &pools, heap: Heap::NOT_COUNTED, journal: &mut journal, progress: &mut Silent };
        again(&settings, &mut tools, &mut curves, &filter, 2).unwrap();
        for p in &curves[0].points {
            let chosen = p.who.engine == Engine::Simd && p.n == 32;
            assert_eq!(p.passes.iter().filter(|&&pass| pass == 2).count(), if chosen { 2 } else { 0 });
        }
        let few = Settings { lines: vec![Who { engine: Engine::Parallel, threads: 3 }], ..settings };
        assert!(matches!(again(&few, &mut tools, &mut curves, &Filter::ALL, 0), Err(MeasureError::Threads(3))));
    }
}
