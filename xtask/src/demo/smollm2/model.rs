//! The decoder: thirty layers of grouped causal attention with rotary positions and a gated feed-forward block (Llama's
//! arrangement, arXiv 2302.13971), over a cache of keys and values.
//!
//! Nine query heads share three key/value heads. A prompt runs on the tiled kernels over the cache's own memory, single
//! tokens on the decode kernel; both see the cache in place.

use attn_core::kv_cache::{AppendCache, Queries};
use attn_core::position::{Pairing, Positions, Rope, RopeTables};
use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut};
use rayon::prelude::*;

use crate::demo::engine::{Attended, contiguous, linear};
use crate::demo::gguf::Gguf;
use crate::demo::tensors::{Dense, Tensors};
use crate::demo::{Failure, Result};

/// From this many tokens on, a call counts as a prompt.
const PROMPT: usize = 8;

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) hidden: usize,
    pub(super) inner: usize,
    pub(super) layers: usize,
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) vocabulary: usize,
    pub(super) rope_base: f64,
    pub(super) eps: f64,
}

impl Sizes {
    fn head_dim(&self) -> usize {
        self.hidden / self.q_heads.max(1)
    }
}

/// The model's weights.
pub(super) struct Decoder {
    pub(super) sizes: Sizes,
    /// Rows of the vocabulary: what tokens become, and what the output is compared with.
    words: Dense,
    layers: Vec<Layer>,
    norm: Vec<f32>,
}

struct Layer {
    norm: Vec<f32>,
    q: Dense,
    k: Dense,
    v: Dense,
    out: Dense,
    inner_norm: Vec<f32>,
    gate: Dense,
    up: Dense,
    down: Dense,
}

impl Decoder {
    /// Of a file of the architecture `llama`.
    pub(super) fn of(file: &mut Gguf) -> Result<Self> {
        let number = |key: &str| {
            let found = file.number(&format!("llama.{key}")).filter(|x| *x > 0.0);
            found.ok_or_else(|| Failure::Text(format!("the model's file lacks llama.{key}")))
        };
        let size = |key: &str| Ok::<_, Failure>(number(key)? as usize);
        let sizes = Sizes {
            hidden: size("embedding_length")?,
            inner: size("feed_forward_length")?,
            layers: size("block_count")?,
            q_heads: size("attention.head_count")?,
            kv_heads: size("attention.head_count_kv")?,
            vocabulary: size("vocab_size")?,
            rope_base: number("rope.freq_base")?,
            eps: number("attention.layer_norm_rms_epsilon")?,
        };
        Self::new(sizes, &mut file.tensors)
    }

    /// Of tensors by GGUF's names.
    pub(super) fn new(sizes: Sizes, from: &mut Tensors) -> Result<Self> {
        let words = Dense::take(from, "token_embd", sizes.hidden, sizes.vocabulary, false)?;
        let layers = (0..sizes.layers).map(|n| Layer::take(from, n, &sizes)).collect::<Result<_>>()?;
        Ok(Self { sizes, words, layers, norm: from.take("output_norm.weight", &[sizes.hidden])? })
    }
}

impl Layer {
    fn take(from: &mut Tensors, n: usize, sizes: &Sizes) -> Result<Self> {
        let (hidden, inner, kv) = (sizes.hidden, sizes.inner, sizes.kv_heads * sizes.head_dim());
        let mut dense = |part: &str, d_in, d_out| Dense::take(from, &format!("blk.{n}.{part}"), d_in, d_out, false);
        Ok(Self {
            q: dense("attn_q", hidden, hidden)?,
            k: dense("attn_k", hidden, kv)?,
            v: dense("attn_v", hidden, kv)?,
            out: dense("attn_output", hidden, hidden)?,
            gate: dense("ffn_gate", hidden, inner)?,
            up: dense("ffn_up", hidden, inner)?,
            down: dense("ffn_down", inner, hidden)?,
            norm: from.take(&format!("blk.{n}.attn_norm.weight"), &[hidden])?,
            inner_norm: from.take(&format!("blk.{n}.ffn_norm.weight"), &[hidden])?,
        })
    }
}

