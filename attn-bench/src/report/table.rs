//! Tables for the terminal.

use comfy_table::{CellAlignment, Table, presets};

use super::{Report, grouped};
use crate::compare::{Comparison, Row, Verdict};
use crate::curve::{Curve, Point, Who, seconds};
use crate::engine::Engine;
use crate::fit::PowerLaw;
use crate::memory::human;
use crate::parts::{Crossing, Layer, Parts};
use crate::roofline::{Bytes, Roofs};

/// A table with a header, whose first `left` columns are text and whose others are numbers.
pub fn table(header: &[&str], left: usize, rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header(header.to_vec()).add_rows(rows);
    let mut style = table.style();
    style = style.row_separator(comfy_table::LineStyle::none());
    table.load_style(style);
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A share as `85.3 %`.
pub fn percent(share: f64) -> String {
    if share.is_nan() { "–".into() } else { format!("{:.1} %", 100.0 * share) }
}

/// Whether a line is shown with its rate and share of the peak.
const fn with_rate(who: Who) -> bool {
    matches!(who.engine, Engine::Simd | Engine::Parallel)
}

/// Time, rate and share of peak of every line against n.
pub fn times(curve: &Curve) -> Table {
    let lines = curve.lines();
    let mut header = vec!["n".to_string()];
    for &who in &lines {
        header.push(who.to_string());
        if with_rate(who) {
            header.extend(["GFLOP/s".to_string(), "of peak".to_string()]);
        }
    }
    let rows = curve.sizes().into_iter().map(|n| {
        let mut row = vec![grouped(n)];
        for &who in &lines {
            let point = curve.at(who, n);
            row.push(point.map_or_else(|| "–".into(), |p| seconds(p.seconds)));
            if with_rate(who) {
                row.push(point.map_or_else(|| "–".into(), |p| format!("{:.1}", p.gflops)));
                row.push(point.map_or_else(|| "–".into(), |p| percent(p.share_of_peak)));
            }
        }
        row
    });
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), 0, rows)
}

/// Extra memory of every line against n.
pub fn memory(curve: &Curve) -> Table {
    let lines = curve.lines();
    let header: Vec<String> = std::iter::once("n".into()).chain(lines.iter().map(Who::to_string)).collect();
    let cell = |p: Option<&Point>| p.map_or_else(|| "–".into(), |p| human(p.extra_bytes));
    let rows = curve.sizes().into_iter().map(|n| {
        let mut row = vec![grouped(n)];
        row.extend(lines.iter().map(|&who| cell(curve.at(who, n))));
        row
    });
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), 0, rows)
}

/// An exponent with its 95 % interval: `n^1.973 ± 0.012`.
fn exponent(law: &PowerLaw) -> String {
    // No minus before a zero.
    let value = format!("n^{:.3}", if law.exponent.abs() < 5e-4 { 0.0 } else { law.exponent });
    law.exponent_95.map_or(value.clone(), |half| format!("{value} ± {half:.3}"))
}

/// The fitted growth of time and memory, and the best rate of each line.
pub fn growth(report: &Report) -> Table {
    let many = report.curves.len() > 1;
    let mut header =
        vec!["engine", "time grows as", "R²", "over n", "extra memory as", "R²", "best GFLOP/s", "of peak"];
    if many {
        header.insert(0, "case");
    }
    let rows = report.growth.iter().filter_map(|g| {
        let curve = report.curves.iter().find(|curve| curve.name() == g.curve)?;
        let best = curve.of(g.who).map(|p| p.gflops).fold(f64::NAN, f64::max);
        let share = curve.of(g.who).map(|p| p.share_of_peak).fold(f64::NAN, f64::max);
        let cell = |law: &Option<PowerLaw>, f: &dyn Fn(&PowerLaw) -> String| law.as_ref().map_or("–".into(), f);
        let mut row = vec![
            g.who.to_string(),
            cell(&g.time, &exponent),
            cell(&g.time, &|law| format!("{:.5}", law.r2)),
            cell(&g.time, &|law| format!("{}–{}", grouped(law.from_n), grouped(law.to_n))),
            // An engine without any extra memory has no law; it is flat.
            g.memory.as_ref().map_or_else(|| "n^0.000".into(), exponent),
            cell(&g.memory, &|law| format!("{:.5}", law.r2)),
            format!("{best:.1}"),
            percent(share),
        ];
        if many {
            row.insert(0, curve.title());
        }
        Some(row)
    });
    table(&header, 1 + usize::from(many), rows)
}

