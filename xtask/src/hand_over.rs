//! Programs that are built when they are asked for, so that nobody waits for them before the first measurement.

use std::ffi::OsStr;
use std::process::{Command, ExitCode};

use crate::root::root;

/// Builds a program with cargo and runs it; `what` selects it: `--package`, or `--manifest-path`.
fn command<A: AsRef<OsStr>>(what: &[&OsStr], args: &[A]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What `cargo run` set for this program alone: build scripts that see another package's would run again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.args(["run", "--release", "--locked"]).args(what).arg("--").args(args);
    command
}

/// Runs a package of this workspace in the place of this program: its exit code is ours.
pub(crate) fn run<A: AsRef<OsStr>>(package: &str, args: &[A]) -> ExitCode {
    let mut command = command(&["--package".as_ref(), package.as_ref()], args);
    match command.status() {
        Ok(status) => status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from),
        Err(error) => {
            eprintln!("cannot start {}: {error}", command.get_program().display());
            ExitCode::FAILURE
        }
    }
}

/// Runs a workspace of its own, with its own folder below `target`. It has said itself what went wrong in there.
pub(crate) fn run_apart<A: AsRef<OsStr>>(folder: &str, target: &str, args: &[A]) -> Result<(), String> {
    let manifest = root().join(folder).join("Cargo.toml");
    let target = root().join("target").join(target);
    let what = ["--manifest-path".as_ref(), manifest.as_os_str(), "--target-dir".as_ref(), target.as_os_str()];
    let mut command = command(&what, args);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("ended with {status}")),
        Err(error) => Err(format!("cannot start {}: {error}", command.get_program().display())),
    }
}
