//! `cargo xtask bench`: measures what attention costs.
//!
//! Without an option it measures the cost curve (time and memory against sequence length) and writes the report page;
//! `--input` runs on the tensors of a file instead, `--kernels` on a table of shapes beside the machine's peak and
//! other libraries, `--decode` on long caches beside a plain read. `--compare` sets a run beside an earlier one. What
//! is measured, and how, is `attn-bench`'s; here are the arguments, the progress and where results go.

mod compare;
mod curve;
mod decode;
mod input;
mod kernels;
mod progress;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use attn_bench::case::Number;
use attn_bench::filter::Filter;
use attn_bench::journal::Journal;
use attn_bench::machine::Machine;
use attn_bench::memory::Heap;
use attn_bench::report::document::Document;
use attn_bench::report::{markdown, terminal};
use attn_simd::Level;
use peak_alloc::PeakAlloc;

/// Counts what the engines allocate. It costs two atomic additions per allocation, and engines allocate nothing per
/// tile.
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
    /// With --kernels: every number type and precision, on the shapes that are of interest there. Rows that need matrix
    /// tiles are named and left out on a level without.
    #[arg(long)]
    types: bool,
    /// As --kernels, beside the libraries that `cargo xtask peers --install` has set up; --python names another Python.
    #[arg(long, conflicts_with = "input")]
    peers: bool,
    /// Measure decoding: one token against long caches of each number type, warm and cold, beside a plain read of as
    /// many bytes (`--threads`, default 1).
    #[arg(long, conflicts_with_all = ["input", "kernels", "peers", "shapes"])]
    decode: bool,
    /// With --kernels or --decode: measure torch and onnxruntime on the same inputs, as far as this Python has them.
    #[arg(long, value_name = "PYTHON")]
    python: Option<String>,
    /// With --kernels: only these shapes.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    shapes: Vec<String>,
    /// Only the cases whose names match, such as `simd/t1/n(1024|2048)$`; --list shows the names.
    #[arg(long, value_name = "REGEX", conflicts_with = "input")]
    filter: Option<String>,
    /// Say which cases would be measured, and stop.
    #[arg(long, conflicts_with = "input")]
    list: bool,
    /// Set this run beside an earlier one (its --json): ratio and noise band per case; ends with code 2 if a case
    /// became slower by more than the threshold and the noise of both runs, and stayed so when it was measured twice
    /// more.
    #[arg(long, value_name = "OLD.json", conflicts_with = "input")]
    compare: Option<PathBuf>,
    /// With --compare: set this run beside it instead of measuring one.
    #[arg(long, value_name = "NEW.json", requires = "compare")]
    with: Option<PathBuf>,
    /// With --compare: what a case may be slower by if noise is nil, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0 * attn_bench::compare::THRESHOLD, requires = "compare")]
    threshold: f64,
    /// Start anew where an interrupted run of the same kind could be gone on with.
    #[arg(long)]
    fresh: bool,
    /// Write all samples and machine facts to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print all tables of the cost curve; without this they are on the report page only.
    #[arg(long)]
    tables: bool,
    /// Put this run into a Markdown file, in the place of an earlier run of its kind on this machine.
    #[arg(long, value_name = "FILE", conflicts_with = "input")]
    markdown: Option<PathBuf>,
    /// Write the pictures of the cost curve to this folder, for light and for dark pages.
    #[arg(long, value_name = "DIR", conflicts_with = "input")]
    pictures: Option<PathBuf>,
    /// Where the report page goes.
    #[arg(long, value_name = "DIR", default_value = "target/attn-bench", conflicts_with = "input")]
    report: PathBuf,
    /// Instruction-set level (see `cargo xtask levels`); default: the best of this machine.
    #[arg(long, value_name = "LEVEL")]
    level: Option<String>,
    /// Threads of the parallel engine; default: one per core (with --kernels: 1, which is the single-thread engine).
    /// The cost curve takes several numbers.
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    threads: Vec<usize>,
    /// Mask out the keys after each query.
    #[arg(long)]
    causal: bool,
    /// Head dimensions of the cost curve; default: 64, with --full 64 and 128.
    #[arg(long, value_name = "D,…", value_delimiter = ',', conflicts_with = "input")]
    head_dim: Vec<usize>,
    /// Number types of the cost curve: f32, f16, bf16; default: f32, with --full all.
    #[arg(long, value_name = "TYPE,…", value_delimiter = ',', value_parser = number)]
    dtype: Vec<Number>,
    /// Heads of the cost curve.
    #[arg(long, value_name = "H", default_value_t = 1, conflicts_with = "input")]
    heads: usize,
    /// Longest sequence of the cost curve.
    #[arg(long, value_name = "N", conflicts_with = "input")]
    max_n: Option<usize>,
}

