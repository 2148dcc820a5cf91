//! Text and token ids: WordPiece as the model's file has it.

use anyhow::{Result, anyhow};
use tokenizers::Tokenizer;

use super::model::Batch;
use crate::fetch::MINILM;

/// The tokenizer that was fetched.
pub(super) fn tokenizer() -> Result<Tokenizer> {
    let path = MINILM.file("tokenizer.json")?;
    let mut tokenizer = Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}", path.display()))?;
    // The file pads and cuts to 128 tokens.
    tokenizer.with_padding(None).with_truncation(None).map_err(|error| anyhow!(error))?;
    Ok(tokenizer)
}

/// Sentences as token ids, padded to the longest.
pub(super) fn batch(tokenizer: &Tokenizer, texts: &[String]) -> Result<Batch> {
    let ids = texts.iter().map(|text| {
        let encoded = tokenizer.encode(text.as_str(), true).map_err(|error| anyhow!("{text}: {error}"))?;
        Ok(encoded.get_ids().to_vec())
    });
    Batch::new(&ids.collect::<Result<Vec<_>>>()?)
}
