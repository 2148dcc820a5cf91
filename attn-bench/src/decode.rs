//! Decoding: one query per head over a cache of keys and values, compared with a plain read of as many bytes.
//!
//! A step must read all keys and values once. So its share of the rate of a plain read shows how much could still be
//! gained. Each sample has a probe before and after it: [`attn_simd::probe::read`] over as many bytes elsewhere, on as
//! many threads, in the same kind of memory pages. *Warm* calls follow each other on the same cache, and the processor
//! keeps of it as much as its caches hold. Before a *cold* call (and a cold probe) other data fill the processor's
//! caches. A time is that of a whole step: checks, plan and run. Other libraries decode the same numbers in between.

use std::hint::black_box;
use std::time::Instant;

use attn_core::formats::{Format, StoredRows, StoredView};
use attn_core::half::{bf16, f16};
use attn_core::int8::{KeyScales, QuantizedView, quantize};
use attn_core::kv_cache::{CacheView, Queries};
use attn_core::{Attention, AttnError, Element, Layout, Precision, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::decode::{DecodePlan, Source};
use attn_simd::{KernelElement, Level, Workspace};
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};

use crate::case::{Case, difference, normal};
use crate::clock::{Repeat, SPIN, median};
use crate::format::FORMAT;
use crate::machine::Machine;
use crate::memory::in_huge_pages;
use crate::peer::{Peer, PeerError, Request};

/// A cache and its queries: batch, query heads, key/value heads, tokens, dim of keys and values, layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Its name in tables.
    pub name: String,
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Tokens of each sequence.
    pub kv_len: usize,
    /// Dims of queries, keys and values.
    pub dim: usize,
    /// Whether the cache is in [`Layout::Bshd`]: the heads of a token are side by side. Otherwise in [`Layout::Bhsd`].
    #[serde(default)]
    pub bshd: bool,
}

/// The shapes that are measured: grouped heads of usual and of long caches, a batch, no groups, heads of a token side
/// by side, and one that is over at once, which shows what a step costs beside the reading.
pub fn shapes() -> Vec<Shape> {
    [
        ("dec4096gqa", 1, 32, 8, 4096, 128, false),
        ("dec32768gqa", 1, 32, 8, 32_768, 128, false),
        ("dec32768gqa-bshd", 1, 32, 8, 32_768, 128, true),
        ("dec2048gqab8", 8, 32, 8, 2048, 128, false),
        ("dec8192mha", 1, 32, 32, 8192, 128, false),
        ("dec8192mha-bshd", 1, 32, 32, 8192, 128, true),
        ("dec16tiny", 1, 1, 1, 16, 64, false),
    ]
    .map(|(name, batch, q_heads, kv_heads, kv_len, dim, bshd)| Shape {
        name: name.into(),
        batch,
        q_heads,
        kv_heads,
        kv_len,
        dim,
        bshd,
    })
    .into()
}

/// What a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stored {
    /// Single precision.
    F32,
    /// Half precision, and queries of it.
    F16,
    /// bfloat16, and queries of it.
    Bf16,
    /// int8 with a scale per token, queries in single precision.
    I8,
    /// The same under `Precision::Fast`.
    #[serde(rename = "int8-fast")]
    I8Fast,
    /// ggml's blocks of 32 int8, queries in single precision.
    #[serde(rename = "q8_0")]
    Q8,
    /// The same under `Precision::Fast`.
    #[serde(rename = "q8_0-fast")]
    Q8Fast,
    /// ggml's blocks of 32 numbers of four bits, queries in single precision.
    #[serde(rename = "q4_0")]
    Q4,
    /// fp8 (e4m3fn) with one scale, queries in single precision.
    Fp8,
}

