//! `cargo xtask python`: the Python package as its users get it.
//!
//! Builds the wheel with maturin, installs it in an environment that has nothing else and imports it there, then
//! installs it beside NumPy (and torch) and runs the tests of `attn-python/tests` against the installed package, or
//! `attn-mpi/examples/ring.py` over the ranks of an MPI job.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::ValueEnum;

use crate::dist::succeed;
use crate::mpi::mpirun;
use crate::need::VENV;
use xtask::root::root;

/// Bytes of a wheel at most: it is downloaded by everybody who tries it.
const WHEEL_BYTES: u64 = 5 << 20;
/// Milliseconds that `import attn` may add to the interpreter's start.
const IMPORT_MS: u64 = 50;
/// Tests that need torch, or run more with it.
const TORCH: [&str; 9] = [
    "test_docs.py",
    "test_examples.py",
    "test_jax.py",
    "test_migrating.py",
    "test_random_gradients.py",
    "test_short_way.py",
    "test_torch.py",
    "test_training.py",
    "test_transformers.py",
];

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The tests to run.
    #[arg(required = true)]
    what: Vec<What>,
}

/// Libraries whose arrays the package takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The wheel in an empty environment, and the tests on NumPy arrays.
    Numpy,
    /// The tests on tensors of torch.
    Torch,
    /// The example over the ranks of an MPI job, by mpi4py.
    Mpi,
}

pub(crate) fn run(args: Args) -> ExitCode {
    let all = wheel().and_then(|wheel| {
        args.what.iter().try_for_each(|what| match what {
            What::Numpy => {
                clean(&wheel).and_then(|()| tests(&wheel, |name| name == "test_docs.py" || !TORCH.contains(&name)))
            }
            What::Torch => tests(&wheel, |name| TORCH.contains(&name)),
            What::Mpi => ranks(&wheel),
        })
    });
    match all {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("python: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The environment's Python.
fn python() -> Command {
    Command::new(root().join(VENV).join("bin/python"))
}

/// Builds the wheel.
fn wheel() -> Result<PathBuf, String> {
    let folder = root().join("target/ci/python-wheel");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
    }
    let mut command = python();
    command.args(["-m", "maturin", "build", "--release", "--locked", "--out"]).arg(&folder);
    command.current_dir(root().join("attn-python")).env("CARGO_TARGET_DIR", root().join("target/ci/python-build"));
    succeed(&mut command)?;
    let mut files = std::fs::read_dir(&folder).map_err(|error| error.to_string())?;
    let wheel = files.next().ok_or("maturin made no wheel")?.map_err(|error| error.to_string())?.path();
    let bytes = wheel.metadata().map_err(|error| error.to_string())?.len();
    println!("{}: {bytes} bytes", wheel.display());
    if bytes > WHEEL_BYTES {
        Err(format!("the wheel has {bytes} bytes, at most {WHEEL_BYTES} are allowed"))
    } else {
        Ok(wheel)
    }
}

/// Installs the wheel where nothing else is, and imports it.
fn clean(wheel: &Path) -> Result<(), String> {
    let venv = root().join("target/ci/python-clean");
    succeed(python().args(["-m", "venv", "--clear", "--without-pip"]).arg(&venv))?;
    let clean = venv.join("bin/python");
    succeed(
        python().args(["-m", "pip", "--python"]).arg(&clean).args(["install", "--quiet", "--no-index"]).arg(wheel),
    )?;
    // The shortest of several starts: others may use the machine.
    let program = format!(
        "import subprocess, sys\n\
         once = 'import time; t = time.perf_counter(); import attn; print(time.perf_counter() - t)'\n\
         run = lambda: float(subprocess.check_output([sys.executable, '-c', once]))\n\
         best = min(run() for _ in range(10)) * 1e3\n\
         import attn\n\
         print(f'attn {{attn.__version__}}: import {{best:.1f}} ms, levels', *attn.levels())\n\
         sys.exit(f'import takes {{best:.1f}} ms, at most {IMPORT_MS} are allowed' if best > {IMPORT_MS} else 0)"
    );
    succeed(Command::new(clean).args(["-c", &program]).current_dir(&venv))
}

/// Installs the wheel beside the libraries.
fn install(wheel: &Path) -> Result<(), String> {
    let install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall"];
    succeed(python().args(install).arg(wheel))
}

/// Runs the ring over NumPy arrays on 1 to 4 ranks; it compares itself with one process.
fn ranks(wheel: &Path) -> Result<(), String> {
    install(wheel)?;
    let ring = root().join("attn-mpi/examples/ring.py");
    (1..=4).try_for_each(|ranks| {
        let mut command = mpirun(ranks)?;
        command.arg(python().get_program()).args(["-m", "mpi4py"]).arg(&ring);
        succeed(command.current_dir(root().join("target/ci")))
    })
}

/// Installs the wheel beside the libraries, and runs the chosen tests.
fn tests(wheel: &Path, chosen: impl Fn(&str) -> bool) -> Result<(), String> {
    install(wheel)?;
    let folder = root().join("attn-python/tests");
    let mut files = Vec::new();
    for file in std::fs::read_dir(&folder).map_err(|error| error.to_string())? {
        let path = file.map_err(|error| error.to_string())?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("test_") && name.ends_with(".py") && chosen(&name) {
            files.push(path);
        }
    }
    files.sort();
    let mut command = python();
    command.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]).args(files);
    // Not in `attn-python`, whose sources must not be imported in the place of the wheel.
    succeed(command.current_dir(root().join("target/ci")).env("PYTHONDONTWRITEBYTECODE", "1"))
}
