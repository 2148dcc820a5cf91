//! Single shapes beside the machine's peak and beside other libraries.
//!
//! The shapes are a table in the repository, `shapes.txt`: f32 as it stands, and by [`types`] the rows that are of
//! interest in other number types and precisions too. For each, samples are taken in rounds: probe, ours, probe, each
//! peer on the same inputs. A ratio is peer's time over ours within a round, above 1 where ours is faster; what is
//! reported is the median over the rounds, which does not care whether the machine was slower for a while. At one
//! thread all times are those of the processor, not of the wall: other programs on the same core take nothing from
//! either side.

mod inputs;
mod result;

use attn_core::{AttnError, Layout, View, ViewMut};
use attn_layers::cost;
use attn_simd::Level;
use inputs::{Ours, window};
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};

use crate::case::{Case, Number, Tensors};
use crate::clock::{Repeat, Samples};
use crate::engine::{Engine, Runner};
use crate::memory;
use crate::peer::Peer;
use crate::probe;

pub use inputs::Inputs;
pub use result::{KernelReport, KernelResult, PeerResult, case_name};

/// The table of shapes.
pub const SHAPES: &str = include_str!("../shapes.txt");

/// What is done to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// Nothing but the scale.
    Plain,
    /// Only the last so many keys before a query are visible (and itself).
    Window(usize),
    /// The published distance penalty per head.
    Alibi,
    /// A dense additive tensor `[q_len, kv_len]`.
    Bias,
    /// A dense boolean mask `[q_len, kv_len]` that hides one key in ten.
    Keep,
    /// `c·tanh(s/c)`.
    Softcap(f64),
    /// Weights dropped with this probability.
    Dropout(f64),
    /// Queries multiplied by this: most weights become tiny, and those below f32's normal range must slow nothing down.
    Spread(f64),
}

impl What {
    /// Name and value, as the table writes them.
    pub fn parts(&self) -> (&'static str, f64) {
        match *self {
            Self::Plain => ("plain", 0.0),
            Self::Window(left) => ("window", left as f64),
            Self::Alibi => ("alibi", 0.0),
            Self::Bias => ("bias", 0.0),
            Self::Keep => ("keep", 0.0),
            Self::Softcap(cap) => ("softcap", cap),
            Self::Dropout(p) => ("dropout", p),
            Self::Spread(factor) => ("spread", factor),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let (name, value) = text.split_once(':').map_or((text, None), |(name, value)| (name, Some(value)));
        let number = |ok: fn(f64) -> bool| value.and_then(|v| v.parse::<f64>().ok()).filter(|&x| ok(x));
        match name {
            "window" => value.and_then(|v| v.parse().ok()).map(Self::Window),
            "softcap" => number(|c| c.is_finite() && c > 0.0).map(Self::Softcap),
            "dropout" => number(|p| (0.0..1.0).contains(&p)).map(Self::Dropout),
            "spread" => number(|f| f.is_finite() && f > 0.0).map(Self::Spread),
            _ if value.is_some() => None,
            "plain" => Some(Self::Plain),
            "alibi" => Some(Self::Alibi),
            "bias" => Some(Self::Bias),
            "keep" => Some(Self::Keep),
            _ => None,
        }
    }
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Its sizes.
    pub case: Case,
    /// What is done to the scores.
    pub what: What,
    /// Whether it takes part in a quick run.
    pub quick: bool,
    /// Whether it is also held against torch on AVX2.
    pub avx2: bool,
    /// Whether it is of interest in other number types: see [`types`].
    #[serde(default)]
    pub types: bool,
    /// Whether it is of interest there only.
    #[serde(default)]
    pub types_only: bool,
    /// The type of its numbers.
    #[serde(default)]
    pub number: Number,
    /// Whether it asks for `Precision::Fast`.
    #[serde(default)]
    pub fast: bool,
}

/// The rows that are of interest in other number types and precisions, in each of them: `NAME-bf16`, `NAME-f32-fast`
/// and so on. `Precision::Fast` is another kernel on matrix tiles only.
///
/// ```
/// use attn_bench::kernels::{SHAPES, parse, types};
/// let rows = types(&parse(SHAPES).unwrap());
/// assert!(rows.iter().any(|kernel| kernel.name == "pf2048d64-bf16-fast" && kernel.fast));
/// ```
pub fn types(rows: &[Kernel]) -> Vec<Kernel> {
    let ways = [
        (Number::F32, false),
        (Number::F32, true),
        (Number::F16, false),
        (Number::F16, true),
        (Number::Bf16, false),
        (Number::Bf16, true),
    ];
    let all = rows.iter().filter(|row| row.types).flat_map(|row| ways.map(|way| (row, way)));
    all.map(|(row, (number, fast))| Kernel {
        name: format!("{}-{number}{}", row.name, if fast { "-fast" } else { "" }),
        number,
        fast,
        ..row.clone()
    })
    .collect()
}

/// A row that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowError {
    /// Its line, from 1.
    pub line: usize,
    /// What is wrong.
    pub why: String,
}

