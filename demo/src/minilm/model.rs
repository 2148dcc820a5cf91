//! The encoder: six layers of attention over twelve heads, each followed by a feed-forward block (BERT, arXiv
//! 1810.04805). Padding is a mask of key lengths.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use attn_core::{Attention, Mask};
use candle_core::{DType, Device, Tensor};
use candle_nn::{LayerNorm, Linear, Module, VarBuilder, layer_norm, linear};

use crate::attend::Attend;
use crate::fetch::MINILM;
use crate::stored::Stored;

/// Features of a token.
const HIDDEN: usize = 384;
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
        ensure!(!lens.contains(&0) && !lens.is_empty(), "a sentence without tokens has no meaning to compare");
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
    /// Rows of the vocabulary, and which row an id has if not all are there.
    words: Tensor,
    rows: Option<HashMap<u32, u32>>,
    positions: Tensor,
    /// The embedding of the only token type.
    kind: Tensor,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    last_norm: LayerNorm,
}

impl Encoder {
    /// The one that `cargo xtask demo fetch minilm` has fetched.
    pub(super) fn fetched() -> Result<Self> {
        Self::of(Stored::read(&MINILM.file("model.safetensors")?)?)
    }

    /// From tensors by the names of the published checkpoint; the vocabulary may be a selection of rows.
    pub(super) fn of(from: Stored) -> Result<Self> {
        let word = "embeddings.word_embeddings";
        let rows = format!("{word}.row_ids");
        let rows = if from.has(&rows) { Some(from.ids(&rows)?.into_iter().zip(0..).collect()) } else { None };
        let words = format!("{word}.{}", if rows.is_some() { "rows" } else { "weight" });
        let [words, positions, kind] =
            [&words, "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"]
                .map(|name| from.get(name).and_then(|x| Ok(x.to_dtype(DType::F32)?)));
        let (words, positions, kind) = (words?, positions?, kind?.get(0)?);
        let weights = VarBuilder::from_tensors(from.into_tensors(), DType::F32, &Device::Cpu);
        let norm = layer_norm(HIDDEN, EPS, weights.pp("embeddings.LayerNorm"))?;
        let layers = (0..LAYERS).map(|n| Layer::of(&weights.pp(format!("encoder.layer.{n}"))));
        let layers = layers.collect::<candle_core::Result<_>>()?;
        Ok(Self { words, rows, positions, kind, norm, layers })
    }

    /// Word, position and type of every token, normalised: `(sentences, longest, HIDDEN)`.
    pub(super) fn embedded(&self, batch: &Batch) -> Result<Tensor> {
        let known = self.positions.dim(0)?;
        ensure!(batch.seq <= known, "a sentence of {} tokens; the model knows {known} positions", batch.seq);
        let vocabulary = self.words.dim(0)? as u32;
        let row = |&id: &u32| {
            let row = self.rows.as_ref().map_or(Some(id), |rows| rows.get(&id).copied());
            row.filter(|&row| row < vocabulary).with_context(|| format!("the model has no token {id}"))
        };
        let rows = batch.ids.iter().map(row).collect::<Result<Vec<_>>>()?;
        let words = self.words.index_select(&Tensor::new(rows, &Device::Cpu)?, 0)?;
        let words = words.reshape((batch.len(), batch.seq, HIDDEN))?;
        let x = words.broadcast_add(&self.positions.narrow(0, 0, batch.seq)?)?.broadcast_add(&self.kind)?;
        normed(&self.norm, &x)
    }

    /// Every layer's output, `(sentences, longest, HIDDEN)`.
    pub(super) fn layers(&self, attend: &mut Attend, batch: &Batch) -> Result<Vec<Tensor>> {
        let mut x = self.embedded(batch)?;
        let each = self.layers.iter().map(|layer| {
            x = layer.forward(attend, batch, &x)?;
            Ok(x.clone())
        });
        each.collect()
    }

