//! `cargo xtask demo minilm`: how alike sentences are, by all-MiniLM-L6-v2.
//!
//! [`model`] is the encoder, [`verify`] the comparison with stored activations. An embedding is the mean over a
//! sentence's tokens, of length 1: the product of two is the cosine of their angle, 1 for the same meaning and about 0
//! for unrelated ones.

mod model;
mod verify;

use std::path::PathBuf;
use std::time::Instant;

use rten_text::Tokenizer;

use super::engine::{Attended, Demo};
use super::fetch::MINILM;
use super::{Failure, Result};
use model::{Batch, Encoder};

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The sentences.
    #[arg(value_name = "TEXT", required_unless_present = "check")]
    texts: Vec<String>,
    /// Compare with the activations in this folder instead.
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "../shared/models/all-minilm-l6-v2")]
    check: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(folder) = &args.check {
        return verify::run(folder);
    }
    let begin = Instant::now();
    let (tokenizer, encoder) = (tokenizer()?, Encoder::fetched()?);
    let loaded = begin.elapsed();
    let batch = batch(&tokenizer, &args.texts)?;

    let mut engine = Demo::default();
    encoder.embed(&mut engine, &batch)?; // wakes the threads, so that the second run shows what a call costs
    let begin = Instant::now();
    let embeddings = encoder.embed(&mut engine, &batch)?;
    let time = begin.elapsed();

    let cosines = model::cosines(&embeddings, batch.len());
    let header: Vec<String> = (1..=batch.len()).map(|n| format!("{n}")).collect();
    let header: Vec<&str> = ["cosine", ""].into_iter().chain(header.iter().map(String::as_str)).collect();
    let rows = args.texts.iter().enumerate().map(|(n, text)| {
        let numbers = cosines[n * batch.len()..][..batch.len()].iter().map(|x| format!("{x:.3}"));
        [format!("{}", n + 1), text.clone()].into_iter().chain(numbers).collect::<Vec<_>>()
    });
    println!("{}", attn_bench::report::table::table(&header, 2, rows));
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

/// The tokens of a text and what attention does with them in every layer.
pub(crate) fn attention(text: &str) -> Result<(Vec<String>, Vec<Attended>)> {
    let (tokenizer, encoder) = (tokenizer()?, Encoder::fetched()?);
    let batch = batch(&tokenizer, &[text.to_owned()])?;
    let tokens = tokenizer.model().get_tokens(batch.ids()).map_err(|error| Failure::Text(error.to_string()))?;
    let mut engine = Demo::tracing();
    encoder.hidden(&mut engine, &batch)?;
    Ok((tokens, engine.trace.unwrap_or_default()))
}

fn tokenizer() -> Result<Tokenizer> {
    let path = MINILM.file("tokenizer.json")?;
    Tokenizer::from_file(&path).map_err(|error| Failure::Format(path, error.to_string()))
}

/// Sentences as token ids, padded to the longest.
fn batch(tokenizer: &Tokenizer, texts: &[String]) -> Result<Batch> {
    let ids = texts.iter().map(|text| {
        let encoded =
            tokenizer.encode(text.as_str(), None).map_err(|error| Failure::Text(format!("{text}: {error}")))?;
        Ok(encoded.into_token_ids())
    });
    Batch::new(&ids.collect::<Result<Vec<_>>>()?)
}
