//! The encoder: six layers of attention over twelve heads, each followed by a feed-forward block (BERT, arXiv
//! 1810.04805).
//!
//! Attention is attn-core's [`MultiHeadAttention`]; padding is a mask of key lengths. The feed-forward block uses the
//! exact GELU, and each LayerNorm comes after the sum.

use std::collections::HashMap;

use attn_core::{Attention, Layout, Mask, View, ViewMut};
use attn_layers::Linear;
use attn_layers::module::{MultiHeadAttention, Sources};
use rayon::prelude::*;

use crate::demo::engine::{self, Demo};
use crate::demo::fetch::MINILM;
use crate::demo::tensors::{Dense, Tensors};
use crate::demo::{Failure, Result};

/// Features of a token.
pub(super) const HIDDEN: usize = 384;
/// Heads of a layer, 32 features each.
pub(super) const HEADS: usize = 12;
/// Layers.
pub(super) const LAYERS: usize = 6;
const INNER: usize = 1536;
const EPS: f64 = 1e-12;

/// Sentences of token ids, padded to the longest.
pub(super) struct Batch {
    ids: Vec<u32>,
    lens: Vec<usize>,
    seq: usize,
}

impl Batch {
    /// Pads with id 0, which attention never sees.
    pub(super) fn new(sentences: &[Vec<u32>]) -> Result<Self> {
        let lens: Vec<usize> = sentences.iter().map(Vec::len).collect();
        let seq = lens.iter().copied().max().unwrap_or(0);
        if lens.contains(&0) || lens.is_empty() {
            return Err(Failure::Text("a sentence without tokens has no meaning to compare".into()));
        }
        let padded = sentences.iter().flat_map(|ids| ids.iter().copied().chain(std::iter::repeat(0)).take(seq));
        Ok(Self { ids: padded.collect(), lens, seq })
    }

    /// Sentences.
    pub(super) fn len(&self) -> usize {
        self.lens.len()
    }

    /// Token ids, `[sentences, longest]`.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The longest sentence.
    pub(super) fn seq(&self) -> usize {
        self.seq
    }

    /// Hides the padding.
    pub(super) fn mask(&self) -> Mask<'_> {
        Mask::kv_lens(&self.lens)
    }

    /// Tokens that are not padding.
    pub(super) fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }
}

/// The model.
pub(super) struct Encoder {
    /// Rows of the vocabulary, and which row an id has where not all are there.
    words: Vec<f32>,
    rows: Option<HashMap<u32, usize>>,
    positions: Vec<f32>,
    /// The embedding of the only token type.
    kind: Vec<f32>,
    norm: Norm,
    layers: Vec<Layer>,
}

struct Layer {
    query: Dense,
    key: Dense,
    value: Dense,
    out: Dense,
    norm: Norm,
    up: Dense,
    down: Dense,
    last_norm: Norm,
}

impl Encoder {
    /// The one that `cargo xtask demo fetch minilm` has fetched.
    pub(super) fn fetched() -> Result<Self> {
        Self::of(Tensors::read(&MINILM.file("model.safetensors")?)?)
    }

