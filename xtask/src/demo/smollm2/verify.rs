//! `--check`: every layer's queries, keys, values, outputs and log-sum-exps against those of a computation in f64, the
//! logits, and the text that follows, token by token.
//!
//! The folder holds what ../shared/models/README.md describes.

use std::path::Path;

use attn_core::weights::{self, RowAt};
use attn_core::{Align, Attention, Mask};

use super::model::{Decoder, Session, Step, Traced};
use super::text::Words;
use crate::demo::Result;
use crate::demo::check::Checks;
use crate::demo::tensors::Tensors;

/// An independent run in f32 came within 2.8e-5 of queries and outputs over thirty layers: ten times that.
const ACTIVATION: f64 = 3e-4;
/// What the files ask for; the independent run came within 9e-5.
const LOGIT: f64 = 1e-3;
/// As a share of the largest number of the last hidden state, which has outliers of some thousands.
const HIDDEN: f64 = 1e-4;
/// A weight is below 1 and moves with its score by as much of itself.
const WEIGHT: f64 = 1e-4;

pub(super) fn run(decoder: &Decoder, words: &Words, folder: &Path) -> Result<()> {
    let mut checks = Checks::default();
    for name in ["short", "medium"] {
        let stored = Tensors::read(&folder.join(format!("{name}.safetensors")))?;
        let ids = stored.ids("token_ids")?;
        if let Some(text) = stored.metadata.get("text") {
            checks.equal("token ids", &words.encode(text)?, &ids);
        }
        let greedy = stored.ids("greedy_ids")?;
        if let Some(text) = stored.metadata.get("continuation") {
            checks.equal("text of tokens", &[words.decode(&greedy).as_deref()], &[Some(text.as_str())]);
        }
        let mut session = Session::new(decoder, ids.len() + greedy.len())?;
        session.trace = Some(Vec::new());
        let step = session.advance(&ids)?;
        for (n, layer) in session.trace.take().unwrap_or_default().iter().enumerate() {
            compare_layer(&mut checks, &stored, n, layer)?;
        }
        compare_logits(&mut checks, &stored, decoder, &step)?;

        let mut found = vec![step.likeliest()];
        while found.len() < greedy.len() {
            let last = found[found.len() - 1];
            found.push(session.advance(&[last])?.likeliest());
        }
        checks.equal("greedy tokens over the cache", &found, &greedy);
    }
    checks.finish()
}

fn compare_layer(checks: &mut Checks, stored: &Tensors, n: usize, layer: &Traced) -> Result<()> {
    let Traced { attended, before_rope: [q_before, k_before] } = layer;
    let [q, k, v, out] = &attended.tensors;
    let pairs = [("q", q), ("k", k), ("v", v), ("attn_out", out), ("lse", &attended.lse)];
    for (name, got) in pairs.into_iter().chain([("q_prerope", q_before), ("k_prerope", k_before)]) {
        let full = format!("layer{n}.{name}");
        if stored.has(&full) {
            checks.compare(name, got, &stored.get(&full)?.data, ACTIVATION);
        }
    }
    for (name, heads) in [("probs", attended.sizes[0][1]), ("probs.head0_3", 3)] {
        let full = format!("layer{n}.{name}");
        if !stored.has(&full) {
            continue;
        }
        let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
        let seq = attended.sizes[0][2];
        let mut got = vec![0.0; heads * seq * seq];
        for (head, to) in got.chunks_exact_mut(seq * seq).enumerate() {
            let at = RowAt { batch: 0, head, query: 0 };
            weights::head(&attn, attended.view(0)?, attended.view(1)?, at, &attended.lse, to)?;
        }
        checks.compare("weights", &got, &stored.get(&full)?.data, WEIGHT);
    }
    Ok(())
}

fn compare_logits(checks: &mut Checks, stored: &Tensors, decoder: &Decoder, step: &Step) -> Result<()> {
    checks.compare("logits of the last token", &step.logits, &stored.get("logits_last")?.data, LOGIT);
    let all = decoder.logits(&step.hidden)?;
    let (ids, top) = (stored.ids("top5_ids")?, &stored.get("top5_logits")?.data);
    let (mut found, mut best, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for (token, logits) in all.chunks_exact(decoder.sizes.vocabulary).enumerate() {
        found.extend(ids[token * 5..][..5].iter().map(|&id| logits[id as usize]));
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        best.push(logits.iter().position(|&x| x == max).unwrap_or(0) as u32);
        let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
        sums.push((f64::from(max) + sum.ln()) as f32);
    }
    checks.compare("five best logits of every token", &found, top, LOGIT);
    checks.equal("likeliest token of every position", &best, &ids.iter().step_by(5).copied().collect::<Vec<_>>());
    checks.compare("logsumexp of the logits", &sums, &stored.get("logsumexp")?.data, LOGIT);
    if stored.has("final_hidden_prenorm") {
        let want = &stored.get("final_hidden_prenorm")?.data;
        let size = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
        checks.compare("last hidden state", &step.hidden, want, HIDDEN * f64::from(size));
    }
    Ok(())
}
