//! The project's workshop: `cargo xtask <command>`.
//!
//! One module per command; each has its arguments as a struct and a `run` that says by its exit code whether all went
//! well. Nothing here is part of the product; everything that CI does can be done by hand with these commands.

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
mod levels;
mod matmul;
mod no_panic;
mod peers;
mod random;
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
    /// Hold random calls to the documented bound on their error, against float64.
    Random(random::Args),
    /// Run attn-core on emulated microcontrollers, against the host: results, flash, RAM, stack, instructions.
    Embedded(embedded::Args),
    /// Run the tests of the tile kernel on an emulated processor with AMX.
    Emulated(emulated::Args),
    /// Write a page that shows who looks at whom: heat maps, scores, weights and vectors of every token.
    Heatmap(heatmap::Args),
    /// Show the instruction-set levels of this machine and the kernels that would run.
    Levels(levels::Args),
    /// Everything that CI runs.
    Ci(ci::Args),
    /// Run real models: sentence similarity, text generation.
    Demo(demo::Args),
    /// Compare the libraries' public interface with the committed text.
    Api(api::Args),
    /// Build the C library as it is handed on, in target/dist.
    Dist(dist::Args),
    /// Use the C library from C, C++, CMake and Python; run it under sanitizers.
    Capi(capi::Args),
    /// Set up the libraries that `bench --peers` measures beside ours, in target/peers.
    Peers(peers::Args),
    /// Prove on machine code that attn-core cannot panic.
    NoPanic(no_panic::Args),
    /// Check the house rules that a compiler does not.
    Tidy(tidy::Args),
    /// Choose the conformance cases that are committed.
    Vectors(vectors::Args),
}

/// Ends quietly where whoever read our output has stopped reading (`cargo xtask bench | head`): to `println!` that is a
/// panic.
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
        Command::Demo(args) => demo::run(args),
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
