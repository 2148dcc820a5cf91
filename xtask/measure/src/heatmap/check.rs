//! `--check`: pages made for the purpose, which the program in `xtask/browser` opens in Chromium and uses.
//!
//! It is a workspace of its own, built in `target/browser` when a check is run: nobody who builds the workshop builds a
//! browser's protocol. `xtask/browser/src/checks.rs` says what each page must show.

use std::path::Path;

use attn_core::{Layout, Result, View};
use attn_layers::worked_example::TOKENS;

use super::example::{self, MAX_TOKENS};
use attn_heatmap::{Drop, Layer, Scene};

use super::masks::PageMask;
use xtask::hand_over;

/// What every page drops.
const DROP: Option<Drop> = Some(Drop { p: 0.5, seed: 1 });

/// The pages, by name: the worked example in one and in two heads, a model's layers, words that look like HTML, the
/// longest sequence, and keys that are other tokens.
pub(super) fn scenes() -> std::result::Result<[(&'static str, Scene); 6], String> {
    let words = |tokens: &[&str], heads| example::scene(tokens, heads, &[PageMask::Causal, PageMask::All], DROP);
    let hostile = ["</script><b>x</b>", "<img src=x onerror=document.title='broken'>", "&amp;", "\"'`${1}"];
    let long: Vec<&str> = TOKENS.into_iter().cycle().take(MAX_TOKENS).collect();
    Ok([
        ("example.html", words(&TOKENS, 1)?),
        ("heads.html", words(&TOKENS, 2)?),
        ("layers.html", layers().map_err(|error| error.to_string())?),
        ("words.html", words(&hostile, 1)?),
        ("long.html", words(&long, 4)?),
        ("keys.html", keys().map_err(|error| error.to_string())?),
    ])
}

/// As a model has it: layers to choose from, heads whose vectors are too long for numbers, no mask.
fn layers() -> Result<Scene> {
    let (heads, seq, dim) = (3, 9, 32);
    let layer = |n: usize| {
        let x: Vec<f32> = (0..heads * seq * dim).map(|i| ((i * (n + 2)) as f32).sin()).collect();
        let x = View::new(&x, Layout::Bhsd, [1, heads, seq, dim])?;
        Layer::new(format!("Layer {n}"), [x; 3], &[PageMask::All.attention()], DROP)
    };
    let layers = (1..=2).map(layer).collect::<Result<_>>()?;
    let tokens = (1..=seq).map(|n| format!("token{n}")).collect();
    let (title, note) = ("Two layers".into(), "Numbers by formula.".into());
    Ok(Scene { title, note, tokens, keys: None, masks: vec!["none".into()], dropout: DROP, layers })
}

/// Three queries of two heads over five keys of other tokens.
fn keys() -> Result<Scene> {
    let x: Vec<f32> = (0..40).map(|i| (i as f32).sin()).collect();
    let [q, k] =
        [(2, 3), (1, 5)].map(|(heads, len)| View::new(&x[..heads * len * 4], Layout::Bhsd, [1, heads, len, 4]));
    let (q, k) = (q?, k?);
    let layers = vec![Layer::new("Layer 1".into(), [q, k, k], &[PageMask::All.attention()], None)?];
    let named = |name: &str, count| (1..=count).map(|n| format!("{name}{n}")).collect::<Vec<_>>();
    let (title, note) = ("Other keys".into(), "Numbers by formula.".into());
    let (tokens, keys) = (named("query", 3), Some(named("key", 5)));
    Ok(Scene { title, note, tokens, keys, masks: vec!["none".into()], dropout: None, layers })
}

/// Uses the pages in a folder. The program says itself what it found.
pub(super) fn run(folder: &Path) -> std::result::Result<(), String> {
    hand_over::run_apart("xtask/browser", "browser", &[folder])
        .map_err(|error| format!("the browser's checks: {error}"))
}
