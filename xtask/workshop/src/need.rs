//! The needs of a step beyond the compiler that runs it: a check for each, and how to install it.
//!
//! Probes look at files and programs, never at the network. Installing is a separate act (`--install`, which `.ci/run`
//! asks for); where it fails, the steps that need the thing are skipped by name and counted.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use xtask::root::root;

/// The oldest compiler that the libraries promise to build with. A test holds it equal to `rust-version` in
/// `Cargo.toml`.
pub(crate) const MSRV: &str = "1.89";

/// The toolchain that Miri and the sanitizers come with.
pub(crate) const NIGHTLY: &str = "nightly";

/// The distribution's packages that can build a core library, for machines that rustup's server is out of reach of.
const DISTRIBUTION: &str = "rustc-web cargo-web rust-web-src";

/// Their compiler.
pub(crate) const DISTRIBUTION_RUSTC: &str = "/usr/bin/rustc";

/// Installs the core library of target `$1`, or else what builds it.
const BARE_SCRIPT: &str = "rustup target add \"$1\" || \
    { apt-get update -q && apt-get install -y -q --no-install-recommends rustc-web cargo-web rust-web-src; }";

/// Builds the emulator of a processor with AMX, in `target/ci`, and starts it once: its processor has to name them.
///
/// Then mends an instruction: its VCVTNE2PS2BF16 takes the upper half of the result from behind the end of the first
/// operand. Only that file is compiled again.
const EMULATOR_SCRIPT: &str = r"set -e
    export EMULATOR_DIR=$PWD/target/ci/amx-emulator
    mkdir -p $EMULATOR_DIR && cd $EMULATOR_DIR && rm -f mended
    printf '#!/bin/busybox sh\nexec /bin/busybox grep -m 1 -o amx_bf16 /proc/cpuinfo\n' > probe && chmod +x probe
    cd ../../.. && ../shared/amx-emulator/run.sh -t 200 $EMULATOR_DIR/probe && cd $EMULATOR_DIR/bochs
    sed -i 's/to_bfloat16(op1\.vmm32u(n));/to_bfloat16(op1.vmm32u(n - DWORD_ELEMENTS(len)));/' cpu/avx/avx512_bf16.cc
    make -s > ../mend.log 2>&1 || { tail -n 5 ../mend.log >&2; exit 1; }
    touch ../mended";

/// The virtual environment of the steps that test the Python package.
pub(crate) const VENV: &str = "target/ci/python";

/// Installs the module `$1` in it. Debian has `venv` in a package of its own.
const VENV_SCRIPT: &str = "v=target/ci/python; test -x $v/bin/pip || python3 -m venv $v || \
    { apt-get install -y -q --no-install-recommends python3-venv && python3 -m venv $v; } && \
    $v/bin/pip install --quiet \"$1\"";

/// What the emulator is built with, and what its disk is made of: Debian packages.
const EMULATOR_PACKAGES: [&str; 8] =
    ["g++", "make", "xz-utils", "patch", "xorriso", "isolinux", "syslinux-common", "cpio"];

/// What of these packages is needed whenever it starts.
const EMULATOR_DISK: [&str; 2] = ["/usr/lib/ISOLINUX/isolinux.bin", "/usr/lib/syslinux/modules/bios/ldlinux.c32"];

