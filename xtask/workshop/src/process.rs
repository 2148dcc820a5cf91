//! Runs one command with its output in a log file and a limit on its time.
//!
//! Each command leads a process group of its own, so that a limit ends everything it started (an emulator that hangs in
//! a grandchild would otherwise outlive it and keep the run waiting). Ctrl-C and a polite termination end the group as
//! well.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How a command ended.
#[derive(Debug)]
pub(crate) enum End {
    /// By itself, with this status.
    Exited(ExitStatus),
    /// By force, when its time was over.
    TimedOut,
    /// It could not be started.
    NotStarted(io::Error),
}

impl End {
    /// Whether the command ended by itself and reported success.
    pub(crate) fn is_success(&self) -> bool {
        matches!(self, Self::Exited(status) if status.success())
    }
}

/// The process groups that run now.
static GROUPS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Applies a change to the running groups; what a panicking thread left in there is still a list of groups.
fn groups<R>(change: impl FnOnce(&mut Vec<u32>) -> R) -> R {
    change(&mut GROUPS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Makes Ctrl-C and termination end the running groups before this process.
pub(crate) fn end_group_on_interrupt() {
    let handler = || {
        groups(|running| running.iter().for_each(|&group| kill_group(group)));
        std::process::exit(130);
    };
    // A second call in one process, or a system without signals, only loses this courtesy.
    if let Err(error) = ctrlc::set_handler(handler) {
        eprintln!("interrupts will not end running steps: {error}");
    }
}

/// Runs `command` with both output streams appended to `log`, for at most `limit`.
pub(crate) fn run(mut command: Command, log: &File, limit: Duration) -> End {
    let streams = || log.try_clone().map(Stdio::from);
    let (stdout, stderr) = match (streams(), streams()) {
        (Ok(stdout), Ok(stderr)) => (stdout, stderr),
        (Err(error), _) | (_, Err(error)) => return End::NotStarted(error),
    };
    command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return End::NotStarted(error),
    };
    let group = child.id();
    groups(|running| running.push(group));
    let end = wait(&mut child, limit);
    groups(|running| running.retain(|&other| other != group));
    end
}

/// How a command ended, for people.
pub(crate) fn told(end: &End, limit: Duration) -> String {
    match end {
        End::Exited(status) => status.to_string(),
        End::TimedOut => format!("ended by force, after {} minutes for the whole step", limit.as_secs() / 60),
        End::NotStarted(error) => format!("could not be started: {error}"),
    }
}

/// Prints the last lines of a log.
pub(crate) fn show_tail(path: &Path, lines: usize) {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<_> = text.lines().collect();
    let skipped = all.len().saturating_sub(lines);
    if skipped > 0 {
        println!("        | ... {skipped} lines before this are in {}", path.display());
    }
    for line in all.iter().skip(skipped) {
        println!("        | {line}");
    }
}

fn wait(child: &mut Child, limit: Duration) -> End {
    let start = Instant::now();
    let mut ticker = Ticker::new(start);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                ticker.clear();
                return End::Exited(status);
            }
            Ok(None) => {}
            Err(error) => {
                kill(child);
                return End::NotStarted(error);
            }
        }
        if start.elapsed() >= limit {
            ticker.clear();
            kill(child);
            return End::TimedOut;
        }
        ticker.tick();
        // Short at first, so that quick commands are not rounded up to the polling interval.
        thread::sleep(start.elapsed().clamp(Duration::from_millis(2), Duration::from_millis(100)));
    }
}

fn kill(child: &mut Child) {
    kill_group(child.id());
    // The leader may have left its group already; both calls fail harmlessly on a process that has ended.
    let _ = child.kill();
    let _ = child.wait();
}

/// Ends a process group at once. The shell's own `kill` does it: signals to groups are not in the standard library.
fn kill_group(group: u32) {
    let _ = Command::new("sh").args(["-c", &format!("kill -s KILL -- -{group}")]).stderr(Stdio::null()).status();
}

/// Shows that a long command is alive: a counter on a terminal, a line a minute elsewhere.
struct Ticker {
    start: Instant,
    next: Duration,
    terminal: bool,
}

impl Ticker {
    fn new(start: Instant) -> Self {
        let terminal = io::stdout().is_terminal();
        Self { start, next: Self::interval(terminal), terminal }
    }

    fn interval(terminal: bool) -> Duration {
        Duration::from_secs(if terminal { 1 } else { 60 })
    }

    fn tick(&mut self) {
        let elapsed = self.start.elapsed();
        if elapsed < self.next {
            return;
        }
        self.next = elapsed + Self::interval(self.terminal);
        if self.terminal {
            print!("\r        ... {} s", elapsed.as_secs());
            let _ = io::stdout().flush();
        } else {
            println!("        ... still running after {} s", elapsed.as_secs());
        }
    }

    fn clear(&self) {
        if self.terminal {
            print!("\r                              \r");
            let _ = io::stdout().flush();
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> (End, String) {
        let path = std::env::temp_dir().join(format!("attn-ci-{}-{:?}", std::process::id(), thread::current().id()));
        let log = File::create(&path).expect("a log in the temporary folder");
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let end = run(command, &log, limit);
        let text = fs::read_to_string(&path).expect("the log");
        let _ = fs::remove_file(&path);
        (end, text)
    }

    #[test]
    fn both_streams_and_the_status_are_kept() {
        let (end, log) = shell("echo out; echo err >&2; exit 3", Duration::from_secs(20));
        assert!(matches!(&end, End::Exited(status) if status.code() == Some(3)), "{end:?}");
        assert!(!end.is_success());
        assert_eq!(log, "out\nerr\n");
    }

    #[test]
    fn a_limit_ends_grandchildren_too() {
        let file = std::env::temp_dir().join(format!("attn-ci-late-{}", std::process::id()));
        let path = file.display();
        let (end, _) = shell(&format!("sh -c 'sleep 2; echo late > {path}' & wait"), Duration::from_millis(300));
        assert!(matches!(end, End::TimedOut), "{end:?}");
        thread::sleep(Duration::from_millis(2500));
        let outlived = file.exists();
        let _ = fs::remove_file(&file);
        assert!(!outlived, "a grandchild outlived its step");
    }
}
