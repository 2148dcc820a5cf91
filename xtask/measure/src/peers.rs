//! `cargo xtask peers`: sets up the libraries that `cargo xtask bench --peers` measures beside ours, in `target/peers`.
//!
//! Rust libraries are the project in `xtask/peers`, built twice: as `cargo build --release` does it, and for this
//! processor with the libraries' own switches. Python ones are installed into a virtual environment, one after another,
//! so that one that cannot be had leaves the others alone. Nothing is installed without `--install`, and nothing
//! outside of `target`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build and install missing libraries; without this option, only list them.
    #[arg(long)]
    install: bool,
    /// Only these libraries: rust, python.
    #[arg(value_parser = ["rust", "python"])]
    only: Vec<String>,
}

/// A build of the Rust peers.
pub(crate) struct Build {
    /// Its folder in `target/peers`, and what names of its libraries end with.
    pub(crate) name: &'static str,
    /// Features of `xtask/peers`.
    features: &'static [&'static str],
    /// `RUSTFLAGS`.
    flags: &'static str,
}

/// As it comes, and at its best.
pub(crate) const BUILDS: [Build; 2] = [
    Build { name: "stock", features: &[], flags: "" },
    Build { name: "native", features: &["--features", "best"], flags: "-C target-cpu=native" },
];

/// What the Python driver can use.
const PACKAGES: [&str; 6] = ["numpy", "onnx", "onnxruntime", "openvino", "jax", "torch"];

impl Build {
    /// The program.
    pub(crate) fn program(&self) -> PathBuf {
        let program = format!("attn-peers{}", std::env::consts::EXE_SUFFIX);
        folder().join(self.name).join("release").join(program)
    }
}

/// Where everything goes.
fn folder() -> PathBuf {
    Path::new("target").join("peers")
}

/// The Python of the virtual environment.
pub(crate) fn python() -> PathBuf {
    let program = if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" };
    folder().join("venv").join(program)
}

pub(crate) fn run(args: Args) -> ExitCode {
    let wants = |what: &str| args.only.is_empty() || args.only.iter().any(|only| only == what);
    let mut missing = Vec::new();
    if wants("rust") {
        for build in &BUILDS {
            if args.install {
                println!("building the Rust peers, {} {}", build.name, build.flags);
                if let Err(why) = build_rust(build) {
                    println!("{why}");
                }
            }
            report(&format!("Rust peers, {}", build.name), &build.program(), &mut missing);
        }
    }
    if wants("python") {
        if args.install {
            for why in install_python() {
                println!("{why}");
            }
        }
        report("Python", &python(), &mut missing);
        for package in PACKAGES.iter().filter(|package| !imports(package)) {
            println!("  no {package}");
        }
    }
    if missing.is_empty() {
        println!("`cargo xtask bench --peers` measures them beside ours.");
        return ExitCode::SUCCESS;
    }
    println!("missing: {}{}", missing.join(", "), if args.install { "" } else { "; --install builds what can be had" });
    if args.install { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Says whether something is there.
fn report(what: &str, path: &Path, missing: &mut Vec<String>) {
    if path.exists() {
        println!("{what}: {}", path.display());
    } else {
        missing.push(what.to_string());
    }
}

fn build_rust(build: &Build) -> Result<(), String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--release", "--locked", "--manifest-path", "xtask/peers/Cargo.toml", "--target-dir"]);
    command.arg(folder().join(build.name)).args(build.features);
    // Flags of the caller's own would make both builds something else than they are called.
    command.env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", build.flags);
    done(command, "the Rust peers")
}

/// Makes the environment and installs each package by itself; returns what went wrong.
fn install_python() -> Vec<String> {
    let mut failures = Vec::new();
    if !python().exists() {
        let mut command = Command::new("python3");
        command.args(["-m", "venv"]).arg(folder().join("venv"));
        if let Err(why) = done(command, "a virtual environment") {
            return vec![why];
        }
    }
    for package in PACKAGES.iter().filter(|package| !imports(package)) {
        let mut command = Command::new(python());
        command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]);
        failures.extend(done(command, package).err());
    }
    failures
}

fn imports(package: &str) -> bool {
    let mut command = Command::new(python());
    command.args(["-c", &format!("import importlib.util as u, sys; sys.exit(not u.find_spec('{package}'))")]);
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn done(mut command: Command, what: &str) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{what}: {status}")),
        Err(error) => Err(format!("{what}: cannot start {}: {error}", command.get_program().to_string_lossy())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_do_not_share_a_folder_and_only_one_is_for_this_processor() {
        let [stock, native] = &BUILDS;
        assert_ne!(stock.program(), native.program());
        assert!(stock.flags.is_empty() && native.flags.contains("native"));
        for path in [stock.program(), native.program(), python()] {
            assert!(path.starts_with("target/peers"), "{}", path.display());
        }
    }

    #[test]
    fn what_does_not_start_is_named() {
        let error = done(Command::new("/no/such/program"), "a peer").unwrap_err();
        assert!(error.contains("a peer") && error.contains("/no/such/program"));
    }

    #[test]
    fn the_workspace_does_not_build_them() {
        let root = include_str!("../../../Cargo.lock");
        assert!(!root.contains("name = \"candle-core\"") && !root.contains("name = \"burn-flex\""));
        assert!(include_str!("../../peers/Cargo.toml").contains("\n[workspace]"));
    }
}