    /// An embedding per sentence, of length 1: `(sentences, HIDDEN)`.
    pub(super) fn embed(&self, batch: &Batch) -> Result<Tensor> {
        let layers = self.layers(&mut Attend::default(), batch)?;
        pool(layers.last().context("no layer")?, batch)
    }
}

/// The mean over the tokens of each sentence, made as long as 1.
pub(super) fn pool(hidden: &Tensor, batch: &Batch) -> Result<Tensor> {
    // The length takes the number of tokens out again.
    let sums = batch.lens.iter().enumerate().map(|(n, &len)| hidden.get(n)?.narrow(0, 0, len)?.sum(0));
    let sums = Tensor::stack(&sums.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
    Ok(sums.broadcast_div(&sums.sqr()?.sum_keepdim(1)?.sqrt()?)?)
}

/// Layer normalisation by candle's slow way, which subtracts the mean first. The fused one takes the variance as a
/// difference of sums.
fn normed(norm: &LayerNorm, x: &Tensor) -> Result<Tensor> {
    let bias = norm.bias().context("a norm without a bias")?;
    Ok(candle_nn::ops::layer_norm_slow(x, norm.weight(), bias, EPS as f32)?)
}

impl Layer {
    fn of(weights: &VarBuilder<'_>) -> candle_core::Result<Self> {
        let dense = |name: &str, d_in, d_out| linear(d_in, d_out, weights.pp(name));
        Ok(Self {
            query: dense("attention.self.query", HIDDEN, HIDDEN)?,
            key: dense("attention.self.key", HIDDEN, HIDDEN)?,
            value: dense("attention.self.value", HIDDEN, HIDDEN)?,
            out: dense("attention.output.dense", HIDDEN, HIDDEN)?,
            norm: layer_norm(HIDDEN, EPS, weights.pp("attention.output.LayerNorm"))?,
            up: dense("intermediate.dense", HIDDEN, INNER)?,
            down: dense("output.dense", INNER, HIDDEN)?,
            last_norm: layer_norm(HIDDEN, EPS, weights.pp("output.LayerNorm"))?,
        })
    }

    fn forward(&self, attend: &mut Attend, batch: &Batch, x: &Tensor) -> Result<Tensor> {
        let (sentences, seq, _) = x.dims3()?;
        // Strides split the heads; nothing is copied.
        let heads = |y: &Linear| y.forward(x)?.reshape((sentences, seq, HEADS, HIDDEN / HEADS))?.transpose(1, 2);
        let (q, k, v) = (heads(&self.query)?, heads(&self.key)?, heads(&self.value)?);
        let y = attend.attention(&Attention::new().mask(batch.mask()), &q, &k, &v)?;
        let y = self.out.forward(&y.transpose(1, 2)?.reshape((sentences, seq, HIDDEN))?)?;
        let x = normed(&self.norm, &(x + y)?)?;
        let y = self.down.forward(&self.up.forward(&x)?.gelu_erf()?)?;
        normed(&self.last_norm, &(x + y)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_filled_and_not_counted() {
        let batch = Batch::new(&[vec![5, 6, 7], vec![8]]).unwrap();
        assert_eq!((batch.ids(), batch.tokens(), batch.len()), (&[5, 6, 7, 8, 0, 0][..], 4, 2));
        assert!(Batch::new(&[vec![1], vec![]]).is_err() && Batch::new(&[]).is_err());
        // The padded positions hold what must not reach the mean.
        let mut hidden = vec![1.0f32; 6 * HIDDEN];
        hidden[4 * HIDDEN..].fill(f32::NAN);
        let hidden = Tensor::from_vec(hidden, (2, 3, HIDDEN), &Device::Cpu).unwrap();
        let pooled = pool(&hidden, &batch).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let expected = 1.0 / (HIDDEN as f32).sqrt();
        assert!(pooled.iter().all(|x| (x - expected).abs() < 1e-7), "{:?}", &pooled[HIDDEN..HIDDEN + 3]);
    }
}
