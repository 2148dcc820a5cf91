//! Two runs side by side: which cases became slower than noise explains.
//!
//! A case has samples from several passes, minutes apart, each with a peak probe beside it. The comparison takes the
//! logarithm of time × peak, which a slower clock does not change. If one thread computes, times are those of the
//! thread, which other programs do not change. With `mₚ` the median of pass `p`:
//!
//! - the case's value is the median of the `mₚ`: one disturbed pass does not move it;
//! - its noise `s` is the larger of half the range of the `mₚ` (the distance between moments of one run) and
//!   the standard error of the median within passes, `1.2533·σ/√samples` with `σ` from the quartiles (0.1 where there
//!   are too few samples to tell);
//! - the band is `ln(1 + threshold) + 2·√(s_old² + s_new²)`. A case whose value grew by more is slower, by less than
//!   minus the band faster, otherwise the same.
//!
//! The command measures slower cases twice more before it believes them: a disturbance passes, a regression stays.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::clock::median;
use crate::curve::Curve;
use crate::curve_report::CurveReport;
use crate::decode::DecodeReport;
use crate::format::FORMAT;
use crate::kernels::KernelReport;
use crate::machine::Machine;

/// How much slower a case may be before it counts, if noise is nil.
pub const THRESHOLD: f64 = 0.05;

/// How the columns of a comparison are read.
pub const LEGEND: &str = "Then and now are medians in seconds of the clock. The ratio is that of time times peak, \
    now over then: each sample is weighed by the peak probed beside it (of multiply-adds, or of a plain read), so that \
    a faster or slower clock counts for nothing, and the ratio may differ from now over then. The band is what it may \
    be off by before it counts: the threshold and twice the noise of both runs.";

/// Taken for the noise of a case with fewer than two samples.
const UNKNOWN_NOISE: f64 = 0.1;

/// One case, as it is compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Its name.
    pub name: String,
    /// Seconds per call.
    pub seconds: f64,
    /// Median over the passes of `ln(time · peak)`.
    value: f64,
    /// How far `value` may be off.
    noise: f64,
}

impl Measured {
    /// From the samples of a case: seconds, the probe's FLOP/s beside each, and the pass of each. `None` without a
    /// sample.
    pub fn new(name: String, seconds: &[f64], peaks: &[f64], passes: &[usize]) -> Option<Self> {
        let mut groups: Vec<(usize, Vec<f64>)> = Vec::new();
        for ((seconds, peak), &pass) in seconds.iter().zip(peaks).zip(passes) {
            let value = (seconds * peak).ln();
            match groups.iter_mut().find(|group| group.0 == pass) {
                Some((_, values)) => values.push(value),
                None => groups.push((pass, vec![value])),
            }
        }
        let medians: Vec<f64> = groups.iter().map(|(_, values)| median(values)).collect();
        let (low, high) = medians.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), &m| (l.min(m), h.max(m)));
        // What is left when each pass is moved to the same median.
        let within: Vec<f64> =
            groups.iter().zip(&medians).flat_map(|((_, values), m)| values.iter().map(move |v| v - m)).collect();
        let value = median(&medians);
        let noise = match (within.len(), groups.len()) {
            (0, _) => return None,
            (1, _) => UNKNOWN_NOISE,
            (samples, passes) if samples == passes => (high - low) / 2.0,
            (samples, _) => {
                let sigma = quartile_range(&within) / 1.349;
                ((high - low) / 2.0).max(1.2533 * sigma / (samples as f64).sqrt())
            }
        };
        value.is_finite().then_some(Self { name, seconds: median(seconds), value, noise })
    }
}

/// Distance between the quartiles.
fn quartile_range(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| sorted.get((share * (sorted.len().max(1) - 1) as f64).round() as usize).copied();
    at(0.75).zip(at(0.25)).map_or(0.0, |(high, low)| high - low)
}

/// A run that another one is compared with.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Where it was measured.
    pub machine: Machine,
    /// Its cases.
    pub cases: Vec<Measured>,
}

