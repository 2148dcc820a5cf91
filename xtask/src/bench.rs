//! `cargo xtask bench` (not built yet).

use std::process::ExitCode;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: Args) -> ExitCode {
    eprintln!("bench: not built yet");
    ExitCode::FAILURE
}
