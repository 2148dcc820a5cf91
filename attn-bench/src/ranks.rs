//! Two ranks of one core each, beside one core alone and beside two threads of one process: strong and weak scaling of
//! calls over the ranks of an MPI job.
//!
//! Two cores at once are not always twice as fast as one: they share caches, memory and often the clock. Their limit is
//! measured, too: two processes side by side that each do one core's work and send no message.
//!
//! `attn-mpi`'s example `measure` takes the samples, in one job for each setup, so that no other process waits on a
//! measured core. This file lists the jobs, and draws the conclusions from their samples.

use serde::{Deserialize, Serialize};

use crate::clock::median;
use crate::format::FORMAT;
use crate::machine::Machine;

/// What runs a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// One process, one thread, held to a core: without messages.
    Core,
    /// Two ranks of one thread each, held to a core each.
    Ranks,
    /// One process of two threads: without messages.
    Threads,
    /// Two processes at once, each as [`Self::Core`]: what the machine gives to two cores.
    Copies,
}

impl Setup {
    /// All of them, in the order in which a pass takes them.
    pub const ALL: [Self; 4] = [Self::Core, Self::Ranks, Self::Threads, Self::Copies];

    /// Processes of the job.
    pub const fn processes(self) -> usize {
        if matches!(self, Self::Ranks | Self::Copies) { 2 } else { 1 }
    }

    /// Threads of each rank.
    pub const fn threads(self) -> usize {
        if matches!(self, Self::Threads) { 2 } else { 1 }
    }

    /// How it is called in journals.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Core => "core",
            Self::Ranks => "ranks",
            Self::Threads => "threads",
            Self::Copies => "copies",
        }
    }
}

/// A call that is measured in every setup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// `prefill` or `backward`.
    pub call: String,
    /// Whether queries see no later key.
    pub causal: bool,
    /// Whether two ranks compute √2 times as many tokens, so that each has as much to compute as one core alone.
    pub weak: bool,
    /// Tokens of one core.
    pub tokens: usize,
}

impl Case {
    /// Its name, for filters.
    pub fn name(&self) -> String {
        let (mask, kind) = (if self.causal { "causal" } else { "full" }, if self.weak { "weak" } else { "strong" });
        format!("ranks/{}/{mask}/{kind}/n{}", self.call, self.tokens)
    }

    /// Tokens of a setup.
    pub fn tokens_of(&self, setup: Setup) -> usize {
        if self.weak && !matches!(setup, Setup::Core | Setup::Copies) {
            (self.tokens as f64 * std::f64::consts::SQRT_2).round() as usize
        } else {
            self.tokens
        }
    }

    /// Arguments of the program that takes samples.
    pub fn arguments(&self, setup: Setup, samples: usize) -> [String; 5] {
        let mask = if self.causal { "causal" } else { "full" };
        let how = if setup == Setup::Copies { "copies" } else { "ranks" };
        [self.call.clone(), mask.into(), self.tokens_of(setup).to_string(), samples.to_string(), how.into()]
    }
}

/// The cases for so many tokens.
pub fn cases(tokens: usize) -> Vec<Case> {
    let of = |call: &str, causal, weak| Case { call: call.into(), causal, weak, tokens };
    let calls = [("prefill", true), ("prefill", false), ("backward", true)];
    calls.into_iter().flat_map(|(call, causal)| [false, true].map(|weak| of(call, causal, weak))).collect()
}

/// One call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Seconds of the slowest rank.
    pub seconds: f64,
    /// The longest that a rank did nothing but wait for messages.
    pub waited: f64,
    /// The most bytes that a rank sent.
    pub sent: f64,
}

/// The samples in a line that `measure` wrote, among whatever else a job says.
///
/// # Errors
/// Where there is no such line, or it holds no sample.
pub fn samples(output: &str) -> Result<Vec<Sample>, String> {
    let line = output.lines().find(|line| line.starts_with('[')).ok_or("the job wrote no samples")?;
    let samples: Vec<Sample> = serde_json::from_str(line).map_err(|error| format!("the job's samples: {error}"))?;
    if samples.is_empty() { Err("the job took no sample".into()) } else { Ok(samples) }
}

/// A case with its samples in each setup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was run.
    pub case: Case,
    /// On one core.
    pub core: Vec<Sample>,
    /// On two ranks.
    pub ranks: Vec<Sample>,
    /// On two threads.
    pub threads: Vec<Sample>,
    /// In two processes at once, each with the work of one core.
    pub copies: Vec<Sample>,
}