/// Why a file cannot be compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadError {
    /// It is not JSON.
    Json(String),
    /// It is JSON, but nothing that `cargo xtask bench --json` writes.
    NotAReport,
    /// Another version of the program wrote it.
    Format {
        /// What the file says.
        found: String,
    },
    /// It is a report of something that has no cases to compare.
    Kind(String),
    /// It claims to be a report, but lacks something.
    Broken(String),
    /// There is no case in it.
    Empty,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => write!(f, "not JSON: {error}"),
            Self::NotAReport => f.write_str("not a report of `cargo xtask bench --json` (it has no field `format`)"),
            Self::Format { found } => {
                write!(f, "its format is {found}, this program reads {FORMAT}: measure the old state again")
            }
            Self::Kind(kind) => {
                write!(f, "a report of kind `{kind}`: only `curve`, `kernels` and `decode` can be compared")
            }
            Self::Broken(error) => write!(f, "a damaged report: {error}"),
            Self::Empty => f.write_str("the report holds no measured case"),
        }
    }
}

impl std::error::Error for ReadError {}

/// The fields that tell a report from any other JSON.
#[derive(Deserialize)]
struct Head {
    format: Option<String>,
    #[serde(default)]
    kind: String,
}

impl Run {
    /// Reads what `--json` wrote.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn read(json: &str) -> Result<Self, ReadError> {
        let Head { format, kind } = serde_json::from_str(json).map_err(|error| match error.is_data() {
            true => ReadError::NotAReport,
            false => ReadError::Json(error.to_string()),
        })?;
        let format = format.ok_or(ReadError::NotAReport)?;
        if format != FORMAT {
            return Err(ReadError::Format { found: format });
        }
        let broken = |error: serde_json::Error| ReadError::Broken(error.to_string());
        let run = match kind.as_str() {
            "curve" => {
                let report: CurveReport = serde_json::from_str(json).map_err(broken)?;
                Self::of_curves(&report.machine, &report.curves)
            }
            "kernels" => Self::of_kernels(&serde_json::from_str(json).map_err(broken)?),
            "decode" => Self::of_decode(&serde_json::from_str(json).map_err(broken)?),
            _ => return Err(ReadError::Kind(kind)),
        };
        if run.cases.is_empty() { Err(ReadError::Empty) } else { Ok(run) }
    }

    /// The cases of cost curves.
    pub fn of_curves(machine: &Machine, curves: &[Curve]) -> Self {
        let points = curves.iter().flat_map(|curve| curve.points.iter().map(move |p| (curve, p)));
        let cases = points
            .filter_map(|(curve, p)| Measured::new(curve.case_name(p.who, p.n), p.times(), &p.peaks, &p.passes))
            .collect();
        Self { machine: machine.clone(), cases }
    }

    /// The cases of a table of kernels.
    pub fn of_kernels(report: &KernelReport) -> Self {
        let cases =
            report.results.iter().filter_map(|r| Measured::new(r.name(), r.times(), &r.peaks, &r.passes)).collect();
        Self { machine: report.machine.clone(), cases }
    }

    /// The cases of a table of decoding: beside each sample is the rate of a plain read.
    pub fn of_decode(report: &DecodeReport) -> Self {
        let rows = report.rows.iter().filter_map(|row| {
            let rates: Vec<f64> = row.probes.iter().map(|seconds| row.bytes as f64 / seconds).collect();
            Measured::new(row.name(), &row.samples, &rates, &row.passes)
        });
        Self { machine: report.machine.clone(), cases: rows.collect() }
    }
}

/// The verdict on a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// By more than the band.
    Slower,
    /// By less than minus the band.
    Faster,
    /// Neither.
    Same,
}

/// A case that both runs have.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Seconds per call then.
    pub old: f64,
    /// Seconds per call now.
    pub new: f64,
    /// Time now over time then, both at one and the same clock: above 1 is slower.
    pub ratio: f64,
    /// What the ratio may be before it counts: the band, as a factor.
    pub band: f64,
    /// What that means.
    pub verdict: Verdict,
}

/// Two runs side by side.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Cases of both, in the new run's order.
    pub rows: Vec<Row>,
    /// Cases that only the old run has.
    pub gone: Vec<String>,
    /// Cases that only the new run has.
    pub added: Vec<String>,
    /// Why the numbers may mean little.
    pub warnings: Vec<String>,
    /// How much slower a case may be before it counts, if noise is nil.
    pub threshold: f64,
}

