//! The project's workshop: `cargo xtask <command>`.
//!
//! One module per command; each has a struct of arguments, and a `run` that returns an exit code. Nothing here is part
//! of the product. CI runs these commands, and so can anybody.

mod api;
mod bench;
mod capi;
mod ci;
mod conformance;
mod demo;
mod dist;
mod embedded;
mod emulated;
mod heatmap;
mod install;
mod levels;
mod need;
mod no_panic;
mod peers;
mod process;
mod random;
mod root;
mod tidy;
mod vectors;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build, measure and check the attn workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the cost of attention against sequence length and write a report.
    Bench(Box<bench::Args>),
    /// Run the conformance suites on every engine and level.
    Conformance(conformance::Args),
    /// Compare random calls with float64, and check the documented bound on the error.
    Random(random::Args),
    /// Run attn-core on emulated microcontrollers, compare with the host, report flash, RAM, stack and instructions.
    Embedded(embedded::Args),
    /// Run the tests of the AMX kernel on an emulated processor.
    Emulated(emulated::Args),
    /// Write a page with heat maps, scores, weights and vectors of every token.
    Heatmap(heatmap::Args),
    /// Show the instruction-set levels of this machine and the kernels that would run.
    Levels(levels::Args),
    /// Run the CI steps.
    Ci(ci::Args),
    /// Run real models: sentence similarity, text generation.
    #[command(disable_help_flag = true)]
    Demo(demo::Args),
    /// Compare the libraries' public interface with the committed text.
    Api(api::Args),
    /// Build the C library for distribution, in target/dist.
    Dist(dist::Args),
    /// Use the C library from C, C++, CMake and Python; run it under sanitizers.
    Capi(capi::Args),
    /// Install the libraries that `bench --peers` compares with, in target/peers.
    Peers(peers::Args),
    /// Prove from machine code that attn-core cannot panic.
    NoPanic(no_panic::Args),
    /// Check the house rules that the compiler does not check.
    Tidy(tidy::Args),
    /// Choose the conformance cases to commit.
    Vectors(vectors::Args),
}

/// Ends quietly if the reader of our output has closed it (`cargo xtask bench | head`), which makes `println!` panic.
fn end_with_the_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>();
        if text.is_some_and(|text| text.starts_with("failed printing to stdout: Broken pipe")) {
            std::process::exit(141); // as the signal would have it: 128 + SIGPIPE
        }
        usual(panic);
    }));
}

fn main() -> ExitCode {
    end_with_the_reader();
    match Cli::parse().command {
        Command::Bench(args) => bench::run(*args),
        Command::Conformance(args) => conformance::run(args),
        Command::Random(args) => random::run(args),
        Command::Demo(args) => demo::run(&args),
        Command::Embedded(args) => embedded::run(args),
        Command::Emulated(args) => emulated::run(args),
        Command::Heatmap(args) => heatmap::run(args),
        Command::Levels(args) => levels::run(args),
        Command::Ci(args) => ci::run(args),
        Command::Api(args) => api::run(args),
        Command::Dist(args) => dist::run(args),
        Command::Capi(args) => capi::run(args),
        Command::Peers(args) => peers::run(args),
        Command::NoPanic(args) => no_panic::run(args),
        Command::Tidy(args) => tidy::run(args),
        Command::Vectors(args) => vectors::run(args),
    }
}
