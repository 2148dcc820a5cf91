//! The decoder: thirty layers of grouped causal attention with rotary positions and a gated feed-forward block (Llama's
//! arrangement, arXiv 2302.13971), over a cache of keys and values.
//!
//! Nine query heads share three key/value heads. Weights are dequantised to f32: quantised products would round the
//! activations too, and `--check` compares with f64. Attention reads the caches in place.

use std::io::{Read, Seek};

use anyhow::{Context, Result, ensure};
use attn_core::{Align, Attention, Mask};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::rotary_emb::rope_i;
use candle_nn::{Linear, Module, RmsNorm};

use crate::attend::Attend;

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) layers: usize,
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) rope_base: f64,
    pub(super) eps: f64,
}

/// The model's weights.
pub(super) struct Decoder {
    sizes: Sizes,
    /// Rows of the vocabulary: what tokens become, and what the output is compared with.
    words: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
}

struct Layer {
    norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    inner_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Decoder {
    /// From a file of the architecture `llama`.
    pub(super) fn read<R: Read + Seek>(content: &Content, file: &mut R) -> Result<Self> {
        let value = |key: &str| {
            let key = format!("llama.{key}");
            content.metadata.get(&key).with_context(|| format!("the model's file lacks {key}"))
        };
        let size = |key: &str| value(key).and_then(|value: &Value| Ok(value.to_u32()? as usize));
        let float = |key: &str| value(key).and_then(|value: &Value| Ok(f64::from(value.to_f32()?)));
        let q_heads = size("attention.head_count")?;
        let sizes = Sizes {
            layers: size("block_count")?,
            q_heads,
            kv_heads: size("attention.head_count_kv")?,
            head_dim: size("embedding_length")? / q_heads.max(1),
            rope_base: float("rope.freq_base")?,
            eps: float("attention.layer_norm_rms_epsilon")?,
        };
        Self::new(sizes, |name| content.tensor(file, name, &Device::Cpu)?.dequantize(&Device::Cpu))
    }

    /// From tensors by GGUF's names.
    pub(super) fn new(sizes: Sizes, mut tensor: impl FnMut(&str) -> candle_core::Result<Tensor>) -> Result<Self> {
        let words = tensor("token_embd.weight")?;
        let norm = RmsNorm::new(tensor("output_norm.weight")?, sizes.eps);
        let layers = (0..sizes.layers).map(|n| {
            let mut part = |part: &str| tensor(&format!("blk.{n}.{part}.weight"));
            Ok(Layer {
                norm: RmsNorm::new(part("attn_norm")?, sizes.eps),
                q: Linear::new(part("attn_q")?, None),
                k: Linear::new(part("attn_k")?, None),
                v: Linear::new(part("attn_v")?, None),
                out: Linear::new(part("attn_output")?, None),
                inner_norm: RmsNorm::new(part("ffn_norm")?, sizes.eps),
                gate: Linear::new(part("ffn_gate")?, None),
                up: Linear::new(part("ffn_up")?, None),
                down: Linear::new(part("ffn_down")?, None),
            })
        });
        let layers = layers.collect::<candle_core::Result<_>>()?;
        Ok(Self { sizes, words, layers, norm })
    }

    /// Of hidden states, `(tokens, hidden)`: `(tokens, vocabulary)`.
    pub(super) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.norm.forward(hidden)?.matmul(&self.words.t()?)?)
    }
}

/// One sequence: the caches of all layers and how far they are filled.
pub(super) struct Session<'d> {
    decoder: &'d Decoder,
    caches: Vec<KvCache>,
    /// cos and sin of every position, `(capacity, head_dim / 2)`.
    rope: [Tensor; 2],
    len: usize,
    pub(super) attend: Attend,
    /// Queries and keys before rotation of each layer of the last call, if the tensors of attention are kept.
    pub(super) before_rope: Vec<[Tensor; 2]>,
}

/// What a call gives.
pub(super) struct Output {
    /// The last layer's output for each token of the call, before the last norm: `(tokens, hidden)`.
    pub(super) hidden: Tensor,
    /// Of the last token, `(vocabulary)`.
    pub(super) logits: Tensor,
}

impl Output {
    /// The token with the largest logit; the first of equal ones.
    pub(super) fn likeliest(&self) -> Result<u32> {
        Ok(self.logits.argmax(0)?.to_scalar()?)
    }
}

impl<'d> Session<'d> {
    /// An empty one, for so many tokens at most.
    pub(super) fn new(decoder: &'d Decoder, capacity: usize) -> Result<Self> {
        let Sizes { head_dim, rope_base, .. } = decoder.sizes;
        let pairs = head_dim / 2;
        let angle = |n: usize| (n / pairs) as f64 * rope_base.powf(-((n % pairs * 2) as f64) / head_dim as f64);
        let table = |of: fn(f64) -> f64| {
            let numbers = (0..capacity * pairs).map(|n| of(angle(n)) as f32);
            Tensor::from_iter(numbers, &Device::Cpu)?.reshape((capacity, pairs))
        };
        let caches = decoder.layers.iter().map(|_| KvCache::new(2, capacity)).collect();
        let rope = [table(f64::cos)?, table(f64::sin)?];
        Ok(Self { decoder, caches, rope, len: 0, attend: Attend::default(), before_rope: Vec::new() })
    }