/// More would measure the scheduler.
const MOST_THREADS_PER_CORE: usize = 16;

/// Why a command ends without a result. The text is for the person who typed it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An argument has no meaning.
    Argument(String),
    /// A file cannot be read or written.
    File(PathBuf, std::io::Error),
    /// Something else that the text names.
    Other(String),
    /// Cases became slower than in the run that this one was compared with.
    Slower(String),
}

/// A number type by its name.
fn number(text: &str) -> Result<Number, String> {
    Number::ALL.into_iter().find(|number| number.name() == text).ok_or_else(|| "must be f32, f16 or bf16".into())
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Argument(text) | Self::Other(text) | Self::Slower(text) => f.write_str(text),
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
        }
    }
}

pub(crate) fn run(mut args: Args) -> ExitCode {
    if args.peers && args.python.is_none() && crate::peers::python().exists() {
        args.python = Some(crate::peers::python().to_string_lossy().into_owned());
    }
    if let Some(ignored) = args.level.is_none().then(crate::levels::ignored).flatten() {
        eprintln!("bench: {ignored}");
    }
    let checked = args.only_of_the_curve().and_then(|()| args.json.as_deref().map_or(Ok(()), writable));
    let result = checked.and_then(|()| match &args.input {
        _ if args.with.is_some() => compare::files(&args),
        Some(path) => input::run(&args, path),
        None if args.decode => decode::run(&args),
        None if args.kernels || args.peers => kernels::run(&args),
        None if args.python.is_some() || !args.shapes.is_empty() || args.types => Err(Failure::Argument(
            "--python, --shapes and --types go with --kernels or --peers, --python with --decode too".into(),
        )),
        None => curve::run(&args),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("bench: {failure}");
            if let Failure::Slower(_) = failure { ExitCode::from(2) } else { ExitCode::FAILURE }
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

    /// Complains of options that the tables of kernels and of decoding would not heed: their shapes, masks and types
    /// are their own.
    fn only_of_the_curve(&self) -> Result<(), Failure> {
        let table = match (self.decode, self.kernels, self.peers) {
            (true, ..) => "--decode",
            (_, true, _) => "--kernels",
            (.., true) => "--peers",
            _ => return Ok(()),
        };
        let given = [
            ("--causal", self.causal),
            ("--head-dim", !self.head_dim.is_empty()),
            ("--dtype", !self.dtype.is_empty()),
            ("--heads", self.heads != 1),
            ("--max-n", self.max_n.is_some()),
            ("--types", self.types && self.decode),
            ("--pictures", self.pictures.is_some()),
        ];
        match given.into_iter().find(|&(_, given)| given) {
            None => Ok(()),
            Some((option, _)) => Err(Failure::Argument(format!(
                "{option} does not go with {table}, whose cases are fixed; --list shows them, --filter chooses"
            ))),
        }
    }

    /// Complains of numbers of threads that compute nothing, or bring the machine down.
    fn threads_are_possible(&self) -> Result<(), Failure> {
        let most = MOST_THREADS_PER_CORE * std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        match self.threads.iter().find(|&&n| n == 0 || n > most) {
            None => Ok(()),
            Some(0) => Err(Failure::Argument("--threads: 0 threads compute nothing".into())),
            Some(n) => Err(Failure::Argument(format!("--threads: {n} is too many for this machine; at most {most}"))),
        }
    }

    /// The numbers of threads asked for, or one per core.
    fn threads(&self) -> Result<Vec<usize>, Failure> {
        self.threads_are_possible()?;
        Ok(match self.threads.as_slice() {
            [] => vec![std::thread::available_parallelism().map_or(1, std::num::NonZero::get)],
            some => some.to_vec(),
        })
    }

    /// The one number of threads that everything but the cost curve runs with.
    fn one_thread_count(&self, default: usize) -> Result<usize, Failure> {
        self.threads_are_possible()?;
        match self.threads.as_slice() {
            [] => Ok(default),
            [one] => Ok(*one),
            _ => Err(Failure::Argument("only the cost curve takes several numbers of --threads".into())),
        }
    }

    /// The filter asked for, or none.
    fn filter(&self) -> Result<Filter, Failure> {
        self.filter.as_deref().map_or(Ok(Filter::ALL), Filter::new).map_err(Failure::Argument)
    }

    /// The journal of this run: a run with the same options, program and machine goes on where an interrupted one
    /// stopped.
    fn journal(&self, kind: &str, machine: &Machine, settings: &str) -> Result<Journal, Failure> {
        let path = self.report.join(format!("interrupted-{kind}.jsonl"));
        // A program that was built again measures something else, even of one revision.
        let program = std::env::current_exe().and_then(std::fs::metadata).ok();
        let program = program.and_then(|facts| Some((facts.len(), facts.modified().ok()?)));
        let key = format!("{} {} {program:?} {settings}", attn_bench::format::FORMAT, machine.cpu);
        let journal = Journal::open(&path, &key, self.fresh).map_err(|error| Failure::File(path, error))?;
        if !journal.is_empty() {
            println!("Going on after an interruption: {} steps are done (--fresh starts anew).", journal.len());
        }
        Ok(journal)
    }
}

/// Complains where a filter leaves nothing, and shows some of what there is.
fn some_case(args: &Args, names: &[String], all: &[String]) -> Result<(), Failure> {
    if !names.is_empty() {
        return Ok(());
    }
    let filter = args.filter.as_deref().unwrap_or_default();
    let examples: Vec<&str> = all.iter().step_by(all.len().div_ceil(4).max(1)).map(String::as_str).collect();
    Err(Failure::Argument(format!(
        "no case matches `{filter}`; there are {}, such as {} (--list shows them)",
        all.len(),
        examples.join(", ")
    )))
}

/// Shows a run on the terminal, and writes what `--markdown` and `--json` ask for.
fn show(args: &Args, kind: &str, document: &Document, report: &impl serde::Serialize) -> Result<(), Failure> {
    println!("{}", terminal::text(document, args.tables));
    if let Some(path) = &args.markdown {
        let file = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::from("# Figures"),
            read => read.map_err(|error| Failure::File(path.clone(), error))?,
        };
        write(path, &markdown::put(&file, kind, document))?;
        println!("Markdown: {}", path.display());
    }
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(report)
            .map_err(|error| Failure::Other(format!("cannot write JSON: {error}")))?;
        write(path, &json)?;
        println!("Samples: {}", path.display());
    }
    Ok(())
}

