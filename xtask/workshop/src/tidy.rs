//! `cargo xtask tidy`: the house rules that neither the compiler nor clippy checks.
//!
//! [`rules`] holds them, [`code`] the scanner that keeps prose out of them, [`copies`] the files that must be the same
//! in several places, [`circles`] which file imports which. Looks at what git tracks and at new files that it does not
//! ignore.

mod circles;
mod code;
mod copies;
mod rules;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use circles::Graph;
use rules::{Finding, Source, TOTAL_BYTES};
use xtask::root::root;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Renew copies that differ from their original.
    #[arg(long)]
    fix: bool,
    /// Print which file of each crate imports which, floor by floor.
    #[arg(long)]
    graph: bool,
}

pub(crate) fn run(args: Args) -> ExitCode {
    let root = root();
    if args.fix
        && let Err(error) = copies::renew(&root)
    {
        eprintln!("tidy: {error}");
        return ExitCode::FAILURE;
    }
    if args.graph {
        return match graphs(&root) {
            Ok(graphs) => {
                for (krate, graph) in graphs {
                    println!("{krate}");
                    graph.floors().iter().for_each(|line| println!("{line}"));
                }
                ExitCode::SUCCESS
            }
            Err(message) => {
                eprintln!("tidy: {message}");
                ExitCode::FAILURE
            }
        };
    }
    let found = match check(&root) {
        Ok(found) => found,
        Err(message) => {
            eprintln!("tidy: {message}");
            return ExitCode::FAILURE;
        }
    };
    for Finding { path, line, message, warning } in &found {
        let kind = if *warning { "warning: " } else { "" };
        println!("{path}:{line}: {kind}{message}");
    }
    let warnings = found.iter().filter(|finding| finding.warning).count();
    println!("tidy: {} broken rules, {warnings} warnings", found.len() - warnings);
    if warnings == found.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Everything that is wrong in the workspace.
fn check(root: &Path) -> Result<Vec<Finding>, String> {
    let files = files(root)?;
    let (mut found, mut total) = (Vec::new(), 0);
    for path in &files {
        // A file that git knows and the work tree lacks was deleted and not committed yet.
        let Ok(bytes) = fs::read(root.join(path)) else { continue };
        total += bytes.len();
        found.extend(rules::check(&Source { path, bytes: &bytes }));
    }
    let whole = |path: &str, message: String| Finding { path: path.to_owned(), line: 0, message, warning: false };
    if total > TOTAL_BYTES {
        found.push(whole(".", format!("{total} bytes in all; at most {TOTAL_BYTES} are kept in the repository")));
    }
    for (original, copy) in copies::stale(root) {
        found.push(whole(copy, format!("differs from {original} (cargo xtask tidy --fix)")));
    }
    for subject in subjects(root)?.iter().filter(|subject| subject.chars().count() > SUBJECT) {
        let columns = subject.chars().count();
        found.push(whole("git log", format!("a subject of {columns} columns, {SUBJECT} are the limit: {subject}")));
    }
    for (_, graph) in graphs(root)? {
        let circles = graph.circles().into_iter();
        found.extend(circles.map(|(path, message)| Finding { path, line: 0, message, warning: false }));
    }
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap_or_default();
    for leaf in rules::UNSAFE_LEAVES.iter().filter(|leaf| !architecture.contains(**leaf)) {
        found.push(whole("ARCHITECTURE.md", format!("does not name {leaf}, which may hold `unsafe`")));
    }
    Ok(found)
}

/// The imports of every crate of the repository, by its folder.
fn graphs(root: &Path) -> Result<BTreeMap<String, Graph>, String> {
    let mut crates: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for path in files(root)?.into_iter().filter(|path| path.ends_with(".rs")) {
        let Some((krate, below)) = path.split_once("/src/") else { continue };
        if let Ok(text) = fs::read_to_string(root.join(&path))
            && !below.starts_with("bin/")
        {
            crates.entry(krate.to_owned()).or_default().push((path, text));
        }
    }
    let graph = |files: Vec<(String, String)>| Graph::of(files.iter().map(|(path, text)| (&**path, &**text)));
    Ok(crates.into_iter().map(|(krate, files)| (krate, graph(files))).collect())
}

/// Columns of the first line of a commit's message; what takes more belongs below it.
const SUBJECT: usize = 72;

/// The first lines of commits since the rule holds.
fn subjects(root: &Path) -> Result<Vec<String>, String> {
    let text = git(root, &["log", "--since=2026-11-23T22:30:00Z", "--format=%s"])?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// What a command of git writes.
fn git(root: &Path, args: &[&str]) -> Result<String, String> {
    let output = Command::new("git")
        .args(args)
        .current_dir(root)
        .output()
        .map_err(|error| format!("git could not be started: {error}"))?;
    if !output.status.success() {
        return Err(format!("git {}: {}", args[0], String::from_utf8_lossy(&output.stderr).trim()));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("what git {} writes is not UTF-8", args[0]))
}

/// The files of the repository, by git.
fn files(root: &Path) -> Result<Vec<String>, String> {
    let text = git(root, &["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
    let files: Vec<String> = text.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    if files.is_empty() { Err("git lists no file here".to_owned()) } else { Ok(files) }
}
