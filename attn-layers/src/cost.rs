//! The costs of attention: parameters, floating-point operations, bytes, steps. Closed forms; nothing is measured.
//!
//! | quantity | closed form | where |
//! |---|---|---|
//! | parameters | `3d²`, with `W_o` `4d²` | [`Model::parameters`] |
//! | FLOPs of a layer over `n` tokens | `6nd² + 4n²d`, with `W_o` `8nd² + 4n²d` | [`Model::flops`] |
//! | FLOPs of the attention alone | `2·pairs·(head_dim + value_dim)`, pairs that the mask shows | [`forward_flops`] |
//! | bytes of the weight matrix | `n²·4` in f32: 16 MiB at 2048 tokens, 40 GB at 100 000 | [`weights_bytes`] |
//! | bytes moved | `Θ(n² + nd)` naive, `n·d` per query tile streaming | [`naive_bytes`], [`streaming_bytes`] |
//! | an RNN layer | `4nd²` | [`rnn_flops`] |
//! | steps, path lengths | Vaswani et al. 2017, table 1 | [`LayerKind`] |
//!
//! A multiplication and an addition are two FLOPs; the softmax (some ten operations per pair) is not counted, as is
//! usual. Counts are `u128` and saturate; no input makes them wrap.
//!
//! ```
//! use attn_layers::cost::{self, Model};
//! use attn_core::{AttnShape, Dtype};
//! let layer = Model::square(512); // one head, d_model = d_k = d_v = 512, no W_o
//! assert_eq!(layer.parameters(), 3 * 512 * 512);
//! assert_eq!(layer.flops(2048), 6 * 2048 * 512 * 512 + 4 * 2048 * 2048 * 512);
//! assert_eq!(layer.crossover_len(), 768); // from 1.5·d tokens on, the n² term is the larger one
//!
//! let square = |n| AttnShape::new([1, 1, n, 64], [1, 1, n, 64], [1, 1, n, 64]);
//! assert_eq!(cost::weights_bytes(&square(2048)?, Dtype::F32), 16 << 20);
//! assert_eq!(cost::weights_bytes(&square(100_000)?, Dtype::F32), 40_000_000_000);
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use attn_core::{AttnShape, Dtype, Mask};

/// A product that saturates.
const fn times(factors: &[usize]) -> u128 {
    let mut product: u128 = 1;
    let mut rest = factors;
    while let Some((&factor, tail)) = rest.split_first() {
        if factor == 0 {
            return 0;
        }
        product = product.saturating_mul(factor as u128);
        rest = tail;
    }
    product
}

/// Sizes of an attention module, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Model {
    /// Features of a token.
    pub d_model: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Size of a query and of a key.
    pub head_dim: usize,
    /// Size of a value.
    pub value_dim: usize,
    /// Features of the output projection; `None` without one.
    pub output: Option<usize>,
}

impl Model {
    /// One head as wide as the token, no output projection: the textbook's `3d²`.
    pub const fn square(d: usize) -> Self {
        Self { d_model: d, q_heads: 1, kv_heads: 1, head_dim: d, value_dim: d, output: None }
    }

    /// `q_heads` heads of `d / q_heads` features (rounded down) that share `kv_heads` keys and values, joined by an
    /// output projection to `d` features. With as many of both it has as many parameters and FLOPs as one head with
    /// `W_o`.
    pub const fn multi_head(d: usize, q_heads: usize, kv_heads: usize) -> Self {
        let head_dim = match d.checked_div(q_heads) {
            Some(dim) => dim,
            None => 0,
        };
        Self { d_model: d, q_heads, kv_heads, head_dim, value_dim: head_dim, output: Some(d) }
    }

    /// With an output projection back to `d_model` features: the textbook's `4d²`.
    pub const fn with_output(mut self) -> Self {
        self.output = Some(self.d_model);
        self
    }

    /// Weights of the projections, without biases: `d·(H·d_k + H_kv·(d_k + d_v)) + H·d_v·d_out`.
    pub const fn parameters(&self) -> u128 {
        let queries = times(&[self.d_model, self.q_heads, self.head_dim]);
        let keys = times(&[self.d_model, self.kv_heads, self.head_dim]);
        let values = times(&[self.d_model, self.kv_heads, self.value_dim]);
        let join = match self.output {
            Some(d_out) => times(&[self.q_heads, self.value_dim, d_out]),
            None => 0,
        };
        queries.saturating_add(keys).saturating_add(values).saturating_add(join)
    }

    /// FLOPs of all projections over `n` tokens: two per token and parameter.
    pub const fn projection_flops(&self, n: usize) -> u128 {
        self.parameters().saturating_mul(n as u128).saturating_mul(2)
    }

