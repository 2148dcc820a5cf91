//! `cargo xtask conformance`: the conformance suites on every engine and level.
//!
//! Without arguments it runs every suite of `../shared/conformance` (beside the workspace) on all four engines, the SIMD and
//! the parallel one at each level of this machine. The last line is `N passed, M failed, K skipped`, counted over all of
//! them; the exit code says whether any failed. What a case means and when it passes is `attn_testing::conformance`.

mod engines;
mod report;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use attn_testing::conformance::{Suite, Tally};
use indicatif::{ProgressBar, ProgressStyle};

use report::{Report, Run};

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directories with suites (NAME.json beside NAME.safetensors); by default ../shared/conformance.
    dirs: Vec<PathBuf>,
    /// Only this engine: reference, streaming, simd or parallel.
    #[arg(long)]
    engine: Option<String>,
    /// Only this level (portable, avx2, avx512, …); leaves out engines without levels.
    #[arg(long)]
    level: Option<String>,
    /// Also write the verdict on every case to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> ExitCode {
    match try_run(&args) {
        Ok(report) => {
            report.print();
            if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(message) => {
            eprintln!("conformance: {message}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(args: &Args) -> Result<Report, String> {
    let runners = engines::chosen(args.engine.as_deref(), args.level.as_deref())?;
    let dirs = if args.dirs.is_empty() { vec![default_dir()?] } else { args.dirs.clone() };
    let mut report = Report::default();
    let mut suites = Vec::new();
    for dir in &dirs {
        let files = Suite::files_in(dir)?;
        if files.is_empty() {
            return Err(format!("{} holds no suites", dir.display()));
        }
        for file in files {
            match Suite::load(&file) {
                Ok(suite) => suites.push(suite),
                // A suite that cannot be read must not look like a suite that passed.
                Err(message) => report.unreadable.push(message),
            }
        }
    }
    let total: usize = suites.iter().map(|suite| suite.cases.len()).sum::<usize>() * runners.len();
    // Drawn on standard error, and only on a terminal.
    let bar = ProgressBar::new(total as u64)
        .with_style(ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}").map_err(|e| e.to_string())?);
    // A panic is a verdict here; the default hook would print it into the report.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for runner in &runners {
        for suite in &suites {
            let mut tally = Tally::default();
            let mut verdicts = Vec::with_capacity(suite.cases.len());
            for case in &suite.cases {
                bar.set_message(format!("{} {}", runner.engine(), suite.name));
                let outcome = runner.run(suite, case);
                verdicts.push((case.name.clone(), case.op.clone(), outcome.clone()));
                tally.add(&case.name, outcome);
                bar.inc(1);
            }
            let level = runner.level();
            report.runs.push(Run { engine: runner.engine(), level, suite: suite.name.clone(), tally, verdicts });
        }
    }
    std::panic::set_hook(hook);
    bar.finish_and_clear();
    if let Some(path) = &args.json {
        report.write_json(path)?;
    }
    Ok(report)
}

/// The suites beside the workspace, or the selection that is committed.
fn default_dir() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("the workspace has no root")?;
    let beside = root.join("../shared/conformance");
    if beside.is_dir() {
        return Ok(beside);
    }
    let committed = root.join("attn-testing/vectors");
    eprintln!("conformance: {} does not exist", beside.display());
    eprintln!("conformance: ONLY THE COMMITTED SELECTION IS RUN: {}", committed.display());
    Ok(committed)
}
