//! `cargo xtask tidy` (not built yet).

use std::process::ExitCode;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: Args) -> ExitCode {
    eprintln!("tidy: not built yet");
    ExitCode::FAILURE
}