impl std::fmt::Display for RowError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "shapes, line {}: {}", self.line, self.why)
    }
}

impl std::error::Error for RowError {}

/// Reads a table of shapes.
///
/// # Errors
/// The first row that makes no sense.
///
/// ```
/// use attn_bench::kernels::{SHAPES, parse};
/// assert!(parse(SHAPES).unwrap().iter().any(|kernel| kernel.name == "pf2048d64"));
/// assert!(parse("short 1 8").is_err());
/// ```
pub fn parse(text: &str) -> Result<Vec<Kernel>, RowError> {
    let rows = text.lines().enumerate().map(|(i, row)| (i + 1, row.trim()));
    rows.filter(|(_, row)| !row.is_empty() && !row.starts_with('#')).map(|(line, row)| parse_row(line, row)).collect()
}

fn parse_row(line: usize, row: &str) -> Result<Kernel, RowError> {
    let fail = |why: String| Err(RowError { line, why });
    let fields: Vec<&str> = row.split_whitespace().collect();
    let [name, sizes @ .., causal, what, tags] = fields.as_slice() else {
        return fail("expected name B H Hkv Sq Skv D causal what tags".into());
    };
    let sizes: Vec<usize> = match sizes.iter().map(|s| s.parse()).collect() {
        Ok(sizes) => sizes,
        Err(error) => return fail(format!("a size is not a number: {error}")),
    };
    let &[batch, q_heads, kv_heads, q_len, kv_len, head_dim] = sizes.as_slice() else {
        return fail(format!("{} sizes instead of six (B H Hkv Sq Skv D)", sizes.len()));
    };
    let causal = match *causal {
        "0" => false,
        // Peers put the diagonal elsewhere where the lengths differ: not one measurement, but two different results.
        "1" if q_len == kv_len => true,
        "1" => return fail("causal needs Sq = Skv".into()),
        other => return fail(format!("causal is 0 or 1, not {other}")),
    };
    let Some(parsed) = What::parse(what) else { return fail(format!("unknown `{what}`")) };
    let case = Case { batch, q_heads, kv_heads, q_len, kv_len, head_dim, causal };
    if let Err(error) = case.shape() {
        return fail(error.to_string());
    }
    let tags: Vec<&str> = tags.split(',').filter(|tag| *tag != "-").collect();
    if let Some(tag) = tags.iter().find(|tag| !["quick", "avx2", "types", "types-only"].contains(tag)) {
        return fail(format!("unknown tag {tag}"));
    }
    let has = |tag| tags.contains(&tag);
    Ok(Kernel {
        quick: has("quick"),
        avx2: has("avx2"),
        types: has("types") || has("types-only"),
        types_only: has("types-only"),
        ..Kernel::plain(name, case, parsed)
    })
}

