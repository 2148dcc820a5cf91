//! The verdict on a case, and counting verdicts.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::compare::compare;
use super::ops::{self, Produced, Scope, Stop};
use super::{Case, Suite, params};
use crate::engine::Engine;

/// What became of a case on one engine.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Every output agrees; the worst difference as a share of the tolerance.
    Passed {
        /// Between 0 and 1.
        worst: f64,
    },
    /// A case that must fail did: how.
    Caught(String),
    /// An output differs, is missing, or the call was refused; or a case that must fail passed.
    Failed(String),
    /// The library cannot run it: why.
    Skipped(String),
    /// The op has one implementation, which is run under the engine `reference`: neither passed nor skipped here.
    Elsewhere,
}

/// An [`Engine`] as a trait object: runs one case.
pub trait Runner: Sync {
    /// The engine's name.
    fn engine(&self) -> &'static str;
    /// Its level, if it has levels.
    fn level(&self) -> Option<&'static str>;
    /// Runs one case and judges it.
    fn run(&self, suite: &Suite, case: &Case) -> Outcome;
}

impl<E: Engine> Runner for E {
    fn engine(&self) -> &'static str {
        self.name()
    }
    fn level(&self) -> Option<&'static str> {
        Engine::level(self)
    }
    fn run(&self, suite: &Suite, case: &Case) -> Outcome {
        run_case(self, suite, case)
    }
}

fn run_case<E: Engine>(engine: &E, suite: &Suite, case: &Case) -> Outcome {
    match ops::scope(&case.op) {
        Some(Scope::Engine) => {}
        Some(Scope::Once) if engine.name() == "reference" => {}
        Some(Scope::Once) => return Outcome::Elsewhere,
        None => return Outcome::Skipped(format!("op {} is not built", case.op)),
    }
    let produced = match catch_unwind(AssertUnwindSafe(|| {
        params::check(case)?;
        ops::run(engine, suite, case)
    })) {
        Ok(Ok(produced)) => produced,
        Ok(Err(Stop::Skip(reason))) => return Outcome::Skipped(reason),
        // Also for a case that must fail: a call that was refused has caught nothing.
        Ok(Err(Stop::Fail(reason))) => return Outcome::Failed(reason),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            return Outcome::Failed(format!("panicked: {text}"));
        }
    };
    match (judge(suite, case, &produced), case.must_fail) {
        (Ok(worst), false) => Outcome::Passed { worst },
        (Err(reason), false) => Outcome::Failed(reason),
        (Ok(_), true) => Outcome::Failed("a wrong expectation was accepted".to_owned()),
        (Err(reason), true) => Outcome::Caught(reason),
    }
}

/// Compares everything that the case lists. The worst share of the tolerance, or the first difference.
fn judge(suite: &Suite, case: &Case, produced: &Produced) -> Result<f64, String> {
    if case.outputs.is_empty() {
        return Err("the case lists no outputs".to_owned());
    }
    let mut worst = 0.0f64;
    for (role, name) in &case.outputs {
        let want = suite.tensors.get(name).ok_or_else(|| format!("{role}: no tensor {name}"))?;
        let (shape, values) = produced.get(role).ok_or_else(|| format!("{role}: not produced"))?;
        let share = compare((shape, values), (&want.shape, &want.to_f64()), case.tolerance(role));
        worst = worst.max(share.map_err(|e| format!("{role}: {e}"))?);
    }
    Ok(worst)
}

/// Counts of verdicts, with the reasons.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Cases that agree, and cases that must fail and did.
    pub passed: usize,
    /// Failed cases: name and reason.
    pub failed: Vec<(String, String)>,
    /// Skipped cases by reason.
    pub skipped: BTreeMap<String, Vec<String>>,
    /// Cases whose op has one implementation, which the engine `reference` runs.
    pub elsewhere: usize,
    /// The worst share of a tolerance among the passed cases.
    pub worst: f64,
}

impl Tally {
    /// Takes one verdict.
    pub fn add(&mut self, case: &str, outcome: Outcome) {
        match outcome {
            Outcome::Passed { worst } => {
                self.passed += 1;
                self.worst = self.worst.max(worst);
            }
            Outcome::Caught(_) => self.passed += 1,
            Outcome::Failed(reason) => self.failed.push((case.to_owned(), reason)),
            Outcome::Skipped(reason) => self.skipped.entry(reason).or_default().push(case.to_owned()),
            Outcome::Elsewhere => self.elsewhere += 1,
        }
    }

    /// Runs every case of a suite.
    pub fn of(runner: &dyn Runner, suite: &Suite) -> Self {
        let mut tally = Self::default();
        for case in &suite.cases {
            tally.add(&case.name, runner.run(suite, case));
        }
        tally
    }

    /// Number of skipped cases.
    pub fn skipped_count(&self) -> usize {
        self.skipped.values().map(Vec::len).sum()
    }
}