    /// Takes in the next tokens: their keys and values join the caches.
    pub(super) fn advance(&mut self, ids: &[u32]) -> Result<Output> {
        let (decoder, tokens) = (self.decoder, ids.len());
        let (known, capacity) = (decoder.words.dim(0)?, self.rope[0].dim(0)?);
        ensure!(ids.iter().all(|&id| (id as usize) < known), "token ids {ids:?}; the model knows {known}");
        ensure!(self.len + tokens <= capacity, "{} tokens; there is room for {capacity}", self.len + tokens);
        let mut x = decoder.words.index_select(&Tensor::new(ids, &Device::Cpu)?, 0)?;
        for (n, layer) in decoder.layers.iter().enumerate() {
            x = (&x + self.attention(n, layer, &layer.norm.forward(&x)?)?)?;
            let y = layer.inner_norm.forward(&x)?;
            let inner = (layer.gate.forward(&y)?.silu()? * layer.up.forward(&y)?)?;
            x = (x + layer.down.forward(&inner)?)?;
        }
        self.len += tokens;
        let logits = decoder.logits(&x.narrow(0, tokens - 1, 1)?)?.get(0)?;
        Ok(Output { hidden: x, logits })
    }

    /// Attention of layer `n` over everything so far: `(tokens, hidden)`.
    fn attention(&mut self, n: usize, layer: &Layer, x: &Tensor) -> Result<Tensor> {
        let (Sizes { q_heads, kv_heads, head_dim, .. }, tokens) = (self.decoder.sizes, x.dim(0)?);
        // (1, heads, tokens, head_dim); candle's rope and cache want it contiguous.
        let project = |layer: &Linear, heads| {
            layer.forward(x)?.reshape((1, tokens, heads, head_dim))?.transpose(1, 2)?.contiguous()
        };
        let (q, k) = (project(&layer.q, q_heads)?, project(&layer.k, kv_heads)?);
        let v = project(&layer.v, kv_heads)?;
        if self.attend.trace.is_some() {
            self.before_rope.push([q.clone(), k.clone()]);
        }
        let [cos, sin] = [self.rope[0].narrow(0, self.len, tokens)?, self.rope[1].narrow(0, self.len, tokens)?];
        let (q, k) = (rope_i(&q, &cos, &sin)?, rope_i(&k, &cos, &sin)?);
        let (all_k, all_v) = self.caches[n].append(&k, &v)?;
        let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
        let y = self.attend.attention(&attn, &q, &all_k, &all_v)?;
        Ok(layer.out.forward(&y.transpose(1, 2)?.reshape((tokens, q_heads * head_dim))?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of two layers with weights by formula: small, but with every part.
    fn model() -> Decoder {
        let sizes = Sizes { layers: 2, q_heads: 3, kv_heads: 1, head_dim: 4, rope_base: 100.0, eps: 1e-5 };
        let mut seed = 0.0;
        Decoder::new(sizes, |name| {
            let shape = match name.split('.').rev().nth(1).unwrap_or_default() {
                "token_embd" => vec![20, 12],
                "attn_q" | "attn_output" => vec![12, 12],
                "attn_k" | "attn_v" => vec![4, 12],
                "ffn_gate" | "ffn_up" => vec![8, 12],
                "ffn_down" => vec![12, 8],
                _ => vec![12],
            };
            seed += 1.0;
            let offset = if shape.len() == 1 { 1.5 } else { 0.0 };
            let data = (0..shape.iter().product()).map(|i: usize| ((i as f32 * 1.7 + seed).sin() + offset) * 0.5);
            Tensor::from_vec(data.collect(), shape, &Device::Cpu)
        })
        .expect("all tensors are there")
    }

    fn numbers(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// However the tokens are cut into calls, the last one's logits are the same: cache, positions and mask agree.
    #[test]
    fn tokens_one_by_one_are_the_prompt_at_once() {
        let (model, ids) = (model(), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]);
        let whole = Session::new(&model, 12).unwrap().advance(&ids).unwrap();
        for cut in [vec![1; 12], vec![9, 1, 1, 1], vec![2, 8, 2], vec![3, 9]] {
            let (mut session, mut from, mut hidden) = (Session::new(&model, 14).unwrap(), 0, Vec::new());
            let mut last = None;
            for n in &cut {
                let output = session.advance(&ids[from..from + n]).unwrap();
                hidden.extend(numbers(&output.hidden));
                (from, last) = (from + n, Some(output));
            }
            for (got, want) in hidden.iter().zip(numbers(&whole.hidden)) {
                assert!((got - want).abs() < 2e-5, "{cut:?}: {got} {want}");
            }
            assert_eq!(last.unwrap().likeliest().unwrap(), whole.likeliest().unwrap(), "{cut:?}");
        }
        // Order matters: rotation tells positions apart.
        let other = Session::new(&model, 12).unwrap().advance(&[1, 3, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]).unwrap();
        let differ = |(a, b): (&f32, f32)| (a - b).abs() > 1e-3;
        assert!(numbers(&other.logits).iter().zip(numbers(&whole.logits)).any(differ));
        assert!(Session::new(&model, 3).unwrap().advance(&ids).is_err());
        assert!(Session::new(&model, 3).unwrap().advance(&[20]).is_err());
    }
}