    /// From tensors by the names of the published checkpoint; the vocabulary may be a selection of rows.
    pub(super) fn of(mut from: Tensors) -> Result<Self> {
        let word = "embeddings.word_embeddings";
        let (words, rows) = if from.has(&format!("{word}.row_ids")) {
            let ids = from.ids(&format!("{word}.row_ids"))?;
            let words = from.take(&format!("{word}.rows"), &[ids.len(), HIDDEN])?;
            (words, Some(ids.into_iter().zip(0..).collect()))
        } else {
            let shape = from.get(&format!("{word}.weight"))?.shape.clone();
            let rows = shape.first().copied().unwrap_or(0);
            (from.take(&format!("{word}.weight"), &[rows, HIDDEN])?, None)
        };
        let name = "embeddings.position_embeddings.weight";
        let known = from.get(name)?.shape.first().copied().unwrap_or(0);
        let positions = from.take(name, &[known, HIDDEN])?;
        let mut kind = from.take("embeddings.token_type_embeddings.weight", &[2, HIDDEN])?;
        kind.truncate(HIDDEN);
        let norm = Norm::take(&mut from, "embeddings.LayerNorm")?;
        let layers = (0..LAYERS).map(|n| Layer::take(&mut from, &format!("encoder.layer.{n}")));
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self { words, rows, positions, kind, norm, layers })
    }

    /// Word, position and type of every token, normalised: `[sentences, longest, HIDDEN]`.
    pub(super) fn embedded(&self, batch: &Batch) -> Result<Vec<f32>> {
        let mut x = Vec::with_capacity(batch.ids.len() * HIDDEN);
        for (n, &id) in batch.ids.iter().enumerate() {
            let row = self.rows.as_ref().map_or(Some(id as usize), |rows| rows.get(&id).copied());
            let word = row.and_then(|row| self.words.get(row * HIDDEN..(row + 1) * HIDDEN));
            let word = word.ok_or_else(|| Failure::Text(format!("the model has no token {id}")))?;
            let at = n % batch.seq;
            let position = self.positions.get(at * HIDDEN..(at + 1) * HIDDEN).ok_or_else(|| {
                let most = self.positions.len() / HIDDEN;
                Failure::Text(format!("a sentence of {} tokens; the model knows {most} positions", batch.seq))
            })?;
            x.extend(word.iter().zip(position).zip(&self.kind).map(|((word, position), kind)| word + position + kind));
        }
        self.norm.apply(&mut x);
        Ok(x)
    }

    /// The last layer's output, `[sentences, longest, HIDDEN]`.
    pub(super) fn hidden(&self, engine: &mut Demo, batch: &Batch) -> Result<Vec<f32>> {
        self.each_layer(engine, batch, |_, _| {})
    }

    /// As [`hidden`](Self::hidden), showing each layer's output.
    pub(super) fn each_layer(
        &self,
        engine: &mut Demo,
        batch: &Batch,
        mut show: impl FnMut(usize, &[f32]),
    ) -> Result<Vec<f32>> {
        let mut x = self.embedded(batch)?;
        for (n, layer) in self.layers.iter().enumerate() {
            layer.forward(engine, batch, &mut x)?;
            show(n, &x);
        }
        Ok(x)
    }

    /// An embedding per sentence, of length 1: `[sentences, HIDDEN]`.
    pub(super) fn embed(&self, engine: &mut Demo, batch: &Batch) -> Result<Vec<f32>> {
        Ok(pool(&self.hidden(engine, batch)?, batch))
    }
}

