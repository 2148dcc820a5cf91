//! The results of a run, for people and for programs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use attn_testing::conformance::{Outcome, Tally};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::json;

/// One suite on one engine and level.
pub(super) struct Run {
    pub(super) engine: &'static str,
    pub(super) level: Option<&'static str>,
    pub(super) suite: String,
    pub(super) tally: Tally,
    /// Case, op, verdict.
    pub(super) verdicts: Vec<(String, String, Outcome)>,
}

impl Run {
    fn place(&self) -> String {
        match self.level {
            Some(level) => format!("{} {level}", self.engine),
            None => self.engine.to_owned(),
        }
    }
}

/// Everything that a call of the command found.
#[derive(Default)]
pub(super) struct Report {
    pub(super) runs: Vec<Run>,
    /// Suites that could not be loaded; each counts as one failure.
    pub(super) unreadable: Vec<String>,
    /// Folders that are not there; each counts as one skipped.
    pub(super) absent: Vec<PathBuf>,
}

impl Report {
    fn passed(&self) -> usize {
        self.runs.iter().map(|run| run.tally.passed).sum()
    }

    pub(super) fn failed(&self) -> usize {
        self.runs.iter().map(|run| run.tally.failed.len()).sum::<usize>() + self.unreadable.len()
    }

    fn skipped(&self) -> usize {
        self.runs.iter().map(|run| run.tally.skipped_count()).sum::<usize>() + self.absent.len()
    }

    /// Table, reasons, and the line that scripts read.
    pub(super) fn print(&self) {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(["engine", "suite", "passed", "failed", "skipped", "worst/tol"]);
        for run in &self.runs {
            let t = &run.tally;
            if t.passed + t.failed.len() + t.skipped_count() == 0 && t.elsewhere > 0 {
                continue; // the whole suite is run under the reference engine
            }
            let counts = [t.passed, t.failed.len(), t.skipped_count()].map(|n| n.to_string());
            let worst = format!("{:.2}", t.worst);
            table.add_row([vec![run.place(), run.suite.clone()], counts.to_vec(), vec![worst]].concat());
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{table}");
        for message in &self.unreadable {
            println!("\nFAILED to load a suite: {message}");
        }
        self.print_failures();
        self.print_skips();
        for dir in &self.absent {
            println!("\nskipped, A WHOLE FOLDER THAT IS NOT THERE: {}", dir.display());
        }
        let elsewhere: usize = self.runs.iter().map(|run| run.tally.elsewhere).sum();
        if elsewhere > 0 {
            println!(
                "\n{elsewhere} runs of ops with one implementation left to the engine reference, and not counted here"
            );
        }
        println!("{} passed, {} failed, {} skipped", self.passed(), self.failed(), self.skipped());
    }

    fn print_failures(&self) {
        for run in self.runs.iter().filter(|run| !run.tally.failed.is_empty()) {
            println!("\nFAILED {}, {}:", run.place(), run.suite);
            for (case, reason) in &run.tally.failed {
                println!("  {case}: {reason}");
            }
        }
    }

    /// Reasons; for each the cases by suite, and the engines that skip just these (their levels skip the same).
    fn print_skips(&self) {
        let mut reasons: BTreeMap<&str, BTreeMap<(&str, &str), Vec<&str>>> = BTreeMap::new();
        for run in &self.runs {
            for (reason, cases) in &run.tally.skipped {
                let place = (run.suite.as_str(), run.engine);
                let names = reasons.entry(reason).or_default().entry(place).or_default();
                for case in cases.iter().map(String::as_str) {
                    if !names.contains(&case) {
                        names.push(case);
                    }
                }
            }
        }
        for (reason, places) in reasons {
            println!("\nskipped, {reason}:");
            let mut alike: BTreeMap<(&str, Vec<&str>), Vec<&str>> = BTreeMap::new();
            for ((suite, engine), cases) in places {
                alike.entry((suite, cases)).or_default().push(engine);
            }
            for ((suite, cases), engines) in alike {
                println!("  {suite}, {} cases on {}: {}", cases.len(), engines.join(" "), cases.join(" "));
            }
        }
    }

    /// Every verdict.
    pub(super) fn write_json(&self, path: &Path) -> Result<(), String> {
        let verdict = |(case, op, outcome): &(String, String, Outcome)| {
            let (word, worst, reason) = match outcome {
                Outcome::Passed { worst } => ("passed", Some(*worst), None),
                Outcome::Caught(how) => ("passed", None, Some(format!("must fail, and did: {how}"))),
                Outcome::Failed(reason) => ("failed", None, Some(reason.clone())),
                Outcome::Skipped(reason) => ("skipped", None, Some(reason.clone())),
                Outcome::Elsewhere => ("elsewhere", None, None),
            };
            json!({ "case": case, "op": op, "outcome": word, "worst": worst, "reason": reason })
        };
        let runs: Vec<_> = self
            .runs
            .iter()
            .map(|run| {
                json!({
                    "engine": run.engine,
                    "level": run.level,
                    "suite": run.suite,
                    "passed": run.tally.passed,
                    "failed": run.tally.failed.len(),
                    "skipped": run.tally.skipped_count(),
                    "elsewhere": run.tally.elsewhere,
                    "cases": run.verdicts.iter().map(verdict).collect::<Vec<_>>(),
                })
            })
            .collect();
        let all = json!({
            "passed": self.passed(),
            "failed": self.failed(),
            "skipped": self.skipped(),
            "unreadable": self.unreadable,
            "absent": self.absent,
            "runs": runs,
        });
        let text = serde_json::to_string_pretty(&all).map_err(|e| e.to_string())?;
        std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
    }
}
