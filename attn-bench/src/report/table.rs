//! Tables for the terminal.

use comfy_table::{CellAlignment, Table, presets};

use super::{Report, grouped};
use crate::curve::{Point, seconds};
use crate::engine::Engine;
use crate::memory::human;

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

/// Time, rate and share of peak of every engine against n.
pub fn times(report: &Report) -> Table {
    let engines = report.curve.engines();
    let mut header = vec!["n".to_string()];
    for engine in &engines {
        header.push(engine.to_string());
        if matches!(engine, Engine::Simd | Engine::Parallel) {
            header.extend(["GFLOP/s".to_string(), "of peak".to_string()]);
        }
    }
    let rows = report.curve.sizes().into_iter().map(|n| {
        let mut row = vec![grouped(n)];
        for &engine in &engines {
            let point = report.curve.of(engine).find(|p| p.n == n);
            row.push(point.map_or_else(|| "–".into(), |p| seconds(p.seconds)));
            if matches!(engine, Engine::Simd | Engine::Parallel) {
                row.push(point.map_or_else(|| "–".into(), |p| format!("{:.1}", p.gflops)));
                row.push(point.map_or_else(|| "–".into(), |p| percent(p.share_of_peak)));
            }
        }
        row
    });
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), 0, rows)
}

/// Extra memory of every engine against n.
pub fn memory(report: &Report) -> Table {
    let engines = report.curve.engines();
    let mut header = vec!["n"];
    header.extend(engines.iter().map(|e| e.name()));
    let cell = |p: Option<&Point>| p.map_or_else(|| "–".into(), |p| human(p.extra_bytes));
    let rows = report.curve.sizes().into_iter().map(|n| {
        let mut row = vec![grouped(n)];
        row.extend(engines.iter().map(|&engine| cell(report.curve.of(engine).find(|p| p.n == n))));
        row
    });
    table(&header, 0, rows)
}

/// The fitted growth of time and memory, and the best rate of each engine.
pub fn growth(report: &Report) -> Table {
    let rows = report.growth.iter().map(|g| {
        let best = report.curve.of(g.engine).map(|p| p.gflops).fold(f64::NAN, f64::max);
        let share = report.curve.of(g.engine).map(|p| p.share_of_peak).fold(f64::NAN, f64::max);
        let rate = |p: &Option<crate::fit::PowerLaw>, f: &dyn Fn(&crate::fit::PowerLaw) -> String| {
            p.as_ref().map_or_else(|| "–".into(), f)
        };
        vec![
            g.engine.to_string(),
            rate(&g.time, &|law| format!("n^{:.3}", law.exponent)),
            rate(&g.time, &|law| format!("{:.5}", law.r2)),
            rate(&g.time, &|law| format!("{}–{}", grouped(law.from_n), grouped(law.to_n))),
            // An engine without any extra memory has no law; it is flat.
            g.memory.as_ref().map_or_else(|| "n^0.000".into(), |law| format!("n^{:.3}", law.exponent.abs())),
            format!("{best:.1}"),
            percent(share),
        ]
    });
    table(&["engine", "time grows as", "R²", "over n", "extra memory as", "best GFLOP/s", "of peak"], 1, rows)
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
    for engine in Engine::ALL {
        let mut of: Vec<_> = report.curve.skipped.iter().filter(|s| s.engine == engine).collect();
        of.sort_by_key(|s| s.n);
        if let (Some(first), Some(last)) = (of.first(), of.last()) {
            let lengths = if first.n == last.n {
                format!("n = {}", grouped(first.n))
            } else {
                format!("n = {} to {}", grouped(first.n), grouped(last.n))
            };
            lines.push(format!("{engine}: not run at {lengths} ({} at the first)", first.why));
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
        let text = times(&report).trim_fmt();
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
        assert!(memory(&report).trim_fmt().contains("16.0 MiB"));
        let text = growth(&report).trim_fmt();
        assert!(text.contains("n^2.000") && text.contains("n^0.000") && text.contains("85.0 %"), "{text}");
        assert_eq!(skipped(&report), ["streaming: not run at n = 2048 (predicted 9.00 s a call at the first)"]);
        let text = crossovers(&report).trim_fmt();
        assert!(text.contains("768") && text.contains("1536"), "{text}");
    }

    #[test]
    fn shares_read_as_percent() {
        assert_eq!([0.8531, 1.0, f64::NAN].map(percent), ["85.3 %", "100.0 %", "–"]);
    }
}
