//! The report of a cost curve.

use comfy_table::Table;

use super::document::{Card, Document, Part, Section, Weight, comparison};
use super::pictures;
use super::table::{grouped, or_none, percent, table};
use crate::clock::Samples;
use crate::compare::Comparison;
use crate::curve::{Curve, Point, Who, seconds};
use crate::curve_report::CurveReport;
use crate::engine::Engine;
use crate::fit::PowerLaw;
use crate::memory::human;
use crate::roofline::{Bytes, Roofs};

/// What is shown of a run, compared with an earlier one if one was named.
pub fn document(report: &CurveReport, earlier: Option<&Comparison>) -> Document {
    let mut parts: Vec<Part> = earlier.map(comparison).into_iter().collect();
    for (at, curve) in report.curves.iter().enumerate() {
        if report.curves.len() > 1 {
            parts.push(Part::Heading(curve.title()));
        }
        let footprints = if at == 0 { report.footprints.as_slice() } else { &[] };
        parts.extend(pictures::of_curve(curve, footprints).into_iter().map(Part::Picture));
    }
    parts.extend(pictures::roofline(report).map(Part::Picture));
    parts.push(Section::part(Weight::Detail, "How the cost grows", GROWTH, growth(report)));
    for curve in &report.curves {
        let title = |what: &str| format!("{what}: {}", curve.title());
        parts.push(Section::part(Weight::Detail, title("Time per call, one thread"), ONE_THREAD, one_thread(curve)));
        parts.push(Section::part(Weight::Detail, title("Time per call, all threads"), THREADS, all_threads(curve)));
        parts.push(Section::part(Weight::Detail, title("Extra memory"), MEMORY, memory(curve)));
    }
    parts.push(Section::part(Weight::Detail, "Memory up to 100 000 tokens", FOOTPRINTS, footprints(report)));
    parts.push(Section::part(Weight::Detail, "Roofs", ROOFS, roofs(report)));
    for curve in &report.curves {
        let title = format!("All points: {}", curve.title());
        parts.push(Section::part(Weight::Folded, title, "Medians of the clock that counts.", points(curve)));
    }
    parts.push(Part::List { title: "Not measured".into(), lines: skipped(report) });
    Document {
        title: "The cost of exact attention".into(),
        subject: subject(report),
        cards: cards(report),
        parts,
        machine: report.machine.clone(),
        method: METHOD,
    }
}

/// What was measured, in a line.
fn subject(report: &CurveReport) -> String {
    let sizes: Vec<usize> = report.curves.iter().flat_map(Curve::sizes).collect();
    let titles: Vec<String> = report.curves.iter().map(Curve::title).collect();
    match (sizes.iter().min(), sizes.iter().max()) {
        (Some(first), Some(last)) => {
            format!("n = {} to {}; {}", grouped(*first), grouped(*last), titles.join("; "))
        }
        _ => "Nothing was measured".into(),
    }
}

/// The four facts that most readers came for.
fn cards(report: &CurveReport) -> Vec<Card> {
    let mut cards = Vec::new();
    let mut card = |value: String, text: String| cards.push(Card { value, text });
    let Some(curve) = report.curves.first() else { return cards };
    let simd = Who::alone(Engine::Simd);
    if let Some(best) = curve.of(simd).max_by(|a, b| a.gflops.total_cmp(&b.gflops)) {
        let text = format!("of the FMA peak at best: {:.0} GFLOP/s on one thread", best.gflops);
        card(format!("{:.0} %", 100.0 * best.share_of_peak), text);
    }
    if let Some((n, times)) = curve.speedup(Engine::Simd, Engine::Naive) {
        let text = format!("as fast as the textbook loop at n = {}, one thread each", grouped(n));
        card(format!("{times:.1}×"), text);
    }
    if let Some(law) = curve.time_law(simd) {
        card(format!("n^{:.2}", law.exponent), format!("is how its time grows (R² {:.4})", law.r2));
    }
    if let Some(last) = curve.of(simd).last() {
        let matrix = human(last.n.saturating_mul(last.n).saturating_mul(size_of::<f32>()));
        let text = format!("of memory beyond inputs and output at n = {}; the n×n matrix is {matrix}", grouped(last.n));
        card(human(last.extra_bytes), text);
    }
    cards
}

const GROWTH: &str = "Power laws fitted by least squares on the logarithms, over the larger lengths (from a \
    sixteenth of an engine's largest on), where the quadratic part rules; ± is the 95 % confidence interval of the \
    exponent. Memory is beyond inputs and output; n^0 is flat.";

const ONE_THREAD: &str = "Medians of the time that the thread ran: other programs on the machine take nothing from \
    it. windowed and linear compute something else.";

const THREADS: &str = "Medians by the wall's clock, all columns: on a busy machine they are too long.";

const MEMORY: &str = "At the worst moment of a call, beyond inputs and output.";

