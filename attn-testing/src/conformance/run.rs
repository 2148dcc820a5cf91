//! The verdict on a case, and counting verdicts.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::compare::compare;
use super::loaded::Produced;
use super::ops::{self, Scope};
use super::stop::Stop;
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
        Some(Scope::Once | Scope::Parts | Scope::Gradients) if engine.name() == "reference" => {}
        Some(Scope::Parts) if engine.gives_parts() => {}
        Some(Scope::Gradients) if engine.gives_gradients() => {}
        Some(Scope::Once | Scope::Parts | Scope::Gradients) => return Outcome::Elsewhere,
        None => return Outcome::Skipped(ops::not_built(&case.op)),
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
        let (answers, wanted) = (produced.get(role), want.to_f64());
        if answers.is_empty() {
            return Err(format!("{role}: not produced"));
        }
        for (nth, (shape, values)) in answers.iter().enumerate() {
            let share = compare((shape, values), (&want.shape, &wanted), case.tolerance(role));
            let which = if nth == 0 { String::new() } else { format!(" (answer {})", nth + 1) };
            worst = worst.max(share.map_err(|e| format!("{role}{which}: {e}"))?);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Data, Tolerance};
    use crate::engine::Reference;

    fn committed() -> Vec<Suite> {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
        let files = Suite::files_in(&dir).expect("the committed vectors");
        files.iter().map(|file| Suite::load(file).unwrap_or_else(|error| panic!("{error}"))).collect()
    }

    /// Moves the first finite number by twenty times the allowed difference, and in any case; false if there is none.
    fn break_one(data: &mut Data, tol: Tolerance) -> bool {
        let moved = |x: f64| x + 20.0 * (tol.atol + tol.rtol * x.abs()) + 1e-3 * x.abs() + 1e-30;
        match data {
            Data::F64(x) => x.iter_mut().find(|x| x.is_finite()).map(|x| *x = moved(*x)).is_some(),
            Data::F32(x) => x.iter_mut().find(|x| x.is_finite()).map(|x| *x = moved(f64::from(*x)) as f32).is_some(),
            Data::U8(x) => x.first_mut().map(|x| *x ^= 1).is_some(),
            _ => false,
        }
    }

    #[test]
    fn every_output_of_every_op_is_compared() {
        let mut seen = std::collections::BTreeSet::new();
        for suite in committed().iter_mut().filter(|suite| suite.name != "mutants") {
            for case in suite.cases.clone() {
                for (role, name) in &case.outputs {
                    let tensor = suite.tensors.get(name).expect("an expected tensor").clone();
                    let broken = suite.tensors.get_mut(name).expect("an expected tensor");
                    if seen.contains(&(case.op.clone(), role.clone()))
                        || !break_one(&mut broken.data, case.tolerance(role))
                    {
                        continue;
                    }
                    let outcome = Reference.run(suite, &case);
                    let named = matches!(&outcome, Outcome::Failed(reason) if reason.starts_with(role.as_str()));
                    assert!(named, "{}, {}, {role}: {outcome:?}", suite.name, case.name);
                    suite.tensors.insert(name.clone(), tensor);
                    assert!(matches!(Reference.run(suite, &case), Outcome::Passed { .. }), "{}", case.name);
                    seen.insert((case.op.clone(), role.clone()));
                }
            }
        }
        for op in ["attention_backward", "wide_attention", "ring_attention", "merge_states", "selected_attention"] {
            assert!(seen.contains(&(op.to_owned(), "y".to_owned())), "{op}");
        }
        for (op, role) in [
            ("attention_backward", "dmask"),
            ("wide_attention_backward", "dsinks"),
            ("ring_attention", "part_lse"),
            ("kv_format_attention", "k_deq"),
            ("kv_quantize", "data"),
            ("hadamard", "q_rot"),
        ] {
            assert!(seen.contains(&(op.to_owned(), role.to_owned())), "{op} {role}");
        }
    }

    #[test]
    fn each_answer_must_agree() {
        let suites = committed();
        let suite = suites.iter().find(|suite| suite.name == "worked_example").expect("the worked example");
        let case = &suite.cases[0];
        let mut produced = ops::run(&Reference, suite, case).expect("an answer");
        assert!(judge(suite, case, &produced).is_ok());
        let (role, name) = case.outputs.first_key_value().expect("an output");
        let shape = &suite.tensors[name].shape;
        produced.put(role, shape, &vec![12345.0f64; shape.iter().product()]);
        let refused = judge(suite, case, &produced).expect_err("a wrong second answer");
        assert!(refused.contains("answer 2"), "{refused}");
    }

    #[test]
    fn what_is_not_built_is_skipped_by_name() {
        let suites = committed();
        let suite = &suites[0];
        for (op, must_fail) in [("gated_delta", false), ("lightning_indexer", true), ("something_new", false)] {
            let case = Case { op: op.to_owned(), must_fail, ..suite.cases[0].clone() };
            let outcome = Reference.run(suite, &case);
            assert!(matches!(&outcome, Outcome::Skipped(reason) if reason.contains(op)), "{outcome:?}");
        }
    }
}
