//! The arguments of `cargo xtask bench`, and why it ends without a result.

use std::path::PathBuf;

use attn_bench::case::Number;
use attn_bench::filter::Filter;
use attn_bench::journal::Journal;
use attn_bench::machine::Machine;
use attn_simd::Level;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Half a minute at most: fewer and shorter sequences, fewer samples.
    #[arg(long, conflicts_with = "full")]
    pub(super) quick: bool,
    /// As long as it takes: up to n = 32768, more samples, slow engines included.
    #[arg(long)]
    pub(super) full: bool,
    /// Run all engines on the layers in this safetensors file, and compare them with the results stored there.
    #[arg(long, value_name = "FILE")]
    pub(super) input: Option<PathBuf>,
    /// Name of the queries in the file; default: every `NAME.q` that has a `NAME.k` and a `NAME.v`.
    #[arg(long, value_name = "NAME", requires = "input")]
    pub(super) q: Option<String>,
    /// Name of the keys in the file.
    #[arg(long, value_name = "NAME", requires = "input")]
    pub(super) k: Option<String>,
    /// Name of the values in the file.
    #[arg(long, value_name = "NAME", requires = "input")]
    pub(super) v: Option<String>,
    /// Measure single kernels on a table of shapes, beside the machine's peak (`--threads`, default 1).
    #[arg(long, conflicts_with = "input")]
    pub(super) kernels: bool,
    /// With --kernels: every number type and precision, on the shapes that are of interest there. Rows that need the
    /// amx kernel are named and left out on a level without it.
    #[arg(long)]
    pub(super) types: bool,
    /// As --kernels: backward calls (gradients of q, k and v), with --types in every number type, with --python beside
    /// torch's.
    #[arg(long, conflicts_with_all = ["input", "kernels", "peers", "decode"])]
    pub(super) backward: bool,
    /// As --kernels, beside the libraries that `cargo xtask peers --install` has set up; --python names another Python.
    #[arg(long, conflicts_with = "input")]
    pub(super) peers: bool,
    /// Measure decoding: one token against long caches of each number type, warm and cold, beside a plain read of as
    /// many bytes (`--threads`, default 1).
    #[arg(long, conflicts_with_all = ["input", "kernels", "peers", "shapes"])]
    pub(super) decode: bool,
    /// Measure two ranks of an MPI job, of one core each, beside one core and beside two threads: strong and weak
    /// scaling of prefill and of gradients, and exposed communication. Needs mpirun and libclang; --max-n is the number
    /// of tokens.
    #[arg(long, conflicts_with_all = ["input", "kernels", "peers", "backward", "decode", "python", "shapes", "types",
                                      "compare", "threads"])]
    pub(super) ranks: bool,
    /// With --kernels or --decode: measure torch and onnxruntime on the same inputs, as far as this Python has them.
    #[arg(long, value_name = "PYTHON")]
    pub(super) python: Option<String>,
    /// With --kernels: only these shapes.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub(super) shapes: Vec<String>,
    /// Only the cases whose names match, such as `simd/t1/n(1024|2048)$`; --list shows the names.
    #[arg(long, value_name = "REGEX", conflicts_with = "input")]
    pub(super) filter: Option<String>,
    /// Say which cases would be measured, and stop.
    #[arg(long, conflicts_with = "input")]
    pub(super) list: bool,
    /// Set this run beside an earlier one (its --json): ratio and noise band per case; ends with code 2 if a case
    /// became slower by more than the threshold and the noise of both runs, and stayed so when it was measured twice
    /// more.
    #[arg(long, value_name = "OLD.json", conflicts_with = "input")]
    pub(super) compare: Option<PathBuf>,
    /// With --compare: set this run beside it instead of measuring one.
    #[arg(long, value_name = "NEW.json", requires = "compare")]
    pub(super) with: Option<PathBuf>,
    /// With --compare: how much slower a case may be if noise is nil, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0 * attn_bench::compare::THRESHOLD, requires = "compare")]
    pub(super) threshold: f64,
    /// Start anew, although an interrupted run of the same kind could go on.
    #[arg(long)]
    pub(super) fresh: bool,
    /// Write all samples and machine facts to this file.
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Print all tables of the cost curve; without this they are on the report page only.
    #[arg(long)]
    pub(super) tables: bool,
    /// Put this run into a Markdown file, in the place of an earlier run of its kind on this machine.
    #[arg(long, value_name = "FILE", conflicts_with = "input")]
    pub(super) markdown: Option<PathBuf>,
    /// Write the pictures of the cost curve to this folder, for light and for dark pages.
    #[arg(long, value_name = "DIR", conflicts_with = "input")]
    pub(super) pictures: Option<PathBuf>,
    /// Where the report page goes.
    #[arg(long, value_name = "DIR", default_value = "target/attn-bench", conflicts_with = "input")]
    pub(super) report: PathBuf,
    /// Instruction-set level (see `cargo xtask levels`); default: the best of this machine.
    #[arg(long, value_name = "LEVEL")]
    pub(super) level: Option<String>,
    /// Threads of the parallel engine; default: one per core (with --kernels: 1, which is the single-thread engine).
    /// The cost curve takes several numbers.
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(super) threads: Vec<usize>,
    /// Mask out the keys after each query.
    #[arg(long)]
    pub(super) causal: bool,
    /// Head dimensions of the cost curve; default: 64, with --full 64 and 128.
    #[arg(long, value_name = "D,…", value_delimiter = ',', conflicts_with = "input")]
    pub(super) head_dim: Vec<usize>,
    /// Number types of the cost curve: f32, f16, bf16; default: f32, with --full all.
    #[arg(long, value_name = "TYPE,…", value_delimiter = ',', value_parser = number)]
    pub(super) dtype: Vec<Number>,
    /// Heads of the cost curve.
    #[arg(long, value_name = "H", default_value_t = 1, conflicts_with = "input")]
    pub(super) heads: usize,
    /// Longest sequence of the cost curve, or of --ranks.
    #[arg(long, value_name = "N", conflicts_with = "input")]
    pub(super) max_n: Option<usize>,
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

