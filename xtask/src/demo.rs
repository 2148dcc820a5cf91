//! `cargo xtask demo`: real models on these kernels, which the workspace in `demo/` runs on candle.
//!
//! Nobody who builds the workshop builds candle: it is built, in `target/demo`, when a demo is run.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use crate::root::root;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A demo and its arguments; --help lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    match hand_over(&args.args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("demo: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the demos and runs one. It has said itself what went wrong in there.
pub(crate) fn hand_over(args: &[OsString]) -> Result<(), String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--release", "--locked", "--manifest-path"]).arg(root().join("demo/Cargo.toml"));
    command.arg("--target-dir").arg(root().join("target/demo")).arg("--").args(args);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("ended with {status}")),
        Err(error) => Err(format!("cannot start {}: {error}", command.get_program().display())),
    }
}
