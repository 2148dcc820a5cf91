//! `cargo xtask conformance` (not built yet).

use std::process::ExitCode;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: Args) -> ExitCode {
    eprintln!("conformance: not built yet");
    ExitCode::FAILURE
}
