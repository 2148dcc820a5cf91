//! Programs that are built when they are asked for, so that nobody waits for them before the first measurement.

use std::ffi::OsStr;
use std::process::Command;

use crate::root::root;

/// Builds a program with cargo and runs it; `what` selects it: `--package`, or `--manifest-path`. It has said itself
/// what went wrong in there.
pub(crate) fn run<A: AsRef<OsStr>>(what: &[&OsStr], args: &[A]) -> Result<(), String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What `cargo run` set for this program alone: build scripts that see another package's would run again.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.args(["run", "--release", "--locked"]).args(what).arg("--").args(args);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("ended with {status}")),
        Err(error) => Err(format!("cannot start {}: {error}", command.get_program().display())),
    }
}

/// A workspace of its own, with its own folder below `target`.
pub(crate) fn run_apart<A: AsRef<OsStr>>(folder: &str, target: &str, args: &[A]) -> Result<(), String> {
    let manifest = root().join(folder).join("Cargo.toml");
    let target = root().join("target").join(target);
    let what = ["--manifest-path".as_ref(), manifest.as_os_str(), "--target-dir".as_ref(), target.as_os_str()];
    run(&what, args)
}
