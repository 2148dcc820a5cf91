//! `cargo xtask conformance`: the conformance suites on every engine and level.
//!
//! Without arguments it runs every suite of `../shared/conformance` and `../shared/conformance-new` (beside the
//! workspace) on all four engines, the SIMD and the parallel one at each level of this machine. The last line is `N
//! passed, M failed, K skipped`, counted over all of them, a folder that is not there as one skipped; the exit code
//! says whether any failed. What a case means and when it passes is `attn_testing::conformance`.

mod engines;
mod folders;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use attn_testing::conformance::Tally;
use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use folders::BESIDE;
use report::{Report, Run};

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directories with suites (NAME.json and NAME.safetensors); the default is those of ../shared.
    dirs: Vec<PathBuf>,
    /// Run only this engine: reference, streaming, simd or parallel.
    #[arg(long)]
    engine: Option<String>,
    /// Run only this level (portable, avx2, avx512, …), and no engine without levels.
    #[arg(long)]
    level: Option<String>,
    /// Also write the result of every case to this file.
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
    let folders::Found { suites, unreadable, absent } = folders::load(&args.dirs)?;
    let mut report = Report { unreadable, absent, ..Report::default() };
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