impl Row {
    /// Without samples.
    pub fn new(case: Case) -> Self {
        Self { case, core: Vec::new(), ranks: Vec::new(), threads: Vec::new(), copies: Vec::new() }
    }

    /// The samples of a setup.
    pub fn of(&mut self, setup: Setup) -> &mut Vec<Sample> {
        match setup {
            Setup::Core => &mut self.core,
            Setup::Ranks => &mut self.ranks,
            Setup::Threads => &mut self.threads,
            Setup::Copies => &mut self.copies,
        }
    }

    /// Median seconds of one core, two ranks, two threads, two copies.
    pub fn seconds(&self) -> [f64; 4] {
        [&self.core, &self.ranks, &self.threads, &self.copies]
            .map(|all| median(&all.iter().map(|x| x.seconds).collect::<Vec<_>>()))
    }

    /// How much more two ranks do than one core: as often as fast where the work is the same, twice the share where
    /// each has as much.
    pub fn speed(&self) -> f64 {
        let [core, ranks, ..] = self.seconds();
        core / ranks * if self.case.weak { 2.0 } else { 1.0 }
    }

    /// Of perfect scaling.
    pub fn efficiency(&self) -> f64 {
        self.speed() / 2.0
    }

    /// What two processes reach that share nothing but the machine, of perfect scaling.
    pub fn ceiling(&self) -> f64 {
        let [core, .., copies] = self.seconds();
        core / copies
    }

    /// Median share of a call in which a rank only waited: communication that hides behind nothing, and the lead of a
    /// rank that was done earlier.
    pub fn exposed(&self) -> f64 {
        median(&self.ranks.iter().map(|x| x.waited / x.seconds).collect::<Vec<_>>())
    }

    /// Median bytes that a rank sent.
    pub fn sent(&self) -> f64 {
        median(&self.ranks.iter().map(|x| x.sent).collect::<Vec<_>>())
    }
}

/// What `cargo xtask bench --ranks --json` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RanksReport {
    /// [`FORMAT`].
    pub format: String,
    /// `ranks`.
    pub kind: String,
    /// Where it was measured.
    pub machine: Machine,
    /// What `mpirun --version` says first.
    pub mpi: String,
    /// The rows.
    pub rows: Vec<Row>,
}

impl RanksReport {
    /// Without samples.
    pub fn new(machine: Machine, mpi: String, cases: &[Case]) -> Self {
        Self {
            format: FORMAT.into(),
            kind: "ranks".into(),
            machine,
            mpi,
            rows: cases.iter().cloned().map(Row::new).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weak_scaling_gives_each_rank_the_work_of_one_core() {
        for case in cases(8192) {
            let pairs = |setup| (case.tokens_of(setup) as f64).powi(2);
            let share = pairs(Setup::Ranks) / pairs(Setup::Core);
            assert_eq!(pairs(Setup::Copies), pairs(Setup::Core), "{}", case.name());
            assert!((share - if case.weak { 2.0 } else { 1.0 }).abs() < 1e-3, "{}", case.name());
        }
        let names: std::collections::BTreeSet<String> = cases(64).iter().map(Case::name).collect();
        assert_eq!(names.len(), 6);
    }

    #[test]
    fn shares_follow_from_the_samples() {
        let of = |seconds, waited| Sample { seconds, waited, sent: 8.0 };
        for (weak, seconds) in [(false, 1.0), (true, 2.0)] {
            let case = Case { call: "prefill".into(), causal: true, weak, tokens: 64 };
            let mut row = Row::new(case);
            row.of(Setup::Core).extend([of(1.9, 0.0), of(1.8, 0.0), of(9.0, 0.0)]);
            row.of(Setup::Ranks).extend([of(seconds, 0.1 * seconds), of(seconds, 0.2 * seconds), of(seconds, 0.0)]);
            assert_eq!((row.speed(), row.efficiency()), (1.9, 0.95));
            row.of(Setup::Copies).extend([of(1.875, 0.0), of(2.0, 0.0), of(2.0, 0.0)]);
            assert_eq!(row.ceiling(), 0.95);
            assert!((row.exposed() - 0.1).abs() < 1e-12 && row.seconds()[2].is_nan());
        }
    }

    #[test]
    fn samples_are_found_among_what_a_job_says() {
        let line = r#"[{"seconds":0.5,"waited":0.0,"sent":1024.0}]"#;
        assert_eq!(samples(&format!("A warning of MPI.\n{line}\n")).unwrap()[0].sent, 1024.0);
        for wrong in ["", "[]", "[{\"seconds\":0.5}]", "no samples"] {
            assert!(samples(wrong).is_err(), "{wrong}");
        }
    }
}