const FOOTPRINTS: &str = "Beyond inputs and output, one call. Counted where the length was run; elsewhere predicted: \
    four bytes a score, and the size of the workspace that the plan asks for.";

const ROOFS: &str = "The best piece of several; all threads at once in the last column.";

/// How times and memory were measured.
const METHOD: &str = "Times are medians over samples; a sample is one call, or the mean of several where a call is \
    short. Engines on one thread are timed by the wall's clock and by the thread's own, which on an idle machine \
    agree; on a busy one the second leaves out what other programs take, so that growth and shares are taken from it. \
    All cases are gone through in several passes. The single-thread engines and the peak probe take turns within a \
    round; the parallel engine has rounds of its own against a probe on all of its threads. Spread is the distance \
    between the quartiles relative to the median. FLOPs count 4·heads·n²·dimension, halved where causal. Extra memory \
    is the peak of the program's counted heap during a first call on empty scratch, worker threads included, stacks \
    not; resident is the growth of the process's resident set over the same call. The naive engine builds the whole \
    score matrix of a head in plain f32, compiled for the build's own instruction set; streaming keeps one output row \
    and takes one key at a time; windowed is the SIMD engine where a query sees 256 keys around itself; linear is \
    attention without a softmax.";

/// Time of every engine on one thread against n; rate and share of peak of the kernels.
fn one_thread(curve: &Curve) -> Table {
    let lines: Vec<Who> = curve.lines().into_iter().filter(|who| who.engine.one_thread()).collect();
    let mut header = vec!["n".to_string()];
    for who in &lines {
        header.push(who.to_string());
        if who.engine == Engine::Simd {
            header.extend(["GFLOP/s".into(), "of peak".into()]);
        }
    }
    let rows = curve.sizes().into_iter().map(|n| {
        let mut row = vec![grouped(n)];
        for &who in &lines {
            let point = curve.at(who, n);
            row.push(or_none(point, |p| seconds(p.seconds)));
            if who.engine == Engine::Simd {
                row.push(or_none(point, |p| format!("{:.1}", p.gflops)));
                row.push(or_none(point, |p| percent(p.share_of_peak)));
            }
        }
        row
    });
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), 0, rows)
}

/// The kernels on one and on several threads against n.
fn all_threads(curve: &Curve) -> Table {
    let simd = Who::alone(Engine::Simd);
    let many: Vec<Who> = curve.lines().into_iter().filter(|who| !who.engine.one_thread()).collect();
    let mut header = vec!["n".to_string(), simd.to_string()];
    for who in &many {
        header.extend([who.to_string(), "times as fast".into(), "GFLOP/s".into(), "of peak".into()]);
    }
    let sizes = if many.is_empty() { Vec::new() } else { curve.sizes() };
    let rows = sizes.into_iter().map(|n| {
        let alone = curve.at(simd, n);
        let mut row = vec![grouped(n), or_none(alone, |p| seconds(p.wall()))];
        for &who in &many {
            let point = curve.at(who, n);
            row.push(or_none(point, |p| seconds(p.wall())));
            row.push(or_none(alone.zip(point), |(one, all)| format!("{:.2}×", one.wall() / all.wall())));
            row.push(or_none(point, |p| format!("{:.1}", p.gflops)));
            row.push(or_none(point, |p| percent(p.share_of_peak)));
        }
        row
    });
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), 0, rows)
}

