//! `--check`: every layer's queries, keys, values, outputs and log-sum-exps against those of a computation in f64.
//!
//! The folder holds what ../shared/models/README.md describes: activations of one sentence and of three padded ones,
//! and the weights in f16 that they were computed with. With the fetched weights the sentences' embeddings in f32 and
//! their tokens are compared as well.

use std::path::Path;

use attn_core::Attention;
use attn_core::weights::{self, RowAt};

use super::model::{self, Batch, Encoder, HEADS, LAYERS};
use super::{MINILM, batch, tokenizer};
use crate::demo::Result;
use crate::demo::check::Checks;
use crate::demo::engine::{Attended, Demo};
use crate::demo::tensors::Tensors;

/// An independent run in f32 came within 2.2e-6, 1.7e-6 and 1.2e-7: ten times that.
const ACTIVATION: f64 = 2e-5;
const EMBEDDING: f64 = 1e-6;
const WEIGHT: f64 = 1e-5;

pub(super) fn run(folder: &Path) -> Result<()> {
    let mut checks = Checks::default();
    let encoder = Encoder::of(Tensors::read(&folder.join("weights_f16_pruned.safetensors"))?)?;
    let short = Tensors::read(&folder.join("short.safetensors"))?;
    let padded = Tensors::read(&folder.join("batch_padded.safetensors"))?;
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
fn stored_batch(stored: &Tensors) -> Result<Batch> {
    let (ids, mask) = (stored.get("token_ids")?, stored.get("attention_mask")?);
    let seq = ids.shape.last().copied().unwrap_or(0).max(1);
    let sentences =
        ids.data.chunks_exact(seq).zip(mask.data.chunks_exact(seq)).map(|(ids, mask)| {
            ids.iter().zip(mask).filter(|&(_, &real)| real != 0.0).map(|(&id, _)| id as u32).collect()
        });
    Batch::new(&sentences.collect::<Vec<Vec<u32>>>())
}

fn compare(encoder: &Encoder, stored: &Tensors, checks: &mut Checks) -> Result<()> {
    let batch = stored_batch(stored)?;
    checks.compare("embedding", &encoder.embedded(&batch)?, &stored.get("embedding_out")?.data, ACTIVATION);
    let (mut engine, mut outputs) = (Demo::tracing(), Vec::new());
    let hidden = encoder.each_layer(&mut engine, &batch, |_, x| outputs.push(x.to_vec()))?;
    let trace = engine.trace.unwrap_or_default();
    checks.equal("layers", &[trace.len()], &[LAYERS]);
    for (n, (call, out)) in trace.iter().zip(&outputs).enumerate() {
        for (which, name) in ["q", "k", "v", "attn_out"].into_iter().enumerate() {
            compare_named(checks, stored, name, n, &call.tensors[which], ACTIVATION)?;
        }
        compare_named(checks, stored, "lse", n, &call.lse, ACTIVATION)?;
        compare_named(checks, stored, "hidden_out", n, out, ACTIVATION)?;
        if stored.has(&format!("layer{n}.probs")) {
            compare_named(checks, stored, "probs", n, &probabilities(call, &batch)?, WEIGHT)?;
        }
    }
    let embeddings = model::pool(&hidden, &batch);
    checks.compare("sentence embedding", &embeddings, &stored.get("sentence_embedding")?.data, EMBEDDING);
    if stored.has("cosine") {
        checks.compare("cosine", &model::cosines(&embeddings, batch.len()), &stored.get("cosine")?.data, EMBEDDING);
    }
    Ok(())
}

fn compare_named(
    checks: &mut Checks,
    stored: &Tensors,
    name: &str,
    layer: usize,
    got: &[f32],
    bound: f64,
) -> Result<()> {
    let full = format!("layer{layer}.{name}");
    if stored.has(&full) {
        checks.compare(name, got, &stored.get(&full)?.data, bound);
    }
    Ok(())
}

/// The weights of a call, by its lse.
fn probabilities(call: &Attended, batch: &Batch) -> Result<Vec<f32>> {
    let attn = Attention::new().mask(batch.mask());
    let (q, k, seq) = (call.view(0)?, call.view(1)?, batch.seq());
    let mut all = vec![0.0; batch.len() * HEADS * seq * seq];
    for (n, to) in all.chunks_exact_mut(seq * seq).enumerate() {
        let at = RowAt { batch: n / HEADS, head: n % HEADS, query: 0 };
        weights::head(&attn, q, k, at, &call.lse, to)?;
    }
    Ok(all)
}

fn with_fetched_weights(stored: &[&Tensors], checks: &mut Checks) -> Result<()> {
    let (encoder, tokenizer) = (Encoder::fetched()?, tokenizer()?);
    for stored in stored {
        let expected = stored_batch(stored)?;
        let texts = texts(stored);
        checks.equal("token ids", batch(&tokenizer, &texts)?.ids(), expected.ids());
        if stored.has("sentence_embedding_f32_weights") {
            let got = encoder.embed(&mut Demo::default(), &expected)?;
            let want = &stored.get("sentence_embedding_f32_weights")?.data;
            checks.compare("sentence embedding, f32 weights", &got, want, EMBEDDING);
        }
    }
    Ok(())
}

/// The texts that a file remarks: one, or a list in brackets between single quotes.
fn texts(stored: &Tensors) -> Vec<String> {
    match (stored.metadata.get("text"), stored.metadata.get("texts")) {
        (Some(text), _) => vec![text.clone()],
        (None, Some(list)) => {
            let inside = list.trim().trim_start_matches("['").trim_end_matches("']");
            inside.split("', '").map(str::to_owned).collect()
        }
        (None, None) => Vec::new(),
    }
}
