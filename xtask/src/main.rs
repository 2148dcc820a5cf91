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

/// Measure and see attention on this machine; build and check the attn workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = FOR_CONTRIBUTORS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The commands that users see first, then those that clap hides and this text names.
const FOR_CONTRIBUTORS: &str = "\
For contributors (each has --help):
  ci           Run the CI steps
  tidy         Check the house rules that the compiler does not check
  api          Compare the libraries' public interface with the committed text
  random       Compare random calls with float64, and check the documented bound on the error
  embedded     Run attn-core on emulated microcontrollers; report flash, RAM, stack and instructions
  emulated     Run the tests of the AMX kernel on an emulated processor
  no-panic     Prove from machine code that attn-core cannot panic
  capi         Use the C library from C, C++, CMake and Python; run it under sanitizers
  vectors      Choose the conformance cases to commit";

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
    Conformance(conformance::Args),
    /// Build the C library for distribution, in target/dist.
    Dist(dist::Args),
    /// Run the CI steps.
    #[command(hide = true)]
    Ci(ci::Args),
    /// Check the house rules that the compiler does not check.
    #[command(hide = true)]
    Tidy(tidy::Args),
    /// Compare the libraries' public interface with the committed text.
    #[command(hide = true)]
    Api(api::Args),
    /// Compare random calls with float64, and check the documented bound on the error.
    #[command(hide = true)]
    Random(random::Args),
    /// Run attn-core on emulated microcontrollers, compare with the host, report flash, RAM, stack and instructions.
    #[command(hide = true)]
    Embedded(embedded::Args),
    /// Run the tests of the AMX kernel on an emulated processor.
    #[command(hide = true)]
    Emulated(emulated::Args),
    /// Prove from machine code that attn-core cannot panic.
    #[command(hide = true)]
    NoPanic(no_panic::Args),
    /// Use the C library from C, C++, CMake and Python; run it under sanitizers.
    #[command(hide = true)]
    Capi(capi::Args),
    /// Choose the conformance cases to commit.
    #[command(hide = true)]
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_command_is_in_one_of_the_two_lists() {
        let command = Cli::command();
        let hidden: Vec<&str> =
            command.get_subcommands().filter(|of| of.is_hide_set()).map(clap::Command::get_name).collect();
        let named: Vec<&str> =
            FOR_CONTRIBUTORS.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(named, hidden);
    }
}
