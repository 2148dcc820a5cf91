//! The decoder: four layers of grouped causal attention with rotary positions, and a gated feed-forward block, each
//! behind an RMSNorm (Llama's arrangement, arXiv 2302.13971).
//!
//! candle-nn's fused norm and rotation have no gradients; the ones of single operations have.

use anyhow::Result;
use attn_core::{Align, Attention, Mask};
use candle_core::{Device, Tensor, Var};
use candle_nn::ops::rms_norm_slow;
use candle_nn::rotary_emb::rope_slow;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

const LAYERS: usize = 4;
const WIDTH: usize = 128;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const INNER: usize = 344;
const EPS: f32 = 1e-5;
const ROPE_BASE: f64 = 10_000.0;

/// The model's weights, by name.
pub(super) struct Gpt {
    words: Var,
    layers: Vec<Layer>,
    norm: Var,
    /// cos and sin of every position, `(context, HEAD_DIM / 2)`.
    rope: [Tensor; 2],
    named: Vec<(String, Var)>,
}

struct Layer {
    norm: Var,
    q: Var,
    k: Var,
    v: Var,
    out: Var,
    inner_norm: Var,
    gate: Var,
    up: Var,
    down: Var,
}

impl Gpt {
    /// With random weights, always the same ones.
    pub(super) fn new(letters: usize, context: usize) -> Result<Self> {
        let mut random = StdRng::seed_from_u64(0);
        let mut named = Vec::new();
        let mut weight = |name: String, out: usize, of: usize, spread: f32| -> Result<Var> {
            let normal = Normal::new(0.0f32, spread)?;
            let numbers: Vec<f32> = (0..out * of).map(|_| normal.sample(&mut random)).collect();
            let var = Var::from_vec(numbers, (out, of), &Device::Cpu)?;
            named.push((name, var.clone()));
            Ok(var)
        };
        // Outputs that are added to the stream begin smaller, the more there are.
        let (spread, added) = (0.02, 0.02 / (2.0 * LAYERS as f32).sqrt());
        let words = weight("words".to_owned(), letters, WIDTH, spread)?;
        let mut layers = Vec::new();
        let mut norms = Vec::new();
        let mut norm = |name: String| -> Result<Var> {
            let var = Var::ones(WIDTH, candle_core::DType::F32, &Device::Cpu)?;
            norms.push((name, var.clone()));
            Ok(var)
        };
        for n in 0..LAYERS {
            let mut part = |part, out, of, spread| weight(format!("{n}.{part}"), out, of, spread);
            layers.push(Layer {
                norm: norm(format!("{n}.norm"))?,
                q: part("q", Q_HEADS * HEAD_DIM, WIDTH, spread)?,
                k: part("k", KV_HEADS * HEAD_DIM, WIDTH, spread)?,
                v: part("v", KV_HEADS * HEAD_DIM, WIDTH, spread)?,
                out: part("out", WIDTH, Q_HEADS * HEAD_DIM, added)?,
                inner_norm: norm(format!("{n}.inner_norm"))?,
                gate: part("gate", INNER, WIDTH, spread)?,
                up: part("up", INNER, WIDTH, spread)?,
                down: part("down", WIDTH, INNER, added)?,
            });
        }
        let norm = norm("norm".to_owned())?;
        named.extend(norms);
        Ok(Self { words, layers, norm, rope: rope(context)?, named })
    }

    /// All weights with their names.
    pub(super) fn named(&self) -> &[(String, Var)] {
        &self.named
    }

    /// All weights.
    pub(super) fn variables(&self) -> Vec<Var> {
        self.named.iter().map(|(_, var)| var.clone()).collect()
    }

    /// How many numbers they are.
    pub(super) fn count(&self) -> usize {
        self.named.iter().map(|(_, var)| var.elem_count()).sum()
    }

    /// Letters that fit into a call.
    pub(super) fn context(&self) -> usize {
        self.rope[0].dims()[0]
    }

    /// Of letters, `(batch, seq)`: `(batch, seq, letters)`.
    pub(super) fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        let (batch, seq) = ids.dims2()?;
        let mut x = self.words.index_select(&ids.flatten_all()?, 0)?; // (batch · seq, WIDTH)
        for layer in &self.layers {
            x = (&x + self.attention(layer, &rms_norm_slow(&x, &layer.norm, EPS)?, (batch, seq))?)?;
            let y = rms_norm_slow(&x, &layer.inner_norm, EPS)?;
            let inner = (y.matmul(&layer.gate.t()?)?.silu()? * y.matmul(&layer.up.t()?)?)?;
            x = (x + inner.matmul(&layer.down.t()?)?)?;
        }
        let x = rms_norm_slow(&x, &self.norm, EPS)?;
        Ok(x.matmul(&self.words.t()?)?.reshape((batch, seq, ()))?)
    }

    fn attention(&self, layer: &Layer, x: &Tensor, (batch, seq): (usize, usize)) -> Result<Tensor> {
        let heads =
            |weight: &Var, heads| x.matmul(&weight.t()?)?.reshape((batch, seq, heads, HEAD_DIM))?.transpose(1, 2);
        let [cos, sin] = [self.rope[0].narrow(0, 0, seq)?, self.rope[1].narrow(0, 0, seq)?];
        let q = rope_slow(&heads(&layer.q, Q_HEADS)?, &cos, &sin)?;
        let k = rope_slow(&heads(&layer.k, KV_HEADS)?, &cos, &sin)?;
        let v = heads(&layer.v, KV_HEADS)?; // read where it is
        let causal = Mask::causal(Align::TopLeft);
        let y = attn_candle::differentiable(causal, |causal| Attention::new().mask(*causal), &q, &k, &v)?;
        Ok(y.transpose(1, 2)?.reshape((batch * seq, Q_HEADS * HEAD_DIM))?.matmul(&layer.out.t()?)?)
    }
}

/// cos and sin of the angles of every position.
fn rope(context: usize) -> Result<[Tensor; 2]> {
    let pairs = HEAD_DIM / 2;
    let angle = |n: usize| (n / pairs) as f64 * ROPE_BASE.powf(-((n % pairs * 2) as f64) / HEAD_DIM as f64);
    let table = |of: fn(f64) -> f64| {
        let numbers = (0..context * pairs).map(|n| of(angle(n)) as f32);
        Tensor::from_iter(numbers, &Device::Cpu)?.reshape((context, pairs))
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}
