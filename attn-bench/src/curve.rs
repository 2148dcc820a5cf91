//! The cost curve: time and memory of every engine against sequence length, for each head dimension and number type.
//!
//! [`measure`](mod@measure) takes the samples; its results are here: points, and their growth.

pub mod measure;

use serde::{Deserialize, Serialize};

use crate::case::{Case, Number};
use crate::clock::{Samples, median};
use crate::engine::Engine;
use crate::fit::PowerLaw;

/// An engine on a number of threads: a line of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Who {
    /// The engine.
    pub engine: Engine,
    /// Its threads.
    pub threads: usize,
}

impl Who {
    /// An engine on one thread.
    pub const fn alone(engine: Engine) -> Self {
        Self { engine, threads: 1 }
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.engine.one_thread() {
            f.pad(self.engine.name())
        } else {
            f.pad(&format!("{} ×{}", self.engine, self.threads))
        }
    }
}

/// One engine at one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Who computed.
    #[serde(flatten)]
    pub who: Who,
    /// Queries and keys.
    pub n: usize,
    /// Median seconds per call: of the thread's own clock for engines on one thread, of the wall's for others.
    pub seconds: f64,
    /// Most heap held during a first call beyond the heap held before, in bytes.
    pub extra_bytes: usize,
    /// Growth of the process's resident set over that call, in bytes, if the system tells.
    pub resident_bytes: Option<usize>,
    /// `flops / seconds / 1e9`.
    pub gflops: f64,
    /// Median over the samples of rate / probe's rate.
    pub share_of_peak: f64,
    /// Calls that each sample is the mean of.
    pub calls_per_sample: u32,
    /// Seconds per call of each sample, by the wall's clock.
    pub samples: Samples,
    /// The same by the clock of the thread; empty for engines on several.
    pub thread: Vec<f64>,
    /// FLOP/s of the probe that ran beside each sample: of one core, or of all threads for the parallel engine.
    pub peaks: Vec<f64>,
    /// The pass that took each sample.
    pub passes: Vec<usize>,
}

impl Point {
    /// Seconds of each sample, by the clock that counts.
    pub fn times(&self) -> &[f64] {
        if self.thread.is_empty() { &self.samples.0 } else { &self.thread }
    }

    /// Median seconds per call by the wall's clock, to compare with lines of several threads.
    pub fn wall(&self) -> f64 {
        self.samples.median()
    }

    /// Draws the conclusions from the samples.
    fn summarise(&mut self, case: &Case) {
        let flops = self.who.engine.flops(case);
        self.seconds = median(self.times());
        let shares: Vec<f64> =
            self.times().iter().zip(&self.peaks).map(|(seconds, peak)| flops / seconds / peak).collect();
        self.gflops = flops / self.seconds / 1e9;
        self.share_of_peak = median(&shares);
    }

    /// Takes the samples of another pass.
    fn join(&mut self, other: Self) {
        self.samples.0.extend(other.samples.0);
        self.thread.extend(other.thread);
        self.peaks.extend(other.peaks);
        self.passes.extend(other.passes);
    }
}

/// A point that was not measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// Who would have computed.
    #[serde(flatten)]
    pub who: Who,
    /// Queries and keys.
    pub n: usize,
    /// Why not.
    pub why: String,
}

/// The results of one pass at one length.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    pub(crate) points: Vec<Point>,
    pub(crate) skipped: Vec<Skipped>,
}

/// All points of one head dimension and number type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Sizes of the largest call.
    pub case: Case,
    /// How numbers are stored.
    pub number: Number,
    /// The measured points.
    pub points: Vec<Point>,
    /// The points that were not measured.
    pub skipped: Vec<Skipped>,
}

impl Curve {
    /// A curve without points.
    pub const fn new(case: Case, number: Number) -> Self {
        Self { case, number, points: Vec::new(), skipped: Vec::new() }
    }

    /// The begin of its cases' names: `curve/d64/f32`, with heads and `causal` if they are not the default.
    pub fn name(&self) -> String {
        let Case { q_heads, head_dim, causal, .. } = self.case;
        let heads = if q_heads == 1 { String::new() } else { format!("/h{q_heads}") };
        format!("curve/d{head_dim}/{}{heads}{}", self.number, if causal { "/causal" } else { "" })
    }

