//! `cargo xtask bench`: measures what attention costs.
//!
//! Without an option it measures the cost curve (time and memory against sequence length) and writes the report page;
//! `--input` runs on the tensors of a file instead, `--kernels` on a table of shapes beside the machine's peak and other
//! libraries. What is measured, and how, is `attn-bench`'s; here are the arguments, the progress and where results go.

mod curve;
mod input;
mod kernels;
mod progress;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use attn_bench::memory::Heap;
use attn_simd::Level;
use peak_alloc::PeakAlloc;

/// Counts what the engines allocate. It costs two atomic additions per allocation, and engines allocate nothing per tile.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The counter as the library takes it.
const COUNTED: Heap =
    Heap { current: || HEAP.current_usage(), peak: || HEAP.peak_usage(), reset_peak: || HEAP.reset_peak_usage() };

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Half a minute at most: fewer and shorter sequences, fewer samples.
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// As long as it takes: up to n = 32768, more samples, slow engines included.
    #[arg(long)]
    full: bool,
    /// Run all engines on the layers in this safetensors file, and compare them with the results stored there.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Name of the queries in the file; default: every `NAME.q` that has a `NAME.k` and a `NAME.v`.
    #[arg(long, value_name = "NAME", requires = "input")]
    q: Option<String>,
    /// Name of the keys in the file.
    #[arg(long, value_name = "NAME", requires = "input")]
    k: Option<String>,
    /// Name of the values in the file.
    #[arg(long, value_name = "NAME", requires = "input")]
    v: Option<String>,
    /// Measure single kernels on a table of shapes, beside the machine's peak (`--threads`, default 1).
    #[arg(long, conflicts_with = "input")]
    kernels: bool,
    /// As --kernels, beside other libraries; the Python is `python3` unless --python names another.
    #[arg(long, conflicts_with = "input")]
    peers: bool,
    /// With --kernels: measure torch and onnxruntime on the same inputs, as far as this Python has them.
    #[arg(long, value_name = "PYTHON")]
    python: Option<String>,
    /// With --kernels: only these shapes.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    shapes: Vec<String>,
    /// Write all samples and machine facts to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the report page goes.
    #[arg(long, value_name = "DIR", default_value = "target/attn-bench")]
    report: PathBuf,
    /// Instruction-set level (see `cargo xtask levels`); default: the best of this machine.
    #[arg(long, value_name = "LEVEL")]
    level: Option<String>,
    /// Threads of the parallel engine; default: one per core (with --kernels: 1, which is the single-thread engine).
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
    /// Mask out the keys after each query.
    #[arg(long)]
    causal: bool,
    /// Head dimension of the cost curve.
    #[arg(long, value_name = "D", default_value_t = 64)]
    head_dim: usize,
    /// Heads of the cost curve.
    #[arg(long, value_name = "H", default_value_t = 1)]
    heads: usize,
    /// Longest sequence of the cost curve.
    #[arg(long, value_name = "N")]
    max_n: Option<usize>,
}

/// Why a command ends without a result. The text is for the person who typed it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An argument has no meaning.
    Argument(String),
    /// A file cannot be read or written.
    File(PathBuf, std::io::Error),
    /// Something else that the text names.
    Other(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Argument(text) | Self::Other(text) => f.write_str(text),
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
        }
    }
}

pub(crate) fn run(mut args: Args) -> ExitCode {
    if args.peers && args.python.is_none() {
        args.python = Some("python3".into());
    }
    let result = match &args.input {
        Some(path) => input::run(&args, path),
        None if args.kernels || args.peers => kernels::run(&args),
        None if args.python.is_some() || !args.shapes.is_empty() => {
            Err(Failure::Argument("--python and --shapes go with --kernels or --peers".into()))
        }
        None => curve::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("bench: {failure}");
            ExitCode::FAILURE
        }
    }
}

impl Args {
    /// The level asked for, or the best one.
    fn level(&self) -> Result<Level, Failure> {
        let Some(name) = &self.level else { return Ok(Level::detect()) };
        Level::by_name(name).map_err(|_| {
            let names: Vec<_> = Level::available().map(Level::name).collect();
            Failure::Argument(format!(
                "level `{name}` is unknown or not on this machine, which has: {}",
                names.join(", ")
            ))
        })
    }

    /// The number of threads asked for, or one per core.
    fn threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            n => n,
        }
    }
}

/// What was typed, for reports.
fn command_line() -> String {
    let quote = |arg: String| if arg.contains(' ') { format!("'{arg}'") } else { arg };
    std::iter::once("cargo xtask".to_string()).chain(std::env::args().skip(1).map(quote)).collect::<Vec<_>>().join(" ")
}

/// Writes a file, making its folder where it is missing.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let failed = |error| Failure::File(path.to_path_buf(), error);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    std::fs::write(path, text).map_err(failed)
}