impl Kernel {
    /// A row of f32 without tags.
    pub fn plain(name: &str, case: Case, what: What) -> Self {
        let (quick, avx2, types, types_only, fast) = (false, false, false, false, false);
        Self { name: name.into(), case, what, quick, avx2, types, types_only, number: Number::F32, fast }
    }

    /// FLOPs of a call. A window counts the visible pairs; dense masks hide keys, but nobody can skip them.
    pub fn flops(&self) -> f64 {
        match (self.what, self.case.shape()) {
            (What::Window(left), Ok(shape)) => {
                cost::forward_flops(&shape, cost::visible_pairs(&window(self.case, left), &shape)) as f64
            }
            _ => self.case.flops(),
        }
    }
}

/// How a kernel is measured.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'s> {
    /// Level of our kernels and of the probe.
    pub level: Level,
    /// One thread: [`attn_simd`]; more: [`attn_parallel`] on this pool.
    pub pool: &'s ThreadPool,
    /// Rounds.
    pub repeat: Repeat,
    /// Shortest sample, in seconds: short calls are taken together until they fill it.
    pub sample_seconds: f64,
    /// Seconds of each probe.
    pub probe_seconds: f64,
}

/// Longer than the thread pools of the peers spin (OpenMP's 200 ms is the longest).
pub(crate) const SPIN: std::time::Duration = std::time::Duration::from_millis(300);

/// Measures one kernel in one pass, beside the peers that can run it. A peer that fails is left out and said so in
/// `notes`.
///
/// # Errors
/// What our engine refuses.
pub fn measure(
    kernel: &Kernel,
    setup: &Setup<'_>,
    pass: usize,
    peers: &mut [Peer],
    notes: &mut Vec<String>,
) -> Result<KernelResult, AttnError> {
    let threads = setup.pool.current_num_threads();
    let engine = if threads == 1 { Engine::Simd } else { Engine::Parallel };
    let mut runner = Runner::new(setup.level, setup.pool);
    let mut inputs = kernel.inputs();
    let mut ours = |calls: u32| inputs.time(kernel, Ours { engine, pool: setup.pool, runner: &mut runner }, calls);
    let calls_for = |seconds: f64| (setup.sample_seconds / seconds.max(1e-9)).ceil().clamp(1.0, 1e6) as u32;
    let (first, resident_bytes) = memory::resident(|| ours(1));
    first?;
    let calls = calls_for(ours(1)?.0);
    let calls = calls_for(ours(calls)?.0);

    let mut note = |text: String| notes.push(format!("{}: {text}", kernel.name));
    let mut others: Vec<Other> = Vec::new();
    for (process, peer) in peers.iter_mut().enumerate() {
        match peer.load(kernel, &kernel.inputs()) {
            Ok(names) => {
                for name in names {
                    match peer.memory(&name).and_then(|resident| Ok((resident, peer.time(&name, 1)?))) {
                        Ok((resident, took)) => {
                            others.push(Other {
                                process,
                                name,
                                calls: calls_for(took.wall),
                                resident,
                                samples: Vec::new(),
                            });
                        }
                        Err(error) => note(format!("{}: {error}", peer.full_name(&name))),
                    }
                }
            }
            Err(error) => note(error.to_string()),
        }
    }

    let peak = || match threads {
        1 => probe::fma_peak(setup.level, setup.probe_seconds),
        _ => probe::fma_peak_of_pool(setup.level, setup.pool, setup.probe_seconds),
    };
    let (mut samples, mut thread, mut peaks, mut spent) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
    while setup.repeat.goes_on(samples.len(), spent, false) {
        if threads > 1 && !peers.is_empty() {
            // A peer's pool spins for a while after its last call, on the very cores that ours is about to use.
            std::thread::sleep(SPIN);
        }
        let before = peak();
        if threads > 1 {
            ours(1)?; // a pool that sleeps is woken, not measured; peers' below as well
        }
        let (wall, ran) = ours(calls)?;
        peaks.push(0.5 * (before + peak()));
        samples.push(wall);
        if threads == 1 {
            thread.push(ran);
        }
        spent += wall * f64::from(calls);
        let timed = |peer: &mut Peer, name: &str, calls: u32| {
            if threads > 1 {
                peer.time(name, 1)?;
            }
            peer.time(name, calls)
        };
        others.retain_mut(|other| match timed(&mut peers[other.process], &other.name, other.calls) {
            Ok(took) => {
                spent += took.wall * f64::from(other.calls);
                other.samples.push(if threads == 1 { took.processor } else { took.wall });
                true
            }
            Err(error) => {
                note(format!("{}: {error}", peers[other.process].full_name(&other.name)));
                false
            }
        });
    }
    let comparable = !matches!(kernel.what, What::Dropout(_));
    let oracle = if kernel.what == What::Plain && pass == 0 { Some(last_rows(&inputs.tensors)?) } else { None };
    let written = inputs.out();
    let error = |out: &[f32]| oracle.as_ref().map(|oracle| distance(&kernel.case, out, oracle));
    let results = others
        .into_iter()
        .map(|other| {
            let peer = &mut peers[other.process];
            let out = if comparable { peer.out(&other.name).ok() } else { None };
            PeerResult {
                ratio: f64::NAN,
                seconds: f64::NAN,
                difference: out.as_ref().map(|out| difference(&written, out)),
                error: out.as_ref().and_then(|out| error(out)),
                resident_bytes: other.resident,
                samples: Samples(other.samples),
                name: peer.full_name(&other.name),
            }
        })
        .collect();
    let passes = vec![pass; samples.len()];
    let mut result = KernelResult {
        kernel: kernel.clone(),
        level: setup.level.name().to_string(),
        threads,
        seconds: 0.0,
        gflops: 0.0,
        share_of_peak: 0.0,
        samples: Samples(samples),
        thread,
        peaks,
        passes,
        error: error(&written),
        resident_bytes,
        peers: results,
    };
    result.summarise();
    Ok(result)
}

