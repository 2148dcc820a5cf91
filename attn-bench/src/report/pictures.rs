//! The pictures of a report, and their axes.

use super::document::Picture;
use super::plot::{self, Axis, Ink, LabelAt, Marker, Plot, Series, X};
use crate::curve::{Curve, Point, Who, seconds};
use crate::curve_report::CurveReport;
use crate::engine::Engine;
use crate::memory::human;
use crate::roofline::{Footprint, Roofs};

/// Colour and marker of an engine.
fn look(engine: Engine) -> (Ink, Marker) {
    match engine {
        Engine::Naive => (plot::NAIVE, Marker::Cross),
        Engine::Streaming => (plot::STREAMING, Marker::Triangle),
        Engine::Simd => (plot::SIMD, Marker::Disc),
        Engine::Parallel => (plot::PARALLEL, Marker::Square),
        Engine::Windowed => (plot::WINDOWED, Marker::Ring),
        Engine::Linear => (plot::LINEAR, Marker::Triangle),
    }
}

/// A line per engine.
fn lines(curve: &Curve, which: impl Fn(Who) -> bool, value: impl Fn(&Point) -> f64) -> Vec<Series> {
    let lines = curve.lines().into_iter().filter(|&who| which(who));
    lines
        .map(|who| {
            let (ink, marker) = look(who.engine);
            let points = curve.of(who).map(|p| (p.n as f64, value(p))).collect();
            Series { label: who.to_string(), ink, marker, points, label_at: LabelAt::End }
        })
        .collect()
}

/// Time, memory and share of the peak of a curve; the n×n matrix beside its memory as far as `footprints` go.
pub(super) fn of_curve(curve: &Curve, footprints: &[Footprint]) -> Vec<Picture> {
    let mut time = lines(curve, |_| true, Point::wall);
    let simd = Who::alone(Engine::Simd);
    if let (Some(law), Some(simd)) = (curve.time_law(simd), curve.of(simd).last()) {
        // A guide of slope 2 below the SIMD engine's last point.
        let at = |n: f64| (n, simd.wall() / 8.0 * (n / simd.n as f64).powi(2));
        time.push(guide("slope of n²", vec![at(law.from_n as f64), at(law.to_n as f64)]));
    }
    // What needs nothing at all still gets a point, at one byte, or a logarithmic axis could not show it.
    let mut memory = lines(curve, |_| true, |p| p.extra_bytes.max(1) as f64);
    let matrix: Vec<_> = footprints.iter().map(|f| (f.n as f64, f.matrix.bytes as f64)).collect();
    if !matrix.is_empty() && !memory.is_empty() {
        memory.push(guide("n×n matrix", matrix));
    }
    let share = lines(curve, |who| who.engine != Engine::Linear, |p| p.share_of_peak);
    let over_length = |title: &str, axis, series| Plot { title: title.into(), x: X::Length, axis, series };
    vec![
        Picture {
            title: "Time per call",
            note:
                "against sequence length, by the wall's clock. Both axes are logarithmic: a straight line of slope 2 \
                   is O(n²), one of slope 1 is O(n). windowed and linear compute something else, cheaper."
                    .into(),
            plot: over_length(
                "Time per call against sequence length",
                Axis::Log { base: 10.0, label: seconds_tick },
                time,
            ),
        },
        Picture {
            title: "Extra memory",
            note: "held at the worst moment of a call, beyond inputs and output. Dashed: the n×n matrix of a head, \
                   predicted where it was not run."
                .into(),
            plot: over_length(
                "Extra memory against sequence length",
                Axis::Log { base: 16.0, label: bytes_tick },
                memory,
            ),
        },
        Picture {
            title: "Share of the FMA peak",
            note: "measured right beside each sample; parallel against all of its threads.".into(),
            plot: over_length("Share of the measured peak against sequence length", Axis::Share, share),
        },
    ]
}