/// A file as a link that terminals open.
fn url(path: &Path) -> String {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    format!("file://{}", whole.display().to_string().replace(' ', "%20"))
}

/// What was typed, for reports.
fn command_line() -> String {
    let quote = |arg: std::ffi::OsString| {
        let arg = arg.to_string_lossy().into_owned();
        if arg.contains(' ') { format!("'{arg}'") } else { arg }
    };
    std::iter::once("cargo xtask".to_string())
        .chain(std::env::args_os().skip(1).map(quote))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Complains of a file that cannot be written before anything has been measured for it. Leaves nothing behind.
fn writable(path: &Path) -> Result<(), Failure> {
    let there = path.exists();
    write_with(path, |path| std::fs::OpenOptions::new().append(true).create(true).open(path).map(drop))?;
    if !there {
        std::fs::remove_file(path).map_err(|error| Failure::File(path.to_path_buf(), error))?;
    }
    Ok(())
}

/// Writes a file, making its folder where it is missing.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    write_with(path, |path| std::fs::write(path, text))
}

fn write_with(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), Failure> {
    let failed = |error| Failure::File(path.to_path_buf(), error);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    write(path).map_err(failed)
}

/// Arguments as they would be typed, for tests.
#[cfg(test)]
fn command(words: &[&str]) -> Args {
    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }
    let words = std::iter::once("bench").chain(words.iter().copied());
    <Command as clap::Parser>::try_parse_from(words).expect("arguments").args
}