impl Stored {
    /// All of them.
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::Bf16, Self::I8, Self::I8Fast, Self::Q8, Self::Q8Fast, Self::Q4, Self::Fp8];

    /// Of a step over it.
    const fn precision(self) -> Precision {
        if matches!(self, Self::I8Fast | Self::Q8Fast) { Precision::Fast } else { Precision::Exact }
    }

    /// As types are called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "int8",
            Self::I8Fast => "int8-fast",
            Self::Q8 => "q8_0",
            Self::Q8Fast => "q8_0-fast",
            Self::Q4 => "q4_0",
            Self::Fp8 => "fp8",
        }
    }
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The shape.
    pub shape: Shape,
    /// The type of the cache.
    pub stored: Stored,
    /// Whether the processor's caches held something else before each call.
    pub cold: bool,
    /// Threads of the step and of the probe.
    pub threads: usize,
    /// Bytes of keys, values and scales.
    pub bytes: usize,
    /// Median seconds of a step.
    pub seconds: f64,
    /// Median over the samples of the probe's seconds over the step's.
    pub share_of_read: f64,
    /// Seconds of each sample, by the wall's clock.
    pub samples: Vec<f64>,
    /// Seconds of the probes beside each: the mean of the one before and the one after.
    pub probes: Vec<f64>,
    /// The pass that took each sample.
    pub passes: Vec<usize>,
    /// Median seconds by which a step takes longer than the probes beside it.
    pub beyond: f64,
    /// Other libraries.
    pub peers: Vec<PeerRow>,
}

impl Row {
    /// Its name, for filters and comparisons.
    pub fn name(&self) -> String {
        let warmth = if self.cold { "cold" } else { "warm" };
        format!("{}/{warmth}", case_name(&self.shape, self.stored, self.threads))
    }

    /// Takes the samples of another pass.
    fn join(&mut self, other: Self) {
        self.samples.extend(other.samples);
        self.probes.extend(other.probes);
        self.passes.extend(other.passes);
        for peer in &mut self.peers {
            if let Some(more) = other.peers.iter().find(|p| p.name == peer.name) {
                peer.samples.extend(&more.samples);
                peer.difference = peer.difference.max(more.difference);
            }
        }
        self.summarise();
    }

    /// Draws the conclusions from the samples.
    fn summarise(&mut self) {
        let pairs = || self.samples.iter().zip(&self.probes);
        let shares: Vec<f64> = pairs().map(|(ours, probe)| probe / ours).collect();
        let beyond: Vec<f64> = pairs().map(|(ours, probe)| ours - probe).collect();
        (self.seconds, self.share_of_read, self.beyond) = (median(&self.samples), median(&shares), median(&beyond));
        for peer in &mut self.peers {
            peer.ratio = median(&peer.samples) / self.seconds;
        }
    }
}

/// The name of a shape over a type, for filters.
pub fn case_name(shape: &Shape, stored: Stored, threads: usize) -> String {
    format!("decode/{}/{}/t{threads}", shape.name, stored.name())
}

/// What `cargo xtask bench --decode --json` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeReport {
    /// [`FORMAT`].
    pub format: String,
    /// `decode`.
    pub kind: String,
    /// Where it was measured.
    pub machine: Machine,
    /// Versions of the peers.
    pub peers: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
}

impl DecodeReport {
    /// Without rows yet.
    pub fn new(machine: Machine) -> Self {
        let (format, kind) = (FORMAT.into(), "decode".into());
        Self { format, kind, machine, peers: Vec::new(), rows: Vec::new() }
    }

    /// Adds a row, or its samples if an earlier pass measured the same.
    pub fn take(&mut self, row: Row) {
        match self.rows.iter_mut().find(|known| known.name() == row.name()) {
            Some(known) => known.join(row),
            None => self.rows.push(row),
        }
    }
}

/// Another library on the same numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRow {
    /// Its name.
    pub name: String,
    /// Its median seconds divided by ours.
    pub ratio: f64,
    /// Seconds of each sample, by the wall's clock.
    pub samples: Vec<f64>,
    /// Largest difference of its output from ours.
    pub difference: f64,
}

/// Why a row is not measured.
#[derive(Debug)]
pub enum DecodeError {
    /// What the plan refuses.
    Plan(AttnError),
    /// Another library's process.
    Peer(PeerError),
}