/// A row per case that became slower or faster; all cases with `all`.
pub fn comparison(comparison: &Comparison, all: bool) -> Table {
    let shown = comparison.rows.iter().filter(|row| all || row.verdict != Verdict::Same);
    let rows = shown.map(|row: &Row| {
        let verdict = match row.verdict {
            Verdict::Slower => "SLOWER",
            Verdict::Faster => "faster",
            Verdict::Same => "same",
        };
        vec![
            row.name.clone(),
            verdict.into(),
            seconds(row.old),
            seconds(row.new),
            format!("{:.3}×", row.ratio),
            format!("± {:.1} %", 100.0 * (row.band - 1.0)),
        ]
    });
    table(&["case", "", "then", "now", "ratio", "band"], 2, rows)
}

/// The parts of a layer against n.
pub fn parts(layer: &Layer) -> Table {
    let rows = layer.points.iter().map(|p| {
        let share = p.fused / (p.fused + p.projections);
        let times = [p.projections, p.scores, p.softmax, p.weighted, p.composed(), p.fused, p.recurrent];
        let mut row = vec![grouped(p.n)];
        row.extend(times.map(seconds));
        row.push(percent(share));
        row
    });
    let header = [
        "n",
        "projections",
        "scores",
        "softmax",
        "weighted sum",
        "these three",
        "fused instead",
        "recurrent layer",
        "fused of layer",
    ];
    table(&header, 0, rows)
}

/// Where attention overtakes other parts of a measured layer.
pub fn crossings(layer: &Layer) -> Table {
    let cell = |crossing: Option<Crossing>| match crossing {
        Some(Crossing { n, measured: true }) => format!("n = {}", grouped(n.round() as usize)),
        Some(Crossing { n, measured: false }) => format!("n ≈ {} (predicted)", grouped(n.round() as usize)),
        None => "not within sight".into(),
    };
    let least = layer.points.first().map_or(0, |p| p.n);
    let from = |of: &dyn Fn(&Parts) -> f64, over: fn(&Parts) -> f64| match layer.is_above(of, over) {
        true => format!("n = {} or less: always here", grouped(least)),
        false => cell(layer.crossing(of, over)),
    };
    let row = |name: &str, of: &dyn Fn(&Parts) -> f64| {
        vec![name.to_string(), from(of, |p| p.projections), from(of, |p| p.recurrent)]
    };
    let rows = [row("composed", &Parts::composed), row("fused", &|p| p.fused)];
    table(&["attention", "costs more than the projections from", "than a recurrent layer from"], 1, rows)
}

/// Memory of the n×n matrix and of ours.
pub fn footprints(report: &Report) -> Table {
    let cell = |b: Bytes| {
        let size = human(usize::try_from(b.bytes).unwrap_or(usize::MAX));
        if b.measured { size } else { format!("{size} (predicted)") }
    };
    let rows = report.footprints.iter().map(|f| {
        let ratio = f.matrix.bytes as f64 / f.ours.bytes.max(1) as f64;
        vec![grouped(f.n), cell(f.matrix), cell(f.ours), format!("{}×", grouped(ratio.round() as usize))]
    });
    table(&["n", "n×n matrix of a head", "SIMD engine", "ratio"], 0, rows)
}

/// The cost model beside measurements, for the larger lengths.
pub fn predictions(report: &Report) -> Table {
    let longest = report.predictions.iter().map(|p| p.n).max().unwrap_or(0);
    let rows = report.predictions.iter().filter(|p| p.n >= longest / 16).map(|p| {
        vec![
            p.who.to_string(),
            grouped(p.n),
            format!("{:.3}", p.flops / 1e9),
            human(p.bytes as usize),
            format!("{:.1}", p.intensity()),
            seconds(p.least),
            seconds(p.measured),
            format!("{:.2}×", p.measured / p.least),
        ]
    });
    let header = ["engine", "n", "GFLOP", "bytes moved", "FLOP/byte", "least time", "measured", "measured / least"];
    table(&header, 1, rows)
}

/// The roofs of the machine.
pub fn roofs(report: &Report) -> Table {
    let Roofs { fma_one, fma_all, tiles_one, reads } = &report.roofs;
    let giga = |rate: f64| format!("{:.1}", rate / 1e9);
    let mut rows = vec![vec!["f32 multiply-adds, GFLOP/s".into(), giga(*fma_one), giga(*fma_all)]];
    rows.push(vec![
        "bf16 products on matrix tiles, GFLOP/s".into(),
        tiles_one.map_or_else(|| "no tiles".into(), giga),
        "–".into(),
    ]);
    rows.extend(reads.iter().map(|r| vec![format!("reading {}, GB/s", human(r.bytes)), giga(r.one), giga(r.all)]));
    table(&["probe", "one thread", &format!("{} threads", report.machine.threads)], 1, rows)
}

/// Where attention meets the linear parts of a layer.
pub fn crossovers(report: &Report) -> Table {
    let at = |n: Option<f64>| n.map_or_else(|| "never".into(), |n| grouped(n.round() as usize));
    let rows = report.crossovers.iter().map(|c| vec![grouped(c.width), at(c.projections), at(c.recurrent)]);
    table(&["model width d", "projections (8·n·d²)", "recurrent layer (4·n·d²)"], 0, rows)
}

