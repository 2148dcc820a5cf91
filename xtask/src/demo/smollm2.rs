//! `cargo xtask demo smollm2`: text, word by word, by SmolLM2-135M-Instruct.
//!
//! [`model`] is the decoder, [`text`] its tokenizer, [`verify`] the comparison with stored activations. Keys and values
//! of all tokens so far lie in caches; the prompt goes in at once, then each token on its own. The next token is always
//! the likeliest.

mod model;
mod text;
mod verify;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::fetch::SMOLLM2;
use super::gguf::Gguf;
use super::{Failure, Result};
use model::{Decoder, Session};
use text::Words;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What the text begins with.
    #[arg(value_name = "PROMPT", required_unless_present = "check")]
    prompt: Option<String>,
    /// Tokens to write at most.
    #[arg(long, value_name = "N", default_value_t = 64)]
    tokens: usize,
    /// Put the prompt as a question to the assistant, instead of going on with it.
    #[arg(long)]
    chat: bool,
    /// Compare with the activations in this folder instead.
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "../shared/models/smollm2-135m-instruct-q4_1")]
    check: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let begin = Instant::now();
    let (decoder, words) = load()?;
    let loaded = begin.elapsed();
    if let Some(folder) = &args.check {
        return verify::run(&decoder, &words, folder);
    }
    let prompt = args.prompt.as_deref().unwrap_or_default();
    let ids = if args.chat { words.question(prompt)? } else { words.encode(prompt)? };
    if ids.is_empty() {
        return Err(Failure::Text("the prompt has no tokens".into()));
    }

    let mut session = Session::new(&decoder, ids.len() + args.tokens)?;
    let mut written = Written { words: &words, ids: Vec::new(), shown: 0 };
    if !args.chat {
        print!("{prompt}");
    }
    let begin = Instant::now();
    let mut next = session.advance(&ids)?.likeliest();
    let first = begin.elapsed();
    let begin = Instant::now();
    let mut decoded = 0;
    for n in 0..args.tokens {
        if next == words.end() {
            break;
        }
        written.push(next)?;
        if n + 1 < args.tokens {
            next = session.advance(&[next])?.likeliest();
            decoded += 1;
        }
    }
    let time = begin.elapsed();
    println!();
    eprintln!(
        "{} tokens of prompt: first token after {:.0} ms ({:.0} tokens/s); {decoded} more: {:.1} tokens/s; loaded in {:.1} s",
        ids.len(),
        1e3 * first.as_secs_f64(),
        ids.len() as f64 / first.as_secs_f64(),
        f64::from(decoded) / time.as_secs_f64(),
        loaded.as_secs_f64(),
    );
    Ok(())
}

/// The model and its tokenizer, with a bar on a terminal: widening half a gigabyte takes a moment.
fn load() -> Result<(Decoder, Words)> {
    let path = SMOLLM2.file("model.gguf")?;
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("loading {bar:40} {pos}/{len} tensors") {
        bar.set_style(style);
    }
    let mut file = Gguf::read(&path, |all, done| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    let words = Words::of(&file).map_err(|what| Failure::Format(path, what))?;
    Ok((Decoder::of(&mut file)?, words))
}

/// What has been written so far, shown as far as it is whole characters.
struct Written<'w> {
    words: &'w Words,
    ids: Vec<u32>,
    shown: usize,
}

impl Written<'_> {
    fn push(&mut self, id: u32) -> Result<()> {
        self.ids.push(id);
        // A character may be spread over several tokens.
        if let Some(text) = self.words.decode(&self.ids) {
            print!("{}", text.get(self.shown..).unwrap_or_default());
            self.shown = text.len();
            std::io::stdout().flush().map_err(|error| Failure::Program(error.to_string()))?;
        }
        Ok(())
    }
}
