//! The commands that build and check the workspace: a program of its own, in `xtask/workshop`. It is built when one of
//! them is used, so that a measurement does not wait for it.

use std::ffi::OsString;
use std::process::ExitCode;

use crate::hand_over;

/// What `--help` says after the commands that users see first. The workshop holds these names equal to its own.
pub(crate) const FOR_CONTRIBUTORS: &str = include_str!("workshop.txt");

/// The commands of the workshop that users see among their own.
pub(crate) const FOR_USERS: [&str; 2] = ["conformance", "dist"];

/// Arguments of such a command; --help lists them.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Its arguments; --help lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// The names of the contributors' commands.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    FOR_CONTRIBUTORS.lines().skip(1).filter_map(|line| line.split_whitespace().next())
}

pub(crate) fn named(name: &str, args: Args) -> ExitCode {
    run([OsString::from(name)].into_iter().chain(args.args).collect())
}

/// Runs a command that this program does not have itself: `args` starts with its name.
pub(crate) fn run(args: Vec<OsString>) -> ExitCode {
    let name = args.first().map_or_else(Default::default, |name| name.to_string_lossy());
    if !names().chain(FOR_USERS).any(|known| known == name) {
        eprintln!("error: no command is called '{name}'\n\nFor more information, try '--help'.");
        return ExitCode::from(2);
    }
    hand_over::run("workshop", &args)
}
