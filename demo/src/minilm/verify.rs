//! `--check`: every layer's queries, keys, values, outputs and log-sum-exps against those of a computation in f64.
//!
//! The folder holds what ../shared/models/README.md describes: activations of one sentence and of three padded ones,
//! and the weights in f16 that they were computed with. With the fetched weights the sentences' embeddings in f32 and
//! their tokens are compared as well.

use std::path::Path;

use anyhow::{Context, Result};
use attn_core::Attention;

use super::model::{self, Batch, Encoder, HEADS, LAYERS};
use super::words::{batch, tokenizer};
use crate::attend::Attend;
use crate::check::Checks;
use crate::fetch::MINILM;
use crate::stored::Stored;

/// An independent run in f32 came within 2.2e-6, 1.7e-6 and 1.2e-7: ten times that.
const ACTIVATION: f64 = 2e-5;
const EMBEDDING: f64 = 1e-6;
const WEIGHT: f64 = 1e-5;

pub(super) fn run(folder: &Path) -> Result<()> {
    let mut checks = Checks::default();
    let encoder = Encoder::of(Stored::read(&folder.join("weights_f16_pruned.safetensors"))?)?;
    let short = Stored::read(&folder.join("short.safetensors"))?;
    let padded = Stored::read(&folder.join("batch_padded.safetensors"))?;
    for stored in [&short, &padded] {
        compare(&encoder, stored, &mut checks)?;
    }
    if MINILM.file("model.safetensors").is_ok() {
        with_fetched_weights(&[&short, &padded], &mut checks)?;
    } else {
        println!("skipped: embeddings with the weights in f32, and the tokenizer (cargo xtask demo fetch minilm)");
    }
    checks.finish()
}

/// The sentences whose tokens are stored.
fn stored_batch(stored: &Stored) -> Result<Batch> {
    let seq = stored.get("token_ids")?.dims().last().copied().unwrap_or(0).max(1);
    let (ids, mask) = (stored.ids("token_ids")?, stored.ids("attention_mask")?);
    let sentences = ids
        .chunks_exact(seq)
        .zip(mask.chunks_exact(seq))
        .map(|(ids, mask)| ids.iter().zip(mask).filter(|&(_, &real)| real != 0).map(|(&id, _)| id).collect());
    Batch::new(&sentences.collect::<Vec<Vec<u32>>>())
}

fn compare(encoder: &Encoder, stored: &Stored, checks: &mut Checks) -> Result<()> {
    let batch = stored_batch(stored)?;
    checks.compare("embedding", &encoder.embedded(&batch)?, stored.get("embedding_out")?, ACTIVATION)?;
    let mut attend = Attend::tracing();
    let outputs = encoder.layers(&mut attend, &batch)?;
    let trace = attend.trace.unwrap_or_default();
    checks.equal("layers", &[trace.len()], &[LAYERS]);
    for (n, (call, hidden)) in trace.iter().zip(&outputs).enumerate() {
        let tensors = [("q", &call.q), ("k", &call.k), ("v", &call.v), ("attn_out", &call.out), ("lse", &call.lse)];
        for (name, got) in tensors.into_iter().chain([("hidden_out", hidden)]) {
            let full = format!("layer{n}.{name}");
            if stored.has(&full) {
                checks.compare(name, got, stored.get(&full)?, ACTIVATION)?;
            }
        }
        let full = format!("layer{n}.probs");
        if stored.has(&full) {
            let got = call.weights(&Attention::new().mask(batch.mask()), HEADS)?;
            checks.compare("probs", &got, stored.get(&full)?, WEIGHT)?;
        }
    }
    let embeddings = model::pool(outputs.last().context("no layer")?, &batch)?;
    checks.compare("sentence embedding", &embeddings, stored.get("sentence_embedding")?, EMBEDDING)?;
    if stored.has("cosine") {
        checks.compare("cosine", &embeddings.matmul(&embeddings.t()?)?, stored.get("cosine")?, EMBEDDING)?;
    }
    Ok(())
}

fn with_fetched_weights(stored: &[&Stored], checks: &mut Checks) -> Result<()> {
    let (encoder, tokenizer) = (Encoder::fetched()?, tokenizer()?);
    for stored in stored {
        let expected = stored_batch(stored)?;
        checks.equal("token ids", batch(&tokenizer, &texts(stored))?.ids(), expected.ids());
        if stored.has("sentence_embedding_f32_weights") {
            let want = stored.get("sentence_embedding_f32_weights")?;
            checks.compare("sentence embedding, f32 weights", &encoder.embed(&expected)?, want, EMBEDDING)?;
        }
    }
    Ok(())
}

/// The texts that a file remarks: one, or a list in brackets between single quotes.
fn texts(stored: &Stored) -> Vec<String> {
    match (stored.metadata.get("text"), stored.metadata.get("texts")) {
        (Some(text), _) => vec![text.clone()],
        (None, Some(list)) => {
            let inside = list.trim().trim_start_matches("['").trim_end_matches("']");
            inside.split("', '").map(str::to_owned).collect()
        }
        (None, None) => Vec::new(),
    }
}