impl std::fmt::Display for DecodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plan(error) => error.fmt(f),
            Self::Peer(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for DecodeError {}

impl From<AttnError> for DecodeError {
    fn from(error: AttnError) -> Self {
        Self::Plan(error)
    }
}

impl From<PeerError> for DecodeError {
    fn from(error: PeerError) -> Self {
        Self::Peer(error)
    }
}

/// How rows are measured.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'s> {
    /// Level of the kernel and of the probe.
    pub level: Level,
    /// One thread: [`DecodePlan`] alone; more: [`attn_parallel`] on this pool.
    pub pool: &'s ThreadPool,
    /// Samples.
    pub repeat: Repeat,
    /// Bytes that are read to fill the processor's caches.
    pub sweep: usize,
    /// Which pass over the table this is.
    pub pass: usize,
}

/// Measures one shape over one type, warm and cold, beside what `peer` has that can decode it. Peers read
/// [`Layout::Bhsd`] only.
///
/// # Errors
/// What the plan refuses (nothing for the shapes of the table), or a peer's process that ended.
pub fn measure(
    shape: &Shape,
    stored: Stored,
    setup: &Setup<'_>,
    peer: Option<&mut Peer>,
) -> Result<[Row; 2], DecodeError> {
    match stored {
        Stored::F32 => over::<f32>(shape, stored, setup, peer),
        Stored::F16 => over::<f16>(shape, stored, setup, peer),
        Stored::Bf16 => over::<bf16>(shape, stored, setup, peer),
        Stored::I8 | Stored::I8Fast => {
            let Shape { batch, kv_heads, kv_len, dim, .. } = *shape;
            let sizes = shape.kv();
            let quantized = [1, 2].map(|seed| {
                let x = normal(seed, sizes.iter().product());
                let mut numbers = vec![0i8; x.len()];
                let rows = x.chunks(dim).zip(numbers.chunks_mut(dim));
                let scales: Vec<f32> = rows.map(|(x, numbers)| quantize(x, numbers)).collect();
                (in_huge_pages(&numbers), scales)
            });
            let number = |n: usize| View::new(&quantized[n].0, shape.layout(), sizes);
            let scale = |n: usize| View::new(&quantized[n].1, shape.layout(), [batch, kv_heads, kv_len, 1]);
            let numbers = CacheView::of_tensors(number(0)?, number(1)?)?;
            let cache = QuantizedView::new(numbers, KeyScales::PerToken(scale(0)?), scale(1)?)?;
            steps::<f32>(shape, stored, setup, cache.into(), None)
        }
        Stored::Q8 | Stored::Q8Fast => stored_as(Format::Q8_0, shape, stored, setup),
        Stored::Q4 => stored_as(Format::Q4_0, shape, stored, setup),
        Stored::Fp8 => stored_as(Format::E4m3, shape, stored, setup),
    }
}

/// Over keys and values in a format of bytes.
fn stored_as(format: Format, shape: &Shape, stored: Stored, setup: &Setup<'_>) -> Result<[Row; 2], DecodeError> {
    let [batch, heads, tokens, dim] = shape.kv();
    let row_bytes = format.row_bytes(dim)?;
    // Numbers of a normal distribution stay below 8.
    let scale = [format.largest().map_or(1.0, |largest| 8.0 / largest)];
    let mut bytes = [1, 2].map(|_| vec![0u8; batch * heads * tokens * row_bytes]);
    for (seed, bytes) in (1..).zip(&mut bytes) {
        let x: Vec<f32> = normal(seed, batch * heads * tokens * dim).iter().map(|x| x / scale[0]).collect();
        x.chunks(dim).zip(bytes.chunks_mut(row_bytes)).try_for_each(|(x, bytes)| format.encode(x, bytes))?;
    }
    let bytes = bytes.map(|bytes| in_huge_pages(&bytes));
    let scales = if format.is_scaled() { Some(View::broadcast(&scale, &[])?) } else { None };
    let rows = StoredRows::new(format, scales)?;
    let sizes = [batch, heads, tokens, row_bytes];
    let [k, v] = &bytes;
    let layout = shape.layout();
    let cache = CacheView::of_tensors(View::new(k, layout, sizes)?, View::new(v, layout, sizes)?)?;
    let cache = StoredView::new(cache, rows, rows)?;
    steps::<f32>(shape, stored, setup, Source::from(cache), None)
}

