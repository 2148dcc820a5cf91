//! The report of a table of kernels.

use comfy_table::Table;

use super::document::{Document, Part, Section, Weight, comparison};
use super::table::{or_none, percent, table};
use crate::compare::Comparison;
use crate::curve::seconds;
use crate::kernels::{KernelReport, KernelResult, What};
use crate::memory::human;

/// The report of a run, compared with an earlier one if one was named.
pub fn document(report: &KernelReport, earlier: Option<&Comparison>) -> Document {
    let mut parts: Vec<Part> = earlier.map(comparison).into_iter().collect();
    let mut levels: Vec<&str> = Vec::new();
    report.results.iter().map(|r| r.level.as_str()).for_each(|level| {
        if !levels.contains(&level) {
            levels.push(level);
        }
    });
    for level in levels {
        let results: Vec<&KernelResult> = report.results.iter().filter(|r| r.level == level).collect();
        let beside = if results.iter().any(|r| !r.peers.is_empty()) { BESIDE } else { "" };
        let text = format!("{SPEED}{beside}");
        parts.push(Section::part(Weight::Main, format!("Level {level}"), text, speed(&results)));
        if results.iter().any(|r| !r.peers.is_empty() || r.error.is_some()) {
            let title = format!("Error and memory, level {level}");
            parts.push(Section::part(Weight::Detail, title, ERROR, errors(&results)));
        }
    }
    parts.push(Part::List { title: "Beside".into(), lines: report.peers.clone() });
    parts.push(Part::List { title: "Not measured".into(), lines: report.notes.clone() });
    let threads = report.machine.threads;
    let subject = if report.results.iter().any(|r| r.kernel.what == What::Backward) { "Gradients" } else { "Kernels" };
    Document {
        title: format!("{subject}, {threads} thread{}", if threads == 1 { "" } else { "s" }),
        subject: match report.results.len() {
            1 => "1 case".into(),
            count => format!("{count} cases"),
        },
        cards: Vec::new(),
        parts,
        machine: report.machine.clone(),
        method: METHOD,
    }
}

const SPEED: &str = "Sizes are batch × heads (key/value heads) × queries (keys) × head_dim. Rates count \
    4·B·H·Sq·Skv·D FLOPs, those of backward calls 10·B·H·Sq·Skv·D, halved where causal. The peak is a loop of \
    multiply-adds, measured beside each sample.";

const BESIDE: &str = " NAME / ours: that library's time divided by ours on the same inputs, in turn with it.";

const ERROR: &str = "Largest error against the reference in f64, in the outputs of each head's last queries or the \
    gradients of the first key/value head | growth of the resident set over a call.";

const METHOD: &str = "Samples are taken in rounds: probe, ours, probe, each peer on the same inputs. Times and \
    ratios are medians over the rounds of several passes. On one thread all times are those of the processor; on \
    several, by the wall's clock.";

/// The peers that ran any of the shapes.
fn peers<'r>(results: &[&'r KernelResult]) -> Vec<&'r str> {
    let mut names: Vec<&str> = Vec::new();
    for peer in results.iter().flat_map(|r| &r.peers) {
        if !names.contains(&peer.name.as_str()) {
            names.push(&peer.name);
        }
    }
    names
}

/// A row per shape; a column per peer that ran any of them.
fn speed(results: &[&KernelResult]) -> Table {
    let peers = peers(results);
    let beside: Vec<String> = peers.iter().map(|name| format!("{name} / ours")).collect();
    let mut header = vec!["case", "sizes", "with", "time", "GFLOP/s", "of peak"];
    header.extend(beside.iter().map(String::as_str));
    if !peers.is_empty() {
        header.push("largest difference");
    }
    let rows = results.iter().map(|r| {
        let what = match r.kernel.what.parts() {
            ("plain", _) => String::new(),
            (name, 0.0) => name.to_string(),
            (name, value) => format!("{name} {value}"),
        };
        let mut row = vec![
            r.kernel.name.clone(),
            r.kernel.case.to_string(),
            what,
            seconds(r.seconds),
            format!("{:.1}", r.gflops),
            percent(r.share_of_peak),
        ];
        for name in &peers {
            row.push(or_none(r.peers.iter().find(|p| p.name == *name), |p| format!("{:.2}×", p.ratio)));
        }
        if !peers.is_empty() {
            let worst = r.peers.iter().filter_map(|p| p.difference).reduce(f64::max);
            row.push(or_none(worst, |d| format!("{d:.1e}")));
        }
        row
    });
    table(&header, 3, rows)
}

/// Accuracy and memory of every library beside ours, one row per shape.
fn errors(results: &[&KernelResult]) -> Table {
    let peers = peers(results);
    let cell = |error: Option<f64>, bytes: Option<usize>| {
        format!("{} | {}", or_none(error, |e| format!("{e:.1e}")), or_none(bytes, human))
    };
    let header: Vec<&str> = ["case", "ours"].into_iter().chain(peers.iter().copied()).collect();
    let rows = results.iter().map(|r| {
        let mut row = vec![r.kernel.name.clone(), cell(r.error, r.resident_bytes)];
        for name in &peers {
            row.push(or_none(r.peers.iter().find(|p| p.name == *name), |p| cell(p.error, p.resident_bytes)));
        }
        row
    });
    table(&header, 1, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Samples;
    use crate::kernels::{PeerResult, parse};
    use crate::machine::Machine;

    #[test]
    fn a_row_per_shape_and_a_column_per_library() {
        let peer = PeerResult {
            name: "torch".into(),
            seconds: 3e-3,
            ratio: 1.5,
            samples: Samples(vec![3e-3]),
            difference: Some(1e-7),
            error: Some(2e-7),
            resident_bytes: Some(1 << 20),
        };
        let result = |row: &str, peers| KernelResult {
            kernel: parse(row).unwrap().remove(0),
            level: "avx2".into(),
            threads: 1,
            seconds: 2e-3,
            gflops: 50.0,
            share_of_peak: 0.8,
            samples: Samples(vec![2e-3]),
            thread: vec![],
            peaks: vec![1e9],
            passes: vec![0],
            error: None,
            resident_bytes: None,
            peers,
        };
        let mut report = KernelReport::new(Machine { threads: 1, ..Machine::default() });
        report.results =
            vec![result("a 1 8 2 64 64 32 1 window:16 -", vec![peer]), result("b 1 1 1 10 20 8 0 plain -", vec![])];
        let document = document(&report, None);
        assert_eq!(document.title, "Kernels, 1 thread");
        let Part::Table(section) = &document.parts[0] else { panic!("no table") };
        let text = section.table.trim_fmt();
        for part in ["1 × 8 (2) × 64 × 32, causal", "window 16", "torch / ours", "1.50×", "2.00 ms", "80.0 %"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("1 × 1 × 10 (20) × 8"), "{text}");
        assert!(
            matches!(&document.parts[1], Part::Table(section) if section.table.trim_fmt().contains("2.0e-7 | 1.00 MiB"))
        );
    }
}
