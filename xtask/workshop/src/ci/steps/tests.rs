//! Tests of the table of steps: names, toolchains, what emulators may run, and what the architecture page says.

use crate::ci::step::Program;

use super::*;

#[test]
fn names_are_unique_and_plain() {
    for (i, step) in STEPS.iter().enumerate() {
        assert!(step.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'), "{}", step.name);
        assert!(STEPS.iter().skip(i + 1).all(|other| other.name != step.name), "{} stands twice", step.name);
        assert!(step.minutes > 0 && !step.runs.is_empty(), "{}", step.name);
    }
}

#[test]
fn a_step_of_another_toolchain_needs_it_and_leaves_the_shared_directory_alone() {
    for step in STEPS {
        for run in step.runs {
            if let Program::CargoOf(toolchain) = run.program {
                assert!(step.needs.contains(&Need::Toolchain(toolchain)), "{}", step.name);
                let own = run.env.iter().any(|(name, value)| *name == "CARGO_TARGET_DIR" && value.starts_with("{ci}/"));
                assert!(own, "{}", step.name);
            }
        }
    }
}

#[test]
fn the_architecture_page_names_every_step() {
    let page = include_str!("../../../../../ARCHITECTURE.md");
    for step in STEPS {
        assert!(page.contains(&format!("`{}`", step.name)), "ARCHITECTURE.md does not name {}", step.name);
    }
}

#[test]
fn no_emulated_step_runs_a_thread_pool() {
    for step in STEPS {
        let emulated = step.runs.iter().any(|run| run.env.iter().any(|(name, _)| name.ends_with("_RUNNER")));
        let pooled =
            step.runs.iter().any(|run| run.args.contains(&"attn-parallel") || run.args.contains(&"--workspace"));
        assert!(!(emulated && pooled), "{}", step.name);
    }
}
