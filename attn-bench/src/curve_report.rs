//! A run of the cost curve as JSON: its curves, and the conclusions from them.

use attn_simd::Level;
use serde::{Deserialize, Serialize};

use crate::curve::{Curve, Who};
use crate::fit::PowerLaw;
use crate::format::FORMAT;
use crate::machine::Machine;
use crate::roofline::{Footprint, Prediction, Roofs, footprints, predict};

/// Cost curves with the conclusions from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurveReport {
    /// [`FORMAT`].
    pub format: String,
    /// `curve`.
    pub kind: String,
    /// Where it was measured.
    pub machine: Machine,
    /// How the cost of each line grows.
    pub growth: Vec<Growth>,
    /// What the machine can do at best.
    pub roofs: Roofs,
    /// What the cost model says of the first curve's points.
    pub predictions: Vec<Prediction>,
    /// Memory of the first curve's case up to 100 000 tokens.
    pub footprints: Vec<Footprint>,
    /// The points, with all samples.
    pub curves: Vec<Curve>,
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
    /// Of its extra memory, over the larger lengths; `None` if it needs none.
    pub memory: Option<PowerLaw>,
}

impl CurveReport {
    /// Draws the conclusions from curves.
    pub fn new(machine: Machine, level: Level, curves: Vec<Curve>, roofs: Roofs) -> Self {
        let lines = curves.iter().flat_map(|curve| curve.lines().into_iter().map(move |who| (curve, who)));
        let growth = lines
            .map(|(curve, who)| Growth {
                curve: curve.name(),
                who,
                time: curve.time_law(who),
                memory: curve.memory_law(who),
            })
            .collect();
        let first = curves.first();
        let predictions = first.map_or_else(Vec::new, |curve| predict(curve, &roofs, level.lanes()));
        let footprints = first.map_or_else(Vec::new, |curve| footprints(curve, level));
        let (format, kind) = (FORMAT.into(), "curve".into());
        Self { format, kind, machine, growth, roofs, predictions, footprints, curves }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::case::{Case, Number};
    use crate::clock::Samples;
    use crate::curve::{Point, Skipped};
    use crate::engine::Engine;
    use crate::roofline::Read;

    fn roofs() -> Roofs {
        let read = |bytes, one| Read { bytes, one, all: 2.0 * one };
        let reads = vec![read(32 << 10, 150e9), read(512 << 10, 80e9), read(256 << 20, 15e9)];
        Roofs { fma_one: 200e9, fma_all: 400e9, bf16_one: None, reads }
    }

    /// A made-up curve: quadratic times, quadratic memory for the naive engine and constant memory for the others.
    pub(crate) fn report() -> CurveReport {
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
        CurveReport::new(machine, Level::portable(), curves, roofs())
    }

    #[test]
    fn json_holds_everything() {
        let report = report();
        let json = serde_json::to_string_pretty(&report).unwrap();
        let back: CurveReport = serde_json::from_str(&json).unwrap();
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
    }
}
