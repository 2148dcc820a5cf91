//! The report of a table of decoding.

use comfy_table::Table;

use super::document::{Document, Part, Section, Weight, comparison};
use super::table::{or_none, percent, table};
use crate::compare::Comparison;
use crate::curve::seconds;
use crate::decode::{DecodeReport, Row, Stored};
use crate::memory::human;

/// The report of a run, compared with an earlier one if one was named.
pub fn document(report: &DecodeReport, earlier: Option<&Comparison>) -> Document {
    let mut parts: Vec<Part> = earlier.map(comparison).into_iter().collect();
    parts.push(Section::part(Weight::Main, "One token over a cache", NOTE, steps(&report.rows)));
    parts.push(Part::List { title: "Beside".into(), lines: report.peers.clone() });
    parts.push(Part::List { title: "Largest differences from ours".into(), lines: differences(&report.rows) });
    let threads = report.machine.threads;
    Document {
        title: format!("Decoding, {threads} thread{}", if threads == 1 { "" } else { "s" }),
        subject: format!("{} cases", report.rows.len()),
        cards: Vec::new(),
        parts,
        machine: report.machine.clone(),
        method: METHOD,
    }
}

const NOTE: &str = "Sizes are sequences × heads (key/value heads) × 1 query (keys) × head_dim. A plain read goes \
    over as many bytes on as many threads, right beside each step; beyond it is what a step takes longer. NAME / ours: \
    that library's time divided by ours on the same numbers. Bshd: the cache keeps the heads of a token side by side; \
    the others keep the tokens of a head side by side.";

const METHOD: &str = "A step is everything from the caller's view: checks, plan and run. Warm steps follow each \
    other on the same cache; before a cold one the processor's caches are filled with something else. Medians by the \
    wall's clock.";

/// One line per row; a column per peer, if there are any.
fn steps(rows: &[Row]) -> Table {
    let peers = peers(rows);
    let beside: Vec<String> = peers.iter().map(|name| format!("{name} / ours")).collect();
    let mut header = vec!["sizes", "cache", "", "bytes", "step", "GB/s", "of a plain read", "beyond it"];
    header.extend(beside.iter().map(String::as_str));
    let lines = rows.iter().map(|row| {
        let mut line = vec![
            format!("{}{}", row.shape.case(), if row.shape.bshd { " Bshd" } else { "" }),
            row.stored.name().into(),
            if row.cold { "cold" } else { "warm" }.into(),
            human(row.bytes),
            seconds(row.seconds),
            format!("{:.1}", row.bytes as f64 / row.seconds / 1e9),
            percent(row.share_of_read),
            or_none((row.beyond > 0.0).then_some(row.beyond), seconds),
        ];
        line.extend(peers.iter().map(|name| {
            let found = row.peers.iter().find(|peer| peer.name == *name);
            or_none(found, |peer| format!("{:.2}×", peer.ratio))
        }));
        line
    });
    table(&header, 3, lines)
}

fn peers(rows: &[Row]) -> Vec<&str> {
    let mut peers: Vec<&str> = rows.iter().flat_map(|row| &row.peers).map(|peer| peer.name.as_str()).collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}

fn differences(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    for name in peers(rows) {
        for stored in Stored::ALL {
            let of = rows.iter().filter(|row| row.stored == stored).flat_map(|row| &row.peers);
            let worst = of.filter(|peer| peer.name == name).map(|peer| peer.difference).max_by(f64::total_cmp);
            lines.extend(worst.map(|worst| format!("{name}, {}: {worst:.1e}", stored.name())));
        }
    }
    lines
}
