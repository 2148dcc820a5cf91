//! Queries, keys and values of a model's layers, from a file: what `cargo xtask demo minilm --save FILE` writes.

use std::path::Path;

use attn_core::{Layout, View};
use serde::Deserialize;

use attn_heatmap::{Drop, Layer, Scene};

use super::masks::PageMask;

/// Longer sequences make pages that no browser likes: all heads of all layers are in there.
const MAX_TOKENS: usize = 64;

#[derive(Deserialize)]
struct File {
    title: String,
    note: String,
    tokens: Vec<String>,
    layers: Vec<Vectors>,
}

/// The rows of all heads: `[heads, tokens, dim]`.
#[derive(Deserialize)]
struct Vectors {
    q: Vec<Vec<Vec<f32>>>,
    k: Vec<Vec<Vec<f32>>>,
    v: Vec<Vec<Vec<f32>>>,
}

/// All layers and heads of a file. Every token sees every other one: there is no mask to choose.
pub(super) fn scene(path: &Path, drop: Option<Drop>) -> Result<Scene, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let bytes = std::fs::read(path).map_err(|error| failed(&error))?;
    let file: File = serde_json::from_slice(&bytes).map_err(|error| failed(&error))?;
    of(file, drop).map_err(|error| failed(&error))
}

fn of(File { title, note, tokens, layers }: File, drop: Option<Drop>) -> Result<Scene, String> {
    if tokens.len() > MAX_TOKENS {
        return Err(format!("{} tokens; at most {MAX_TOKENS} of a model fit on a page", tokens.len()));
    }
    let layer = |(n, Vectors { q, k, v }): (usize, &Vectors)| {
        let [q, k, v] = [flat("q", q, tokens.len())?, flat("k", k, tokens.len())?, flat("v", v, tokens.len())?];
        let view = |(sizes, data)| View::new(data, Layout::Bhsd, sizes);
        let all = || {
            let views = [view((q.0, &q.1))?, view((k.0, &k.1))?, view((v.0, &v.1))?];
            Layer::new(format!("Layer {n}"), views, &[PageMask::All.attention()], drop)
        };
        all().map_err(|error: attn_core::AttnError| format!("layer {n}: {error}"))
    };
    let layers = (1..).zip(&layers).map(layer).collect::<Result<Vec<_>, _>>()?;
    if layers.is_empty() {
        return Err("no layer".into());
    }
    Ok(Scene { title, note, tokens, keys: None, masks: vec!["none".into()], dropout: drop, layers })
}

/// Sizes and elements of `[heads][tokens][dim]`.
fn flat(name: &str, heads: &[Vec<Vec<f32>>], tokens: usize) -> Result<([usize; 4], Vec<f32>), String> {
    let dim = heads.first().and_then(|head| head.first()).map_or(0, Vec::len);
    if heads.iter().any(|head| head.len() != tokens || head.iter().any(|row| row.len() != dim)) {
        return Err(format!("{name} is not [heads][{tokens} tokens][{dim}] everywhere"));
    }
    Ok(([1, heads.len(), tokens, dim], heads.concat().concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(k: &str) -> Result<Scene, String> {
        let layer = format!(r#"{{"q": [[[1, 0], [0, 1]], [[1, 1], [2, 0]]], "k": {k}, "v": [[[3, 4], [5, 6]]]}}"#);
        let json = format!(r#"{{"title": "T", "note": "N", "tokens": ["a", "b"], "layers": [{layer}]}}"#);
        of(serde_json::from_str(&json).unwrap(), None)
    }

    #[test]
    fn the_heads_of_a_file_are_shown() {
        let scene = file("[[[1, 2], [3, 4]]]").unwrap();
        assert_eq!((scene.tokens.len(), scene.layers.len(), scene.layers[0].heads.len()), (2, 1, 2));
        assert_eq!(scene.layers[0].heads[1].q, [[1.0, 1.0], [2.0, 0.0]]);
        assert_eq!(scene.layers[0].heads[1].k, [[1.0, 2.0], [3.0, 4.0]]);
    }

    #[test]
    fn rows_that_do_not_fit_are_an_error() {
        assert!(file("[[[1, 2]]]").is_err_and(|error| error.contains("k is not")));
        assert!(file("[[[1, 2], [3]]]").is_err_and(|error| error.contains("k is not")));
        assert!(file("[[[1], [3]]]").is_err_and(|error| error.contains("head_dim")));
    }
}
