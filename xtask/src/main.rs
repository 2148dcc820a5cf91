//! `cargo xtask <command>`: the front. It knows the names of all commands, and starts the program that has one.
//!
//! `measure` measures and draws, `workshop` builds and checks, `demo/` runs real models. Each is built when one of its
//! commands is first used: nobody waits for kernels to read `--help`, nor for candle to measure. Nothing here is part
//! of the product.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::hand_over::{self, demo};
use xtask::reader;

/// Measure and see attention on this machine; build and check the attn workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = FOR_CONTRIBUTORS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the cost of attention against sequence length and write a report.
    #[command(disable_help_flag = true)]
    Bench(Args),
    /// Write a page with heat maps, scores, weights and vectors of every token.
    #[command(disable_help_flag = true)]
    Heatmap(Args),
    /// Show the instruction-set levels of this machine and the kernels that would run.
    #[command(disable_help_flag = true)]
    Levels(Args),
    /// Run real models: sentence similarity, text generation.
    #[command(disable_help_flag = true)]
    Demo(Args),
    /// Install the libraries that `bench --peers` compares with, in target/peers.
    #[command(disable_help_flag = true)]
    Peers(Args),
    /// Run the conformance suites on every engine and level; also folders of your own.
    #[command(disable_help_flag = true)]
    Conformance(Args),
    /// Build the C library for distribution, in target/dist.
    #[command(disable_help_flag = true)]
    Dist(Args),
    /// Whatever else the workshop has.
    #[command(external_subcommand)]
    Workshop(Vec<OsString>),
}

/// Arguments of a command; --help lists them.
#[derive(clap::Args)]
struct Args {
    /// Its arguments; --help lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// What `--help` says after the commands that users see first. The workshop holds these names equal to its own.
const FOR_CONTRIBUTORS: &str = include_str!("contributors.txt");

/// Starts the program that has the command.
fn main() -> ExitCode {
    reader::end_with_it();
    match Cli::parse().command {
        Command::Bench(args) => named("measure", "bench", args),
        Command::Heatmap(args) => named("measure", "heatmap", args),
        Command::Levels(args) => named("measure", "levels", args),
        Command::Peers(args) => named("measure", "peers", args),
        Command::Conformance(args) => named("workshop", "conformance", args),
        Command::Dist(args) => named("workshop", "dist", args),
        Command::Workshop(args) => for_contributors(&args),
        Command::Demo(args) => match demo(&args.args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => {
                eprintln!("demo: {message}");
                ExitCode::FAILURE
            }
        },
    }
}

/// Runs a command of a program.
fn named(program: &str, command: &str, args: Args) -> ExitCode {
    let args: Vec<_> = [OsString::from(command)].into_iter().chain(args.args).collect();
    hand_over::run(program, &args)
}

/// Runs a contributors' command: `args` starts with its name.
fn for_contributors(args: &[OsString]) -> ExitCode {
    let name = args.first().map_or_else(Default::default, |name| name.to_string_lossy());
    if !FOR_CONTRIBUTORS.lines().skip(1).any(|line| line.split_whitespace().next() == Some(&*name)) {
        eprintln!("error: no command is called '{name}'\n\nFor more information, try '--help'.");
        return ExitCode::from(2);
    }
    hand_over::run("workshop", args)
}
