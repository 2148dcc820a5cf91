//! A stream of tokens, and the output of a plain call over it: the measure of every cache.

use crate::options::Attention;
use crate::outputs::Outputs;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::view::View;
use crate::{Layout, ViewMut, streaming};
use std::vec;
use std::vec::Vec;

/// `batch` streams of `len` tokens.
pub(super) struct Stream {
    sizes: [[usize; 4]; 3],
    data: [Vec<f32>; 3],
}

/// Output and lse of a plain call.
pub(super) struct Plain {
    out: Vec<f32>,
    lse: Vec<f32>,
    shape: AttnShape,
}

impl Stream {
    pub(super) fn new(
        batch: usize,
        q_heads: usize,
        kv_heads: usize,
        len: usize,
        head_dim: usize,
        value_dim: usize,
    ) -> Self {
        let sizes =
            [[batch, q_heads, len, head_dim], [batch, kv_heads, len, head_dim], [batch, kv_heads, len, value_dim]];
        let data = [0.1, 0.2, 0.3].map(|seed: f64| seed);
        let mut n = 0;
        let data = data.map(|seed| {
            let count = sizes[n].iter().product();
            n += 1;
            (0..count).map(|i| (2.0 * libm::sin(seed + i as f64 * 1.7)) as f32).collect()
        });
        Self { sizes, data }
    }

    pub(super) fn views(&self) -> (View<'_, f32>, View<'_, f32>, View<'_, f32>) {
        let view = |n: usize| View::new(&self.data[n], Layout::Bhsd, self.sizes[n]).unwrap();
        (view(0), view(1), view(2))
    }

    /// `n` tokens of every sequence, from a start of its own on; NaN beyond the end.
    pub(super) fn chunk(&self, starts: [usize; 2], n: usize) -> Self {
        let mut part = 0;
        let (q, k, v) = self.views();
        let views = [q, k, v];
        let data = [(); 3].map(|()| {
            let [batch, heads, len, dim] = self.sizes[part];
            let mut out = Vec::new();
            for b in 0..batch {
                for h in 0..heads {
                    for t in starts[b]..starts[b] + n {
                        for d in 0..dim {
                            out.push(if t < len { views[part].at(b, h, t, d) } else { f32::NAN });
                        }
                    }
                }
            }
            part += 1;
            out
        });
        Self { sizes: self.sizes.map(|[b, h, _, d]| [b, h, n, d]), data }
    }

    pub(super) fn plain<M: Mods>(&self, attn: &Attention<'_, M>) -> Plain {
        let (q, k, v) = self.views();
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes()).unwrap();
        let (mut out, mut lse) = (vec![0.0; shape.rows() * shape.value_dim], vec![0.0; shape.rows()]);
        let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
        streaming::forward(attn, q, k, v, outputs, &mut vec![0.0; shape.value_dim]).unwrap();
        Plain { out, lse, shape }
    }
}

/// Compares rows `0..counts[b]` of a chunk of `n` queries with those from `starts[b]` on; the others must be
/// padding.
pub(super) fn assert_same_bits(
    want: &Plain,
    out: &[f32],
    lse: &[f32],
    starts: [usize; 2],
    counts: [usize; 2],
    n: usize,
) {
    let shape = want.shape;
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for i in 0..n {
                let got = (batch * shape.q_heads + head) * n + i;
                let row = &out[got * shape.value_dim..][..shape.value_dim];
                if i < counts[batch] {
                    let at = shape.row(batch, head, starts[batch] + i);
                    assert_eq!(row, &want.out[at * shape.value_dim..][..shape.value_dim], "{batch} {head} {i}");
                    assert_eq!(lse[got], want.lse[at]);
                } else {
                    assert!(row.iter().all(|&x| x == 0.0) && lse[got] == f32::NEG_INFINITY);
                }
            }
        }
    }
}
