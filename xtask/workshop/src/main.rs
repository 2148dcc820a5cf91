//! The commands that build and check the workspace: `cargo xtask <command>` starts this program for those that it
//! lacks.
//!
//! One module per command; each has a struct of arguments, and a `run` that returns an exit code. Nothing here is part
//! of the product. CI runs these commands, and so can anybody.

mod api;
mod capi;
mod ci;
mod conformance;
mod dist;
mod embedded;
mod emulated;
mod install;
mod mpi;
mod need;
mod no_panic;
mod process;
mod programs;
mod python;
mod random;
mod simd;
mod tidy;
mod vectors;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build and check the attn workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the conformance suites on every engine and level; also folders of your own.
    Conformance(conformance::Args),
    /// Build the C library for distribution, in target/dist.
    Dist(dist::Args),
    /// Run the CI steps.
    Ci(ci::Args),
    /// Check the house rules that the compiler does not check.
    Tidy(tidy::Args),
    /// Compare the libraries' public interface with the committed text.
    Api(api::Args),
    /// Compare random calls with float64, and check the documented bound on the error.
    Random(random::Args),
    /// Run attn-core on emulated microcontrollers, compare with the host, report flash, RAM, stack and instructions.
    Embedded(embedded::Args),
    /// Run the tests of kernels on emulated processors: with AMX, or without AVX.
    Emulated(emulated::Args),
    /// Prove from machine code that attn-core cannot panic.
    NoPanic(no_panic::Args),
    /// Use the C library from C, C++, CMake and Python; run it under sanitizers.
    Capi(capi::Args),
    /// Build the Python package's wheel, install it and run its tests.
    Python(python::Args),
    /// Choose the conformance cases to commit.
    Vectors(vectors::Args),
}

fn main() -> ExitCode {
    xtask::reader::end_with_it();
    match Cli::parse().command {
        Command::Conformance(args) => conformance::run(args),
        Command::Random(args) => random::run(args),
        Command::Embedded(args) => embedded::run(args),
        Command::Emulated(args) => emulated::run(args),
        Command::Ci(args) => ci::run(args),
        Command::Api(args) => api::run(args),
        Command::Dist(args) => dist::run(args),
        Command::Capi(args) => capi::run(args),
        Command::Python(args) => python::run(args),
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
    fn the_front_names_every_command() {
        let front = include_str!("../../src/contributors.txt");
        let named = front.lines().skip(1).filter_map(|line| line.split_whitespace().next());
        let mut named: Vec<&str> = named.chain(["conformance", "dist"]).collect();
        let command = Cli::command();
        let mut own: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        named.sort_unstable();
        own.sort_unstable();
        assert_eq!(named, own);
    }
}
