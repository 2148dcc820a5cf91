//! `cargo xtask capi`: the C library used as its users use it.
//!
//! Builds `target/dist` and compiles the examples of `attn-capi/examples` against it: with pkg-config, with CMake, from
//! Python, statically, and over the ranks of an MPI job. The program of wrong arguments
//! (`attn-capi/tests/c/errors.c`) runs under AddressSanitizer, together with a library that is instrumented as well,
//! and under Valgrind.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::ValueEnum;

use crate::dist::{self, succeed, write};
use crate::mpi::mpirun;
use xtask::root::root;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checks to run.
    #[arg(required = true)]
    what: Vec<What>,
}

/// Ways to use the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The examples in C and C++, built with pkg-config; the one in C also with the static library.
    Examples,
    /// The examples in C and C++, built with CMake.
    Cmake,
    /// The example in Python, with NumPy.
    Python,
    /// The example over the ranks of an MPI job, by mpicc and mpirun.
    Mpi,
    /// Wrong arguments under AddressSanitizer.
    Asan,
    /// Wrong arguments under Valgrind.
    Valgrind,
    /// The cost of a call before it computes.
    Overhead,
}

pub(crate) fn run(args: Args) -> ExitCode {
    let all = dist::build().and_then(|dist| {
        let at = Places { dist, source: root().join("attn-capi"), out: root().join("target/ci/capi") };
        std::fs::create_dir_all(&at.out).map_err(|error| error.to_string())?;
        args.what.iter().try_for_each(|what| {
            println!("== {}", format!("{what:?}").to_lowercase());
            match what {
                What::Examples => at.examples(),
                What::Cmake => at.cmake(),
                What::Python => at.python(),
                What::Mpi => at.mpi(),
                What::Asan => at.asan(),
                What::Valgrind => at.valgrind(),
                What::Overhead => at.overhead(),
            }
        })
    });
    match all {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("capi: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Warnings are errors in what users copy.
const C: &[&str] = &["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"];
/// Missing initialisers are what C90 knows instead of designated ones.
const C90: &[&str] =
    &["-std=c90", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"];
const CXX: &[&str] = &["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"];

/// Runs a program that must end by an abort.
fn aborts(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    // No status: a signal ended it. Its name is part of the text of the status on every system that has signals.
    if output.status.code().is_some() || !output.status.to_string().contains("SIGABRT") {
        return Err(format!("{command:?}: {}, where an abort is promised: {said}", output.status));
    }
    println!("an exception from a callback: {}", said.lines().last().unwrap_or_default());
    Ok(())
}

struct Places {
    dist: PathBuf,
    source: PathBuf,
    out: PathBuf,
}

impl Places {
    /// What pkg-config says of a package.
    fn pkg_config(&self, package: &str) -> Result<Vec<String>, String> {
        let output = Command::new("pkg-config")
            .args(["--cflags", "--libs", package])
            .env("PKG_CONFIG_PATH", self.dist.join("lib/pkgconfig"))
            .output()
            .map_err(|error| format!("pkg-config: {error}"))?;
        if !output.status.success() {
            return Err(format!("pkg-config: {}", String::from_utf8_lossy(&output.stderr)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect())
    }

    /// Compiles a program.
    fn compile(
        &self,
        compiler: &str,
        flags: &[&str],
        from: &str,
        name: &str,
        link: &[String],
    ) -> Result<PathBuf, String> {
        let program = self.out.join(name);
        let mut command = Command::new(env::var(compiler.to_uppercase()).unwrap_or_else(|_| compiler.to_owned()));
        command.args(flags).arg(self.source.join(from)).arg("-o").arg(&program).args(link);
        succeed(&mut command)?;
        Ok(program)
    }

    /// A program that finds the shared library, and has as many threads on any machine.
    fn shared(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env("LD_LIBRARY_PATH", self.dist.join("lib")).env("RAYON_NUM_THREADS", "3");
        command
    }

    fn examples(&self) -> Result<(), String> {
        let mut link = self.pkg_config("attn")?;
        link.push("-lm".into());
        for name in ["attention", "decode"] {
            let c = self.compile("cc", C, &format!("examples/{name}.c"), &format!("{name}-c"), &link)?;
            succeed(&mut self.shared(c))?;
            let cxx = self.compile("c++", CXX, &format!("examples/{name}.cpp"), &format!("{name}-cxx"), &link)?;
            succeed(&mut self.shared(cxx))?;
        }
        for name in ["gradients", "packed"] {
            let program = self.compile("cc", C, &format!("examples/{name}.c"), &format!("{name}-c"), &link)?;
            succeed(&mut self.shared(program))?;
        }
        let program =
            self.compile("cc", C, "examples/attention.c", "attention-static", &self.pkg_config("attn-static")?)?;
        succeed(&mut Command::new(program))?;
        let c90 = self.compile("cc", C90, "tests/c/c90.c", "c90", &link)?;
        succeed(&mut self.shared(c90))?;
        let cxx = self.compile("c++", &[CXX, &["-x", "c++"]].concat(), "tests/c/c90.c", "c90-cxx", &link);
        succeed(&mut self.shared(cxx?))?;
        let throws = self.compile("c++", CXX, "tests/c/throws.cpp", "throws", &link)?;
        aborts(&mut self.shared(throws))
    }

    fn cmake(&self) -> Result<(), String> {
        let (source, build) = (self.out.join("cmake"), self.out.join("cmake/build"));
        std::fs::create_dir_all(&source).map_err(|error| error.to_string())?;
        let examples = self.source.join("examples");
        let lists = format!(
            "cmake_minimum_required(VERSION 3.18)\nproject(user C CXX)\nset(CMAKE_CXX_STANDARD 17)\n\
             find_package(attn {version} REQUIRED)\n\
             add_executable(c {examples}/attention.c)\ntarget_link_libraries(c attn::attn m)\n\
             add_executable(cxx {examples}/attention.cpp)\ntarget_link_libraries(cxx attn::attn)\n\
             add_executable(static {examples}/attention.c)\ntarget_link_libraries(static attn::attn_static m)\n",
            version = env!("CARGO_PKG_VERSION"),
            examples = examples.display(),
        );
        write(&source.join("CMakeLists.txt"), &lists)?;
        let prefix = format!("-DCMAKE_PREFIX_PATH={}", self.dist.display());
        succeed(Command::new("cmake").arg("-S").arg(&source).arg("-B").arg(&build).arg(prefix))?;
        succeed(Command::new("cmake").arg("--build").arg(&build))?;
        // CMake writes the library's folder into the programs; nothing is set here.
        ["c", "cxx", "static"].iter().try_for_each(|name| succeed(&mut Command::new(build.join(name))))
    }

    fn python(&self) -> Result<(), String> {
        let mut command = self.shared("python3");
        command.arg(self.source.join("examples/attn_ctypes.py")).arg(self.dist.join("lib/libattn.so"));
        succeed(&mut command)
    }

    fn mpi(&self) -> Result<(), String> {
        let mut link = self.pkg_config("attn")?;
        link.push("-lm".into());
        let program = self.compile("mpicc", C, "examples/ranks.c", "ranks", &link)?;
        for ranks in 1..=4 {
            succeed(mpirun(ranks)?.env("LD_LIBRARY_PATH", self.dist.join("lib")).arg(&program))?;
        }
        Ok(())
    }

    fn asan(&self) -> Result<(), String> {
        let (target, folder) = ("x86_64-unknown-linux-gnu", root().join("target/ci/asan"));
        let mut command = Command::new("rustup");
        command.args(["run", "nightly", "cargo", "build", "--quiet", "--lib", "--target", target]).current_dir(root());
        // With attn-testing the kernels' dependencies have the features that they have in the step `asan` of CI.
        command.args(["-p", "attn-capi", "-p", "attn-testing"]);
        command.env("RUSTFLAGS", "-Zsanitizer=address").env("CARGO_TARGET_DIR", &folder);
        command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
        succeed(&mut command)?;
        let archive = folder.join(target).join("debug/libattn.a").to_string_lossy().into_owned();
        let mut link = self.pkg_config("attn-static")?;
        link.iter_mut().filter(|flag| flag.ends_with("libattn.a")).for_each(|flag| flag.clone_from(&archive));
        let flags: Vec<_> =
            C.iter().copied().chain(["-fsanitize=address,undefined", "-fno-sanitize-recover"]).collect();
        let program = self.compile("cc", &flags, "tests/c/errors.c", "errors-asan", &link)?;
        // The pool's threads live as long as the process, so that what they hold is no leak.
        succeed(Command::new(program).env("RAYON_NUM_THREADS", "3"))
    }

    fn valgrind(&self) -> Result<(), String> {
        let program = self.compile("cc", C, "tests/c/errors.c", "errors", &self.pkg_config("attn-static")?)?;
        let mut command = Command::new("valgrind");
        command.args([
            "--quiet",
            "--error-exitcode=9",
            "--leak-check=full",
            "--show-leak-kinds=definite",
            "--errors-for-leak-kinds=definite",
        ]);
        succeed(command.arg(program).env("RAYON_NUM_THREADS", "3"))
    }

    fn overhead(&self) -> Result<(), String> {
        let link = self.pkg_config("attn")?;
        let program = self.compile("cc", C, "examples/overhead.c", "overhead", &link)?;
        succeed(&mut self.shared(program))
    }
}