/// Over keys and values of a type of tensors.
fn over<T: KernelElement>(
    shape: &Shape,
    stored: Stored,
    setup: &Setup<'_>,
    peer: Option<&mut Peer>,
) -> Result<[Row; 2], DecodeError> {
    let sizes = shape.kv();
    let [k, v] = [1, 2].map(|seed| in_huge_pages(&painted::<T>(seed, sizes.iter().product())));
    let layout = shape.layout();
    let cache = CacheView::of_tensors(View::new(&k, layout, sizes)?, View::new(&v, layout, sizes)?)?;
    steps::<T>(shape, stored, setup, cache.into(), peer.filter(|_| !shape.bshd))
}

fn painted<T: Element>(seed: u64, len: usize) -> Vec<T> {
    normal(seed, len).into_iter().map(|x| T::from_f64(f64::from(x))).collect()
}

impl Shape {
    /// The call of one step.
    pub const fn case(&self) -> Case {
        let Self { batch, q_heads, kv_heads, kv_len, dim, .. } = *self;
        Case { batch, q_heads, kv_heads, q_len: 1, kv_len, head_dim: dim, causal: false }
    }

    const fn layout(&self) -> Layout {
        if self.bshd { Layout::Bshd } else { Layout::Bhsd }
    }

    fn q(&self) -> [usize; 4] {
        [self.batch, self.q_heads, 1, self.dim]
    }

    fn kv(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.dim]
    }
}