impl Comparison {
    /// Puts two runs side by side; see the [module](self) for `threshold`.
    pub fn new(old: &Run, new: &Run, threshold: f64) -> Self {
        let find = |cases: &[Measured], name: &str| cases.iter().position(|case| case.name == name);
        let mut rows = Vec::new();
        let mut added = Vec::new();
        for case in &new.cases {
            match find(&old.cases, &case.name).and_then(|at| old.cases.get(at)) {
                Some(before) => {
                    let growth = case.value - before.value;
                    let band = threshold.ln_1p() + 2.0 * before.noise.hypot(case.noise);
                    let verdict = match growth {
                        g if g > band => Verdict::Slower,
                        g if g < -band => Verdict::Faster,
                        _ => Verdict::Same,
                    };
                    rows.push(Row {
                        name: case.name.clone(),
                        old: before.seconds,
                        new: case.seconds,
                        ratio: growth.exp(),
                        band: band.exp(),
                        verdict,
                    });
                }
                None => added.push(case.name.clone()),
            }
        }
        let gone = old.cases.iter().map(|c| &c.name).filter(|name| find(&new.cases, name).is_none()).cloned().collect();
        Self { rows, gone, added, warnings: warnings(&old.machine, &new.machine), threshold }
    }

    /// The names of the cases that became slower.
    pub fn slower(&self) -> impl Iterator<Item = &str> {
        self.rows.iter().filter(|row| row.verdict == Verdict::Slower).map(|row| row.name.as_str())
    }

    /// Counts, in a sentence: slower, faster, the same.
    pub fn summary(&self) -> String {
        let count = |verdict| self.rows.iter().filter(|row| row.verdict == verdict).count();
        format!(
            "{} cases: {} slower, {} faster, {} the same within {} % and noise; median ratio {:.3}",
            self.rows.len(),
            count(Verdict::Slower),
            count(Verdict::Faster),
            count(Verdict::Same),
            // Without the digits that 5/100·100 may leave.
            (self.threshold * 1e6).round() / 1e4,
            self.overall()
        )
    }

    /// The median of all ratios: the factor of the whole run.
    pub fn overall(&self) -> f64 {
        median(&self.rows.iter().map(|row| row.ratio).collect::<Vec<_>>())
    }
}

