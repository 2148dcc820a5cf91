//! The shares of the bound that calls used, by level, kernel and kind of data.

use std::collections::BTreeMap;
use std::time::Duration;

use attn_testing::random::{Call, Ready, Target, Verdict};
use comfy_table::{CellAlignment, Table, presets};

/// A level and a kernel.
type Place = (String, &'static str);

/// What calls of one kind took, at most, and how often it was too much.
#[derive(Clone, Copy, Default)]
struct Worst {
    out: f64,
    lse: f64,
    call: u64,
    beyond: usize,
}

/// Everything that a run found.
#[derive(Default)]
pub(super) struct Summary {
    places: BTreeMap<Place, Worst>,
    values: BTreeMap<String, BTreeMap<Place, Worst>>,
    scores: BTreeMap<String, BTreeMap<Place, Worst>>,
    types: BTreeMap<String, BTreeMap<Place, Worst>>,
    skips: BTreeMap<String, usize>,
    calls: usize,
    exact: usize,
    rows: usize,
    passed: usize,
    failed: usize,
    pub(super) time: Duration,
}

impl Summary {
    /// Counts a call that was drawn.
    pub(super) fn draw(&mut self, ready: &Ready) {
        self.calls += 1;
        self.exact += ready.rows();
    }

    /// Takes a verdict in; the text of a failure.
    pub(super) fn add(&mut self, call: &Call, target: &dyn Target, verdict: Verdict) -> Option<String> {
        let found = match verdict {
            Verdict::Skipped(why) => {
                *self.skips.entry(format!("{}: {why}", target.label())).or_default() += 1;
                return None;
            }
            Verdict::Broken(how) => {
                self.failed += 1;
                return Some(how);
            }
            Verdict::Compared(found) => found,
        };
        self.rows += found.rows;
        let place = (target.level().to_owned(), call.kernel(target.level()));
        let values = self.values.entry(call.values.name()).or_default().entry(place.clone()).or_default();
        let scores = self.scores.entry(call.scores.name().to_owned()).or_default().entry(place.clone()).or_default();
        let types = self.types.entry(call.types()).or_default().entry(place.clone()).or_default();
        for worst in [values, scores, types, self.places.entry(place).or_default()] {
            if found.out.max(found.lse) > worst.out.max(worst.lse) {
                worst.call = call.name.1;
            }
            (worst.out, worst.lse) = (worst.out.max(found.out), worst.lse.max(found.lse));
            worst.beyond += usize::from(found.beyond.is_some());
        }
        match found.beyond {
            None => self.passed += 1,
            Some(_) => self.failed += 1,
        }
        found.beyond
    }

    pub(super) fn failed(&self) -> usize {
        self.failed
    }

    /// Tables, and the line that scripts read.
    pub(super) fn print(&self) {
        let mut table = table(vec!["".into(), "output".into(), "lse".into(), "beyond".into(), "worst call".into()]);
        for ((level, kernel), worst) in &self.places {
            let (out, lse) = (format!("{:.3}", worst.out), format!("{:.3}", worst.lse));
            table.add_row([format!("{level} {kernel}"), out, lse, worst.beyond.to_string(), worst.call.to_string()]);
        }
        println!("Worst shares of the bound (1 is all of it), and runs beyond it:");
        print_aligned(table);
        for (title, kinds) in [("values", &self.values), ("scores", &self.scores), ("types", &self.types)] {
            println!("\nThe worst share of an output, by {title}:");
            self.print_kinds(kinds);
        }
        for (why, times) in &self.skips {
            println!("\nskipped {times} times, {why}");
        }
        let seconds = self.time.as_secs_f64();
        println!("\n{} calls, {} exact rows, {} rows compared, {seconds:.1} s", self.calls, self.exact, self.rows);
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skips.values().sum::<usize>());
    }

    fn print_kinds(&self, kinds: &BTreeMap<String, BTreeMap<Place, Worst>>) {
        let head = self.places.keys().map(|(level, kernel)| format!("{level} {kernel}"));
        let mut table = table([String::new()].into_iter().chain(head).collect());
        for (kind, places) in kinds {
            let cell = |place| places.get(place).map_or(String::new(), |worst| format!("{:.2}", worst.out));
            table.add_row([kind.clone()].into_iter().chain(self.places.keys().map(cell)).collect::<Vec<_>>());
        }
        print_aligned(table);
    }
}

fn table(head: Vec<String>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(head);
    table
}

fn print_aligned(mut table: Table) {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}");
}
