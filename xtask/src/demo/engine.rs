//! An engine for attn-core's modules: products by `gemm`, attention by `attn-parallel`.
//!
//! Heads are split and joined by strides alone. Where the features of a position lie side by side, a projection is one
//! product; where each head has a block of its own, it is one per head.

use attn_bench::product::Place;
use attn_core::{Attention, AttnShape, Mods, Outputs, Result, View, ViewMut};
use attn_layers::Linear;
use attn_layers::module::Engine;
use attn_parallel::Kernels;

use crate::matmul::add_product;

/// The engine, which can keep what attention saw and gave.
#[derive(Default)]
pub(crate) struct Demo {
    kernels: Kernels,
    /// Every call's tensors, where somebody wants them.
    pub(crate) trace: Option<Vec<Attended>>,
}

impl Demo {
    /// An engine that keeps the tensors of every call.
    pub(crate) fn tracing() -> Self {
        Self { trace: Some(Vec::new()), ..Self::default() }
    }
}

/// The tensors of one call of attention, each `[batch, heads, seq, dim]`, contiguous.
pub(crate) struct Attended {
    /// Queries, keys, values and outputs.
    pub(crate) tensors: [Vec<f32>; 4],
    /// Their sizes.
    pub(crate) sizes: [[usize; 4]; 4],
    /// `[batch, heads, seq]`.
    pub(crate) lse: Vec<f32>,
}

impl Attended {
    /// Queries, keys, values or outputs.
    pub(crate) fn view(&self, which: usize) -> Result<View<'_, f32>> {
        View::new(&self.tensors[which], attn_core::Layout::Bhsd, self.sizes[which])
    }
}

impl Engine<f32> for Demo {
    type Mid = f32;

    fn scratch_len(&self, _: &AttnShape) -> Result<usize> {
        Ok(0)
    }

    fn attend<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        qkv: [View<'_, f32>; 3],
        mut outputs: Outputs<'_, f32>,
        _: &mut [f32],
    ) -> Result<()> {
        let again = Outputs {
            out: outputs.out.reborrow(),
            lse: outputs.lse.as_deref_mut(),
            weights: outputs.weights.as_deref_mut(),
        };
        Engine::<f32>::attend(&mut self.kernels, attn, qkv, again, &mut [])?;
        if let Some(trace) = &mut self.trace {
            let [q, k, v] = qkv;
            let all = [q, k, v, outputs.out.as_view()];
            let lse = outputs.lse.as_deref().unwrap_or_default().to_vec();
            trace.push(Attended { tensors: all.map(contiguous), sizes: all.map(|x| x.sizes()), lse });
        }
        Ok(())
    }

    fn project(&mut self, layer: &Linear<'_, f32>, x: View<'_, f32>, y: &mut ViewMut<'_, f32>) -> Result<()> {
        linear(layer, x, y)
    }

    fn join(&mut self, layer: &Linear<'_, f32>, x: View<'_, f32>, y: &mut ViewMut<'_, f32>) -> Result<()> {
        linear(layer, x, y)
    }
}

/// The elements in the order of batch, heads, positions, dims.
pub(super) fn contiguous(x: View<'_, f32>) -> Vec<f32> {
    let [batch, heads, seq, _] = x.sizes();
    let rows = (0..batch * heads * seq).map(|n| x.row(n / seq / heads, n / seq % heads, n % seq));
    rows.flat_map(attn_core::Row::iter).collect()
}

/// `y = x·W + b`; `x` and `y` are `[batch, heads, seq, dim]`, whose features are their heads side by side.
pub(super) fn linear(layer: &Linear<'_, f32>, x: View<'_, f32>, y: &mut ViewMut<'_, f32>) -> Result<()> {
    layer.check(x.sizes(), y.sizes())?;
    let [batch, heads, seq, dim] = y.sizes();
    for n in 0..batch * heads * seq {
        let (b, head, s) = (n / seq / heads, n / seq % heads, n % seq);
        for d in 0..dim {
            let bias = layer.get_bias().and_then(|bias| bias.get(head * dim + d));
            y.set(b, head, s, d, bias.copied().unwrap_or(0.0));
        }
    }
    let weight = layer.weight();
    let (from, to, by) = (Blocks::of(x.sizes(), x.strides()), Blocks::of(y.sizes(), y.strides()), weight.strides());
    let (x_offset, y_offset) = (x.offset(), y.offset());
    let y = y.reborrow().into_data();
    for b in 0..batch {
        for y_head in 0..to.heads {
            for x_head in 0..from.heads {
                // Outputs of this block of rows of W, from inputs of this block of its columns.
                let w = Place {
                    offset: weight.offset() + y_head * to.dim * by[2] as usize + x_head * from.dim * by[3] as usize,
                    rows: to.dim,
                    cols: from.dim,
                    strides: [by[2] as usize, by[3] as usize],
                };
                let (left, result) = (from.place(x_offset, b, x_head), to.place(y_offset, b, y_head));
                add_product((y, result), (x.data(), left), (weight.data(), w.transposed()));
            }
        }
    }
    Ok(())
}