fn steps<Q: KernelElement>(
    shape: &Shape,
    stored: Stored,
    setup: &Setup<'_>,
    cache: Source<'_>,
    mut peer: Option<&mut Peer>,
) -> Result<[Row; 2], DecodeError> {
    let q_sizes = shape.q();
    let q = painted::<Q>(3, q_sizes.iter().product());
    let q = View::new(&q, Layout::Bhsd, q_sizes)?;
    let (attn, threads) = (Attention::new().precision(stored.precision()), setup.pool.current_num_threads());
    let (mut out, mut scratch) = (vec![Q::default(); q.data().len()], Workspace::new());
    let bytes = DecodePlan::new(&attn, q_sizes, Queries::All, cache, setup.level)?.bytes();
    // Seconds of a call, of which several may be taken together.
    let mut ours = |calls: usize| -> Result<f64, AttnError> {
        let mut once = || -> Result<(), AttnError> {
            let plan = DecodePlan::new(&attn, q_sizes, Queries::All, cache, setup.level)?;
            let to = ViewMut::new(&mut out, Layout::Bhsd, q_sizes)?;
            match threads {
                1 => plan.split(q, to)?.run(scratch.lines(plan.workspace_lines())),
                _ => Runner::new().attend_cache_planned(&plan, q, to),
            }
        };
        let mut all = || -> Result<f64, AttnError> {
            let start = Instant::now();
            (0..calls).try_for_each(|_| once())?;
            Ok(start.elapsed().as_secs_f64() / calls as f64)
        };
        if threads == 1 { all() } else { setup.pool.install(all) }
    };
    // Ones, not zeros: pages that were never written may all be one.
    let data = in_huge_pages(&vec![1.0f32; bytes.div_ceil(4)]);
    let sweep = vec![1.0f32; setup.sweep.div_ceil(4)];
    let read = |data: &[f32]| match threads {
        1 => drop(black_box(attn_simd::probe::read(setup.level, black_box(data)))),
        _ => drop(setup.pool.broadcast(|thread| {
            let share = data.len().div_ceil(threads).max(1);
            let mine = data.chunks(share).nth(thread.index()).unwrap_or_default();
            black_box(attn_simd::probe::read(setup.level, black_box(mine)))
        })),
    };
    ours(1)?;
    let names = match peer.as_deref_mut() {
        Some(peer) => {
            let tensors = [(3, q_sizes), (1, shape.kv()), (2, shape.kv())];
            let [q, k, v] = tensors.map(|(seed, sizes)| normal(seed, sizes.iter().product()));
            let tensors = [q.as_slice(), &k, &v, &[]];
            peer.load(&Request { case: shape.case(), number: stored.name(), what: "decode", value: 0.0, tensors })?
        }
        None => Vec::new(),
    };
    let mut row = |cold: bool| -> Result<Row, DecodeError> {
        // Steps that are over at once are taken together, but not if the caches are filled before each.
        let calls = if cold { 1 } else { ((1 << 20) / bytes.max(1)).clamp(1, 1000) };
        let probe = || {
            if cold {
                read(&sweep);
            }
            let start = Instant::now();
            (0..calls).for_each(|_| read(&data));
            start.elapsed().as_secs_f64() / calls as f64
        };
        let (mut samples, mut probes, mut spent) = (Vec::new(), Vec::new(), 0.0);
        let mut others = vec![Vec::new(); names.len()];
        while setup.repeat.goes_on(samples.len(), spent, false) {
            if threads > 1 && !names.is_empty() {
                // A peer's pool spins for a while after its last call, on the very cores that ours is about to use.
                std::thread::sleep(SPIN);
            }
            let before = probe();
            if cold {
                read(&sweep);
            }
            let sample = ours(calls)?;
            probes.push(0.5 * (before + probe()));
            samples.push(sample);
            spent += sample * calls as f64;
            for (name, others) in names.iter().zip(&mut others) {
                let Some(peer) = peer.as_deref_mut() else { continue };
                let took = if cold { peer.time_cold(name, setup.sweep)? } else { peer.time(name, calls as u32)? };
                spent += took.wall * calls as f64;
                others.push(took.wall);
            }
        }
        let peers = names.iter().zip(others);
        let peers =
            peers.map(|(name, samples)| PeerRow { name: name.clone(), ratio: f64::NAN, samples, difference: f64::NAN });
        let mut row = Row {
            shape: shape.clone(),
            stored,
            cold,
            threads,
            bytes,
            seconds: f64::NAN,
            share_of_read: f64::NAN,
            passes: vec![setup.pass; samples.len()],
            samples,
            probes,
            beyond: f64::NAN,
            peers: peers.collect(),
        };
        row.summarise();
        Ok(row)
    };
    let mut rows = [row(false)?, row(true)?];
    let out: Vec<f32> = out.iter().map(|x| x.to_f64() as f32).collect();
    for (n, name) in names.iter().enumerate() {
        let Some(peer) = peer.as_deref_mut() else { continue };
        let theirs = peer.out(name)?;
        rows.iter_mut().for_each(|row| row.peers[n].difference = difference(&out, &theirs));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_measured_warm_and_cold() {
        let repeat = Repeat { at_least: 3, at_most: 3, seconds: 0.0 };
        for threads in [1, 2] {
            let pool = crate::engine::pool(threads).unwrap();
            let setup = Setup { level: Level::detect(), pool: &pool, repeat, sweep: 1 << 16, pass: 0 };
            let (name, bshd) = ("t".into(), threads == 2);
            let shape = Shape { name, batch: 2, q_heads: 4, kv_heads: 2, kv_len: 600, dim: 32, bshd };
            let elements = [32 * 4, 32 * 2, 32 * 2, 32 + 4, 32 + 4, 34, 34, 18, 32];
            assert_eq!(elements.len(), Stored::ALL.len());
            for (stored, element) in Stored::ALL.into_iter().zip(elements) {
                let [warm, cold] = measure(&shape, stored, &setup, None).unwrap();
                assert!(!warm.cold && cold.cold);
                for row in [warm, cold] {
                    assert_eq!((row.bytes, row.samples.len(), row.probes.len()), (2 * 2 * 2 * 600 * element, 3, 3));
                    assert!(row.seconds > 0.0 && row.share_of_read > 0.0 && row.threads == threads);
                    assert!(row.beyond < row.seconds && row.peers.is_empty());
                }
            }
        }
    }
}