/// One sequence: the caches of all layers and how far they are filled.
pub(super) struct Session<'d> {
    decoder: &'d Decoder,
    caches: Vec<Memory>,
    /// cos and sin of every position, `[capacity, head_dim / 2]`.
    turns: [Vec<f32>; 2],
    len: usize,
    capacity: usize,
    /// What attention saw and gave in each layer of the last call, where somebody wants it.
    pub(super) trace: Option<Vec<Traced>>,
}

/// Keys and values of a layer, `[1, kv_heads, capacity, head_dim]`.
struct Memory {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// A layer's tensors: those of attention, with the keys and values of this call alone, and queries and keys before
/// rotation.
pub(super) struct Traced {
    pub(super) attended: Attended,
    pub(super) before_rope: [Vec<f32>; 2],
}

/// What a call gives.
pub(super) struct Step {
    /// The last layer's output for each token of the call, before the last norm: `[tokens, hidden]`.
    pub(super) hidden: Vec<f32>,
    /// Of the last token, `[vocabulary]`.
    pub(super) logits: Vec<f32>,
}

impl Step {
    /// The token with the largest logit; the first of equal ones.
    pub(super) fn likeliest(&self) -> u32 {
        let mut best = (0, f32::NEG_INFINITY);
        for (id, &logit) in (0..).zip(&self.logits) {
            if logit > best.1 {
                best = (id, logit);
            }
        }
        best.0
    }
}

impl<'d> Session<'d> {
    /// An empty one, for so many tokens at most.
    pub(super) fn new(decoder: &'d Decoder, capacity: usize) -> Result<Self> {
        let (kv_heads, dim) = (decoder.sizes.kv_heads, decoder.sizes.head_dim());
        let memory = || vec![0.0f32; kv_heads * capacity * dim];
        let caches = decoder.layers.iter().map(|_| Memory { k: memory(), v: memory() }).collect();
        let (mut cos, mut sin) = (vec![0.0f32; capacity * dim / 2], vec![0.0f32; capacity * dim / 2]);
        let rope = Rope::new(Pairing::Interleaved).base(decoder.sizes.rope_base);
        let mut tables = [ViewMut::matrix(&mut cos, capacity, dim / 2)?, ViewMut::matrix(&mut sin, capacity, dim / 2)?];
        let [to_cos, to_sin] = &mut tables;
        rope.tables(dim, Positions::Offset(0), to_cos, to_sin)?;
        Ok(Self { decoder, caches, turns: [cos, sin], len: 0, capacity, trace: None })
    }

    /// Takes in the next tokens: their keys and values join the caches.
    pub(super) fn advance(&mut self, ids: &[u32]) -> Result<Step> {
        let (decoder, sizes, tokens) = (self.decoder, self.decoder.sizes, ids.len());
        let words = decoder.words.linear()?;
        let mut x = Vec::with_capacity(tokens * sizes.hidden);
        for &id in ids {
            if id as usize >= sizes.vocabulary {
                return Err(Failure::Text(format!("token {id}; the model knows {}", sizes.vocabulary)));
            }
            x.extend(words.weight().row(0, 0, id as usize).iter());
        }
        if let Some(trace) = &mut self.trace {
            trace.clear();
        }
        let mut normed = vec![0.0; x.len()];
        for (n, layer) in decoder.layers.iter().enumerate() {
            rms_norm(&x, &layer.norm, sizes.eps, &mut normed);
            let context = self.attend(n, &normed, tokens)?;
            let joined = project(&layer.out, &context, tokens)?;
            x.iter_mut().zip(&joined).for_each(|(x, y)| *x += y);

            rms_norm(&x, &layer.inner_norm, sizes.eps, &mut normed);
            let mut inner = project(&layer.gate, &normed, tokens)?;
            let up = project(&layer.up, &normed, tokens)?;
            inner.par_iter_mut().zip(&up).with_min_len(4096).for_each(|(gate, up)| *gate = silu(*gate) * up);
            let down = project(&layer.down, &inner, tokens)?;
            x.iter_mut().zip(&down).for_each(|(x, y)| *x += y);
        }
        self.len += tokens;
        let last = &x[x.len().saturating_sub(sizes.hidden)..];
        let logits = if last.is_empty() { Vec::new() } else { self.decoder.logits(last)? };
        Ok(Step { hidden: x, logits })
    }

