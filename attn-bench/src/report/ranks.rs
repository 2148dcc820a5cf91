//! The report of calls over the ranks of a job.

use comfy_table::Table;

use super::document::{Document, Section, Weight};
use super::table::{or_none, percent, table};
use crate::curve::seconds;
use crate::memory::human;
use crate::ranks::{RanksReport, Row, Setup};

/// What is shown of a run.
pub fn document(report: &RanksReport) -> Document {
    Document {
        title: "Two ranks of one core each".into(),
        subject: format!("{} cases over {}", report.rows.len(), report.mpi),
        cards: Vec::new(),
        parts: vec![Section::part(Weight::Main, "Strong and weak scaling", NOTE, rows(&report.rows))],
        machine: report.machine.clone(),
        method: METHOD,
    }
}

const NOTE: &str = "8 query heads over 2 key/value heads of 64, f32, zig-zag shards, the ring. Strong: the same tokens \
    on one core and on two ranks. Weak: √2 times as many on two ranks, so that each has as much to compute. Speed: how \
    much more two ranks do in the same time than one core; 2 is perfect. Two copies: what two processes at once reach \
    of perfect, each with one core's work and without a message; more is not to be had from these two cores. Exposed: the share of a call in which a rank \
    only waited. Threads / ranks: the time of one process with two threads, divided by that of two ranks.";

const METHOD: &str = "Each number is the median of samples from jobs that alternate: one core, two ranks, two threads, \
    two copies. All but the ranks call attn-parallel, without messages. A sample is the slowest rank's time by the wall's \
    clock.";

/// One line per case.
fn rows(rows: &[Row]) -> Table {
    let header = [
        "call",
        "mask",
        "scaling",
        "tokens",
        "one core",
        "two ranks",
        "speed",
        "of perfect",
        "two copies",
        "exposed",
        "sent",
        "two threads",
        "threads / ranks",
    ];
    let lines = rows.iter().map(|row| {
        let [core, ranks, threads, _] = row.seconds();
        let time = |x: f64| or_none((!x.is_nan()).then_some(x), seconds);
        let times = |x: f64| or_none((!x.is_nan()).then_some(x), |x| format!("{x:.2}×"));
        vec![
            row.case.call.clone(),
            if row.case.causal { "causal" } else { "none" }.into(),
            if row.case.weak { "weak" } else { "strong" }.into(),
            row.case.tokens_of(Setup::Ranks).to_string(),
            time(core),
            time(ranks),
            times(row.speed()),
            percent(row.efficiency()),
            percent(row.ceiling()),
            percent(row.exposed()),
            or_none((!row.sent().is_nan()).then(|| row.sent() as usize), human),
            time(threads),
            times(threads / ranks),
        ]
    });
    table(&header, 3, lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::ranks::{Sample, cases};

    #[test]
    fn a_row_shows_its_shares() {
        let mut report = RanksReport::new(Machine::default(), "MPI".into(), &cases(1000)[..2]);
        for (setup, seconds, waited) in [(Setup::Core, 1.0, 0.0), (Setup::Ranks, 0.5, 0.01), (Setup::Threads, 0.6, 0.0)]
        {
            report.rows[0].of(setup).push(Sample { seconds, waited, sent: 2048.0 });
        }
        let text = crate::report::terminal::text(&document(&report), false);
        let line = text.lines().find(|line| line.contains("strong") && line.contains("1000")).unwrap();
        for cell in ["prefill", "causal", "1.00 s", "500 ms", "2.00×", "100.0 %", "2.0 %", "1.20×"] {
            assert!(line.contains(cell), "{cell} in {line}");
        }
        // What was not measured is a dash, not a number.
        assert!(text.lines().any(|line| line.contains("weak") && line.contains('–')));
    }
}
