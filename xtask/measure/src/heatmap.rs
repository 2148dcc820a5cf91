//! `cargo xtask heatmap`: who attends to whom, as a page to click through.
//!
//! Without an option it shows the worked example, "The cat sat on the mat"; `--tokens` other words through the same
//! projections, `--heads-of FILE` the queries, keys and values of any model, and `--model minilm --text "…"` those of a
//! real encoder, which a demo computes and writes to such a file.
//!
//! `attn_heatmap` computes a page with the library's own kernels, and writes it as one file. Here [`example`] makes
//! queries, keys and values of words, [`heads`] reads them from a file, [`picture`] draws the first head for documents,
//! and [`check`] has pages opened and used in Chromium.

mod check;
mod example;
mod heads;
mod masks;
mod picture;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use attn_bench::report::plot::Theme;
use attn_bench::report::table;

use attn_heatmap::{Drop, Scene};
use masks::PageMask;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// These words instead of the worked example's. A word that it does not know gets an embedding drawn from its
    /// letters.
    #[arg(long, value_name = "WORD", num_args = 1.., conflicts_with_all = ["model", "heads_of"])]
    tokens: Vec<String>,
    /// Queries, keys and values of all layers, as `cargo xtask demo minilm --save FILE` writes them: JSON with title,
    /// note, tokens and layers, each with q, k and v as `[heads][tokens][dim]`.
    #[arg(long = "heads-of", value_name = "FILE", conflicts_with = "model")]
    heads_of: Option<PathBuf>,
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
    #[arg(long, value_enum, default_value_t = PageMask::Causal)]
    mask: PageMask,
    /// Probability of dropping a weight, for the weights after dropout; 0 for none.
    #[arg(long, value_name = "P", default_value_t = 0.5)]
    dropout: f32,
    /// Seed of that draw.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Where the page goes.
    #[arg(long, value_name = "FILE", default_value = "target/heatmap/heatmap.html")]
    out: PathBuf,
    /// Also write the first head's weights as pictures to this folder, for light and for dark pages.
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
    /// Also open pages in Chromium, click and type there and check what they show; pictures are saved beside the page.
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
    write(&args.out, scene.html().as_bytes())?;
    for (theme, name) in Theme::ALL {
        if let (Some(folder), Some(svg)) = (&args.pictures, picture::svg(&scene, theme)) {
            write(&folder.join(format!("heatmap-{name}.svg")), svg.as_bytes())?;
        }
    }
    if scene.tokens.len() <= 16 && scene.layers.len() == 1 {
        print!("{}", table_of(&scene));
    }
    println!("{}", args.out.display());
    if args.check {
        let folder = args.out.parent().unwrap_or(Path::new("."));
        for (name, scene) in check::scenes()? {
            write(&folder.join(name), scene.html().as_bytes())?;
        }
        check::run(folder)?;
    }
    Ok(())
}

/// The scene of the arguments.
fn scene(args: &Args) -> Result<Scene, String> {
    let drop = (args.dropout != 0.0).then_some(Drop { p: args.dropout, seed: args.seed });
    if let Some(path) = &args.heads_of {
        return heads::scene(path, drop);
    }
    if let (Some(model), Some(text)) = (&args.model, &args.text) {
        let path = args.out.with_extension("json");
        xtask::hand_over::demo(&[model.into(), "--save".into(), path.clone().into(), "--".into(), text.into()])?;
        return heads::scene(&path, drop);
    }
    let tokens: Vec<&str> = match args.tokens.as_slice() {
        [] => attn_layers::worked_example::TOKENS.to_vec(),
        words => words.iter().map(String::as_str).collect(),
    };
    let mut masks = vec![args.mask];
    masks.extend([PageMask::Causal, PageMask::All].into_iter().filter(|&mask| mask != args.mask));
    example::scene(&tokens, args.heads, &masks, drop)
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
