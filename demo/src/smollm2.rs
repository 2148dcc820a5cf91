//! `cargo xtask demo smollm2`: text, token by token, by SmolLM2-135M-Instruct.
//!
//! [`text`] makes tokens of text, [`model`] is the decoder, [`verify`] the comparison with stored activations. Caches
//! hold keys and values of all tokens so far; the prompt goes in at once, then each token on its own. The next token is
//! always the likeliest.

mod model;
mod text;
mod verify;

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::quantized::gguf_file::Content;
use tokenizers::Tokenizer;

use crate::fetch::SMOLLM2;
use model::{Decoder, Session};
use text::{END, encode, question};

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
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    #[arg(default_missing_value = "../shared/models/smollm2-135m-instruct-q4_1")]
    check: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let begin = Instant::now();
    let (decoder, tokenizer) = load()?;
    let loaded = begin.elapsed();
    if let Some(folder) = &args.check {
        return verify::run(&decoder, &tokenizer, folder);
    }
    let prompt = args.prompt.as_deref().unwrap_or_default();
    let ids = encode(&tokenizer, &if args.chat { question(prompt) } else { prompt.to_owned() })?;
    ensure!(!ids.is_empty(), "the prompt has no tokens");
    let end = tokenizer.token_to_id(END).context("the model has no token that ends a turn")?;

    let mut session = Session::new(&decoder, ids.len() + args.tokens)?;
    let mut written = tokenizer.decode_stream(true);
    if !args.chat {
        print!("{prompt}");
    }
    let begin = Instant::now();
    let mut next = session.advance(&ids)?.likeliest()?;
    let first = begin.elapsed();
    let begin = Instant::now();
    let mut decoded = 0;
    for n in 0..args.tokens {
        if next == end {
            break;
        }
        // A character may be spread over several tokens: there is text when it is whole.
        if let Some(more) = written.step(next).map_err(|error| anyhow!(error))? {
            print!("{more}");
            std::io::stdout().flush()?;
        }
        if n + 1 < args.tokens {
            next = session.advance(&[next])?.likeliest()?;
            decoded += 1;
        }
    }
    let time = begin.elapsed();
    println!();
    eprintln!(
        "{} tokens of prompt: first token after {:.0} ms ({:.0} tokens/s); {decoded} more: {:.1} tokens/s; loaded in \
         {:.1} s",
        ids.len(),
        1e3 * first.as_secs_f64(),
        ids.len() as f64 / first.as_secs_f64(),
        f64::from(decoded) / time.as_secs_f64(),
        loaded.as_secs_f64(),
    );
    Ok(())
}

/// The model and its tokenizer.
fn load() -> Result<(Decoder, Tokenizer)> {
    let path = SMOLLM2.file("model.gguf")?;
    let named = || path.display().to_string();
    let mut file = BufReader::new(File::open(&path).with_context(named)?);
    let mut content = Content::read(&mut file).with_context(named)?;
    let tokenizer = text::tokenizer(&mut content).with_context(named)?;
    Ok((Decoder::read(&content, &mut file).with_context(named)?, tokenizer))
}
