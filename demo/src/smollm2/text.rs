//! Text and token ids: byte-level BPE from the vocabulary in the model's file.

use anyhow::{Result, anyhow};
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

/// The end of a turn.
pub(super) const END: &str = "<|im_end|>";

/// candle's reading of the vocabulary, and what it does not know of this model: each digit is a token of its own, no
/// space goes before a text, and a byte without a token is the unknown one.
pub(super) fn tokenizer(content: &mut Content) -> Result<Tokenizer> {
    if let Some(unknown) = content.metadata.get("tokenizer.ggml.unknown_token_id").cloned() {
        content.metadata.insert("tokenizer.ggml.unk_token_id".into(), unknown);
    }
    let mut tokenizer = Tokenizer::from_gguf(content)?;
    let split = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
    tokenizer.with_pre_tokenizer(Some(Sequence::new(split)));
    Ok(tokenizer)
}

/// Text as tokens; names of special tokens are these.
pub(super) fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoded = tokenizer.encode_fast(text, false).map_err(|error| anyhow!("{text}: {error}"))?;
    Ok(encoded.get_ids().to_vec())
}

/// A question as the model was trained to be asked.
pub(super) fn question(text: &str) -> String {
    let system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
    format!("<|im_start|>system\n{system}{END}\n<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_core::quantized::gguf_file::{Value, VersionedMagic};

    use super::*;

    /// Every byte but `~`, a few merges and the tokens of a chat.
    fn words() -> Tokenizer {
        let special = ["<|endoftext|>", "<|im_start|>", END].map(str::to_owned);
        let mut bytes: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).filter(|x| x != "~").collect();
        bytes.sort_unstable();
        let merged = ["ab", "abc", "\u{120}ab", "12"].map(str::to_owned);
        let tokens: Vec<String> = special.into_iter().chain(bytes).chain(merged).collect();
        let kinds = (0..tokens.len()).map(|id| Value::I32(if id < 3 { 3 } else { 1 })).collect();
        let texts = |texts: &[&str]| Value::Array(texts.iter().map(|&text| Value::String(text.into())).collect());
        let all: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let metadata = HashMap::from([
            ("model", Value::String("gpt2".into())),
            ("tokens", texts(&all)),
            ("token_type", Value::Array(kinds)),
            ("merges", texts(&["a b", "ab c", "\u{120} ab", "1 2"])),
            ("eos_token_id", Value::U32(2)),
            ("unknown_token_id", Value::U32(0)),
        ]);
        let metadata = metadata.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
        let (magic, tensor_infos) = (VersionedMagic::GgufV3, HashMap::new());
        tokenizer(&mut Content { magic, metadata, tensor_infos, tensor_data_offset: 0 }).unwrap()
    }

    #[test]
    fn text_becomes_tokens_and_text_again() {
        let words = words();
        for text in ["abc ab", "cab12", "Grüße, 世界!\n\n"] {
            assert_eq!(words.decode(&encode(&words, text).unwrap(), false).unwrap(), text);
        }
        assert_eq!(encode(&words, "abc ab").unwrap().len(), 2);
        assert_eq!(encode(&words, "12").unwrap().len(), 2); // each digit on its own, whatever the merges say
        assert!(encode(&words, "").unwrap().is_empty());
        assert_eq!(encode(&words, "a~").unwrap()[1], 0);
    }

    #[test]
    fn a_question_is_framed_by_turns() {
        let words = words();
        let ids = encode(&words, &question("abc")).unwrap();
        let count = |token| ids.iter().filter(|&&id| id == token).count();
        assert_eq!((ids[0], count(1), count(words.token_to_id(END).unwrap())), (1, 3, 2));
    }
}
