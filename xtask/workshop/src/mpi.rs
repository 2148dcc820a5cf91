//! Starts jobs of MPI on this machine: more ranks than cores, also as a container's root.

use std::env;
use std::process::Command;

/// `mpirun`, or the launcher that `MPIRUN` names, for so many ranks of one thread. The program and its arguments are to
/// follow.
pub(crate) fn mpirun(ranks: usize) -> Result<Command, String> {
    let name = env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    let version = Command::new(&name).arg("--version").output().map_err(|error| format!("{name}: {error}"))?;
    let mut command = Command::new(name);
    command.args(["-n", &ranks.to_string()]).env("RAYON_NUM_THREADS", "1");
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        command.args(["--oversubscribe", "--allow-run-as-root"]);
        command.args(["--mca", "btl_vader_single_copy_mechanism", "none"]);
    }
    Ok(command)
}