/// The mean over the tokens of each sentence, made as long as 1.
pub(super) fn pool(hidden: &[f32], batch: &Batch) -> Vec<f32> {
    let mut embeddings = Vec::with_capacity(batch.len() * HIDDEN);
    for (sentence, &len) in hidden.chunks_exact(batch.seq * HIDDEN).zip(&batch.lens) {
        let mut sum = vec![0.0f64; HIDDEN];
        for token in sentence.chunks_exact(HIDDEN).take(len) {
            sum.iter_mut().zip(token).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        // Its length takes the number of tokens out again.
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        embeddings.extend(sum.iter().map(|x| (x / length) as f32));
    }
    embeddings
}

/// The product of every pair of embeddings, `[sentences, sentences]`.
pub(super) fn cosines(embeddings: &[f32], sentences: usize) -> Vec<f32> {
    let row = |n: usize| &embeddings[n * HIDDEN..][..HIDDEN];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
    (0..sentences).flat_map(|a| (0..sentences).map(move |b| dot(row(a), row(b)))).collect()
}

impl Layer {
    fn take(from: &mut Tensors, name: &str) -> Result<Self> {
        let mut dense = |part: &str, d_in, d_out| Dense::take(from, &format!("{name}.{part}"), d_in, d_out, true);
        let (query, key) =
            (dense("attention.self.query", HIDDEN, HIDDEN)?, dense("attention.self.key", HIDDEN, HIDDEN)?);
        let value = dense("attention.self.value", HIDDEN, HIDDEN)?;
        let out = dense("attention.output.dense", HIDDEN, HIDDEN)?;
        let (up, down) = (dense("intermediate.dense", HIDDEN, INNER)?, dense("output.dense", INNER, HIDDEN)?);
        let norm = Norm::take(from, &format!("{name}.attention.output.LayerNorm"))?;
        let last_norm = Norm::take(from, &format!("{name}.output.LayerNorm"))?;
        Ok(Self { query, key, value, out, norm, up, down, last_norm })
    }

    fn forward(&self, engine: &mut Demo, batch: &Batch, x: &mut [f32]) -> Result<()> {
        let (sentences, seq) = (batch.len(), batch.seq);
        let sizes = [sentences, 1, seq, HIDDEN];
        let module =
            MultiHeadAttention::new(HEADS, HEADS, self.query.linear()?, self.key.linear()?, self.value.linear()?)?
                .output(self.out.linear()?)?;
        let attn = Attention::new().mask(batch.mask());
        let mut y = vec![0.0; x.len()];
        let mut scratch = vec![0.0; module.scratch_len(engine, sentences, seq, seq)?];
        let to = ViewMut::new(&mut y, Layout::Bhsd, sizes)?;
        module.forward(engine, &attn, Sources::same(View::new(x, Layout::Bhsd, sizes)?), to, &mut scratch)?;
        add(x, &y);
        self.norm.apply(x);

        let mut inner = vec![0.0; sentences * seq * INNER];
        project(&self.up.linear()?, x, &mut inner, sentences * seq)?;
        inner.par_iter_mut().for_each(|x| *x = gelu(*x));
        project(&self.down.linear()?, &inner, &mut y, sentences * seq)?;
        add(x, &y);
        self.last_norm.apply(x);
        Ok(())
    }
}

fn project(layer: &Linear<'_, f32>, x: &[f32], y: &mut [f32], tokens: usize) -> Result<()> {
    let x = View::matrix(x, tokens, layer.d_in())?;
    Ok(engine::linear(layer, x, &mut ViewMut::matrix(y, tokens, layer.d_out())?)?)
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// `x·Φ(x)`, Φ being the normal distribution's (Hendrycks and Gimpel 2016, arXiv 1606.08415).
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// LayerNorm (arXiv 1607.06450): mean 0, variance 1, then a learned scale and offset.
struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Norm {
    fn take(from: &mut Tensors, name: &str) -> Result<Self> {
        let mut part = |part: &str| from.take(&format!("{name}.{part}"), &[HIDDEN]);
        Ok(Self { weight: part("weight")?, bias: part("bias")? })
    }

    /// Every row of `x`.
    fn apply(&self, x: &mut [f32]) {
        for row in x.chunks_exact_mut(HIDDEN) {
            let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / HIDDEN as f64;
            let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / HIDDEN as f64;
            let scale = 1.0 / (variance + EPS).sqrt();
            for ((x, weight), bias) in row.iter_mut().zip(&self.weight).zip(&self.bias) {
                *x = ((f64::from(*x) - mean) * scale) as f32 * weight + bias;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_is_that_of_the_paper() {
        // x·Φ(x) by a table of the normal distribution.
        for (x, want) in [(0.0, 0.0), (1.0, 0.841_345), (-1.0, -0.158_655), (2.0, 1.954_5), (-3.0, -0.004_05)] {
            assert!((gelu(x) - want).abs() < 1e-5, "{x}: {} {want}", gelu(x));
        }
    }

    #[test]
    fn padding_is_filled_and_not_counted() {
        let batch = Batch::new(&[vec![5, 6, 7], vec![8]]).unwrap();
        assert_eq!((batch.ids(), batch.tokens(), batch.len()), (&[5, 6, 7, 8, 0, 0][..], 4, 2));
        assert!(Batch::new(&[vec![1], vec![]]).is_err() && Batch::new(&[]).is_err());
        // The padded positions hold what must not reach the mean.
        let mut hidden = vec![1.0f32; 6 * HIDDEN];
        hidden[4 * HIDDEN..].fill(f32::NAN);
        let pooled = pool(&hidden, &batch);
        let expected = 1.0 / (HIDDEN as f32).sqrt();
        assert!(pooled.iter().all(|x| (x - expected).abs() < 1e-7), "{:?}", &pooled[HIDDEN..HIDDEN + 3]);
        assert!(cosines(&pooled, 2).iter().all(|x| (x - 1.0).abs() < 1e-6));
    }
}