    /// The name of one case, for filters and comparisons.
    pub fn case_name(&self, who: Who, n: usize) -> String {
        format!("{}/{}/t{}/n{n}", self.name(), who.engine, who.threads)
    }

    /// The case in words: `f32, one head of dimension 64, causal`.
    pub fn title(&self) -> String {
        let Case { q_heads, head_dim, causal, .. } = self.case;
        let heads = if q_heads == 1 { "one head".into() } else { format!("{q_heads} heads") };
        format!("{}, {heads} of dimension {head_dim}{}", self.number, if causal { ", causal" } else { "" })
    }

    /// The points of one line, by ascending length.
    pub fn of(&self, who: Who) -> impl Iterator<Item = &Point> {
        self.points.iter().filter(move |p| p.who == who)
    }

    /// The point of one line at one length.
    pub fn at(&self, who: Who, n: usize) -> Option<&Point> {
        self.of(who).find(|p| p.n == n)
    }

    /// The lines that have points, in the order in which they were measured first.
    pub fn lines(&self) -> Vec<Who> {
        let mut lines = Vec::new();
        for point in &self.points {
            if !lines.contains(&point.who) {
                lines.push(point.who);
            }
        }
        lines.sort_by_key(|who| Engine::ALL.iter().chain(&Engine::CHEAPER).position(|&engine| engine == who.engine));
        lines
    }

    /// The lengths, ascending.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.points.iter().map(|p| p.n).chain(self.skipped.iter().map(|s| s.n)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// How the time of a line grows over the larger lengths.
    pub fn time_law(&self, who: Who) -> Option<PowerLaw> {
        PowerLaw::fit_large(&self.of(who).map(|p| (p.n, p.seconds)).collect::<Vec<_>>())
    }

    /// How its extra memory grows over the larger lengths; `None` if it needs none at all.
    pub fn memory_law(&self, who: Who) -> Option<PowerLaw> {
        PowerLaw::fit_large(&self.of(who).map(|p| (p.n, p.extra_bytes as f64)).collect::<Vec<_>>())
    }

    /// At the largest length that both have: how many times faster `fast` is than `slow`.
    pub fn speedup(&self, fast: Engine, slow: Engine) -> Option<(usize, f64)> {
        let slow = self.of(Who::alone(slow)).last()?;
        let fast = self.at(Who::alone(fast), slow.n)?;
        Some((slow.n, slow.seconds / fast.seconds))
    }

    /// Takes the results of one pass at one length.
    pub(crate) fn take(&mut self, found: Found) {
        let case = self.case;
        for point in found.points {
            let case = Case { q_len: point.n, kv_len: point.n, ..case };
            match self.points.iter_mut().find(|p| p.who == point.who && p.n == point.n) {
                Some(known) => {
                    known.join(point);
                    known.summarise(&case);
                }
                None => {
                    self.points.push(point);
                    if let Some(new) = self.points.last_mut() {
                        new.summarise(&case);
                    }
                }
            }
            if case.q_len > self.case.q_len {
                self.case = case;
            }
        }
        self.skipped.extend(found.skipped);
        self.points.sort_by_key(|p| p.n);
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

    #[test]
    fn names_are_short_and_tell_cases_apart() {
        let mut curve = Curve::new(Case::square(0, 64), Number::F32);
        assert_eq!(curve.case_name(Who::alone(Engine::Simd), 128), "curve/d64/f32/simd/t1/n128");
        curve.case = Case { q_heads: 8, kv_heads: 8, causal: true, ..curve.case };
        curve.number = Number::Bf16;
        let who = Who { engine: Engine::Parallel, threads: 2 };
        assert_eq!(curve.case_name(who, 64), "curve/d64/bf16/h8/causal/parallel/t2/n64");
        assert_eq!(curve.title(), "bf16, 8 heads of dimension 64, causal");
        assert_eq!((who.to_string(), Who::alone(Engine::Naive).to_string()), ("parallel ×2".into(), "naive".into()));
    }

    #[test]
    fn times_read_well() {
        assert_eq!(
            [2.5e-9, 1.234e-6, 45.67e-6, 0.0123, 0.5, 12.0].map(seconds),
            ["2.50 ns", "1.23 µs", "45.7 µs", "12.3 ms", "500 ms", "12.0 s"]
        );
    }
}