/// One line per engine that was not run at some lengths.
pub fn skipped(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    let all = report.curves.iter().flat_map(|curve| {
        let mut lines: Vec<Who> = Vec::new();
        curve.skipped.iter().for_each(|s| {
            if !lines.contains(&s.who) {
                lines.push(s.who)
            }
        });
        lines.into_iter().map(move |who| (curve, who))
    });
    for (curve, who) in all {
        let mut of: Vec<_> = curve.skipped.iter().filter(|s| s.who == who).collect();
        of.sort_by_key(|s| s.n);
        if let (Some(first), Some(last)) = (of.first(), of.last()) {
            let lengths = if first.n == last.n {
                format!("n = {}", grouped(first.n))
            } else {
                format!("n = {} to {}", grouped(first.n), grouped(last.n))
            };
            let case = if report.curves.len() > 1 { format!(", {}", curve.title()) } else { String::new() };
            lines.push(format!("{who}{case}: not run at {lengths} ({} at the first)", first.why));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn a_row_per_length_and_a_dash_where_nothing_was_measured() {
        let report = report();
        let text = times(&report.curves[0]).trim_fmt();
        let lines: Vec<&str> = text.lines().collect();
        let row = lines.iter().find(|line| line.trim_start().starts_with("2048")).unwrap();
        let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect();
        // 1.07 GFLOP at 6, 170 and 330 GFLOP/s.
        assert_eq!(cells, ["2048", "179 ms", "–", "6.32 ms", "170.0", "85.0 %", "3.25 ms", "330.0", "82.5 %"]);
        assert_eq!(lines.iter().filter(|l| l.trim_start().starts_with(|c: char| c.is_ascii_digit())).count(), 5);
    }

    #[test]
    fn memory_growth_and_skips_are_told() {
        let report = report();
        assert!(memory(&report.curves[0]).trim_fmt().contains("16.0 MiB"));
        let text = growth(&report).trim_fmt();
        assert!(text.contains("n^2.000 ± 0.000") && text.contains("n^0.000") && text.contains("85.0 %"), "{text}");
        assert!(text.contains("bf16, one head of dimension 64"), "{text}");
        let lines = skipped(&report);
        assert_eq!(lines.len(), 2);
        assert_eq!(
            lines[0],
            "streaming, f32, one head of dimension 64: not run at n = 2048 (predicted 9.00 s a call at the first)"
        );
        let text = crossovers(&report).trim_fmt();
        assert!(text.contains("768") && text.contains("1536"), "{text}");
    }

    #[test]
    fn layers_and_memory_say_what_is_predicted() {
        let report = report();
        let layer = report.layer.as_ref().unwrap();
        let text = crossings(layer).trim_fmt();
        // 2·n²·d against 8·n·d² (and 5·n²·d for the composed form): n = 4d and 8d/5; against 39·n·d²: 39d/2 and 39d/5.
        for crossing in ["n = 2048", "n = 819", "n ≈ 9984 (predicted)", "n = 3994"] {
            assert!(text.contains(crossing), "{text}");
        }
        let text = parts(layer).trim_fmt();
        assert!(text.lines().count() >= 4 && text.contains("66.7 %"), "{text}");
        let text = footprints(&report).trim_fmt();
        assert!(text.contains("37.3 GiB (predicted)") && text.contains("4.00 MiB "), "{text}");
        let text = roofs(&report).trim_fmt();
        assert!(text.contains("no tiles") && text.contains("reading 256 MiB, GB/s"), "{text}");
        assert!(predictions(&report).trim_fmt().contains("streaming"));
    }

    #[test]
    fn comparisons_show_what_changed() {
        let row = |name: &str, ratio: f64, verdict| Row {
            name: name.into(),
            old: 1e-3,
            new: 1e-3 * ratio,
            ratio,
            band: 1.062,
            verdict,
        };
        let rows = vec![row("a/n1", 1.25, Verdict::Slower), row("b/n2", 1.01, Verdict::Same)];
        let both = Comparison { rows, gone: vec![], added: vec![], warnings: vec![], threshold: 0.05 };
        let text = comparison(&both, false).trim_fmt();
        let line = text.lines().find(|line| line.contains("a/n1")).unwrap();
        for part in ["SLOWER", "1.00 ms", "1.25 ms", "1.250×", "± 6.2 %"] {
            assert!(line.contains(part), "{line}");
        }
        assert!(!text.contains("b/n2") && comparison(&both, true).trim_fmt().contains("b/n2"));
    }

    #[test]
    fn shares_read_as_percent() {
        assert_eq!([0.8531, 1.0, f64::NAN].map(percent), ["85.3 %", "100.0 %", "–"]);
    }
}
