//! `cargo xtask api`: the public interface of each published library as text, committed beside it, so that a change of
//! the interface is seen in review and never happens by accident.
//!
//! cargo-public-api writes the text, from what nightly's rustdoc knows. All features are on; blanket and auto
//! implementations are left out.

use std::fs;
use std::process::{Command, ExitCode};

use xtask::root::root;

/// The libraries, whose text is `CRATE/public-api.txt`. (The C interface is `attn.h`.)
const CRATES: &[&str] = &["attn-core", "attn-layers", "attn-simd", "attn-parallel"];

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the texts instead of comparing them.
    #[arg(long)]
    fix: bool,
}

pub(crate) fn run(args: Args) -> ExitCode {
    let mut fine = true;
    for name in CRATES {
        let path = root().join(name).join("public-api.txt");
        let found = match text(name) {
            Ok(found) => found,
            Err(message) => {
                eprintln!("api: {name}: {message}");
                return ExitCode::FAILURE;
            }
        };
        if args.fix {
            if let Err(error) = fs::write(&path, &found) {
                eprintln!("api: {}: {error}", path.display());
                return ExitCode::FAILURE;
            }
            println!("{name}: {} lines", found.lines().count());
            continue;
        }
        let differing = differences(&fs::read_to_string(&path).unwrap_or_default(), &found);
        println!("{name}: {} lines, {} differ", found.lines().count(), differing.len());
        differing.iter().for_each(|line| println!("    {line}"));
        fine &= differing.is_empty();
    }
    if !fine {
        println!("If that is meant: cargo xtask api --fix, and a line in CHANGELOG.md.");
    }
    if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What cargo-public-api says.
fn text(name: &str) -> Result<String, String> {
    let output = Command::new("rustup")
        .args(["run", "nightly", "cargo", "public-api", "--all-features", "-sss", "--color", "never", "-p", name])
        .arg("--target-dir")
        .arg(root().join("target/ci/api"))
        .current_dir(root())
        .env_remove("CARGO")
        .env_remove("RUSTUP_TOOLCHAIN")
        .output()
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Lines that are gone, and lines that are new, in the order of the texts.
fn differences(committed: &str, found: &str) -> Vec<String> {
    let only = |here: &str, there: &str, sign: char| {
        let there: std::collections::BTreeSet<&str> = there.lines().collect();
        here.lines().filter(|line| !there.contains(line)).map(|line| format!("{sign} {line}")).collect::<Vec<_>>()
    };
    let mut all = only(committed, found, '-');
    all.extend(only(found, committed, '+'));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_and_what_is_new_is_told() {
        assert_eq!(differences("a\nb\nc\n", "a\nc\nd\n"), ["- b", "+ d"]);
        assert_eq!(differences("a\n", "a\n"), Vec::<String>::new());
    }
}