impl Args {
    /// The level of `--level`, or the best one.
    pub(super) fn level(&self) -> Result<Level, Failure> {
        let Some(name) = &self.level else { return Ok(Level::detect()) };
        Level::by_name(name).map_err(|_| {
            let names: Vec<_> = Level::available().map(Level::name).collect();
            Failure::Argument(format!(
                "level `{name}` is unknown or not on this machine, which has: {}",
                names.join(", ")
            ))
        })
    }

    /// Refuses options that the tables of kernels and of decoding would ignore: their shapes, masks and types
    /// are their own.
    pub(super) fn only_of_the_curve(&self) -> Result<(), Failure> {
        let tables = [
            ("--decode", self.decode),
            ("--backward", self.backward),
            ("--kernels", self.kernels),
            ("--peers", self.peers),
            ("--ranks", self.ranks),
        ];
        let Some((table, _)) = tables.into_iter().find(|&(_, wanted)| wanted) else { return Ok(()) };
        let given = [
            ("--causal", self.causal),
            ("--head-dim", !self.head_dim.is_empty()),
            ("--dtype", !self.dtype.is_empty()),
            ("--heads", self.heads != 1),
            ("--max-n", self.max_n.is_some() && !self.ranks),
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

    /// Refuses numbers of threads that compute nothing or overload the machine.
    fn threads_are_possible(&self) -> Result<(), Failure> {
        let most = MOST_THREADS_PER_CORE * std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        match self.threads.iter().find(|&&n| n == 0 || n > most) {
            None => Ok(()),
            Some(0) => Err(Failure::Argument("--threads: 0 threads compute nothing".into())),
            Some(n) => Err(Failure::Argument(format!("--threads: {n} is too many for this machine; at most {most}"))),
        }
    }

    /// The numbers of `--threads`, or one per core.
    pub(super) fn threads(&self) -> Result<Vec<usize>, Failure> {
        self.threads_are_possible()?;
        Ok(match self.threads.as_slice() {
            [] => vec![std::thread::available_parallelism().map_or(1, std::num::NonZero::get)],
            some => some.to_vec(),
        })
    }

    /// The one number of threads that everything but the cost curve runs with.
    pub(super) fn one_thread_count(&self, default: usize) -> Result<usize, Failure> {
        self.threads_are_possible()?;
        match self.threads.as_slice() {
            [] => Ok(default),
            [one] => Ok(*one),
            _ => Err(Failure::Argument("only the cost curve takes several numbers of --threads".into())),
        }
    }

    /// The filter of `--filter`, or none.
    pub(super) fn filter(&self) -> Result<Filter, Failure> {
        self.filter.as_deref().map_or(Ok(Filter::ALL), Filter::new).map_err(Failure::Argument)
    }

    /// The journal of this run: a run with the same options, program and machine goes on where an interrupted one
    /// stopped.
    pub(super) fn journal(&self, kind: &str, machine: &Machine, settings: &str) -> Result<Journal, Failure> {
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

/// Arguments as they would be typed, for tests.
#[cfg(test)]
pub(super) fn command(words: &[&str]) -> Args {
    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }
    let words = std::iter::once("bench").chain(words.iter().copied());
    <Command as clap::Parser>::try_parse_from(words).expect("arguments").args
}
