//! `cargo xtask ci`: everything that CI runs, as a table of steps.
//!
//! [`steps`] holds the table, [`need`](crate::need) what a step cannot run without, [`install`](crate::install) gets
//! it, and [`process`] keeps the limit on time. Each step's output goes to `target/ci/NAME.log`; only a failed one's is
//! shown. A step that cannot run here says so and is counted as skipped: it is neither a pass nor a failure. So is one
//! that was not done when the time for all of them, if there is a limit, was over. The last line is
//! `N passed, M failed, K skipped`.

mod needs;
mod step;
mod steps;

use std::env;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};

use crate::install::Installation;
use crate::need::Need;
use crate::process::{self, End, show_tail, told};
use step::{Program, Run, Step};
use steps::STEPS;
use xtask::root::root;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the steps, what each proves, and whether it can run here.
    #[arg(long)]
    list: bool,
    /// Run only these steps.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Skip these steps.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    skip: Vec<String>,
    /// First install missing tools of the chosen steps (rustup; apt-get, as root).
    #[arg(long)]
    install: bool,
    /// Time for all steps, in minutes. Steps that are not done by then are skipped, and counted so.
    #[arg(long, value_name = "N")]
    minutes: Option<u64>,
}

/// What became of a step.
enum Outcome {
    Passed,
    Failed,
    Skipped(String),
}

pub(crate) fn run(args: Args) -> ExitCode {
    let chosen = match choose(&args) {
        Ok(chosen) => chosen,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::FAILURE;
        }
    };
    let logs = root().join("target/ci");
    if let Err(error) = fs::create_dir_all(&logs) {
        eprintln!("{}: {error}", logs.display());
        return ExitCode::FAILURE;
    }
    process::end_group_on_interrupt();
    let start = Instant::now();
    // Those that build take all cores; those that keep one core busy come in pairs.
    let (alone, paired): (Vec<_>, Vec<_>) = chosen.iter().enumerate().partition(|(_, step)| !step.one_core);
    let needs: Vec<Need> = alone.iter().chain(&paired).flat_map(|(_, step)| step.needs).copied().collect();
    let installation = Installation::new(if args.install { &needs } else { &[] });
    if args.list {
        installation.run(&logs);
        list(&chosen);
        return ExitCode::SUCCESS;
    }
    let deadline = args.minutes.map(|minutes| start + Duration::from_secs(60 * minutes));
    let lanes = |lanes, steps: &[_]| in_lanes(lanes, steps, chosen.len(), &installation, &logs, deadline);
    let mut results = thread::scope(|scope| {
        // Downloads take minutes in which the first steps can work.
        scope.spawn(|| installation.run(&logs));
        let mut results = lanes(1, &alone);
        results.append(&mut lanes(2, &paired));
        results
    });
    results.sort_by_key(|(i, ..)| *i);
    summary(&results, start.elapsed())
}

