//! Installs what a step or a command needs, and says what is missing.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::need::Need;
use crate::process::{self, show_tail, told};
use xtask::root::root;

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
    Installation::new(needs).run(logs);
}

/// Needs that one thread installs in order, while others wait only for those that they come to.
pub(crate) struct Installation<'a> {
    needs: &'a [Need],
    /// How many of them have been dealt with.
    tried: Mutex<usize>,
    advanced: Condvar,
}

impl<'a> Installation<'a> {
    pub(crate) fn new(needs: &'a [Need]) -> Self {
        Self { needs, tried: Mutex::new(0), advanced: Condvar::new() }
    }

    /// Installs what is lacking, in order.
    pub(crate) fn run(&self, logs: &Path) {
        for (n, need) in self.needs.iter().enumerate() {
            if !self.needs[..n].contains(need) && !need.is_met() {
                install_one(*need, n, logs);
            }
            *self.tried.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            self.advanced.notify_all();
        }
    }

    /// Returns when each of these has been dealt with, or is not among those to be installed.
    pub(crate) fn wait_for(&self, needs: &[Need]) {
        let Some(last) = needs.iter().filter_map(|need| self.needs.iter().position(|other| other == need)).max() else {
            return;
        };
        let tried = self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.advanced.wait_while(tried, |tried| *tried <= last));
    }
}

/// Installs one thing, the `n`th of a list.
fn install_one(need: Need, n: usize, logs: &Path) {
    for (i, words) in need.install().iter().enumerate() {
        let [program, args @ ..] = words.as_slice() else { continue };
        println!("installing: {}", words.join(" "));
        let mut command = Command::new(program);
        command.args(args).env("DEBIAN_FRONTEND", "noninteractive").current_dir(root());
        let path = logs.join(format!("install-{n}-{i}.log"));
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn a_step_waits_for_its_own_needs() {
        // Nothing can be done about these, so that nothing is installed.
        let needs = [Need::Folder("no/such/folder"), Need::Arch("pdp11"), Need::Arch("pdp10")];
        let installation = Installation::new(&needs);
        installation.wait_for(&[Need::Linux]); // is not among them
        let came = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                installation.wait_for(&needs[..2]);
                came.store(true, Ordering::Relaxed);
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!came.load(Ordering::Relaxed));
            installation.run(Path::new("no/such/folder"));
        });
        assert!(came.load(Ordering::Relaxed));
    }
}
