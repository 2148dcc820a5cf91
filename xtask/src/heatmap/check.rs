//! `--check`: pages made for the purpose, which the program in `xtask/browser` opens in Chromium and uses.
//!
//! It is a workspace of its own, built in `target/browser` when a check is run: nobody who builds the workshop builds a
//! browser's protocol. `xtask/browser/src/checks.rs` says what each page must show.

use std::path::Path;

use attn_core::{Layout, Result, View};
use attn_layers::worked_example::TOKENS;

use super::example::{self, MAX_TOKENS};
use attn_heatmap::{Drop, Layer, Scene};

use super::look::Look;
use crate::hand_over;

/// What every page drops.
const DROP: Option<Drop> = Some(Drop { p: 0.5, seed: 1 });

/// The pages, by name: the worked example in one and in two heads, a model's layers, words that look like HTML, and the
/// longest sequence.
pub(super) fn scenes() -> std::result::Result<[(&'static str, Scene); 5], String> {
    let words = |tokens: &[&str], heads| example::scene(tokens, heads, &[Look::Causal, Look::All], DROP);
    let hostile = ["</script><b>x</b>", "<img src=x onerror=document.title='broken'>", "&amp;", "\"'`${1}"];
    let long: Vec<&str> = TOKENS.into_iter().cycle().take(MAX_TOKENS).collect();
    Ok([
        ("example.html", words(&TOKENS, 1)?),
        ("heads.html", words(&TOKENS, 2)?),
        ("layers.html", layers().map_err(|error| error.to_string())?),
        ("words.html", words(&hostile, 1)?),
        ("long.html", words(&long, 4)?),
    ])
}

/// As a model has it: layers to choose from, heads whose vectors are too long for numbers, no mask.
fn layers() -> Result<Scene> {
    let (heads, seq, dim) = (3, 9, 32);
    let layer = |n: usize| {
        let x: Vec<f32> = (0..heads * seq * dim).map(|i| ((i * (n + 2)) as f32).sin()).collect();
        let x = View::new(&x, Layout::Bhsd, [1, heads, seq, dim])?;
        Layer::new(format!("Layer {n}"), [x; 3], &[Look::All.attention()], DROP)
    };
    let layers = (1..=2).map(layer).collect::<Result<_>>()?;
    let tokens = (1..=seq).map(|n| format!("token{n}")).collect();
    let (title, note) = ("Two layers".into(), "Numbers by formula.".into());
    Ok(Scene { title, note, tokens, keys: None, masks: vec!["none".into()], dropout: DROP, layers })
}

/// Uses the pages in a folder. The program says itself what it found.
pub(super) fn run(folder: &Path) -> std::result::Result<(), String> {
    hand_over::run_apart("xtask/browser", "browser", &[folder])
        .map_err(|error| format!("the browser's checks: {error}"))
}