/// Differences of the machines that spoil a comparison.
fn warnings(old: &Machine, new: &Machine) -> Vec<String> {
    let facts = [
        ("CPU", &old.cpu, &new.cpu),
        ("level", &old.level, &new.level),
        ("compiler", &old.rustc, &new.rustc),
        ("flags", &old.flags, &new.flags),
    ];
    let differ = facts.into_iter().filter(|(_, old, new)| old != new);
    differ.map(|(what, old, new)| format!("another {what} then: {old}; now: {new}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve_report::tests::report;
    use serde_json::Value;

    /// A case whose passes have these times, at a peak of 1 FLOP/s.
    fn case(name: &str, passes: &[&[f64]]) -> Measured {
        let seconds: Vec<f64> = passes.concat();
        let numbers: Vec<usize> = passes.iter().enumerate().flat_map(|(p, s)| vec![p; s.len()]).collect();
        Measured::new(name.into(), &seconds, &vec![1.0; seconds.len()], &numbers).unwrap()
    }

    fn compare(old: &[&[f64]], new: &[&[f64]]) -> Row {
        let run = |passes| Run { machine: Machine::default(), cases: vec![case("a", passes)] };
        Comparison::new(&run(old), &run(new), THRESHOLD).rows.remove(0)
    }

    #[test]
    fn growth_counts_beyond_threshold_and_noise() {
        let calm: &[&[f64]] = &[&[1.0, 1.0], &[1.0, 1.0]];
        let verdict = |new: f64| compare(calm, &[&[new, new], &[new, new]]).verdict;
        assert_eq!(
            [1.04, 0.97, 1.06, 0.9].map(verdict),
            [Verdict::Same, Verdict::Same, Verdict::Slower, Verdict::Faster]
        );
        let row = compare(calm, &[&[1.2], &[1.2]]);
        assert!((row.ratio - 1.2).abs() < 1e-12 && (row.band - 1.05).abs() < 1e-12, "{row:?}");
        // Passes that lie 20 % apart, in either run, widen the band by about that.
        let restless: &[&[f64]] = &[&[0.9, 0.9], &[1.1, 1.1]];
        assert_eq!(compare(restless, &[&[1.2, 1.2], &[1.2, 1.2]]).verdict, Verdict::Same);
        assert_eq!(compare(calm, &[&[1.1, 1.1], &[1.3, 1.3]]).verdict, Verdict::Same);
        assert_eq!(compare(restless, &[&[1.6, 1.6], &[1.6, 1.6]]).verdict, Verdict::Slower);
        // And so do samples that scatter within passes.
        let scattered: &[&[f64]] = &[&[0.6, 0.9, 1.0, 1.0, 1.6], &[0.5, 0.8, 1.0, 1.2, 1.5]];
        assert!(compare(scattered, calm).band > 1.15);
    }

    #[test]
    fn one_disturbed_pass_of_three_moves_nothing() {
        let row = compare(&[&[1.0, 1.0], &[1.0, 1.0], &[1.0, 1.0]], &[&[1.0, 1.0], &[2.0, 2.0], &[1.0, 1.0]]);
        assert_eq!((row.ratio, row.verdict), (1.0, Verdict::Same));
    }

    #[test]
    fn a_slower_clock_is_no_regression() {
        let at = |clock: f64| {
            let passes = [0, 0, 1, 1];
            let case = Measured::new("a".into(), &[1.0 / clock; 4], &[1e9 * clock; 4], &passes).unwrap();
            Run { machine: Machine::default(), cases: vec![case] }
        };
        let row = Comparison::new(&at(1.0), &at(0.5), THRESHOLD).rows.remove(0);
        assert_eq!((row.verdict, row.new / row.old), (Verdict::Same, 2.0));
        assert!((row.ratio - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_single_sample_says_little() {
        assert_eq!(compare(&[&[1.0]], &[&[1.3]]).verdict, Verdict::Same);
        assert_eq!(compare(&[&[1.0]], &[&[2.0]]).verdict, Verdict::Slower);
        assert_eq!(Measured::new("a".into(), &[], &[], &[]), None);
        assert_eq!(Measured::new("a".into(), &[f64::NAN], &[1.0], &[0]), None);
    }

    #[test]
    fn a_run_equals_itself_and_a_slowed_case_is_named() {
        let old = report();
        let json = serde_json::to_string(&old).unwrap();
        let read = Run::read(&json).unwrap();
        let same = Comparison::new(&read, &Run::of_curves(&old.machine, &old.curves), THRESHOLD);
        assert!(same.slower().next().is_none() && same.rows.iter().all(|row| row.ratio == 1.0));
        assert_eq!((same.rows.len(), same.gone.len(), same.added.len()), (read.cases.len(), 0, 0));
        assert_eq!(same.overall(), 1.0);
        let mut slow = old.clone();
        for seconds in &mut slow.curves[0].points[2].samples.0 {
            *seconds *= 1.1;
        }
        slow.curves[0].points.pop();
        slow.machine.level = "another".into();
        let comparison = Comparison::new(&read, &Run::of_curves(&slow.machine, &slow.curves), THRESHOLD);
        let point = &old.curves[0].points[2];
        let name = old.curves[0].case_name(point.who, point.n);
        assert_eq!(comparison.slower().collect::<Vec<_>>(), [name]);
        assert_eq!((comparison.gone.len(), comparison.warnings.len()), (1, 1));
        let back = Comparison::new(&Run::of_curves(&slow.machine, &slow.curves), &read, THRESHOLD);
        assert_eq!((back.added, back.gone), (comparison.gone, vec![]));
    }

    #[test]
    fn files_that_are_no_report_are_told_apart() {
        let json = serde_json::to_string(&report()).unwrap();
        assert!(matches!(Run::read(&json[..json.len() / 2]), Err(ReadError::Json(_))));
        assert!(matches!(Run::read(""), Err(ReadError::Json(_))));
        assert_eq!(Run::read("{}"), Err(ReadError::NotAReport));
        assert_eq!(Run::read("{\"format\": 3}"), Err(ReadError::NotAReport));
        assert_eq!(Run::read("[1, 2]"), Err(ReadError::NotAReport));
        let other = json.replace(FORMAT, "attn-bench/0");
        assert_eq!(Run::read(&other), Err(ReadError::Format { found: "attn-bench/0".into() }));
        assert!(Run::read(&other).unwrap_err().to_string().contains(FORMAT), "the error names both");
        let edit = |change: &dyn Fn(&mut Value)| {
            let mut value: Value = serde_json::from_str(&json).unwrap();
            change(&mut value);
            Run::read(&value.to_string())
        };
        assert_eq!(edit(&|v| v["kind"] = "input".into()), Err(ReadError::Kind("input".into())));
        assert!(matches!(edit(&|v| v["curves"] = 3.into()), Err(ReadError::Broken(_))));
        assert_eq!(edit(&|v| v["curves"] = Value::Array(vec![])), Err(ReadError::Empty));
    }
}
