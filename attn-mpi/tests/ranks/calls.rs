//! Inputs that every rank makes for itself, and every kind of options over them.

use std::ops::Range;

use attn_core::mask::{BlockSparse, Documents, Lengths, Tree, Window};
use attn_core::{Align, AttnShape, Layout, Mask, View};

/// Numbers between −1 and 1 that follow from a seed.
pub(crate) fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Bools of which about two thirds are true.
pub(crate) fn bools(seed: u64, len: usize) -> Vec<bool> {
    numbers(seed, len).into_iter().map(|x| x > -0.3).collect()
}

/// Whole tensors of a call, `[batch, heads, seq, dim]`.
pub(crate) struct Inputs {
    pub(crate) shape: AttnShape,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

impl Inputs {
    pub(crate) fn new(shape: AttnShape) -> Self {
        let [q, k, v] = sizes(&shape);
        let of = |seed, sizes: [usize; 4]| numbers(seed, sizes.iter().product());
        let mut q = of(1, q);
        q.iter_mut().for_each(|x| *x *= 3.0); // scores that differ
        Self { shape, q, k: of(2, k), v: of(3, v) }
    }

    pub(crate) fn views(&self) -> [View<'_, f32>; 3] {
        let [q, k, v] = sizes(&self.shape);
        let view = |x, sizes| View::new(x, Layout::Bhsd, sizes).expect("as many as the sizes say");
        [view(&self.q, q), view(&self.k, k), view(&self.v, v)]
    }
}

/// Sizes of q, k and v.
pub(crate) fn sizes(shape: &AttnShape) -> [[usize; 4]; 3] {
    let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *shape;
    [[batch, q_heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim], [batch, kv_heads, kv_len, value_dim]]
}

/// Rows of some positions, `[batch, heads, positions, dim]`.
pub(crate) fn rows_of(x: View<'_, f32>, ranges: &[Range<usize>]) -> Vec<f32> {
    let [batch, heads, ..] = x.sizes();
    let mut rows = Vec::new();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        ranges.iter().cloned().flatten().for_each(|s| rows.extend(x.row(b, h, s).iter()));
    }
    rows
}

/// What masks refer to, for a shape.
pub(crate) struct Tables {
    cu_q: Vec<usize>,
    cu_k: Vec<usize>,
    lens: Vec<usize>,
    q_lens: Vec<usize>,
    blocks: [Vec<bool>; 2],
    block_sizes: [[usize; 4]; 2],
    dense: Vec<bool>,
    row: Vec<bool>,
    parents: Vec<Option<usize>>,
    shape: AttnShape,
}

/// Queries and keys of a block: one that cuts shards, one that they are a multiple of now and then.
const BLOCKS: [[usize; 2]; 2] = [[48, 37], [1, 64]];

impl Tables {
    pub(crate) fn new(shape: AttnShape) -> Self {
        let AttnShape { batch, q_heads, q_len, kv_len, .. } = shape;
        let cut = |len: usize, parts: &[usize]| parts.iter().map(|part| len * part / 100).collect::<Vec<_>>();
        let block_sizes = BLOCKS.map(|[q, k]| [1, q_heads, q_len.div_ceil(q), kv_len.div_ceil(k)]);
        Self {
            cu_q: cut(q_len, &[0, 20, 20, 55, 97]),
            cu_k: cut(kv_len, &[0, 30, 45, 60, 100]),
            lens: (0..batch).map(|b| kv_len * (b + 1) / (batch + 1)).collect(),
            q_lens: (0..batch).map(|b| q_len * (b + 1) / (batch + 1)).collect(),
            blocks: block_sizes.map(|sizes| bools(4, sizes.iter().product())),
            block_sizes,
            dense: bools(5, q_heads * q_len * kv_len),
            row: bools(6, kv_len),
            parents: (0..q_len).map(|n| (n % 7 != 0).then(|| n - 1 - n % 3 % n.max(1))).collect(),
            shape,
        }
    }

    /// Every kind of mask, with a name.
    pub(crate) fn masks(&self) -> Vec<(&'static str, Mask<'_>)> {
        let AttnShape { q_heads, q_len, kv_len, .. } = self.shape;
        let block = |n: usize| {
            let blocks = View::new(&self.blocks[n], Layout::Bhsd, self.block_sizes[n]).expect("made for it");
            let [block_q, block_k] = BLOCKS[n];
            Mask::block_sparse(BlockSparse { blocks, block_q, block_k })
        };
        let documents = Documents::new(&self.cu_q, &self.cu_k);
        let dense = View::new(&self.dense, Layout::Bhsd, [1, q_heads, q_len, kv_len]).expect("made for it");
        let row = View::broadcast(&self.row, &[kv_len]).expect("made for it");
        let window = Window { left: Some(100), right: None, align: Align::BottomRight };
        let mut masks = vec![
            ("none", Mask::none()),
            ("causal, bottom right", Mask::causal(Align::BottomRight)),
            ("causal, top left", Mask::causal(Align::TopLeft)),
            ("causal, offset", Mask::causal(Align::Offset(-150))),
            ("window", Mask::window(90, 20, Align::BottomRight)),
            ("prefix", Mask::prefix_lm(Lengths::PerBatch(&self.lens), Align::TopLeft)),
            ("kv_lens", Mask::kv_lens(&self.lens).and(Mask::causal(Align::BottomRight))),
            ("kv_starts", Mask::kv_starts(&self.lens)),
            ("padding of queries", Mask::q_lens(&self.q_lens)),
            ("documents", Mask::documents(documents)),
            ("causal documents", Mask::documents(documents.causal(Align::BottomRight))),
            ("documents with windows", Mask::documents(documents.causal(Align::TopLeft).window(window))),
            ("blocks that shards cut", block(0)),
            ("blocks", block(1).and(Mask::causal(Align::BottomRight))),
            ("a dense mask", Mask::keep(dense)),
            ("a row that hides keys", Mask::drop(row).and(Mask::causal(Align::BottomRight))),
        ];
        if kv_len >= q_len {
            masks.push(("a tree", Mask::tree(Tree { parents: &self.parents })));
        }
        masks
    }
}
