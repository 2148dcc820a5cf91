//! Self-attention whose sizes are known when compiling: projections around [`FixedAttention`], without scratch.

use attn_core::engine::dot_slices;
use attn_core::fixed::FixedAttention;

/// A projection in `f32` to `HEADS` heads of `DIM`: row `[head][channel]` holds the weights of one output, so that it
/// is torch's `[d_out, d_in]` in memory.
pub type FixedProjection<const D_MODEL: usize, const HEADS: usize, const DIM: usize> = [[[f32; D_MODEL]; DIM]; HEADS];

/// Multi-head self-attention in `f32` with constant sizes: `D_MODEL` features, `HEADS` query heads of `DIM`,
/// `KV_HEADS` key/value heads. The options are those of [`FixedAttention`].
///
/// Nothing can fail: every size is part of a type. Projected heads are on the stack, so that there is no scratch
/// argument: `8·N·DIM·(HEADS + KV_HEADS)` bytes for `N` tokens. The image is a small part of that of
/// [`MultiHeadAttention`](super::MultiHeadAttention) on [`Streaming`](super::Streaming), and the bits are the same.
///
/// ```
/// use attn_core::Align;
/// use attn_core::fixed::FixedAttention;
/// use attn_layers::module::FixedSelfAttention;
/// // Two features, one head of two: the identity four times.
/// static EYE: [[[f32; 2]; 2]; 1] = [[[1.0, 0.0], [0.0, 1.0]]];
/// static OUT: [[[f32; 2]; 1]; 2] = [[[1.0, 0.0]], [[0.0, 1.0]]];
/// static LAYER: FixedSelfAttention<2, 1, 1, 2> =
///     FixedSelfAttention::new(FixedAttention::new().causal(Align::TopLeft), &EYE, &EYE, &EYE, &OUT);
/// let x = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]; // three tokens
/// let mut y = [[0.0; 2]; 3];
/// LAYER.forward(&x, &mut y);
/// assert_eq!(y[0], x[0]); // the first token sees only itself
/// assert!((y[2][0] - y[2][1]).abs() < 1e-6); // the third is drawn to both others alike
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FixedSelfAttention<'a, const D_MODEL: usize, const HEADS: usize, const KV_HEADS: usize, const DIM: usize> {
    attn: FixedAttention<HEADS, KV_HEADS, DIM>,
    w_q: &'a FixedProjection<D_MODEL, HEADS, DIM>,
    w_k: &'a FixedProjection<D_MODEL, KV_HEADS, DIM>,
    w_v: &'a FixedProjection<D_MODEL, KV_HEADS, DIM>,
    w_o: &'a [[[f32; DIM]; HEADS]; D_MODEL],
    b_q: Option<&'a [[f32; DIM]; HEADS]>,
    b_k: Option<&'a [[f32; DIM]; KV_HEADS]>,
    b_v: Option<&'a [[f32; DIM]; KV_HEADS]>,
    b_o: Option<&'a [f32; D_MODEL]>,
}

impl<'a, const D_MODEL: usize, const HEADS: usize, const KV_HEADS: usize, const DIM: usize>
    FixedSelfAttention<'a, D_MODEL, HEADS, KV_HEADS, DIM>
{
    /// Weights as torch stores them: `W_q` `[HEADS·DIM, D_MODEL]`, `W_k` and `W_v` `[KV_HEADS·DIM, D_MODEL]`, `W_o`
    /// `[D_MODEL, HEADS·DIM]`, with `HEADS·DIM` as two axes. No biases.
    pub const fn new(
        attn: FixedAttention<HEADS, KV_HEADS, DIM>,
        w_q: &'a FixedProjection<D_MODEL, HEADS, DIM>,
        w_k: &'a FixedProjection<D_MODEL, KV_HEADS, DIM>,
        w_v: &'a FixedProjection<D_MODEL, KV_HEADS, DIM>,
        w_o: &'a [[[f32; DIM]; HEADS]; D_MODEL],
    ) -> Self {
        Self { attn, w_q, w_k, w_v, w_o, b_q: None, b_k: None, b_v: None, b_o: None }
    }

    /// Biases of the four projections.
    pub const fn biases(
        mut self,
        b_q: &'a [[f32; DIM]; HEADS],
        b_k: &'a [[f32; DIM]; KV_HEADS],
        b_v: &'a [[f32; DIM]; KV_HEADS],
        b_o: &'a [f32; D_MODEL],
    ) -> Self {
        self.b_q = Some(b_q);
        self.b_k = Some(b_k);
        self.b_v = Some(b_v);
        self.b_o = Some(b_o);
        self
    }

    /// Attention of `N` tokens to each other.
    pub fn forward<const N: usize>(&self, x: &[[f32; D_MODEL]; N], y: &mut [[f32; D_MODEL]; N]) {
        let (mut q, mut context) = ([[[0.0; DIM]; HEADS]; N], [[[0.0; DIM]; HEADS]; N]);
        let (mut k, mut v) = ([[[0.0; DIM]; KV_HEADS]; N], [[[0.0; DIM]; KV_HEADS]; N]);
        project(x, self.w_q.as_flattened(), bias(&self.b_q), q.iter_mut().map(|row| row.as_flattened_mut()));
        project(x, self.w_k.as_flattened(), bias(&self.b_k), k.iter_mut().map(|row| row.as_flattened_mut()));
        project(x, self.w_v.as_flattened(), bias(&self.b_v), v.iter_mut().map(|row| row.as_flattened_mut()));
        self.attn.forward(&q, &k, &v, &mut context);
        let b_o = self.b_o.map_or(&[][..], |b| &b[..]);
        for (context, y) in context.iter().zip(y) {
            let weights = self.w_o.iter().map(|row| row.as_flattened());
            project_token(context.as_flattened(), weights, b_o, y);
        }
    }
}