    /// Attention of layer `n` over everything so far: `[tokens, hidden]`.
    fn attend(&mut self, n: usize, x: &[f32], tokens: usize) -> Result<Vec<f32>> {
        let (layer, sizes) = (&self.decoder.layers[n], self.decoder.sizes);
        let dim = sizes.head_dim();
        let (q_sizes, kv_sizes) = ([1, sizes.q_heads, tokens, dim], [1, sizes.kv_heads, tokens, dim]);
        // Heads lie side by side: `[tokens, heads · dim]`, which is a layout like any other.
        let mut q = project(&layer.q, x, tokens)?;
        let mut k = project(&layer.k, x, tokens)?;
        let v = project(&layer.v, x, tokens)?;
        let before_rope = self.trace.is_some().then(|| [q.clone(), k.clone()]);
        let table = |turns| View::matrix(turns, self.capacity, dim / 2);
        let rope = RopeTables::new(Pairing::Interleaved, table(&self.turns[0])?, table(&self.turns[1])?)?;
        let at = Positions::Offset(self.len.cast_signed());
        rope.apply_in_place(&mut ViewMut::new(&mut q, Layout::Bshd, q_sizes)?, at)?;
        rope.apply_in_place(&mut ViewMut::new(&mut k, Layout::Bshd, kv_sizes)?, at)?;
        let (q_view, k_view) = (View::new(&q, Layout::Bshd, q_sizes)?, View::new(&k, Layout::Bshd, kv_sizes)?);
        let v_view = View::new(&v, Layout::Bshd, kv_sizes)?;

        let Memory { k: cached_k, v: cached_v } = &mut self.caches[n];
        let (mut lens, cache_sizes) = ([self.len], [1, sizes.kv_heads, self.capacity, dim]);
        let mut cache = AppendCache::new(
            ViewMut::new(cached_k, Layout::Bhsd, cache_sizes)?,
            ViewMut::new(cached_v, Layout::Bhsd, cache_sizes)?,
            &mut lens,
        )?;
        cache.append(k_view, v_view)?;

        let (mut context, mut lse) = (vec![0.0; tokens * sizes.hidden], vec![0.0; sizes.q_heads * tokens]);
        let outputs = Outputs::new(ViewMut::new(&mut context, Layout::Bshd, q_sizes)?).lse(&mut lse);
        if tokens < PROMPT {
            attn_parallel::attend_cache(&Attention::new(), q_view, Queries::All, cache.view(), outputs)?;
        } else {
            let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
            let (all_k, all_v) = cache.sequence(0)?;
            attn_parallel::forward(&attn, q_view, all_k, all_v, outputs)?;
        }
        if let (Some(trace), Some([q_before, k_before])) = (&mut self.trace, before_rope) {
            let by_heads = |x: &[f32], sizes| Ok::<_, Failure>(contiguous(View::new(x, Layout::Bshd, sizes)?));
            let tensors = [
                by_heads(&q, q_sizes)?,
                by_heads(&k, kv_sizes)?,
                by_heads(&v, kv_sizes)?,
                by_heads(&context, q_sizes)?,
            ];
            let attended = Attended { tensors, sizes: [q_sizes, kv_sizes, kv_sizes, q_sizes], lse };
            trace.push(Traced {
                attended,
                before_rope: [by_heads(&q_before, q_sizes)?, by_heads(&k_before, kv_sizes)?],
            });
        }
        Ok(context)
    }
}

impl Decoder {
    /// Of one token's hidden state, `[hidden]`.
    pub(super) fn logits(&self, hidden: &[f32]) -> Result<Vec<f32>> {
        let mut normed = vec![0.0; hidden.len()];
        rms_norm(hidden, &self.norm, self.sizes.eps, &mut normed);
        project(&self.words, &normed, hidden.len() / self.sizes.hidden)
    }
}

/// `x·Wᵀ` for `[tokens, d_in]`.
fn project(layer: &Dense, x: &[f32], tokens: usize) -> Result<Vec<f32>> {
    let layer = layer.linear()?;
    let mut y = vec![0.0; tokens * layer.d_out()];
    let x = View::matrix(x, tokens, layer.d_in())?;
    linear(&layer, x, &mut ViewMut::matrix(&mut y, tokens, layer.d_out())?)?;
    Ok(y)
}

/// RMSNorm (arXiv 1910.07467) of every row.
fn rms_norm(x: &[f32], weight: &[f32], eps: f64, to: &mut [f32]) {
    for (x, to) in x.chunks_exact(weight.len()).zip(to.chunks_exact_mut(weight.len())) {
        let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / weight.len() as f64;
        let scale = 1.0 / (mean + eps).sqrt();
        for ((to, x), weight) in to.iter_mut().zip(x).zip(weight) {
            *to = (f64::from(*x) * scale) as f32 * weight;
        }
    }
}

/// `x·σ(x)` (arXiv 1606.08415, §3).
fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    use super::*;
    use crate::demo::tensors::Tensor;

