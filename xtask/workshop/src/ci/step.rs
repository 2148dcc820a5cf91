//! A step of CI: its name, its needs and the commands that it runs. [`steps`](super::steps) has them all.

use crate::need::Need;

/// One line of the table.
pub(super) struct Step {
    /// How `--only` and `--skip` call it.
    pub(super) name: &'static str,
    /// What is known when it passes.
    pub(super) proves: &'static str,
    /// Minutes after which it counts as failed.
    pub(super) minutes: u64,
    /// Whether it keeps one core busy for most of its time (interpreters, emulators, a browser): two such steps run
    /// side by side, after all others.
    pub(super) one_core: bool,
    /// What it cannot run without.
    pub(super) needs: &'static [Need],
    /// Run in order; the first failure ends the step.
    pub(super) runs: &'static [Run],
}

/// One command of a step. In arguments and values, `{root}` stands for the workspace and `{ci}` for `target/ci`.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// What to start.
    pub(super) program: Program,
    /// Its arguments.
    pub(super) args: &'static [&'static str],
    /// Variables set for it.
    pub(super) env: &'static [(&'static str, &'static str)],
}

/// What a command starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// The cargo that runs this.
    Cargo,
    /// Cargo of a named toolchain.
    CargoOf(&'static str),
    /// `cargo xtask`, with another command.
    Xtask,
    /// A program that a run before this one has built, by its path below `target/ci`.
    Built(&'static str),
}

/// A run of cargo.
pub(super) const fn cargo(args: &'static [&'static str]) -> Run {
    Run { program: Program::Cargo, args, env: &[] }
}

/// A run of a toolchain's cargo.
pub(super) const fn cargo_of(toolchain: &'static str, args: &'static [&'static str]) -> Run {
    Run { program: Program::CargoOf(toolchain), args, env: &[] }
}

/// A run of `cargo xtask`.
pub(super) const fn xtask(args: &'static [&'static str]) -> Run {
    Run { program: Program::Xtask, args, env: &[] }
}

/// A run of a program that the run before has built.
pub(super) const fn built(path: &'static str, args: &'static [&'static str]) -> Run {
    Run { program: Program::Built(path), args, env: &[] }
}

impl Run {
    /// With these variables.
    pub(super) const fn with(self, env: &'static [(&'static str, &'static str)]) -> Self {
        Self { env, ..self }
    }
}
