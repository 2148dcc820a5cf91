//! `cargo xtask demo`: real models on these kernels, which `demo/` runs on candle.
//!
//! Nobody who builds `xtask` builds candle: it is built, in `target/demo`, when a demo is run.

use std::ffi::OsString;
use std::process::ExitCode;

use crate::hand_over;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A demo and its arguments; --help lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    match build_and_run(&args.args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("demo: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the demos and runs one.
pub(crate) fn build_and_run(args: &[OsString]) -> Result<(), String> {
    hand_over::run_apart("demo", "demo", args)
}
