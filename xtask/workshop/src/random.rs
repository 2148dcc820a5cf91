//! `cargo xtask random`: random calls against float64, held to the bound that is documented.
//!
//! Each call is drawn from the seed and its number alone (`attn_testing::random`): `--seed S --only N` runs one again.
//! It goes through the kernels at every level of this machine, through `attn-parallel` at one level on one to three
//! threads, and now and then through the model of AMX. What breaks the bound is printed with all that was
//! drawn. The last line is `N passed, M failed, K skipped`, counted in calls of an engine; the exit code says whether
//! any failed.

mod engines;
mod summary;

use std::process::ExitCode;
use std::time::Instant;

use attn_testing::random::{Call, Ready};
use indicatif::{ProgressBar, ProgressStyle};

use engines::Engines;
use summary::Summary;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many calls to draw.
    #[arg(long, default_value_t = 100_000)]
    calls: u64,
    /// Where the draws start.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this level (portable, avx2, avx512, …; those that end in -model run everywhere).
    #[arg(long)]
    level: Option<String>,
    /// Only the call of this number: prints it, and what each engine makes of it.
    #[arg(long, value_name = "N")]
    only: Option<u64>,
    /// How many failures are printed with all that was drawn; the rest is counted.
    #[arg(long, value_name = "N", default_value_t = 10)]
    print: usize,
}

pub(crate) fn run(args: Args) -> ExitCode {
    match try_run(&args) {
        Ok(summary) => {
            summary.print();
            if summary.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(message) => {
            eprintln!("random: {message}");
            ExitCode::FAILURE
        }
    }
}

fn try_run(args: &Args) -> Result<Summary, String> {
    let engines = Engines::new(args.level.as_deref())?;
    let mut summary = Summary::default();
    // Drawn on standard error, and only on a terminal.
    let template = "{bar:40} {pos}/{len} {msg} {eta} left";
    let style = ProgressStyle::with_template(template).map_err(|e| e.to_string())?;
    let numbers = args.only.map_or(0..args.calls, |n| n..n + 1);
    let bar = ProgressBar::new(numbers.end - numbers.start).with_style(style);
    // A panic is a verdict here; the default hook would print it into the report.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    for n in numbers {
        let call = Call::draw(args.seed, n);
        let ready =
            Ready::new(&call).map_err(|error| format!("call {n} should not have been drawn: {error}; {call:?}"))?;
        let mut told = args.only.is_some();
        if told {
            println!("{call:?}");
        }
        summary.draw(&ready);
        for target in engines.of(&call) {
            let verdict = target.check(&call, &ready);
            if args.only.is_some() {
                println!("{}: {verdict:?}", target.label());
            }
            let Some(failure) = summary.add(&call, target, verdict) else { continue };
            if args.only.is_none() && summary.failed() <= args.print {
                // Through the bar, which is drawn again below; without a terminal it prints nothing.
                bar.suspend(|| {
                    println!("FAILED {}, --seed {} --only {n}: {failure}", target.label(), args.seed);
                    if !told {
                        println!("  {call:?}");
                    }
                });
                told = true;
            }
        }
        bar.inc(1);
        if n % 256 == 0 {
            bar.set_message(format!("{} failed", summary.failed()));
        }
    }
    std::panic::set_hook(hook);
    bar.finish_and_clear();
    summary.time = start.elapsed();
    Ok(summary)
}
