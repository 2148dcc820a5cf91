//! Starts [`xtask::run`].

use std::process::ExitCode;

fn main() -> ExitCode {
    xtask::run()
}
