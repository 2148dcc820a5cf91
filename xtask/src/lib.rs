//! `cargo xtask <command>`: the commands that measure and draw.
//!
//! One module per command; each has a struct of arguments, and a `run` that returns an exit code. Nothing here is part
//! of the product. The commands that build and check the workspace are in `workshop`, a program of its own. All this
//! is a library, so that cargo compiles it while it still compiles the kernels; `main` only starts it.

mod bench;
mod demo;
mod hand_over;
mod heatmap;
mod levels;
mod peers;
mod reader;
mod root;
mod workshop;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measure and see attention on this machine; build and check the attn workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = workshop::FOR_CONTRIBUTORS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the cost of attention against sequence length and write a report.
    Bench(Box<bench::Args>),
    /// Write a page with heat maps, scores, weights and vectors of every token.
    Heatmap(heatmap::Args),
    /// Show the instruction-set levels of this machine and the kernels that would run.
    Levels(levels::Args),
    /// Run real models: sentence similarity, text generation.
    #[command(disable_help_flag = true)]
    Demo(demo::Args),
    /// Install the libraries that `bench --peers` compares with, in target/peers.
    Peers(peers::Args),
    /// Run the conformance suites on every engine and level; also folders of your own.
    #[command(disable_help_flag = true)]
    Conformance(workshop::Args),
    /// Build the C library for distribution, in target/dist.
    #[command(disable_help_flag = true)]
    Dist(workshop::Args),
    /// Whatever the workshop has.
    #[command(external_subcommand)]
    Workshop(Vec<OsString>),
}

/// Runs the command that the program's arguments name.
#[must_use]
pub fn run() -> ExitCode {
    reader::end_with_it();
    match Cli::parse().command {
        Command::Bench(args) => bench::run(*args),
        Command::Demo(args) => demo::run(&args),
        Command::Heatmap(args) => heatmap::run(args),
        Command::Levels(args) => levels::run(args),
        Command::Peers(args) => peers::run(args),
        Command::Conformance(args) => workshop::named("conformance", args),
        Command::Dist(args) => workshop::named("dist", args),
        Command::Workshop(args) => workshop::run(args),
    }
}
