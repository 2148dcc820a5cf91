//! candle's CPU attention in a real layer, replaced: the self-attention of a Llama block, with grouped heads and a
//! cache of keys and values that grows, once as candle's models write it for CPUs and once with `attn_candle::sdpa`;
//! outputs are compared.
//!
//! ```sh
//! cargo run --release --example layer
//! ```

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear_no_bias, ops};

const HIDDEN: usize = 256;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = HIDDEN / HEADS;

/// The projections of a block, and what it remembers of earlier tokens.
struct SelfAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    past: Option<(Tensor, Tensor)>,
    /// Whether attn's kernels compute, or candle's matmuls and softmax.
    attn: bool,
}

impl SelfAttention {
    fn new(vb: &VarBuilder<'_>, attn: bool) -> Result<Self> {
        Ok(Self {
            q: linear_no_bias(HIDDEN, HEADS * DIM, vb.pp("q_proj"))?,
            k: linear_no_bias(HIDDEN, KV_HEADS * DIM, vb.pp("k_proj"))?,
            v: linear_no_bias(HIDDEN, KV_HEADS * DIM, vb.pp("v_proj"))?,
            out: linear_no_bias(HEADS * DIM, HIDDEN, vb.pp("o_proj"))?,
            past: None,
            attn,
        })
    }

    fn forward(&mut self, x: &Tensor) -> Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        let heads = |x: Tensor, n| x.reshape((batch, len, n, DIM))?.transpose(1, 2);
        let (q, k, v) = (
            heads(self.q.forward(x)?, HEADS)?,
            heads(self.k.forward(x)?, KV_HEADS)?,
            heads(self.v.forward(x)?, KV_HEADS)?,
        );
        let (k, v) = match &self.past {
            Some((past_k, past_v)) => (Tensor::cat(&[past_k, &k], 2)?, Tensor::cat(&[past_v, &v], 2)?),
            None => (k, v),
        };
        self.past = Some((k.clone(), v.clone()));
        let scale = 1.0 / (DIM as f32).sqrt();
        // The one line that changes. It needs neither contiguous() nor repeat_kv, and no mask is made.
        let y = if self.attn {
            attn_candle::sdpa(&q, &k, &v, None, true, scale, 1.0)?
        } else {
            by_matmul(&q, &k, &v, scale)?
        };
        self.out.forward(&y.transpose(1, 2)?.reshape((batch, len, HEADS * DIM))?)
    }
}

/// As candle-transformers' models do on CPUs.
fn by_matmul(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32) -> Result<Tensor> {
    let (_, heads, len, _) = q.dims4()?;
    let (batch, kv_heads, kv_len, dim) = k.dims4()?;
    let repeat = |x: &Tensor| {
        let expanded = x.unsqueeze(2)?.expand((batch, kv_heads, heads / kv_heads, kv_len, dim))?;
        expanded.reshape((batch, heads, kv_len, dim))
    };
    let scores = (q.contiguous()?.matmul(&repeat(k)?.t()?.contiguous()?)? * f64::from(scale))?;
    let hidden =
        (0..len).flat_map(|i| (0..kv_len).map(move |j| if j > i + kv_len - len { f32::NEG_INFINITY } else { 0.0 }));
    let mask = Tensor::from_iter(hidden, q.device())?.reshape((len, kv_len))?;
    ops::softmax_last_dim(&scores.broadcast_add(&mask)?)?.matmul(&repeat(v)?.contiguous()?)
}

fn main() -> Result<()> {
    let (device, weights) = (Device::Cpu, VarMap::new());
    let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
    let (mut candle, mut attn) = (SelfAttention::new(&vb, false)?, SelfAttention::new(&vb, true)?); // the same weights
    let mut worst = 0f32;
    for (step, len) in [100, 37, 1, 1, 1].into_iter().enumerate() {
        let x = Tensor::randn(0f32, 1.0, (2, len, HIDDEN), &device)?;
        let (want, found) = (candle.forward(&x)?, attn.forward(&x)?);
        let difference = (&want - &found)?.abs()?.max(D::Minus1)?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        println!("step {step}, {len} tokens: largest difference from candle {difference:.1e}");
        worst = worst.max(difference);
    }
    assert!(worst < 1e-5, "the layers disagree");
    println!("ok");
    Ok(())
}
