//! Text and token ids: byte-level BPE as GPT-2 has it, with each digit on its own, from the vocabulary in the model's
//! file.

use std::collections::HashMap;

use rten_text::Tokenizer;
use rten_text::models::{Bpe, BpeOptions, char_to_byte, merge_pairs_from_lines};
use rten_text::pre_tokenizers::{Digits, Sequence, Split};
use rten_text::tokenizer::TokenizerOptions;

use crate::demo::gguf::{Gguf, Value};
use crate::demo::{Failure, Result};

/// Tokens that are neither bytes nor merges, such as the end of a turn, have this type in the file.
const CONTROL: i64 = 3;

/// The tokenizer.
pub(super) struct Words {
    tokenizer: Tokenizer,
    /// Tokens that stand for themselves.
    special: HashMap<String, u32>,
    end: u32,
    unknown: u32,
    /// How many tokens the model knows; ids from here on stand for bytes that it does not.
    known: u32,
}

impl Words {
    /// From a file's metadata; the error says what it lacks.
    pub(super) fn of(file: &Gguf) -> std::result::Result<Self, String> {
        let lacks = |key: &str| format!("lacks {key}, or has it otherwise than expected");
        let texts = |key: &str| file.texts(key).ok_or_else(|| lacks(key));
        let tokens = texts("tokenizer.ggml.tokens")?;
        let merges = merge_pairs_from_lines(&texts("tokenizer.ggml.merges")?);
        let kinds = match file.metadata.get("tokenizer.ggml.token_type") {
            Some(Value::List(kinds)) => kinds,
            _ => return Err(lacks("tokenizer.ggml.token_type")),
        };
        let control = tokens.iter().zip(0..).zip(kinds).filter(|(_, kind)| **kind == Value::Whole(CONTROL));
        let special: HashMap<String, u32> = control.map(|((token, id), _)| ((*token).to_owned(), id)).collect();
        let mut vocab: HashMap<String, u32> =
            tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect();
        // A token for every byte is what the tokenizer asks for; the vocabulary lacks some that text hardly holds.
        let known = tokens.len() as u32;
        let mut bytes: Vec<(char, u8)> = char_to_byte().into_iter().collect();
        bytes.sort_unstable_by_key(|&(_, byte)| byte);
        for (name, byte) in bytes {
            vocab.entry(name.to_string()).or_insert(known + u32::from(byte));
        }
        let model = Bpe::new(BpeOptions {
            merges: &merges,
            vocab: Some(vocab.into_iter().collect()),
            added_tokens: special.iter().map(|(token, &id)| (id, token.clone())).collect(),
            ..BpeOptions::default()
        });
        let model = model.map_err(|error| error.to_string())?;
        // Digits first: the pattern of GPT-2 would otherwise take a number as one word.
        let split = Sequence::from_vec(vec![Box::new(Digits::new(true)), Box::new(Split::gpt2())]);
        let tokenizer = Tokenizer::new(model, TokenizerOptions::default()).with_pre_tokenizer(Box::new(split));
        let id = |key: &str| file.number(key).map(|id| id as u32).ok_or_else(|| lacks(key));
        let (end, unknown) = (id("tokenizer.ggml.eos_token_id")?, id("tokenizer.ggml.unknown_token_id")?);
        Ok(Self { tokenizer, special, end, unknown, known })
    }

    /// The token that ends a turn.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Plain text as tokens.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let encoded = self.tokenizer.encode(text, None).map_err(|error| Failure::Text(format!("{text}: {error}")))?;
        let known = |id| if id < self.known { id } else { self.unknown };
        Ok(encoded.into_token_ids().into_iter().map(known).collect())
    }

    /// A question as the model was trained to be asked.
    pub(super) fn question(&self, text: &str) -> Result<Vec<u32>> {
        let special = |token: &str| {
            self.special.get(token).copied().ok_or_else(|| Failure::Text(format!("the model has no token {token}")))
        };
        let (start, end) = (special("<|im_start|>")?, special("<|im_end|>")?);
        let system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face";
        let mut ids = Vec::new();
        for turn in [system, &format!("user\n{text}")] {
            ids.push(start);
            ids.extend(self.encode(turn)?);
            ids.push(end);
            ids.extend(self.encode("\n")?);
        }
        ids.push(start);
        ids.extend(self.encode("assistant\n")?);
        Ok(ids)
    }

    /// Tokens as text; `None` where they end inside of a character.
    pub(super) fn decode(&self, ids: &[u32]) -> Option<String> {
        self.tokenizer.decode(ids).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::demo::tensors::Tensors;

    /// Every byte but 0xf5, which no text holds, and 0x7e (`~`), a few merges and the tokens of a chat.
    fn file() -> Gguf {
        let special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned);
        let mut bytes: Vec<(char, u8)> = char_to_byte().into_iter().collect();
        bytes.sort_unstable_by_key(|&(_, byte)| byte);
        let bytes =
            bytes.into_iter().filter(|&(_, byte)| byte != 0xf5 && byte != 0x7e).map(|(name, _)| name.to_string());
        let merged = ["ab", "abc", "\u{120}ab", "12"].map(str::to_owned);
        let tokens: Vec<String> = special.into_iter().chain(bytes).chain(merged).collect();
        let kinds = (0..tokens.len()).map(|id| Value::Whole(if id < 3 { CONTROL } else { 1 })).collect();
        let texts = |texts: &[&str]| Value::List(texts.iter().map(|&text| Value::Text(text.to_owned())).collect());
        let all: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let metadata = [
            ("tokens", texts(&all)),
            ("token_type", Value::List(kinds)),
            ("merges", texts(&["a b", "ab c", "\u{120} ab", "1 2"])),
            ("eos_token_id", Value::Whole(2)),
            ("unknown_token_id", Value::Whole(0)),
        ];
        let metadata = metadata.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
        Gguf { metadata, tensors: Tensors::of(Path::new("model"), HashMap::new()) }
    }

    #[test]
    fn text_becomes_tokens_and_text_again() {
        let words = Words::of(&file()).unwrap();
        for text in ["abc ab", "cab12", "Grüße, 世界!\n\n"] {
            assert_eq!(words.decode(&words.encode(text).unwrap()).as_deref(), Some(text));
        }
        assert_eq!(words.encode("abc ab").unwrap().len(), 2);
        assert_eq!(words.encode("12").unwrap().len(), 2); // each digit on its own, whatever the merges say
        assert!(words.encode("").unwrap().is_empty());
        let half = &words.encode("世").unwrap()[..2];
        assert_eq!(words.decode(half), None);
    }

    #[test]
    fn a_byte_without_a_token_is_the_unknown_one() {
        assert_eq!(Words::of(&file()).unwrap().encode("a~").unwrap()[1], 0);
    }

    #[test]
    fn a_question_is_framed_by_turns() {
        let words = Words::of(&file()).unwrap();
        let ids = words.question("abc").unwrap();
        assert_eq!(
            (ids.iter().filter(|&&id| id == 1).count(), ids.iter().filter(|&&id| id == words.end()).count()),
            (3, 2)
        );
        assert_eq!(ids[0], 1);
    }

    #[test]
    fn what_the_file_lacks_is_named() {
        for key in ["tokens", "merges", "token_type", "eos_token_id", "unknown_token_id"] {
            let mut file = file();
            let key = format!("tokenizer.ggml.{key}");
            file.metadata.remove(&key);
            assert!(Words::of(&file).is_err_and(|what| what.contains(&key)), "{key}");
        }
    }
}