/// A dashed line.
fn guide(label: &str, points: Vec<(f64, f64)>) -> Series {
    Series { label: label.into(), ink: plot::GUIDE, marker: Marker::Dashed, points, label_at: LabelAt::End }
}

/// The engines on one thread under the roofs of the machine.
pub(super) fn roofline(report: &CurveReport) -> Option<Picture> {
    let Roofs { fma_one, reads, .. } = &report.roofs;
    let points = |engine| {
        let of = report.predictions.iter().filter(move |p| p.who.engine == engine);
        of.map(|p| (p.intensity(), p.flops / p.measured)).collect::<Vec<_>>()
    };
    let mut series: Vec<Series> = [Engine::Naive, Engine::Streaming, Engine::Simd]
        .into_iter()
        .map(|engine| {
            let (ink, marker) = look(engine);
            Series { label: engine.to_string(), ink, marker, points: points(engine), label_at: LabelAt::End }
        })
        .filter(|series| !series.points.is_empty())
        .collect();
    if series.is_empty() || *fma_one <= 0.0 {
        return None;
    }
    let intensities = || series.iter().flat_map(|s| &s.points).map(|p| p.0);
    let left = intensities().fold(1.0, f64::min) / 2.0;
    let right = intensities().fold(1.0, f64::max) * 4.0;
    let mut roofs = Vec::new();
    // The slowest memory and the fastest cache: two slopes that end under one roof.
    for (read, label) in
        reads.last().map(|r| (r, "from memory")).into_iter().chain(reads.first().map(|r| (r, "from the first cache")))
    {
        let ridge = (fma_one / read.one).clamp(left, right);
        let points = vec![(left, left * read.one), (ridge, ridge * read.one), (right, *fma_one)];
        roofs.push(Series { label_at: LabelAt::Start, ..guide(label, points) });
    }
    series.append(&mut roofs);
    let note = "FLOP/s against FLOPs per byte that the cost model says are moved (no key stays in a cache between blocks \
                of queries), one thread. Dashed: what multiply-adds and reading allow; a point above the slope of memory \
                finds its keys in a cache.";
    let title = "Roofline of the engines on one thread".into();
    let plot = Plot { title, x: X::Intensity, axis: Axis::Log { base: 10.0, label: flops_tick }, series };
    Some(Picture { title: "Roofline", note: note.into(), plot })
}

fn flops_tick(rate: f64) -> String {
    match rate * 1.000_001 {
        r if r < 1e9 => format!("{} MFLOP/s", (r / 1e6).floor()),
        r if r < 1e12 => format!("{} GFLOP/s", (r / 1e9).floor()),
        r => format!("{} TFLOP/s", (r / 1e12).floor()),
    }
}

fn seconds_tick(t: f64) -> String {
    seconds(t * 1.000_001).replace(".00", "").replace(".0", "")
}

fn bytes_tick(bytes: f64) -> String {
    human(bytes.round() as usize).replace(".00", "").replace(".0", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_short() {
        assert_eq!(
            [1e-6, 1e-3, 0.01, 0.1, 1.0, 10.0].map(seconds_tick),
            ["1 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s"]
        );
        assert_eq!([1e6, 1e9, 1e11, 1e12].map(flops_tick), ["1 MFLOP/s", "1 GFLOP/s", "100 GFLOP/s", "1 TFLOP/s"]);
        assert_eq!([1.0, 256.0, 4096.0, 1048576.0].map(bytes_tick), ["1 B", "256 B", "4 KiB", "1 MiB"]);
    }

    #[test]
    fn roofs_bend_at_the_ridge() {
        let report = crate::curve_report::tests::report();
        let Picture { plot, .. } = roofline(&report).unwrap();
        let memory = plot.series.iter().find(|s| s.label == "from memory").unwrap();
        assert_eq!(memory.points[1], (200.0 / 15.0, 200e9));
        assert_eq!(memory.points[2].1, 200e9);
        assert!((memory.points[0].1 / memory.points[0].0 / 15e9 - 1.0).abs() < 1e-12);
    }
}