    /// A model of two layers with weights by formula: small, but with every part.
    fn model() -> Decoder {
        let sizes = Sizes {
            hidden: 12,
            inner: 8,
            layers: 2,
            q_heads: 3,
            kv_heads: 1,
            vocabulary: 20,
            rope_base: 100.0,
            eps: 1e-5,
        };
        let mut named = HashMap::new();
        let mut add = |name: String, shape: &[usize]| {
            let seed = named.len() as f32;
            let len = shape.iter().product();
            let data =
                (0..len).map(|i| ((i as f32 * 1.7 + seed).sin() + if shape.len() == 1 { 1.5 } else { 0.0 }) * 0.5);
            named.insert(name, Tensor { shape: shape.to_vec(), data: data.collect() });
        };
        add("token_embd.weight".into(), &[20, 12]);
        add("output_norm.weight".into(), &[12]);
        for n in 0..2 {
            for (part, shape) in [
                ("attn_q", &[12usize, 12][..]),
                ("attn_k", &[4, 12]),
                ("attn_v", &[4, 12]),
                ("attn_output", &[12, 12]),
                ("ffn_gate", &[8, 12]),
                ("ffn_up", &[8, 12]),
                ("ffn_down", &[12, 8]),
                ("attn_norm", &[12]),
                ("ffn_norm", &[12]),
            ] {
                add(format!("blk.{n}.{part}.weight"), shape);
            }
        }
        Decoder::new(sizes, &mut Tensors::of(Path::new("model"), named)).expect("all tensors are there")
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
                let step = session.advance(&ids[from..from + n]).unwrap();
                hidden.extend_from_slice(&step.hidden);
                (from, last) = (from + n, Some(step));
            }
            for (got, want) in hidden.iter().zip(&whole.hidden) {
                assert!((got - want).abs() < 2e-5, "{cut:?}: {got} {want}");
            }
            assert_eq!(last.unwrap().likeliest(), whole.likeliest(), "{cut:?}");
        }
        // Order matters: rotation tells positions apart.
        let other = Session::new(&model, 12).unwrap().advance(&[1, 3, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]).unwrap();
        assert!(other.logits.iter().zip(&whole.logits).any(|(a, b)| (a - b).abs() > 1e-3));
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let model = model();
        let mut session = Session::new(&model, 3).unwrap();
        assert!(session.advance(&[20]).is_err_and(|failure| failure.to_string().contains("knows 20")));
        session.advance(&[1, 2]).unwrap();
        assert!(session.advance(&[1, 2]).is_err()); // no room
    }
}