    /// FLOPs of the attention of `n` tokens to each other, nothing masked.
    pub const fn attention_flops(&self, n: usize) -> u128 {
        pair_flops(times(&[self.q_heads, n, n]), self.head_dim, self.value_dim)
    }

    /// FLOPs of the layer over `n` tokens: `6nd² + 4n²d` for [`square`](Self::square), `8nd² + 4n²d` with `W_o`.
    pub const fn flops(&self, n: usize) -> u128 {
        self.projection_flops(n).saturating_add(self.attention_flops(n))
    }

    /// The number of tokens from which on the attention's n² term is at least as large as the projections: `1.5d`
    /// without `W_o`, `2d` with it. 0 for a model without heads.
    pub const fn crossover_len(&self) -> u128 {
        let per_token = times(&[self.q_heads, self.head_dim]).saturating_add(times(&[self.q_heads, self.value_dim]));
        if per_token == 0 { 0 } else { self.parameters().div_ceil(per_token) }
    }
}

/// `2·pairs·(head_dim + value_dim)`.
const fn pair_flops(pairs: u128, head_dim: usize, value_dim: usize) -> u128 {
    let dims = (head_dim as u128).saturating_add(value_dim as u128);
    pairs.saturating_mul(dims).saturating_mul(2)
}

/// (query, key) pairs over all heads if nothing is masked: elements of the weight matrix.
pub const fn all_pairs(shape: &AttnShape) -> u128 {
    times(&[shape.batch, shape.q_heads, shape.q_len, shape.kv_len])
}

/// (query, key) pairs over all heads that a mask shows, counted exactly: per row its range, or its bits where it may
/// have holes.
///
/// ```
/// use attn_core::{Align, AttnShape, Mask};
/// use attn_layers::cost;
/// let shape = AttnShape::new([2, 8, 100, 64], [2, 8, 100, 64], [2, 8, 100, 64])?;
/// assert_eq!(cost::visible_pairs(&Mask::causal(Align::TopLeft), &shape), 2 * 8 * 100 * 101 / 2);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn visible_pairs(mask: &Mask<'_>, shape: &AttnShape) -> u128 {
    if mask.is_none() {
        return all_pairs(shape);
    }
    let mut pairs: u128 = 0;
    // What is a range does not depend on the head.
    let ranges = mask.is_ranges();
    let heads = if ranges { shape.q_heads.min(1) } else { shape.q_heads };
    for batch in 0..shape.batch {
        for head in 0..heads {
            for query in 0..shape.q_len {
                let range = mask.row_range(shape, batch, head, query);
                let seen: u128 = if ranges {
                    range.len() as u128
                } else {
                    let tiles = range.step_by(64);
                    tiles.map(|start| u128::from(mask.row_bits(shape, batch, head, query, start).count_ones())).sum()
                };
                pairs = pairs.saturating_add(seen);
            }
        }
    }
    if ranges { pairs.saturating_mul(shape.q_heads as u128) } else { pairs }
}

/// FLOPs of `softmax(q·kᵀ)·v` over so many (query, key) pairs: `2·pairs·(head_dim + value_dim)`, which is `4n²d` for a
/// square head. Take the pairs from [`visible_pairs`] or [`all_pairs`].
pub const fn forward_flops(shape: &AttnShape, pairs: u128) -> u128 {
    pair_flops(pairs, shape.head_dim, shape.value_dim)
}

/// FLOPs of the gradient over so many pairs: the scores again, `dy·vᵀ`, and the sums into dq, dk and dv: `10n²d` for a
/// square head (FlashAttention-2, arXiv 2307.08691, counts the same 2.5 times the forward pass).
pub const fn backward_flops(shape: &AttnShape, pairs: u128) -> u128 {
    let dims = (shape.head_dim as u128).saturating_mul(3).saturating_add((shape.value_dim as u128).saturating_mul(2));
    pairs.saturating_mul(dims).saturating_mul(2)
}

/// Bytes of the weight matrix, `batch·q_heads·q_len·kv_len` elements. Only the naive form stores it.
pub const fn weights_bytes(shape: &AttnShape, dtype: Dtype) -> u128 {
    all_pairs(shape).saturating_mul(dtype.bytes() as u128)
}

/// Bytes of q and of the output.
const fn query_bytes(shape: &AttnShape, dtype: Dtype) -> u128 {
    let dims = (shape.head_dim as u128).saturating_add(shape.value_dim as u128);
    let rows = times(&[shape.batch, shape.q_heads, shape.q_len, dtype.bytes()]);
    rows.saturating_mul(dims)
}

/// Bytes of k and v: the size of their cache, and the bytes that decoding one token must read.
pub const fn kv_bytes(shape: &AttnShape, dtype: Dtype) -> u128 {
    let dims = (shape.head_dim as u128).saturating_add(shape.value_dim as u128);
    let rows = times(&[shape.batch, shape.kv_heads, shape.kv_len, dtype.bytes()]);
    rows.saturating_mul(dims)
}