/// The bias of all heads, or nothing.
fn bias<'b, const HEADS: usize, const DIM: usize>(bias: &Option<&'b [[f32; DIM]; HEADS]>) -> &'b [f32] {
    bias.map_or(&[], |bias| bias.as_flattened())
}

/// Every token's features, into rows of as many outputs as there are weights.
fn project<'y, const D_MODEL: usize>(
    x: &[[f32; D_MODEL]],
    weights: &[[f32; D_MODEL]],
    bias: &[f32],
    y: impl Iterator<Item = &'y mut [f32]>,
) {
    for (x, y) in x.iter().zip(y) {
        project_token(x, weights.iter().map(|row| &row[..]), bias, y);
    }
}

/// `y = W·x + b`, the sums as in [`Linear::forward_in`](crate::Linear::forward_in).
fn project_token<'w>(x: &[f32], weights: impl Iterator<Item = &'w [f32]>, bias: &[f32], y: &mut [f32]) {
    for (n, (y, weights)) in y.iter_mut().zip(weights).enumerate() {
        *y = dot_slices(x, weights) + bias.get(n).copied().unwrap_or(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MultiHeadAttention, Sources, Streaming};
    use super::*;
    use crate::Linear;
    use attn_core::{Align, Attention, Layout, Mask, View, ViewMut};
    use std::vec;

    fn numbers<const N: usize>(seed: usize) -> [f32; N] {
        core::array::from_fn(|n| (((n + seed) * 7919 % 613) as f32 / 306.5 - 1.0) * 0.9)
    }

    /// Grouped heads and a dim that is not one of fours, with and without biases: the bits of the module whose sizes
    /// are known at run time.
    #[test]
    fn bits_are_those_of_the_module() {
        const D: usize = 10;
        let (w_q, w_k, w_v, w_o) = (numbers::<180>(1), numbers::<60>(2), numbers::<60>(3), numbers::<180>(4));
        let (b_q, b_k, b_v, b_o) = (numbers::<18>(5), numbers::<6>(6), numbers::<6>(7), numbers::<D>(8));
        let x = numbers::<70>(9);
        let rows = |w: &[f32]| -> [[[f32; D]; 3]; 2] {
            core::array::from_fn(|h| core::array::from_fn(|d| core::array::from_fn(|i| w[(h * 3 + d) * D + i])))
        };
        let (k_rows, v_rows) = (rows(&w_k), rows(&w_v));
        let q_rows: [[[f32; D]; 3]; 6] =
            core::array::from_fn(|h| core::array::from_fn(|d| core::array::from_fn(|i| w_q[(h * 3 + d) * D + i])));
        let o_rows: [[[f32; 3]; 6]; D] =
            core::array::from_fn(|o| core::array::from_fn(|h| core::array::from_fn(|d| w_o[o * 18 + h * 3 + d])));
        let (q_bias, heads) = (b_q.as_chunks::<3>().0, |b: &[f32; 6]| [[b[0], b[1], b[2]], [b[3], b[4], b[5]]]);
        let (k_bias, v_bias) = (heads(&b_k), heads(&b_v));
        let layer = FixedSelfAttention::new(
            FixedAttention::<6, 2, 3>::new().causal(Align::TopLeft),
            &q_rows,
            &k_rows,
            &v_rows,
            &o_rows,
        );
        let biased = layer.biases(q_bias.first_chunk().unwrap(), &k_bias, &v_bias, &b_o);

        let linear = |w, d_in, d_out| Linear::transposed(w, d_in, d_out).unwrap();
        let [q, k, v, o] =
            [(&w_q[..], D, 18), (&w_k, D, 6), (&w_v, D, 6), (&w_o, 18, D)].map(|(w, i, o)| linear(w, i, o));
        let module = MultiHeadAttention::new(6, 2, q, k, v).unwrap().output(o).unwrap();
        let [q, k, v, o] =
            [(q, &b_q[..]), (k, &b_k), (v, &b_v), (o, &b_o)].map(|(linear, bias)| linear.bias(bias).unwrap());
        let module_biased = MultiHeadAttention::new(6, 2, q, k, v).unwrap().output(o).unwrap();

        for (layer, module) in [(layer, module), (biased, module_biased)] {
            let tokens: [[f32; D]; 7] = core::array::from_fn(|n| core::array::from_fn(|i| x[n * D + i]));
            let mut y = [[9.0f32; D]; 7];
            layer.forward(&tokens, &mut y);
            let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
            let mut want = [9.0f32; 70];
            let mut scratch = vec![0.0; module.scratch_len(&Streaming, 1, 7, 7).unwrap()];
            let sizes = [1, 1, 7, D];
            let (x, to) = (View::new(&x, Layout::Bhsd, sizes).unwrap(), ViewMut::new(&mut want, Layout::Bhsd, sizes));
            module.forward(&mut Streaming, &attn, Sources::same(x), to.unwrap(), &mut scratch).unwrap();
            assert_eq!(y.as_flattened(), want);
        }
    }
}
