//! Starts [`measure::run`].

use std::process::ExitCode;

fn main() -> ExitCode {
    measure::run()
}
