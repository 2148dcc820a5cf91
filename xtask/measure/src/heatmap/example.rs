//! Queries, keys and values of words: the worked example's, or of other words through its projections.

use attn_core::{Layout, View, ViewMut};
use attn_layers::Linear;
use attn_layers::worked_example::{TOKENS, W_K, W_Q, W_V, X};

use attn_heatmap::{Drop, Layer, Scene};

use super::masks::PageMask;

/// Dimensions of an embedding, which the heads share.
const DIM: usize = 4;

/// Longer sequences make more cells than a page can show and a reader can see.
pub(super) const MAX_TOKENS: usize = 128;

/// The scene of some words, through as many heads.
pub(super) fn scene(tokens: &[&str], heads: usize, masks: &[PageMask], drop: Option<Drop>) -> Result<Scene, String> {
    if heads == 0 || !DIM.is_multiple_of(heads) {
        return Err(format!("{heads} heads do not share the example's {DIM} dimensions: 1, 2 or 4 do"));
    }
    if tokens.len() > MAX_TOKENS {
        return Err(format!("{} tokens; at most {MAX_TOKENS} fit on a page", tokens.len()));
    }
    let x: Vec<f32> = tokens.iter().flat_map(|token| embedding(token)).collect();
    let sizes = [1, heads, tokens.len(), DIM / heads];
    let attended = || {
        let x = View::new(&x, Layout::Bshd, [1, 1, tokens.len(), DIM])?;
        let mut qkv = [const { Vec::new() }; 3];
        for (y, weight) in qkv.iter_mut().zip([&W_Q, &W_K, &W_V]) {
            y.resize(tokens.len() * DIM, 0.0f32);
            Linear::new(weight.as_flattened(), DIM, DIM)?.forward(x, &mut ViewMut::new(y, Layout::Bshd, sizes)?)?;
        }
        let [q, k, v] = &qkv;
        let view = |x| View::new(x, Layout::Bshd, sizes);
        let attns: Vec<_> = masks.iter().map(|mask| mask.attention()).collect();
        Layer::new("Layer 1".into(), [view(q)?, view(k)?, view(v)?], &attns, drop)
    };
    let layer = attended().map_err(|error: attn_core::AttnError| error.to_string())?;

    let unknown: Vec<&str> = tokens.iter().copied().filter(|token| known(token).is_none()).collect();
    let mut note = match heads {
        1 => "One head over the worked example's projections: q = x·W_q, k = x·W_k, v = x·W_v, all of 4 dimensions."
            .into(),
        _ => format!("{heads} heads of {} dimensions each, over the worked example's projections.", DIM / heads),
    };
    if !unknown.is_empty() {
        note +=
            &format!(" Not in the example, embedding drawn from the letters, without meaning: {}.", unknown.join(", "));
    }
    let masks = masks.iter().map(|mask| mask.name()).collect();
    let tokens: Vec<String> = tokens.iter().map(|&token| token.to_owned()).collect();
    Ok(Scene { title: tokens.join(" "), note, tokens, keys: None, masks, dropout: drop, layers: vec![layer] })
}

/// The embedding that the example gives a word.
fn known(token: &str) -> Option<[f32; DIM]> {
    TOKENS.iter().position(|known| *known == token).map(|at| X[at])
}

/// The example's embedding, or four numbers from 0 to 1 that depend on the word alone.
fn embedding(token: &str) -> [f32; DIM] {
    known(token).unwrap_or_else(|| {
        // FNV-1a over the bytes, then a multiplication per number that spreads the bits.
        let mut hash = token
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        [(); DIM].map(|()| {
            hash = (hash ^ (hash >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((hash >> 40) as f32 / (1u32 << 24) as f32 * 100.0).round() / 100.0
        })
    })
}

#[cfg(test)]
mod tests {
    use attn_layers::worked_example::{CAUSAL_CONTEXT, CAUSAL_WEIGHTS, K, Q, SCALED_SCORES, V, WEIGHTS};

    use super::*;

    /// Half a unit of the example's last decimal, and what f32 rounds.
    const CLOSE: f64 = 0.5e-4 + 1e-6;

    fn close(got: &[Vec<f32>], want: &[[f64; 4]; 6]) {
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((f64::from(*got) - want).abs() < CLOSE, "{got} {want}");
        }
    }

    #[test]
    fn the_default_scene_is_the_worked_example() {
        let scene = scene(&TOKENS, 1, &[PageMask::Causal, PageMask::All], None).unwrap();
        assert_eq!(
            (scene.title.as_str(), scene.masks),
            ("The cat sat on the mat", vec!["causal".to_owned(), "none".to_owned()])
        );
        let head = &scene.layers[0].heads[0];
        close(&head.q, &Q);
        close(&head.k, &K);
        close(&head.v, &V);
        let [causal, all] = head.views.as_slice() else { panic!("two masks") };
        close(&causal.out, &CAUSAL_CONTEXT);
        for i in 0..6 {
            for j in 0..6 {
                let want = (j <= i).then_some(CAUSAL_WEIGHTS[i][j]);
                match (causal.before[i][j], want) {
                    (None, None) => {}
                    (Some(got), Some(want)) => assert!((f64::from(got) - want).abs() < CLOSE, "{got} {want}"),
                    other => panic!("row {i}, key {j}: {other:?}"),
                }
                let got = all.before[i][j].zip(all.scores[i][j]).expect("every key is seen");
                assert!((f64::from(got.0) - WEIGHTS[i][j]).abs() < CLOSE, "{got:?}");
                assert!((f64::from(got.1) - SCALED_SCORES[i][j]).abs() < CLOSE, "{got:?}");
            }
        }
    }

    #[test]
    fn two_heads_share_the_dimensions() {
        let scene = scene(&TOKENS, 2, &[PageMask::All], None).unwrap();
        let [first, second] = scene.layers[0].heads.as_slice() else { panic!("two heads") };
        for i in 0..6 {
            let both: Vec<f32> = first.q[i].iter().chain(&second.q[i]).copied().collect();
            close(&[both], &[Q[i]; 6]);
        }
        assert!(super::scene(&TOKENS, 3, &[PageMask::All], None).is_err_and(|error| error.contains("1, 2 or 4")));
    }

    #[test]
    fn other_words_get_embeddings_that_stay() {
        assert_eq!(embedding("cat"), X[1]);
        assert_eq!(embedding("dog"), embedding("dog"));
        assert_ne!(embedding("dog"), embedding("god"));
        assert!(embedding("dog").iter().all(|x| (0.0..=1.0).contains(x)));
        let scene = scene(&["the", "dog"], 1, &[PageMask::All], None).unwrap();
        assert!(scene.note.ends_with("without meaning: dog."), "{}", scene.note);
    }
}