/// A step's place in the table, the step, what became of it and how long it took.
type Ended = (usize, &'static Step, Outcome, Duration);

/// Runs steps in order, `lanes` of them at a time.
fn in_lanes(
    lanes: usize,
    steps: &[(usize, &&'static Step)],
    all: usize,
    installation: &Installation<'_>,
    logs: &Path,
    deadline: Option<Instant>,
) -> Vec<Ended> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..lanes.min(steps.len()) {
            scope.spawn(|| {
                while let Some((i, step)) = steps.get(next.fetch_add(1, Ordering::Relaxed)) {
                    installation.wait_for(step.needs);
                    println!("[{:>2}/{all}] {}: {}", i + 1, step.name, step.proves);
                    let begin = Instant::now();
                    let outcome = run_step(step, logs, deadline);
                    let time = begin.elapsed();
                    let name = if lanes > 1 { format!("{} ", step.name) } else { String::new() };
                    match &outcome {
                        Outcome::Passed => println!("        {name}ok in {}", seconds(time)),
                        Outcome::Failed => println!("        {name}FAILED after {}", seconds(time)),
                        Outcome::Skipped(why) => println!("        {name}SKIPPED: {why}"),
                    }
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((*i, **step, outcome, time));
                }
            });
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The steps that the arguments ask for, in the table's order.
fn choose(args: &Args) -> Result<Vec<&'static Step>, String> {
    let known = |name: &&String| STEPS.iter().all(|step| step.name != name.as_str());
    if let Some(name) = args.only.iter().chain(&args.skip).find(known) {
        let names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        return Err(format!("no step is called {name}; there are: {}", names.join(", ")));
    }
    let named = |list: &[String], step: &Step| list.iter().any(|name| name == step.name);
    let wanted = |step: &&Step| (args.only.is_empty() || named(&args.only, step)) && !named(&args.skip, step);
    Ok(STEPS.iter().filter(wanted).collect())
}

fn list(chosen: &[&Step]) {
    let mut table = table(["step", "proves", "limit", "here"]);
    for step in chosen {
        let missing: Vec<_> = step.needs.iter().filter(|need| !need.is_met()).map(|need| need.missing()).collect();
        let here = if missing.is_empty() { "runs".to_owned() } else { missing.join("; ") };
        table.add_row([step.name, step.proves, &format!("{} min", step.minutes), &here]);
    }
    println!("{table}");
}

/// What is said of steps for which a slow machine has no time.
const NO_TIME: &str = "the time for all steps was over";

/// Runs a step, until the deadline of all steps at most.
fn run_step(step: &Step, logs: &Path, all: Option<Instant>) -> Outcome {
    let missing: Vec<_> = step.needs.iter().filter(|need| !need.is_met()).map(|need| need.missing()).collect();
    if !missing.is_empty() {
        return Outcome::Skipped(missing.join("; "));
    }
    let path = logs.join(format!("{}.log", step.name));
    let log = match File::create(&path) {
        Ok(log) => log,
        Err(error) => {
            println!("        {}: {error}", path.display());
            return Outcome::Failed;
        }
    };
    let deadline = Instant::now() + Duration::from_secs(60 * step.minutes);
    for run in step.runs {
        let until = all.map_or(deadline, |all| all.min(deadline));
        let end = process::run(command(run), &log, until.saturating_duration_since(Instant::now()));
        if end.is_success() {
            continue;
        }
        if matches!(end, End::TimedOut) && all.is_some_and(|all| all < deadline) {
            return Outcome::Skipped(NO_TIME.to_owned());
        }
        show_tail(&path, 200);
        let what = told(&end, Duration::from_secs(60 * step.minutes));
        println!("        {}: {what}", describe(run));
        return Outcome::Failed;
    }
    Outcome::Passed
}

/// The command of a run, in the workspace, without what `cargo run` set for this program alone.
fn command(run: &Run) -> Command {
    let mut command = match run.program {
        Program::Cargo => Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into())),
        Program::CargoOf(toolchain) => {
            let mut command = Command::new("rustup");
            command.args(["run", toolchain, "cargo"]).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
            command
        }
        Program::Xtask => {
            let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
            command.args(["run", "--release", "--quiet", "--package", "xtask", "--"]);
            command
        }
        Program::Built(path) => Command::new(root().join("target/ci").join(path)),
    };
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.current_dir(root());
    command.args(run.args.iter().map(|arg| fill(arg)));
    command.envs(run.env.iter().map(|(name, value)| (name, fill(value))));
    command
}

/// Puts this machine's paths into a text of the table.
fn fill(text: &str) -> String {
    let root = root();
    text.replace("{ci}", &root.join("target/ci").to_string_lossy()).replace("{root}", &root.to_string_lossy())
}

/// The run as a person would type it.
fn describe(run: &Run) -> String {
    let program = match run.program {
        Program::Cargo => "cargo".to_owned(),
        Program::CargoOf(toolchain) => format!("cargo +{toolchain}"),
        Program::Xtask => "cargo xtask".to_owned(),
        Program::Built(path) => format!("target/ci/{path}"),
    };
    let env = run.env.iter().map(|(name, value)| format!("{name}='{}' ", fill(value)));
    let args = run.args.iter().map(|arg| format!(" {}", fill(arg)));
    env.chain([program]).chain(args).collect()
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
}

/// Prints the closing table and the line that counts; the exit code is a failure if any step failed.
fn summary(results: &[Ended], total: Duration) -> ExitCode {
    let mut table = table(["step", "result", "time"]);
    if let Some(column) = table.column_mut(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (_, step, outcome, time) in results {
        let (count, result) = match outcome {
            Outcome::Passed => (&mut passed, "ok".to_owned()),
            Outcome::Failed => (&mut failed, "FAILED".to_owned()),
            // The first reason is enough here; all of them stand above.
            Outcome::Skipped(why) => (&mut skipped, format!("SKIPPED: {}", why.split(';').next().unwrap_or(why))),
        };
        *count += 1;
        table.add_row([step.name, &result, &seconds(*time)]);
    }
    println!("\n{table}");
    println!("total {:.0} min {:02.0} s", (total.as_secs() / 60) as f64, (total.as_secs() % 60) as f64);
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A step that takes some seconds, by a program that every such system has.
    const SLEEPS: Step = Step {
        name: "of-a-test",
        proves: "nothing",
        minutes: 1,
        one_core: false,
        needs: &[],
        runs: &[step::built("/bin/sleep", &["2"])],
    };

    #[test]
    fn a_step_that_is_not_done_at_the_deadline_of_all_is_skipped_and_says_so() {
        let logs = env::temp_dir();
        for (all, passes) in [(None, true), (Some(50_000), true), (Some(500), false), (Some(0), false)] {
            let all = all.map(|milliseconds| Instant::now() + Duration::from_millis(milliseconds));
            match run_step(&SLEEPS, &logs, all) {
                Outcome::Passed => assert!(passes, "{all:?}"),
                Outcome::Skipped(why) => assert!(!passes && why == NO_TIME, "{all:?}: {why}"),
                Outcome::Failed => panic!("{all:?}"),
            }
        }
        let _ = fs::remove_file(logs.join("of-a-test.log"));
    }
}
