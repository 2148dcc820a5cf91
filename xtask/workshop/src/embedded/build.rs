//! Compiles the programs of `firmware` for the host and for boards, and runs the skeleton project.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::boards::{Board, folder, objdump};
use crate::need::{DISTRIBUTION_RUSTC, Need};
use crate::process;
use xtask::root::root;

/// How long one compilation may take.
const LIMIT: Duration = Duration::from_secs(600);

/// A folder of linked programs.
pub(super) struct Programs(PathBuf);

impl Programs {
    /// One of them.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// The host's programs.
pub(super) fn host(names: &[&str; 2]) -> Result<[PathBuf; 2], String> {
    cargo(None, &["--bins", "--examples"], "host")?.map_err(|log| format!("the programs do not build:\n{log}"))?;
    let programs = folder().join("release");
    let [bin, example] = *names;
    Ok([programs.join(bin), programs.join("examples").join(example)])
}

/// A board's programs: all images, the cases, the example.
pub(super) fn board(board: &Board) -> Result<Programs, String> {
    cargo(Some(board.target), &["--bins", "--example", "gesture"], board.target)?.map_err(|log| {
        format!("{}: the programs do not link; if a panic can be reached, the linker says so:\n{log}", board.name)
    })?;
    Ok(Programs(folder().join(board.target).join("release")))
}

/// The proof that the linker would find a panic: an image that has one is refused, for that reason.
pub(super) fn control_does_not_link() -> Result<(), String> {
    let target = "thumbv7em-none-eabihf";
    match cargo(Some(target), &["--bin", "image-control", "--features", "control"], "control")? {
        Err(log) if log.contains("attn_a_panic_can_be_reached") => Ok(()),
        Err(log) => Err(format!("the image that can panic fails for another reason:\n{log}")),
        Ok(()) => Err("an image that can panic links: that the others do proves nothing".to_owned()),
    }
}

/// Builds the project that users copy, `firmware/skeleton`, and runs it in QEMU, as its own settings say. It ends with
/// 0 if its result is right.
pub(super) fn skeleton_runs() -> Result<(), String> {
    let target = "thumbv7em-none-eabihf"; // which its settings name too; here, what to build it with depends on it
    cargo_in("firmware/skeleton", "run", Some(target), &["--features", "qemu"], "skeleton")?
        .map_err(|log| format!("firmware/skeleton does not build or run:\n{log}"))
}

/// Builds in `firmware`; the inner error is what cargo printed.
fn cargo(target: Option<&'static str>, args: &[&str], name: &str) -> Result<Result<(), String>, String> {
    cargo_in("firmware", "build", target, args, name)
}

/// Runs a command of cargo in one of the workspaces; the inner error is what it printed.
fn cargo_in(
    workspace: &str,
    verb: &str,
    target: Option<&'static str>,
    args: &[&str],
    name: &str,
) -> Result<Result<(), String>, String> {
    fs::create_dir_all(folder()).map_err(|error| error.to_string())?;
    let path = folder().join(format!("{name}.log"));
    let log = File::create(&path).map_err(|error| error.to_string())?;
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args([verb, "--release", "--locked"]).args(args).arg("--target-dir").arg(folder());
    command.current_dir(root().join(workspace));
    if let Some(target) = target {
        command.args(["--target", target]);
        if !Need::Target(target).is_met() {
            distribution(&mut command, target);
        }
    }
    let done = process::run(command, &log, LIMIT).is_success();
    Ok(if done { Ok(()) } else { Err(fs::read_to_string(&path).unwrap_or_default()) })
}

/// Where rustup has no core library for a target, the distribution's compiler builds it from source.
fn distribution(command: &mut Command, target: &str) {
    command.args(["-Zbuild-std=core"]).env("RUSTC", DISTRIBUTION_RUSTC).env("RUSTC_BOOTSTRAP", "1");
    command.env_remove("RUSTUP_TOOLCHAIN");
    if let Some(linker) = objdump().map(|path| path.with_file_name("rust-lld")) {
        let name = target.replace(['-', '.'], "_").to_uppercase();
        command.env(format!("CARGO_TARGET_{name}_LINKER"), linker);
    }
}