/// A peer while it is measured.
struct Other {
    process: usize,
    name: String,
    calls: u32,
    resident: Option<usize>,
    samples: Vec<f64>,
}

/// Queries per head that are held against the reference, which is slow: the last ones, which see all keys even if
/// causal.
const ORACLE_ROWS: usize = 8;

/// The reference engine's output in f64 for the last queries of each head, `[batch, heads, rows, dim]`.
fn last_rows(tensors: &Tensors) -> Result<Vec<f64>, AttnError> {
    let case = tensors.case;
    let rows = case.q_len.min(ORACLE_ROWS);
    let few = Case { q_len: rows, ..case };
    let heads = tensors.q.chunks_exact((case.q_len * case.head_dim).max(1));
    let q: Vec<f32> = heads.flat_map(|head| &head[(case.q_len - rows) * case.head_dim..]).copied().collect();
    let mut out = vec![0.0f64; q.len()];
    let view = |x| View::new(x, Layout::Bhsd, case.kv_sizes());
    let (k, v) = (view(&tensors.k)?, view(&tensors.v)?);
    let q = View::new(&q, Layout::Bhsd, few.q_sizes())?;
    let to = ViewMut::new(&mut out, Layout::Bhsd, few.q_sizes())?;
    attn_core::reference::forward(&few.attention(), q, k, v, to, &mut vec![0.0; case.kv_len])?;
    Ok(out)
}

