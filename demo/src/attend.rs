//! Attention by `attn-candle`, which keeps the tensors of every call if somebody wants them.

use anyhow::Result;
use attn_core::weights::{self, RowAt};
use attn_core::{Attention, Layout, View};
use candle_core::{Device, Tensor};

/// Calls attention for a model.
#[derive(Default)]
pub(crate) struct Attend {
    /// Every call's tensors, if they are kept.
    pub(crate) trace: Option<Vec<Attended>>,
}

/// The tensors of one call of attention, `(batch, heads, seq, dim)`.
pub(crate) struct Attended {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) out: Tensor,
    /// `(batch, q_heads, q_len)`.
    pub(crate) lse: Tensor,
}

impl Attend {
    /// Keeps the tensors of every call.
    pub(crate) fn tracing() -> Self {
        Self { trace: Some(Vec::new()) }
    }

    /// The output of one call, `(batch, q_heads, q_len, value_dim)`.
    pub(crate) fn attention(&mut self, attn: &Attention<'_>, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let Some(trace) = &mut self.trace else { return Ok(attn_candle::attention(attn, q, k, v)?) };
        let (out, lse) = attn_candle::attention_lse(attn, q, k, v)?;
        // Copies: a cache changes under its views.
        let [q, k, v] = [q.copy()?, k.copy()?, v.copy()?];
        trace.push(Attended { q, k, v, out: out.clone(), lse });
        Ok(out)
    }
}

impl Attended {
    /// The weights of the first `heads` heads, by the lse: `(batch, heads, q_len, kv_len)`.
    pub(crate) fn weights(&self, attn: &Attention<'_>, heads: usize) -> Result<Tensor> {
        let numbers = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let (q, k, lse) = (numbers(&self.q)?, numbers(&self.k)?, numbers(&self.lse)?);
        let sizes = |x: &Tensor| x.dims4().map(|(batch, heads, seq, dim)| [batch, heads, seq, dim]);
        let ([batch, _, q_len, _], [.., kv_len, _]) = (sizes(&self.q)?, sizes(&self.k)?);
        let q = View::new(&q, Layout::Bhsd, sizes(&self.q)?)?;
        let k = View::new(&k, Layout::Bhsd, sizes(&self.k)?)?;
        let mut all = vec![0.0; batch * heads * q_len * kv_len];
        for (n, to) in all.chunks_exact_mut(q_len * kv_len).enumerate() {
            let at = RowAt { batch: n / heads, head: n % heads, query: 0 };
            weights::head(attn, q, k, at, &lse, to)?;
        }
        Ok(Tensor::from_vec(all, (batch, heads, q_len, kv_len), &Device::Cpu)?)
    }
}
