//! `--check`: every layer's queries, keys, values, outputs and log-sum-exps against those of a computation in f64, the
//! logits, and the text that follows, token by token.
//!
//! The folder holds what ../shared/models/README.md describes.

use std::path::Path;

use anyhow::{Result, anyhow};
use attn_core::{Align, Attention, Mask};
use candle_core::{D, DType, Tensor};
use tokenizers::Tokenizer;

use super::model::{Decoder, Output, Session};
use super::text::encode;
use crate::attend::Attend;
use crate::check::Checks;
use crate::stored::Stored;

/// An independent run in f32 came within 2.8e-5 of queries and outputs over thirty layers: ten times that.
const ACTIVATION: f64 = 3e-4;
/// What the files ask for; the independent run came within 9e-5.
const LOGIT: f64 = 1e-3;
/// As a share of the largest number of the last hidden state, which has outliers of some thousands.
const HIDDEN: f64 = 1e-4;
/// A weight is below 1 and moves with its score by as much of itself.
const WEIGHT: f64 = 1e-4;

pub(super) fn run(decoder: &Decoder, tokenizer: &Tokenizer, folder: &Path) -> Result<()> {
    let mut checks = Checks::default();
    for name in ["short", "medium"] {
        let stored = Stored::read(&folder.join(format!("{name}.safetensors")))?;
        let ids = stored.ids("token_ids")?;
        if let Some(text) = stored.metadata.get("text") {
            checks.equal("token ids", &encode(tokenizer, text)?, &ids);
        }
        let greedy = stored.ids("greedy_ids")?;
        if let Some(text) = stored.metadata.get("continuation") {
            let got = tokenizer.decode(&greedy, false).map_err(|error| anyhow!(error))?;
            checks.equal("text of tokens", &[got.as_str()], &[text.as_str()]);
        }
        let mut session = Session::new(decoder, ids.len() + greedy.len())?;
        session.attend = Attend::tracing();
        let output = session.advance(&ids)?;
        compare_layers(&mut checks, &stored, &session)?;
        compare_logits(&mut checks, &stored, decoder, &output)?;

        session.attend = Attend::default();
        let mut found = vec![output.likeliest()?];
        while found.len() < greedy.len() {
            let last = found[found.len() - 1];
            found.push(session.advance(&[last])?.likeliest()?);
        }
        checks.equal("greedy tokens over the cache", &found, &greedy);
    }
    checks.finish()
}

fn compare_layers(checks: &mut Checks, stored: &Stored, session: &Session<'_>) -> Result<()> {
    for (n, (call, [q, k])) in session.attend.trace.iter().flatten().zip(&session.before_rope).enumerate() {
        let tensors = [("q", &call.q), ("k", &call.k), ("v", &call.v), ("attn_out", &call.out), ("lse", &call.lse)];
        for (name, got) in tensors.into_iter().chain([("q_prerope", q), ("k_prerope", k)]) {
            let full = format!("layer{n}.{name}");
            if stored.has(&full) {
                checks.compare(name, got, stored.get(&full)?, ACTIVATION)?;
            }
        }
        for (name, heads) in [("probs", call.q.dim(1)?), ("probs.head0_3", 3)] {
            let full = format!("layer{n}.{name}");
            if stored.has(&full) {
                let got = call.weights(&Attention::new().mask(Mask::causal(Align::TopLeft)), heads)?;
                checks.compare("weights", &got, stored.get(&full)?, WEIGHT)?;
            }
        }
    }
    Ok(())
}

fn compare_logits(checks: &mut Checks, stored: &Stored, decoder: &Decoder, output: &Output) -> Result<()> {
    checks.compare("logits of the last token", &output.logits, stored.get("logits_last")?, LOGIT)?;
    let all = decoder.logits(&output.hidden)?;
    let (ids, top) = (stored.get("top5_ids")?.to_dtype(DType::U32)?, stored.get("top5_logits")?);
    let ids = ids.reshape((all.dim(0)?, 5))?;
    checks.compare("five best logits of every token", &all.gather(&ids, 1)?, top, LOGIT)?;
    let best: Vec<u32> = ids.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?;
    checks.equal("likeliest token of every position", &all.argmax(1)?.to_vec1::<u32>()?, &best);
    let sums: Tensor = all.to_dtype(DType::F64)?.log_sum_exp(D::Minus1)?;
    checks.compare("logsumexp of the logits", &sums, stored.get("logsumexp")?, LOGIT)?;
    if stored.has("final_hidden_prenorm") {
        let want = stored.get("final_hidden_prenorm")?;
        let size = want.flatten_all()?.abs()?.max(0)?.to_scalar::<f32>()?;
        checks.compare("last hidden state", &output.hidden, want, HIDDEN * f64::from(size))?;
    }
    Ok(())
}
