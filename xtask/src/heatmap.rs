//! `cargo xtask heatmap`: who looks at whom, as a page to click through.
//!
//! Without an option it shows the worked example, "The cat sat on the mat"; `--tokens` other words through the same
//! projections, `--model minilm --text "…"` what a real encoder does with a sentence, in all its layers and heads.
//!
//! [`mod@scene`] computes what is shown with the library's own kernels and its functions on weights, [`example`] makes
//! queries, keys and values of words, [`page`] writes one file that needs no other, and [`check`] opens it in Chromium
//! and uses it.

mod browser;
mod check;
mod example;
mod page;
mod scene;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use attn_bench::report::table;

use crate::demo::minilm;
use scene::{Drop, Look, Scene};

/// Longer sequences make more cells than a page can show and a reader can see.
const MAX_TOKENS: usize = 128;
/// The same for all heads of a model: the page's size grows with their number too.
const MAX_MODEL_TOKENS: usize = 64;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// These words instead of the worked example's. A word that it does not know gets an embedding drawn from its
    /// letters.
    #[arg(long, value_name = "WORD", num_args = 1.., conflicts_with = "model")]
    tokens: Vec<String>,
    /// A real model: `cargo xtask demo fetch minilm` gets it.
    #[arg(long, value_name = "NAME", value_parser = ["minilm"], requires = "text")]
    model: Option<String>,
    /// The sentence that the model reads.
    #[arg(long, value_name = "TEXT", requires = "model")]
    text: Option<String>,
    /// Split the example's four dimensions among 1, 2 or 4 heads.
    #[arg(long, value_name = "N", default_value_t = 1)]
    heads: usize,
    /// Which mask the page shows first; the other one is a click away.
    #[arg(long, value_enum, default_value_t = Look::Causal)]
    mask: Look,
    /// Probability of dropping a weight, for the weights after dropout; 0 for none.
    #[arg(long, value_name = "P", default_value_t = 0.5)]
    dropout: f32,
    /// Seed of that draw.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Where the page goes.
    #[arg(long, value_name = "FILE", default_value = "target/heatmap/heatmap.html")]
    out: PathBuf,
    /// Also open pages in Chromium, click and type there and look at what they show; pictures are left beside the page.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: Args) -> ExitCode {
    match show(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("heatmap: {message}");
            ExitCode::FAILURE
        }
    }
}

fn show(args: &Args) -> Result<(), String> {
    let scene = scene(args)?;
    write(&args.out, page::html(&scene).as_bytes())?;
    if scene.tokens.len() <= 16 && scene.layers.len() == 1 {
        print!("{}", table_of(&scene));
    }
    println!("{}", args.out.display());
    if args.check {
        let folder = args.out.parent().unwrap_or(Path::new("."));
        println!("{}", check::run(folder)?);
    }
    Ok(())
}

/// What the arguments ask for.
fn scene(args: &Args) -> Result<Scene, String> {
    let drop = (args.dropout != 0.0).then_some(Drop { p: args.dropout, seed: args.seed });
    if let (Some(_), Some(text)) = (&args.model, &args.text) {
        return model_scene(text, drop);
    }
    let tokens: Vec<&str> = match args.tokens.as_slice() {
        [] => attn_layers::worked_example::TOKENS.to_vec(),
        words => words.iter().map(String::as_str).collect(),
    };
    if tokens.len() > MAX_TOKENS {
        return Err(format!("{} tokens; at most {MAX_TOKENS} fit on a page", tokens.len()));
    }
    let mut looks = vec![args.mask];
    looks.extend([Look::Causal, Look::All].into_iter().filter(|&look| look != args.mask));
    example::scene(&tokens, args.heads, &looks, drop)
}

/// All layers and heads of the encoder. Every token sees every other one: there is no mask to choose.
fn model_scene(text: &str, drop: Option<Drop>) -> Result<Scene, String> {
    let (tokens, layers) = minilm::attention(text).map_err(|failure| failure.to_string())?;
    if tokens.len() > MAX_MODEL_TOKENS {
        return Err(format!("{} tokens; at most {MAX_MODEL_TOKENS} of a model fit on a page", tokens.len()));
    }
    let layers = (1..).zip(&layers).map(|(n, call)| {
        scene::layer(format!("Layer {n}"), [call.view(0)?, call.view(1)?, call.view(2)?], &[Look::All], drop)
    });
    let layers = layers.collect::<attn_core::Result<Vec<_>>>().map_err(|error| error.to_string())?;
    let note = "all-MiniLM-L6-v2 as it reads this sentence: every token sees every other one. [CLS] and [SEP] mark its ends; \
                ## goes on with the word before.";
    Ok(Scene { title: text.to_owned(), note: note.into(), tokens, masks: vec!["none"], dropout: drop, layers })
}

/// The weights of the first head under the first mask, for the terminal.
fn table_of(scene: &Scene) -> String {
    let Some(head) = scene.layers.first().and_then(|layer| layer.heads.first()) else { return String::new() };
    let Some(view) = head.views.first() else { return String::new() };
    let tokens = scene.tokens.iter().map(String::as_str);
    let header: Vec<&str> = std::iter::once("query \\ key").chain(tokens.clone()).collect();
    let cell = |weight: &Option<f32>| weight.map_or("-".to_owned(), |weight| format!("{weight:.4}"));
    let rows = tokens
        .zip(&view.before)
        .map(|(token, row)| std::iter::once(token.to_owned()).chain(row.iter().map(cell)).collect::<Vec<_>>());
    format!("{}\n", table::table(&header, 1, rows))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let failed = |error| format!("{}: {error}", path.display());
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    std::fs::write(path, bytes).map_err(failed)
}
