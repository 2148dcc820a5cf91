//! Programs that are built when they are first used, so that nobody waits for them before the first measurement.

use std::ffi::{OsStr, OsString};
use std::process::{Command, ExitCode, ExitStatus};

use crate::root::root;

/// Builds a program with cargo and runs it; `what` selects it: `--package`, or `--manifest-path`.
fn start<A: AsRef<OsStr>>(what: &[&OsStr], args: &[A]) -> Result<ExitStatus, String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--release", "--locked"]).args(what).arg("--").args(args);
    command.status().map_err(|error| format!("cannot start {}: {error}", command.get_program().display()))
}

/// Runs a package of this workspace in the place of this program: its exit code is ours.
pub fn run<A: AsRef<OsStr>>(package: &str, args: &[A]) -> ExitCode {
    match start(&["--package".as_ref(), package.as_ref()], args) {
        Ok(status) => status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a workspace of its own, with its own folder below `target`. It has said itself what went wrong in there.
///
/// # Errors
/// The program cannot be built or started, or ends with another code than 0.
pub fn run_apart<A: AsRef<OsStr>>(folder: &str, target: &str, args: &[A]) -> Result<(), String> {
    let manifest = root().join(folder).join("Cargo.toml");
    let target = root().join("target").join(target);
    let what = ["--manifest-path".as_ref(), manifest.as_os_str(), "--target-dir".as_ref(), target.as_os_str()];
    let status = start(&what, args)?;
    if status.success() { Ok(()) } else { Err(format!("ended with {status}")) }
}

/// Runs a demo of `demo/`, whose name `args` starts with.
///
/// # Errors
/// Those of [`run_apart`].
pub fn demo(args: &[OsString]) -> Result<(), String> {
    run_apart("demo", "demo", args)
}
