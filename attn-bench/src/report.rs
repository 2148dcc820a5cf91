//! What a run leaves behind: tables for the terminal, a page with plots, and JSON with every sample.

pub mod html;
pub mod plot;
pub mod table;

use serde::{Deserialize, Serialize};

use crate::crossover::{Crossover, WIDTHS};
use crate::curve::Curve;
use crate::engine::Engine;
use crate::fit::PowerLaw;
use crate::machine::Machine;

/// Version of the JSON that [`Report`] serialises to. It changes when a field changes its meaning or goes.
pub const FORMAT: &str = "attn-bench/1";

/// A cost curve with everything that is said about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: String,
    /// Where it was measured.
    pub machine: Machine,
    /// How each engine's cost grows.
    pub growth: Vec<Growth>,
    /// Where attention meets the linear parts of a layer.
    pub crossovers: Vec<Crossover>,
    /// The points, with all samples.
    pub curve: Curve,
}

/// The fitted growth of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// The engine.
    pub engine: Engine,
    /// Of its time, over the larger lengths.
    pub time: Option<PowerLaw>,
    /// Of its extra memory, over the larger lengths; `None` where it needs none.
    pub memory: Option<PowerLaw>,
}

impl Report {
    /// Draws the conclusions from a curve.
    pub fn new(machine: Machine, curve: Curve) -> Self {
        let growth = curve
            .engines()
            .into_iter()
            .map(|engine| Growth { engine, time: curve.time_law(engine), memory: curve.memory_law(engine) })
            .collect();
        let crossovers = curve.linear().map_or_else(Vec::new, |linear| WIDTHS.map(|d| linear.crossover(d)).to_vec());
        Self { format: FORMAT.into(), machine, growth, crossovers, curve }
    }

    /// As JSON, indented. A number that is not finite, which no measured curve contains, becomes `null`.
    ///
    /// # Errors
    /// None for this type; the signature is that of `serde_json`.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }
}

/// A length or count with thin grouping: `16 384`.
pub fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) && digits.len() > 4 {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::case::Case;
    use crate::clock::Samples;
    use crate::curve::{Point, Skipped};

    /// A made-up curve: quadratic times, quadratic memory for the naive engine and constant memory for the others.
    pub(crate) fn report() -> Report {
        let mut curve = Curve { case: Case::square(2048, 64), points: Vec::new(), skipped: Vec::new() };
        for n in [128usize, 256, 512, 1024, 2048] {
            for (engine, gflops) in Engine::ALL.into_iter().zip([6.0, 1.5, 170.0, 330.0]) {
                if engine == Engine::Streaming && n > 1024 {
                    curve.skipped.push(Skipped { engine, n, why: "predicted 9.00 s a call".into() });
                    continue;
                }
                let seconds = Case::square(n, 64).flops() / gflops / 1e9;
                curve.points.push(Point {
                    engine,
                    n,
                    seconds,
                    extra_bytes: if engine == Engine::Naive { 4 * n * n } else { 100_000 },
                    gflops,
                    share_of_peak: gflops / if engine == Engine::Parallel { 400.0 } else { 200.0 },
                    calls_per_sample: 1,
                    samples: Samples(vec![seconds; 3]),
                    peaks: vec![200e9; 3],
                });
            }
        }
        let machine = Machine { cpu: "A <fast> & quiet CPU".into(), threads: 2, ..Machine::default() };
        Report::new(machine, curve)
    }

    #[test]
    fn json_holds_everything() {
        let report = report();
        let json = report.to_json().unwrap();
        let back: Report = serde_json::from_str(&json).unwrap();
        assert!(back == report, "not the same after a round trip");
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["format"], FORMAT);
        assert_eq!(value["curve"]["points"][2]["engine"], "simd");
        assert_eq!(value["curve"]["points"][2]["samples"].as_array().unwrap().len(), 3);
    }

    #[test]
    fn growth_is_fitted_for_time_and_memory() {
        let report = report();
        for g in &report.growth {
            assert!((g.time.unwrap().exponent - 2.0).abs() < 1e-9, "{g:?}");
            let memory = g.memory.unwrap().exponent;
            assert!((memory - if g.engine == Engine::Naive { 2.0 } else { 0.0 }).abs() < 1e-9, "{g:?}");
        }
        assert_eq!(report.crossovers.len(), WIDTHS.len());
    }

    #[test]
    fn long_numbers_are_grouped() {
        assert_eq!([7, 4096, 16384, 1_234_567].map(grouped), ["7", "4096", "16\u{202f}384", "1\u{202f}234\u{202f}567"]);
    }
}
