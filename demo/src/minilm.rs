//! `cargo xtask demo minilm`: how alike sentences are, by all-MiniLM-L6-v2.
//!
//! [`words`] makes tokens of text, [`model`] is the encoder, [`verify`] the comparison with stored activations. An
//! embedding is the mean over a sentence's tokens, of length 1: the product of two is the cosine of their angle, 1 for
//! the same meaning and about 0 for unrelated ones.

mod model;
mod verify;
mod words;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::Tensor;
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::attend::Attend;
use crate::table::table;
use model::Encoder;
use words::{batch, tokenizer};

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The sentences.
    #[arg(value_name = "TEXT", required_unless_present = "check")]
    texts: Vec<String>,
    /// Compare with the activations in this folder instead.
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "../shared/models/all-minilm-l6-v2")]
    check: Option<PathBuf>,
    /// Write queries, keys and values of all layers instead, as JSON for `cargo xtask heatmap --heads-of`.
    #[arg(long, value_name = "FILE", conflicts_with = "check")]
    save: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(folder) = &args.check {
        return verify::run(folder);
    }
    let begin = Instant::now();
    let (tokenizer, encoder) = (tokenizer()?, Encoder::fetched()?);
    let loaded = begin.elapsed();
    if let Some(file) = &args.save {
        return save(&tokenizer, &encoder, &args.texts, file);
    }
    let batch = batch(&tokenizer, &args.texts)?;
    encoder.embed(&batch)?; // wakes the threads, so that the second run shows what a call costs
    let begin = Instant::now();
    let embeddings = encoder.embed(&batch)?;
    let time = begin.elapsed();

    let cosines = embeddings.matmul(&embeddings.t()?)?.to_vec2::<f32>()?;
    let header: Vec<String> = (1..=batch.len()).map(|n| n.to_string()).collect();
    let header: Vec<&str> = ["cosine", ""].into_iter().chain(header.iter().map(String::as_str)).collect();
    let rows = args.texts.iter().zip(&cosines).enumerate().map(|(n, (text, row))| {
        let numbers = row.iter().map(|x| format!("{x:.3}"));
        [(n + 1).to_string(), text.clone()].into_iter().chain(numbers).collect()
    });
    println!("{}", table(&header, 2, rows));
    println!(
        "{} sentences, {} tokens: {:.1} ms ({:.0} tokens/s); loaded in {:.2} s",
        batch.len(),
        batch.tokens(),
        1e3 * time.as_secs_f64(),
        batch.tokens() as f64 / time.as_secs_f64(),
        loaded.as_secs_f64(),
    );
    Ok(())
}

/// What `cargo xtask heatmap --heads-of` reads.
#[derive(Serialize)]
struct Heads<'t> {
    title: &'t str,
    note: &'static str,
    tokens: &'t [String],
    layers: Vec<Layer>,
}

/// The rows of all heads: `[heads, tokens, dim]`.
#[derive(Serialize)]
struct Layer {
    q: Vec<Vec<Vec<f32>>>,
    k: Vec<Vec<Vec<f32>>>,
    v: Vec<Vec<Vec<f32>>>,
}

fn save(tokenizer: &Tokenizer, encoder: &Encoder, texts: &[String], file: &Path) -> Result<()> {
    ensure!(texts.len() == 1, "{} sentences; a heat map shows one", texts.len());
    let batch = batch(tokenizer, texts)?;
    let encoded = tokenizer.encode(texts[0].as_str(), true).map_err(|error| anyhow!(error))?;
    let mut attend = Attend::tracing();
    encoder.layers(&mut attend, &batch)?;
    let heads = |x: &Tensor| x.squeeze(0)?.to_vec3::<f32>();
    let layers = attend.trace.iter().flatten();
    let layers = layers.map(|call| Ok(Layer { q: heads(&call.q)?, k: heads(&call.k)?, v: heads(&call.v)? }));
    let note = "all-MiniLM-L6-v2 as it reads this sentence: every token sees every other one. [CLS] and [SEP] mark its \
                ends; ## goes on with the word before.";
    let all = Heads { title: &texts[0], note, tokens: encoded.get_tokens(), layers: layers.collect::<Result<_>>()? };
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(file, serde_json::to_vec(&all)?).with_context(|| file.display().to_string())
}