/// Extra memory of every line against n.
fn memory(curve: &Curve) -> Table {
    let lines = curve.lines();
    let header: Vec<String> = std::iter::once("n".into()).chain(lines.iter().map(Who::to_string)).collect();
    let rows = curve.sizes().into_iter().map(|n| {
        let mut row = vec![grouped(n)];
        row.extend(lines.iter().map(|&who| or_none(curve.at(who, n), |p| human(p.extra_bytes))));
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
fn growth(report: &CurveReport) -> Table {
    let many = report.curves.len() > 1;
    let mut header =
        vec!["engine", "time grows as", "R²", "over n", "extra memory as", "R²", "best GFLOP/s", "of peak"];
    if many {
        header.insert(0, "case");
    }
    let rows = report.growth.iter().filter_map(|g| {
        let curve = report.curves.iter().find(|curve| curve.name() == g.curve)?;
        let best = |of: fn(&Point) -> f64| curve.of(g.who).map(of).fold(f64::NAN, f64::max);
        let mut row = vec![
            g.who.to_string(),
            or_none(g.time.as_ref(), exponent),
            or_none(g.time.as_ref(), |law| format!("{:.5}", law.r2)),
            or_none(g.time.as_ref(), |law| format!("{}–{}", grouped(law.from_n), grouped(law.to_n))),
            // An engine without any extra memory has no law; it is flat.
            g.memory.as_ref().map_or_else(|| "n^0.000".into(), exponent),
            or_none(g.memory.as_ref(), |law| format!("{:.5}", law.r2)),
            format!("{:.1}", best(|p| p.gflops)),
            percent(best(|p| p.share_of_peak)),
        ];
        if many {
            row.insert(0, curve.title());
        }
        Some(row)
    });
    table(&header, 1 + usize::from(many), rows)
}

/// Memory of the n×n matrix and of ours.
fn footprints(report: &CurveReport) -> Table {
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

/// The roofs of the machine.
fn roofs(report: &CurveReport) -> Table {
    let Roofs { fma_one, fma_all, bf16_one, reads } = &report.roofs;
    let giga = |rate: f64| format!("{:.1}", rate / 1e9);
    let mut rows = vec![vec!["f32 multiply-adds, GFLOP/s".into(), giga(*fma_one), giga(*fma_all)]];
    if let Some(rate) = bf16_one {
        rows.push(vec!["bf16 products, GFLOP/s".into(), giga(*rate), or_none(None, giga)]);
    }
    rows.extend(reads.iter().map(|r| vec![format!("reading {}, GB/s", human(r.bytes)), giga(r.one), giga(r.all)]));
    table(&["probe", "one thread", &format!("{} threads", report.machine.threads)], 1, rows)
}

/// Every point of a curve.
fn points(curve: &Curve) -> Table {
    const HEADER: [&str; 10] =
        ["engine", "n", "median", "fastest", "spread", "samples", "GFLOP/s", "of peak", "extra memory", "resident"];
    let rows = curve.lines().into_iter().flat_map(|who| curve.of(who)).map(|p| {
        let times = Samples(p.times().to_vec());
        vec![
            p.who.to_string(),
            grouped(p.n),
            seconds(p.seconds),
            seconds(times.min()),
            percent(times.spread()),
            times.0.len().to_string(),
            format!("{:.1}", p.gflops),
            percent(p.share_of_peak),
            human(p.extra_bytes),
            or_none(p.resident_bytes, human),
        ]
    });
    table(&HEADER, 1, rows)
}

/// One line per engine that was not run at some lengths.
fn skipped(report: &CurveReport) -> Vec<String> {
    let mut lines = Vec::new();
    for curve in &report.curves {
        let mut known: Vec<Who> = Vec::new();
        for who in curve.skipped.iter().map(|s| s.who) {
            if known.contains(&who) {
                continue;
            }
            known.push(who);
            let first = curve.skipped.iter().filter(|s| s.who == who).min_by_key(|s| s.n);
            let Some(first) = first else { continue };
            let case = if report.curves.len() > 1 { format!(", {}", curve.title()) } else { String::new() };
            lines.push(format!("{who}{case}: not run at n = {} and above ({} there)", grouped(first.n), first.why));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve_report::tests::report;

    fn row_of(table: &Table, name: &str) -> Vec<String> {
        let text = table.trim_fmt();
        let row = text.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        row.split("  ").map(str::trim).filter(|c| !c.is_empty()).map(str::to_string).collect()
    }

    #[test]
    fn a_row_per_length_and_one_clock_per_table() {
        let mut report = report();
        for point in &mut report.curves[0].points {
            point.thread = vec![1.0; 4];
        }
        let curve = &report.curves[0];
        // 1.07 GFLOP at 6, 170 and 330 GFLOP/s.
        assert_eq!(row_of(&one_thread(curve), "2048"), ["2048", "179 ms", "–", "6.32 ms", "170.0", "85.0 %"]);
        assert_eq!(row_of(&all_threads(curve), "2048"), ["2048", "6.32 ms", "3.25 ms", "1.94×", "330.0", "82.5 %"]);
        assert_eq!(one_thread(curve).row_count(), 5);
        report.curves[0].points.retain(|p| p.who.engine.one_thread());
        assert_eq!(all_threads(&report.curves[0]).row_count(), 0, "nothing to compare with");
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
            "streaming, f32, one head of dimension 64: not run at n = 2048 and above (predicted 9.00 s a call there)"
        );
        let text = footprints(&report).trim_fmt();
        assert!(text.contains("37.3 GiB (predicted)") && text.contains("4.00 MiB "), "{text}");
        let text = roofs(&report).trim_fmt();
        assert!(text.contains("reading 256 MiB, GB/s") && !text.contains("AMX"), "{text}");
        assert_eq!(points(&report.curves[0]).row_count(), 19);
    }

    #[test]
    fn the_cards_say_what_was_measured() {
        let cards = cards(&report());
        let values: Vec<&str> = cards.iter().map(|card| card.value.as_str()).collect();
        assert_eq!(values, ["85 %", "28.3×", "n^2.00", "97.7 KiB"]);
        assert!(cards[3].text.ends_with("the n×n matrix is 16.0 MiB"), "{}", cards[3].text);
    }
}