/// The largest distance of an output's last queries from the reference; infinite where it has another length or is not
/// a number.
fn distance(case: &Case, out: &[f32], oracle: &[f64]) -> f64 {
    let (rows, dim) = (case.q_len.min(ORACLE_ROWS), case.head_dim);
    let heads = out.chunks_exact((case.q_len * dim).max(1));
    let got: Vec<f64> = heads.flat_map(|head| &head[(case.q_len - rows) * dim..]).map(|&x| f64::from(x)).collect();
    if got.len() != oracle.len() {
        return f64::INFINITY;
    }
    let off = got.iter().zip(oracle).map(|(x, y)| (x - y).abs());
    off.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
}

/// The largest difference of two outputs; infinite where they differ in length or one is not a number.
pub(crate) fn difference(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let differences = a.iter().zip(b).map(|(x, y)| f64::from((x - y).abs()));
    differences.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine;
    use attn_core::half::{bf16, f16};

    #[test]
    fn the_committed_table_is_read() {
        let kernels = parse(SHAPES).unwrap();
        let names: std::collections::HashSet<&str> = kernels.iter().map(|k| k.name.as_str()).collect();
        assert_eq!(names.len(), kernels.len(), "two rows have one name");
        assert!(kernels.iter().filter(|k| k.quick).count() >= 5 && kernels.iter().filter(|k| k.avx2).count() == 4);
        let gqa = kernels.iter().find(|k| k.name == "gqa1024d128c").unwrap();
        let case = Case { q_heads: 32, kv_heads: 8, causal: true, ..Case::square(1024, 128) };
        assert_eq!((gqa.case, gqa.what), (case, What::Plain));
        let special = [What::Window(256), What::Softcap(30.0), What::Dropout(0.1), What::Spread(60.0)];
        for what in special.into_iter().chain([What::Alibi, What::Bias, What::Keep]) {
            assert!(kernels.iter().any(|k| k.what == what), "{what:?}");
        }
    }

    #[test]
    fn halves_are_measured_on_the_numbers_that_peers_get() {
        let pool = engine::pool(1).unwrap();
        let repeat = Repeat { at_least: 2, at_most: 2, seconds: 0.0 };
        let rows = types(&parse("k 1 2 1 40 40 8 1 plain types").unwrap());
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["k-f32", "k-f32-fast", "k-f16", "k-f16-fast", "k-bf16", "k-bf16-fast"]);
        let level = Level::by_name("amx-model").unwrap();
        let setup = Setup { level, pool: &pool, repeat, sample_seconds: 1e-6, probe_seconds: 1e-4 };
        for (row, worst) in rows.iter().zip([1e-6, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2]) {
            let inputs = row.inputs();
            let narrow = |x: &f32| match row.number {
                Number::F32 => *x,
                Number::F16 => f16::from_f32(*x).to_f32(),
                Number::Bf16 => bf16::from_f32(*x).to_f32(),
            };
            assert!(inputs.tensors.q.iter().chain(&inputs.tensors.v).all(|x| narrow(x) == *x), "{}", row.name);
            let error = measure(row, &setup, 0, &mut [], &mut Vec::new()).unwrap().error.unwrap();
            assert!(error > 0.0 && error < worst, "{}: {error:e}", row.name);
        }
    }

    #[test]
    fn rows_without_sense_are_named() {
        for (row, why) in [
            ("a 1 1 1 4 4 8 0 plain", "six"),
            ("a 1 1 1 4 4 x 0 plain -", "number"),
            ("a 1 1 1 4 5 8 1 plain -", "Sq = Skv"),
            ("a 1 1 1 4 4 8 2 plain -", "0 or 1"),
            ("a 1 1 1 4 4 8 0 fancy -", "fancy"),
            ("a 1 1 1 4 4 8 0 softcap:-1 -", "softcap"),
            ("a 1 1 1 4 4 8 0 dropout:1 -", "dropout"),
            ("a 1 1 1 4 4 8 0 spread:0 -", "spread"),
            ("a 1 1 1 4 4 8 0 plain:3 -", "plain:3"),
            ("a 1 4 3 4 4 8 0 plain -", "q_heads is 4"),
            ("a 1 1 1 4 4 8 0 plain slow", "slow"),
            ("a", "expected"),
        ] {
            let error = parse(&format!("# comment\n\n{row}")).unwrap_err();
            assert!(error.line == 3 && error.why.contains(why), "{row}: {error}");
        }
    }

    #[test]
    fn a_window_counts_the_pairs_it_shows() {
        let kernel = |row: &str| parse(row).unwrap().remove(0);
        assert_eq!(kernel("a 1 1 1 4 4 1 1 window:1 -").flops(), 4.0 * 7.0); // 1 + 2 + 2 + 2
        assert_eq!(kernel("a 1 1 1 4 4 1 0 window:1 -").flops(), 4.0 * 13.0); // 4 + 4 + 3 + 2
        assert_eq!(kernel("a 2 3 3 4 4 5 1 plain -").flops(), 4.0 * 2.0 * 3.0 * 8.0 * 5.0);
    }

    #[test]
    fn a_dense_mask_hides_one_key_in_ten_for_us_and_for_the_peer() {
        let inputs = parse("k 1 1 1 100 100 8 0 keep -").unwrap()[0].inputs();
        let kept = inputs.keep.iter().filter(|&&keep| keep).count();
        assert!((8800..=9200).contains(&kept), "{kept} of 10000"); // six standard deviations of a binomial share
        assert_eq!(inputs.extra().iter().sum::<f32>(), kept as f32);
    }

    #[test]
    fn every_feature_runs_and_is_right() {
        let pool = engine::pool(1).unwrap();
        let repeat = Repeat { at_least: 2, at_most: 2, seconds: 0.0 };
        let setup = Setup { level: Level::detect(), pool: &pool, repeat, sample_seconds: 1e-6, probe_seconds: 1e-4 };
        for what in ["plain", "window:3", "alibi", "bias", "keep", "softcap:2", "dropout:0.3", "spread:9"] {
            for causal in [0, 1] {
                let kernel = parse(&format!("k 1 4 2 20 20 8 {causal} {what} -")).unwrap().remove(0);
                let result = measure(&kernel, &setup, 0, &mut [], &mut Vec::new()).unwrap();
                assert!(result.seconds > 0.0 && result.gflops > 0.0 && result.samples.0.len() == 2);
                // The same options through the reference engine.
                let mut inputs = kernel.inputs();
                let want = inputs.with(&kernel, |attn, (q, k, v, out)| {
                    attn_core::reference::forward(attn, q, k, v, out, &mut [0.0; 20])
                });
                want.unwrap();
                let want = inputs.tensors.out.clone();
                let mut runner = Runner::new(Level::detect(), &pool);
                inputs.tensors.out.fill(f32::NAN);
                inputs.with(&kernel, |attn, (q, k, v, out)| runner.run(Engine::Simd, attn, q, k, v, out)).unwrap();
                let off = difference(&inputs.tensors.out, &want);
                assert!(off < 5e-6, "{what}, causal {causal}: {off}");
            }
        }
        for causal in [false, true] {
            let case = Case { batch: 2, q_heads: 4, kv_heads: 2, causal, ..Case::square(20, 8) };
            let mut tensors = Tensors::<f32>::new(case, 1);
            let oracle = last_rows(&tensors).unwrap();
            let (q, k, v, out) = tensors.views().unwrap();
            attn_core::reference::forward(&case.attention(), q, k, v, out, &mut [0.0; 20]).unwrap();
            assert!(distance(&case, &tensors.out, &oracle) < 1e-6, "causal {causal}");
            tensors.out[20 * 8 - 1] += 1.0; // the last query of the first head
            assert!(distance(&case, &tensors.out, &oracle) > 0.9);
            assert_eq!(distance(&case, &tensors.out[..8], &oracle), f64::INFINITY);
        }
        assert_eq!(difference(&[1.0], &[f32::NAN]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[]), f64::INFINITY);
    }
}