/// Bytes that the naive form moves: q, k, v and the output once; the scores written and read, the weights written and
/// read (FlashAttention, Dao et al. 2022, arXiv 2205.14135, algorithm 0: `Θ(n² + nd)`).
pub const fn naive_bytes(shape: &AttnShape, dtype: Dtype) -> u128 {
    let tensors = query_bytes(shape, dtype).saturating_add(kv_bytes(shape, dtype));
    tensors.saturating_add(weights_bytes(shape, dtype).saturating_mul(4))
}

/// Bytes that a streaming form moves if it takes `q_tile` queries of a head at a time and no key stays in a cache
/// between tiles: q and the output once, a query head's k and v once per tile. `q_tile = 1` is
/// [`streaming`](attn_core::streaming) uncached, `q_tile ≥ q_len` the least that a head by itself can do. 0 counts
/// as 1.
pub const fn streaming_bytes(shape: &AttnShape, dtype: Dtype, q_tile: usize) -> u128 {
    let tiles = if q_tile == 0 { shape.q_len } else { shape.q_len.div_ceil(q_tile) };
    let dims = (shape.head_dim as u128).saturating_add(shape.value_dim as u128);
    let keys = times(&[shape.batch, shape.q_heads, tiles, shape.kv_len, dtype.bytes()]);
    query_bytes(shape, dtype).saturating_add(keys.saturating_mul(dims))
}

/// FLOPs of a recurrent layer `h_t = tanh(x_t·W + h_{t−1}·U)` over `n` tokens of `d` features: `4nd²`, in `n` steps
/// that wait for each other.
pub const fn rnn_flops(n: usize, d: usize) -> u128 {
    times(&[4, n, d, d])
}

/// The layers that Vaswani et al. 2017 (arXiv 1706.03762) compare in table 1. The numbers are those inside its
/// `O(·)`.
///
/// | layer | complexity | sequential steps | maximum path length |
/// |---|---|---|---|
/// | self-attention | `n²·d` | 1 | 1 |
/// | recurrent | `n·d²` | `n` | `n` |
/// | convolutional, kernel `k` | `k·n·d²` | 1 | `log_k n` |
/// | restricted self-attention, neighbourhood `r` | `r·n·d` | 1 | `n/r` |
///
/// ```
/// use attn_layers::cost::LayerKind;
/// let (n, d) = (1000, 512);
/// assert_eq!(LayerKind::SelfAttention.complexity(n, d), 512_000_000);
/// assert_eq!(LayerKind::Recurrent.sequential_steps(n), 1000);
/// assert_eq!(LayerKind::Convolutional { kernel: 10 }.max_path_len(n), Some(3));
/// assert_eq!(LayerKind::Restricted { neighbourhood: 64 }.max_path_len(n), Some(16)); // ⌈1000 / 64⌉
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Every token sees every token.
    SelfAttention,
    /// A state is handed from token to token.
    Recurrent,
    /// A stack of dilated convolutions.
    Convolutional {
        /// Tokens that one output sees.
        kernel: usize,
    },
    /// Every token sees its neighbourhood.
    Restricted {
        /// Tokens that one token sees.
        neighbourhood: usize,
    },
}

impl LayerKind {
    /// Operations per layer over `n` tokens of `d` features.
    pub const fn complexity(&self, n: usize, d: usize) -> u128 {
        match *self {
            Self::SelfAttention => times(&[n, n, d]),
            Self::Recurrent => times(&[n, d, d]),
            Self::Convolutional { kernel } => times(&[kernel, n, d, d]),
            Self::Restricted { neighbourhood } => times(&[neighbourhood, n, d]),
        }
    }

    /// Operations that must wait for each other, whatever the number of processors.
    pub const fn sequential_steps(&self, n: usize) -> u128 {
        match self {
            Self::Recurrent => n as u128,
            _ => 1,
        }
    }

    /// Layers (or steps) between the two tokens of `n` that are farthest apart, fractions rounded up; `None` if they
    /// never meet (a kernel of 1, a neighbourhood of 0).
    pub const fn max_path_len(&self, n: usize) -> Option<u128> {
        match *self {
            Self::SelfAttention => Some(1),
            Self::Recurrent => Some(n as u128),
            Self::Convolutional { kernel } => {
                if kernel < 2 {
                    return if n < 2 { Some(0) } else { None };
                }
                let (mut layers, mut reach) = (0, 1u128);
                while reach < n as u128 {
                    reach = reach.saturating_mul(kernel as u128);
                    layers += 1;
                }
                Some(layers)
            }
            Self::Restricted { neighbourhood } => {
                if neighbourhood == 0 {
                    return None;
                }
                Some((n as u128).div_ceil(neighbourhood as u128))
            }
        }
    }
}
