//! Installs what a step or a command needs, and says what is missing.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::need::Need;
use crate::process::{self, show_tail, told};
use crate::root::root;

/// How long one command that installs something may take; the emulator of AMX is built by one.
const INSTALL_LIMIT: Duration = Duration::from_secs(600);

/// What is missing of what a command needs, as texts; installs it first where that is asked for.
pub(crate) fn missing(needs: &[Need], to_install: bool) -> Vec<String> {
    let logs = root().join("target/ci");
    if to_install && fs::create_dir_all(&logs).is_ok() {
        install(needs, &logs);
    }
    needs.iter().filter(|need| !need.is_met()).map(|need| need.missing()).collect()
}

/// Installs what is lacking. A failure is only told: the steps that need the thing are skipped for the same reason.
pub(crate) fn install(needs: &[Need], logs: &Path) {
    let mut tried: Vec<Need> = Vec::new();
    for need in needs {
        if tried.contains(need) || need.is_met() {
            continue;
        }
        tried.push(*need);
        for (i, words) in need.install().iter().enumerate() {
            let [program, args @ ..] = words.as_slice() else { continue };
            println!("installing: {}", words.join(" "));
            let mut command = Command::new(program);
            command.args(args).env("DEBIAN_FRONTEND", "noninteractive").current_dir(root());
            let path = logs.join(format!("install-{}-{i}.log", tried.len()));
            let log = match File::create(&path) {
                Ok(log) => log,
                Err(error) => {
                    println!("        {}: {error}", path.display());
                    continue;
                }
            };
            let end = process::run(command, &log, INSTALL_LIMIT);
            if !end.is_success() {
                println!("        DID NOT INSTALL: {}", told(&end, INSTALL_LIMIT));
                show_tail(&path, 15);
            }
        }
    }
}
