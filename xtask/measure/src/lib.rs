//! The commands that measure and draw: `cargo xtask <command>` starts this program for them.
//!
//! One module per command; each has a struct of arguments, and a `run` that returns an exit code. Nothing here is part
//! of the product. All this is a library, so that cargo compiles it while it still compiles the kernels; `main` only
//! starts it.

mod bench;
mod heatmap;
mod levels;
mod peers;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measure and see attention on this machine.
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
    /// Write a page with heat maps, scores, weights and vectors of every token.
    Heatmap(heatmap::Args),
    /// Show the instruction-set levels of this machine and the kernels that would run.
    Levels(levels::Args),
    /// Install the libraries that `bench --peers` compares with, in target/peers.
    Peers(peers::Args),
}

/// Runs the command that the program's arguments name.
#[must_use]
pub fn run() -> ExitCode {
    xtask::reader::end_with_it();
    match Cli::parse().command {
        Command::Bench(args) => bench::run(*args),
        Command::Heatmap(args) => heatmap::run(args),
        Command::Levels(args) => levels::run(args),
        Command::Peers(args) => peers::run(args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// The front has the same commands with the same words, and starts this program for them.
    #[test]
    fn the_front_names_every_command() {
        let front = include_str!("../../src/main.rs");
        let command = Cli::command();
        for own in command.get_subcommands() {
            let (name, about) = (own.get_name(), own.get_about().expect("a line that says what it does"));
            assert!(front.contains(&format!("named(\"measure\", \"{name}\", args)")), "{name}");
            assert!(front.contains(&format!("    /// {about}.\n")), "{name}: {about}");
        }
        assert_eq!(front.matches("named(\"measure\", ").count(), command.get_subcommands().count());
    }
}
