//! Strides: the layout of tensors never changes a bit.

use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut};

use super::{attend, attend_views, same_bits};
use crate::cases::{Inputs, Memory, Tensor4, shape, sizes};
use crate::engine::Engine;

/// q, k and v each in every layout, strided, padded with nonfinite numbers, reversed.
pub fn inputs_may_lie_anyhow<E: Engine>(engine: &E) {
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
    for dims in [(2, 4, 2, 19, 37, 24, 20), (1, 2, 1, 65, 66, 5, 3), (2, 2, 2, 1, 40, 16, 16)] {
        let dims = shape(dims);
        let plain = Inputs::<f32>::plain(dims, 31);
        let want = attend(engine, &causal, &plain);
        for memory in Memory::ALL {
            for which in 0..3 {
                let mut inputs = plain.clone();
                let [q, k, v] = sizes(&dims);
                match which {
                    0 => inputs.q = Tensor4::painted(q, memory, 31, 1.0),
                    1 => inputs.k = Tensor4::painted(k, memory, 32, 1.0),
                    _ => inputs.v = Tensor4::painted(v, memory, 33, 1.0),
                }
                let got = attend(engine, &causal, &inputs);
                same_bits(&got.out, &want.out, &(engine.label(), dims, memory, which));
                same_bits(&got.lse, &want.lse, &(engine.label(), dims, memory, which));
            }
        }
    }
}

/// The output in every layout; the bytes between its elements stay as they were.
pub fn outputs_may_lie_anyhow<E: Engine>(engine: &E) {
    let dims = shape((2, 4, 2, 33, 20, 8, 10));
    let inputs = Inputs::<f32>::plain(dims, 34);
    let want = attend(engine, &Attention::new(), &inputs);
    for memory in Memory::ALL {
        let (strides, offset, len) = memory.place(dims.output());
        let mut data = vec![-777.0f32; len + 5];
        let view = ViewMut::strided(&mut data, dims.output(), strides, offset).expect("output");
        let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
        engine.forward(&Attention::new(), q, k, v, Outputs::new(view)).expect("accepted");
        let mut out = Tensor4 { data, sizes: dims.output(), strides, offset };
        let mut got = Vec::new();
        out.each(|_, x| {
            got.push(*x);
            *x = -777.0;
        });
        same_bits(&got, &want.out, &(engine.label(), memory));
        assert!(out.data.iter().all(|&x| x == -777.0), "{}: {memory:?} wrote between the rows", engine.label());
    }
}

/// A stride of 0 repeats a row, a head or a whole sequence.
pub fn broadcast_inputs_are_repeated_ones<E: Engine>(engine: &E) {
    let dims = shape((2, 2, 2, 18, 21, 12, 7));
    for axis in 0..4 {
        let mut inputs = Inputs::<f32>::plain(dims, 35);
        for tensor in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
            let first = tensor.clone();
            tensor.each(|mut place, x| {
                place[axis] = 0;
                *x = first.at(place);
            });
        }
        let want = attend(engine, &Attention::new(), &inputs);
        for tensor in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
            tensor.strides[axis] = 0;
        }
        let got = attend(engine, &Attention::new(), &inputs);
        same_bits(&got.out, &want.out, &(engine.label(), axis));
    }
}

/// `[batch, seq, 3, heads, dim]`, as one projection leaves it.
pub fn packed_qkv_is_read_in_place<E: Engine>(engine: &E) {
    let (batch, heads, seq, dim) = (2, 3, 25, 8);
    let qkv: Vec<f32> = crate::paint::normals(36, batch * seq * 3 * heads * dim, 1.0);
    let part = |n| View::packed(&qkv, [batch, heads, seq, dim], 3, n).expect("packed");
    let got = attend_views(engine, &Attention::new(), part(0), part(1), part(2)).expect("accepted");
    let split = |n: usize| -> Vec<f32> {
        let mut out = Vec::new();
        for b in 0..batch {
            for h in 0..heads {
                for s in 0..seq {
                    let start = (((b * seq + s) * 3 + n) * heads + h) * dim;
                    out.extend_from_slice(&qkv[start..start + dim]);
                }
            }
        }
        out
    };
    let (q, k, v) = (split(0), split(1), split(2));
    let view = |x| View::new(x, Layout::Bhsd, [batch, heads, seq, dim]).expect("dense");
    let want = attend_views(engine, &Attention::new(), view(&q), view(&k), view(&v)).expect("accepted");
    same_bits(&got.out, &want.out, &engine.label());
}
