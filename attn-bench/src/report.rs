//! What a run leaves behind: tables for the terminal, a page with plots, the same tables as Markdown, and JSON with
//! every sample.

pub mod html;
pub mod markdown;
mod pictures;
pub mod plot;
mod section;
pub mod table;

use attn_simd::Level;
use serde::{Deserialize, Serialize};

use crate::compare::Comparison;
use crate::crossover::{Crossover, WIDTHS};
use crate::curve::{Curve, Who};
use crate::fit::PowerLaw;
use crate::machine::Machine;
use crate::parts::Layer;
use crate::roofline::{Footprint, Prediction, Roofs, footprints, predict};

/// Version of the JSON that reports serialise to. It changes when a field changes its meaning or goes.
pub const FORMAT: &str = "attn-bench/2";

/// Cost curves with everything that is said about them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: String,
    /// `curve`.
    pub kind: String,
    /// Where it was measured.
    pub machine: Machine,
    /// How the cost of each line grows.
    pub growth: Vec<Growth>,
    /// Where attention meets the linear parts of a layer.
    pub crossovers: Vec<Crossover>,
    /// What the machine can do at best.
    pub roofs: Roofs,
    /// What the cost model says of the first curve's points.
    pub predictions: Vec<Prediction>,
    /// Memory of the first curve's case up to 100 000 tokens.
    pub footprints: Vec<Footprint>,
    /// The parts of a layer, if they were measured.
    pub layer: Option<Layer>,
    /// The points, with all samples.
    pub curves: Vec<Curve>,
    /// Against an earlier run, if one was named. Not part of the JSON: it can be made again from both files.
    #[serde(skip)]
    pub comparison: Option<Comparison>,
}

/// The fitted growth of one line of a curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// The curve's name.
    pub curve: String,
    /// The line.
    #[serde(flatten)]
    pub who: Who,
    /// Of its time, over the larger lengths.
    pub time: Option<PowerLaw>,
    /// Of its extra memory, over the larger lengths; `None` where it needs none.
    pub memory: Option<PowerLaw>,
}

impl Report {
    /// Draws the conclusions from curves.
    pub fn new(machine: Machine, level: Level, curves: Vec<Curve>, roofs: Roofs, layer: Option<Layer>) -> Self {
        let lines = curves.iter().flat_map(|curve| curve.lines().into_iter().map(move |who| (curve, who)));
        let growth = lines
            .map(|(curve, who)| Growth {
                curve: curve.name(),
                who,
                time: curve.time_law(who),
                memory: curve.memory_law(who),
            })
            .collect();
        let linear = curves.first().and_then(Curve::linear);
        let crossovers = linear.map_or_else(Vec::new, |linear| WIDTHS.map(|d| linear.crossover(d)).to_vec());
        let first = curves.first();
        let predictions = first.map_or_else(Vec::new, |curve| predict(curve, &roofs, level.lanes()));
        let footprints = first.map_or_else(Vec::new, |curve| footprints(curve, level));
        let (format, kind) = (FORMAT.into(), "curve".into());
        Self {
            format,
            kind,
            machine,
            growth,
            crossovers,
            roofs,
            predictions,
            footprints,
            layer,
            curves,
            comparison: None,
        }
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
    use crate::case::{Case, Number};
    use crate::clock::Samples;
    use crate::curve::{Point, Skipped};
    use crate::engine::Engine;
    use crate::parts::Parts;
    use crate::roofline::Read;

    fn roofs() -> Roofs {
        let read = |bytes, one| Read { bytes, one, all: 2.0 * one };
        let reads = vec![read(32 << 10, 150e9), read(512 << 10, 80e9), read(256 << 20, 15e9)];
        Roofs { fma_one: 200e9, fma_all: 400e9, tiles_one: None, reads }
    }

    /// A made-up layer: everything at 100 GFLOP/s, the fused kernel at twice that, the recurrent layer at a tenth of
    /// that.
    fn layer() -> Layer {
        let part = |n: usize| {
            let (linear, square) = ((n * 512 * 512) as f64 / 1e11, (n * n * 512) as f64 / 1e11);
            Parts {
                n,
                projections: 8.0 * linear,
                scores: 2.0 * square,
                softmax: square,
                weighted: 2.0 * square,
                fused: 2.0 * square,
                recurrent: 39.0 * linear,
            }
        };
        Layer { width: 512, heads: 8, products: "hand".into(), points: [256, 1024, 4096].map(part).to_vec() }
    }

    /// A made-up curve: quadratic times, quadratic memory for the naive engine and constant memory for the others.
    pub(crate) fn report() -> Report {
        let curve = |number| {
            let mut curve = Curve::new(Case::square(2048, 64), number);
            for n in [128usize, 256, 512, 1024, 2048] {
                for (engine, gflops) in Engine::ALL.into_iter().zip([6.0, 1.5, 170.0, 330.0]) {
                    let who = Who { engine, threads: if engine == Engine::Parallel { 2 } else { 1 } };
                    if engine == Engine::Streaming && n > 1024 {
                        curve.skipped.push(Skipped { who, n, why: "predicted 9.00 s a call".into() });
                        continue;
                    }
                    let seconds = Case::square(n, 64).flops() / gflops / 1e9;
                    curve.points.push(Point {
                        who,
                        n,
                        seconds,
                        extra_bytes: if engine == Engine::Naive { 4 * n * n } else { 100_000 },
                        resident_bytes: Some(131_072),
                        gflops,
                        share_of_peak: gflops / if engine == Engine::Parallel { 400.0 } else { 200.0 },
                        calls_per_sample: 1,
                        samples: Samples(vec![seconds; 4]),
                        thread: Vec::new(),
                        peaks: vec![200e9; 4],
                        passes: vec![0, 0, 1, 1],
                    });
                }
            }
            curve
        };
        let machine = Machine { cpu: "A <fast> & quiet CPU".into(), threads: 2, ..Machine::default() };
        let curves = vec![curve(Number::F32), curve(Number::Bf16)];
        Report::new(machine, Level::portable(), curves, roofs(), Some(layer()))
    }

    #[test]
    fn json_holds_everything() {
        let report = report();
        let json = report.to_json().unwrap();
        let back: Report = serde_json::from_str(&json).unwrap();
        assert!(back == report, "not the same after a round trip");
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["format"], &value["kind"]), (&FORMAT.into(), &"curve".into()));
        let point = &value["curves"][1]["points"][2];
        assert_eq!((&point["engine"], point["samples"].as_array().unwrap().len()), (&"simd".into(), 4));
        assert_eq!(value["growth"][2]["curve"], "curve/d64/f32");
    }

    #[test]
    fn growth_is_fitted_for_time_and_memory() {
        let report = report();
        assert_eq!(report.growth.len(), 8);
        for g in &report.growth {
            assert!((g.time.unwrap().exponent - 2.0).abs() < 1e-9, "{g:?}");
            let memory = g.memory.unwrap().exponent;
            assert!((memory - if g.who.engine == Engine::Naive { 2.0 } else { 0.0 }).abs() < 1e-9, "{g:?}");
        }
        assert_eq!(report.crossovers.len(), WIDTHS.len());
    }

    #[test]
    fn long_numbers_are_grouped() {
        assert_eq!([7, 4096, 16384, 1_234_567].map(grouped), ["7", "4096", "16\u{202f}384", "1\u{202f}234\u{202f}567"]);
    }
}