/// One thing that a step needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A component of the default toolchain, and the file that shows it: `clippy`.
    Component(&'static str, &'static str),
    /// The standard library of the default toolchain for a target.
    Target(&'static str),
    /// The core library for a bare-metal target: rustup's, or the sources that the distribution's compiler builds it
    /// from.
    Bare(&'static str),
    /// A toolchain by rustup's name.
    Toolchain(&'static str),
    /// A component of a toolchain, and the file in its sysroot that shows it.
    ComponentOf(&'static str, &'static str, &'static str),
    /// A program, and the Debian package that holds it.
    Program(&'static str, &'static str),
    /// A header that this compiler finds, and the Debian package that holds it.
    Header(&'static str, &'static str, &'static str),
    /// A shared library, by how its file's name begins, and the Debian package that holds it.
    Library(&'static str, &'static str),
    /// A cargo command of this version, which `cargo install` builds.
    CargoCommand(&'static str, &'static str),
    /// A module that `python3` can import, and that pip installs by the same name.
    PythonModule(&'static str),
    /// A module that the virtual environment in `target/ci/python` can import, and that pip installs by the same name.
    Venv(&'static str),
    /// The packages that a workspace of its own is locked to, by its manifest: `cargo fetch` gets them from the
    /// registry.
    Packages(&'static str),
    /// A folder, by its path from the workspace, that not every checkout has beside it.
    Folder(&'static str),
    /// The emulator of a processor with AMX, built by `../shared/amx-emulator/run.sh` into `target/ci`, started once.
    AmxEmulator,
    /// A host of this architecture.
    Arch(&'static str),
    /// Linux, whose emulators and sanitizers the step uses.
    Linux,
}

impl Need {
    /// What to say where it is missing.
    pub(crate) fn missing(self) -> String {
        match self {
            Self::Component(name, _) => format!("component {name} is not installed (rustup component add {name})"),
            Self::Target(name) => format!("target {name} is not installed (rustup target add {name})"),
            Self::Bare(name) => {
                format!("target {name} is not installed (rustup target add {name}; or Debian packages {DISTRIBUTION})")
            }
            Self::Toolchain(name) => format!("toolchain {name} is not installed (rustup toolchain install {name})"),
            Self::ComponentOf(toolchain, name, _) => {
                format!(
                    "component {name} of {toolchain} is not installed (rustup component add --toolchain {toolchain} {name})"
                )
            }
            Self::Program(name, package) => format!("program {name} is not installed (Debian package {package})"),
            Self::Header(compiler, name, package) => {
                format!("{compiler} does not find {name} (Debian package {package})")
            }
            Self::Library(name, package) => format!("library {name} is not installed (Debian package {package})"),
            Self::CargoCommand(name, version) => {
                format!("{name} {version} is not installed (cargo install --locked {name}@{version})")
            }
            Self::PythonModule(name) => format!("python3 has no module {name} (python3 -m pip install {name})"),
            Self::Venv(name) => {
                format!("{VENV} has no module {name} (python3 -m venv {VENV}; {VENV}/bin/pip install {name})")
            }
            Self::Packages(manifest) => {
                format!("packages of {manifest} are not here ({})", fetch(manifest).join(" "))
            }
            Self::Folder(path) => format!("there is no folder {path}"),
            Self::AmxEmulator => format!(
                "the emulator of AMX is not built (Debian packages {}; EMULATOR_DIR=target/ci/amx-emulator \
                 ../shared/amx-emulator/run.sh)",
                EMULATOR_PACKAGES.join(" ")
            ),
            Self::Arch(arch) => format!("this is not an {arch} machine"),
            Self::Linux => "this is not Linux".to_owned(),
        }
    }

    /// Whether it is there.
    pub(crate) fn is_met(self) -> bool {
        match self {
            Self::Component(_, file) => sysroot(None).is_some_and(|root| root.join(file).exists()),
            Self::Target(name) => {
                sysroot(None).is_some_and(|root| root.join("lib/rustlib").join(name).join("lib").is_dir())
            }
            Self::Bare(name) => Self::Target(name).is_met() || has_distribution_sources(),
            Self::Toolchain(name) => sysroot(Some(name)).is_some_and(|root| root.join("bin").is_dir()),
            Self::ComponentOf(toolchain, _, file) => {
                sysroot(Some(toolchain)).is_some_and(|root| root.join(file).exists())
            }
            Self::Program(name, _) => is_on_path(name),
            Self::Header(compiler, name, _) => {
                let read = Command::new(compiler).args(["-E", "-include", name, "-x", "c", "/dev/null"]).output();
                read.is_ok_and(|output| output.status.success())
            }
            Self::Library(name, _) => has_library(name),
            Self::CargoCommand(name, version) => {
                let said = Command::new(name).arg("--version").output();
                said.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim().ends_with(version))
            }
            Self::PythonModule(name) => {
                let imported = Command::new("python3").args(["-c", &format!("import {name}")]).output();
                imported.is_ok_and(|output| output.status.success())
            }
            Self::Venv(name) => {
                let mut python = Command::new(root().join(VENV).join("bin/python"));
                python.args(["-c", &format!("import {name}")]).output().is_ok_and(|output| output.status.success())
            }
            Self::Packages(manifest) => {
                // Reads the manifest of each, and downloads nothing.
                let args = ["metadata", "--offline", "--locked", "--format-version", "1", "--manifest-path", manifest];
                let output = Command::new("cargo").args(args).current_dir(root()).output();
                output.is_ok_and(|output| output.status.success())
            }
            Self::Folder(path) => root().join(path).is_dir(),
            Self::AmxEmulator => {
                let built = root().join("target/ci/amx-emulator");
                built.join("mended").is_file()
                    && built.join("bochs/bochs").is_file()
                    && is_on_path("xorriso")
                    && is_on_path("cpio")
                    && EMULATOR_DISK.iter().all(|file| PathBuf::from(file).is_file())
            }
            Self::Arch(arch) => env::consts::ARCH == arch,
            Self::Linux => cfg!(target_os = "linux"),
        }
    }

    /// The commands that install it, in order; none where it cannot be installed.
    pub(crate) fn install(self) -> Vec<Vec<&'static str>> {
        match self {
            Self::Component(name, _) => vec![vec!["rustup", "component", "add", name]],
            Self::Target(name) => vec![vec!["rustup", "target", "add", name]],
            // The packages are large: only where rustup cannot help.
            Self::Bare(name) => vec![vec!["sh", "-c", BARE_SCRIPT, "sh", name]],
            Self::Toolchain(name) => vec![vec!["rustup", "toolchain", "install", "--profile", "minimal", name]],
            Self::ComponentOf(toolchain, name, _) => {
                vec![vec!["rustup", "component", "add", "--toolchain", toolchain, name]]
            }
            Self::Program(_, package) | Self::Header(.., package) | Self::Library(_, package) => vec![
                vec!["apt-get", "update", "-q"],
                vec!["apt-get", "install", "-y", "-q", "--no-install-recommends", package],
            ],
            // Without optimisation: it is built once and waits for rustdoc.
            Self::CargoCommand(name, version) => {
                vec![vec!["cargo", "install", "--locked", "--debug", "--quiet", "--version", version, name]]
            }
            Self::PythonModule(name) => vec![vec!["python3", "-m", "pip", "install", "--quiet", name]],
            Self::Venv(name) => vec![vec!["sh", "-c", VENV_SCRIPT, "sh", name]],
            Self::Packages(manifest) => vec![fetch(manifest)],
            // Where there is nothing to build, nothing is installed for it.
            Self::AmxEmulator if !Self::Folder("../shared/amx-emulator").is_met() => Vec::new(),
            Self::AmxEmulator => {
                let mut packages = vec!["apt-get", "install", "-y", "-q", "--no-install-recommends"];
                packages.extend(EMULATOR_PACKAGES);
                vec![vec!["apt-get", "update", "-q"], packages, vec!["sh", "-c", EMULATOR_SCRIPT]]
            }
            Self::Folder(_) | Self::Arch(_) | Self::Linux => Vec::new(),
        }
    }
}

/// Where a toolchain keeps its files; the default one's without a name. `None` if there is no such toolchain.
pub(crate) fn sysroot(toolchain: Option<&str>) -> Option<PathBuf> {
    let mut command = match toolchain {
        None => Command::new("rustc"),
        Some(name) => {
            let mut command = Command::new("rustup");
            // A probe must not start a download, which newer rustups do for a toolchain they lack.
            command.args(["run", name, "rustc"]).env("RUSTUP_AUTO_INSTALL", "0");
            command
        }
    };
    let output = command.args(["--print", "sysroot"]).output().ok().filter(|output| output.status.success())?;
    let path = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(path.trim()))
}

/// What downloads the packages of a workspace of its own.
fn fetch(manifest: &'static str) -> Vec<&'static str> {
    vec!["cargo", "fetch", "--locked", "--manifest-path", manifest]
}

/// Whether the distribution's compiler and the library's sources are there.
fn has_distribution_sources() -> bool {
    let output = Command::new(DISTRIBUTION_RUSTC).args(["--print", "sysroot"]).output();
    let Some(output) = output.ok().filter(|output| output.status.success()) else { return false };
    let sysroot = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    PathBuf::from(sysroot).join("lib/rustlib/src/rust/library/core").exists()
}

/// Whether a program of this name would be found.
pub(crate) fn is_on_path(program: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// Whether a file whose name begins so is where Debian keeps libraries: `/usr/lib`, its folder of an architecture, or
/// that of a version of LLVM.
fn has_library(name: &str) -> bool {
    let files = |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let begins = |path: PathBuf| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name));
    let dirs = files(PathBuf::from("/usr/lib")).flat_map(|dir| [dir.join("lib"), dir]);
    std::iter::once(PathBuf::from("/usr/lib")).chain(dirs).filter(|dir| dir.is_dir()).flat_map(files).any(begins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_msrv_is_the_one_that_cargo_states() {
        assert_eq!(MSRV, env!("CARGO_PKG_RUST_VERSION"));
    }

    #[test]
    fn what_this_test_runs_on_is_found() {
        assert!(Need::Arch(env::consts::ARCH).is_met());
        assert!(!Need::Arch("pdp11").is_met());
        assert!(!Need::Target("pdp11-unknown-none").is_met());
        assert!(!Need::Program("no-such-program-anywhere", "none").is_met());
        assert!(!Need::Header("no-such-compiler-anywhere", "stdio.h", "none").is_met());
        assert!(!Need::Library("libno-such-library", "none").is_met());
        assert!(Need::Folder("xtask").is_met() && !Need::Folder("no/such/folder").is_met());
        assert!(!Need::Packages("no/such/Cargo.toml").is_met());
    }

    #[test]
    fn what_is_missing_says_how_to_get_it() {
        assert!(!Need::PythonModule("no_such_module_anywhere").is_met());
        for need in [Need::Component("clippy", ""), Need::Target("t"), Need::Toolchain(NIGHTLY)] {
            let command = need.install().concat().join(" ");
            let text = need.missing();
            let named = command.split(' ').next_back().expect("a command");
            assert!(text.contains("rustup") && text.contains(named), "{text}");
        }
    }
}