/// A tensor as matrices of positions by features: one where heads lie side by side, else one per head.
struct Blocks {
    heads: usize,
    seq: usize,
    dim: usize,
    strides: [usize; 4],
}

impl Blocks {
    fn of([_, heads, seq, dim]: [usize; 4], strides: [isize; 4]) -> Self {
        assert!(strides.iter().all(|&stride| stride >= 0), "no tensor of the demos runs backwards");
        let strides = strides.map(isize::unsigned_abs);
        let merged = heads == 1 || strides[1] == dim * strides[3];
        let (heads, dim) = if merged { (1, heads * dim) } else { (heads, dim) };
        Self { heads, seq, dim, strides }
    }

    fn place(&self, offset: usize, batch: usize, head: usize) -> Place {
        let offset = offset + batch * self.strides[0] + head * self.strides[1];
        Place { offset, rows: self.seq, cols: self.dim, strides: [self.strides[2], self.strides[3]] }
    }
}

#[cfg(test)]
mod tests {
    use attn_core::Layout;

    use super::*;

    /// Small whole numbers, whose products are exact in any order.
    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 5 + 2) % 9) as f32 - 4.0).collect()
    }

    /// Against attn-core's own loops, for every way in which heads may lie.
    #[test]
    fn projections_are_those_of_the_plain_loops() {
        let (batch, seq) = (2, 5);
        let weight = numbers(12 * 8);
        let bias = numbers(12);
        let layers =
            [Linear::new(&weight, 8, 12).unwrap(), Linear::transposed(&weight, 8, 12).unwrap().bias(&bias).unwrap()];
        for layer in layers {
            for (x_heads, x_layout) in [(1, Layout::Bhsd), (2, Layout::Bhsd), (4, Layout::Bshd), (2, Layout::Sbhd)] {
                for (y_heads, y_layout) in [(1, Layout::Bhsd), (3, Layout::Bhsd), (4, Layout::Bshd), (6, Layout::Sbhd)]
                {
                    let x = numbers(batch * seq * 8);
                    let x = View::new(&x, x_layout, [batch, x_heads, seq, 8 / x_heads]).unwrap();
                    let (mut got, mut want) = (vec![9.0f32; batch * seq * 12], vec![7.0f32; batch * seq * 12]);
                    let sizes = [batch, y_heads, seq, 12 / y_heads];
                    linear(&layer, x, &mut ViewMut::new(&mut got, y_layout, sizes).unwrap()).unwrap();
                    layer.forward(x, &mut ViewMut::new(&mut want, y_layout, sizes).unwrap()).unwrap();
                    assert_eq!(got, want, "{x_heads} {x_layout:?} {y_heads} {y_layout:?}");
                }
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_before_writing() {
        let (weight, x, mut y) = ([1.0f32; 6], [1.0f32; 4], [5.0f32; 3]);
        let layer = Linear::new(&weight, 2, 3).unwrap();
        let x = View::matrix(&x, 1, 4).unwrap();
        assert!(linear(&layer, x, &mut ViewMut::matrix(&mut y, 1, 3).unwrap()).is_err());
        assert_eq!(y, [5.0; 3]);
    }

    #[test]
    fn a_trace_holds_what_attention_saw_and_gave() {
        let x = numbers(2 * 3 * 4);
        let x = View::new(&x, Layout::Bshd, [1, 2, 3, 4]).unwrap();
        let (mut out, mut lse) = ([0.0f32; 24], [0.0f32; 6]);
        let mut engine = Demo::tracing();
        let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 2, 3, 4]).unwrap();
        engine.attend(&Attention::new(), [x; 3], Outputs::new(to).lse(&mut lse), &mut []).unwrap();
        let [call] = engine.trace.as_deref().unwrap() else { panic!("one call") };
        assert_eq!((&call.tensors[3][..], &call.lse[..]), (&out[..], &lse[..]));
        assert_eq!(call.view(0).unwrap().at(0, 1, 2, 3), x.at(0, 1, 2, 3));
    }
}
