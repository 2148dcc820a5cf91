//! A few small calls that pass through every phase of the kernel: quick enough for Miri, which runs each instruction
//! set whose features the build turns on.

use attn_core::half::{bf16, f16};
use attn_core::{Align, Attention, Element, Layout, Mask, Outputs, Precision, View, ViewMut, streaming};
use attn_simd::{KernelElement, Level, Workspace};

/// Every level against the streaming engine. Lengths are one more than a block, a vector or nothing at all; the queries
/// lie with heads inside, and rows have a gap behind, so that strides matter.
fn agrees<T: KernelElement>(attn: &Attention<'_>, sizes: [usize; 4], tolerance: f64) {
    agrees_at::<T>(Level::available(), attn, sizes, tolerance);
}

/// The same at some levels.
fn agrees_at<T: KernelElement>(
    levels: impl Iterator<Item = Level>,
    attn: &Attention<'_>,
    [q_len, kv_len, head_dim, value_dim]: [usize; 4],
    tolerance: f64,
) {
    let (q_heads, kv_heads) = (2, 1);
    let numbers = |n: usize, seed: f64| -> Vec<T> { (0..n).map(|i| T::from_f64((seed + i as f64).sin())).collect() };
    let (q, k, v) = (
        numbers(q_heads * q_len * head_dim, 0.1),
        numbers(kv_heads * kv_len * head_dim, 0.2),
        numbers(kv_heads * kv_len * (value_dim + 1), 0.3),
    );
    let q = View::new(&q, Layout::Bshd, [1, q_heads, q_len, head_dim]).expect("q");
    let k = View::new(&k, Layout::Bhsd, [1, kv_heads, kv_len, head_dim]).expect("k");
    let (rows, row) = (kv_len as isize, value_dim as isize + 1);
    let v = View::strided(&v, [1, kv_heads, kv_len, value_dim], [rows * row, rows * row, row, 1], 0).expect("v");
    let sizes = [1, q_heads, q_len, value_dim];
    let elements = q_heads * q_len * value_dim;

    let (mut want, mut want_lse) = (vec![0.0f32; elements], vec![0.0f32; q_heads * q_len]);
    let to = ViewMut::new(&mut want, Layout::Bhsd, sizes).expect("out");
    let outputs = Outputs::new(to).lse(&mut want_lse);
    streaming::forward(attn, q, k, v, outputs, &mut vec![0.0; value_dim]).expect("streaming");

    let mut workspace = Workspace::new();
    for level in levels {
        let (mut out, mut lse) = (vec![T::from_f64(7.0); elements], vec![7.0f32; q_heads * q_len]);
        let to = ViewMut::new(&mut out, Layout::Bhsd, sizes).expect("out");
        let outputs = Outputs::new(to).lse(&mut lse);
        attn_simd::forward_at(level, attn, q, k, v, outputs, &mut workspace).expect("simd");
        for (n, (got, want)) in out.iter().zip(&want).enumerate() {
            let error = (Element::to_f64(*got) - f64::from(*want)).abs();
            assert!(error <= tolerance, "{level:?}: element {n} is {got:?}, expected {want}");
        }
        for (got, want) in lse.iter().zip(&want_lse) {
            // Fast weights are coarse, and the lse is the logarithm of their sum.
            let allowed = if attn.get_precision() == Precision::Exact { 1e-5 } else { 4e-3 };
            assert!(got == want || (got - want).abs() < allowed, "{level:?}: lse {got}, expected {want}");
        }
    }
}

#[test]
fn plain_f32() {
    agrees::<f32>(&Attention::new(), [17, 65, 5, 3], 1e-5);
    agrees::<f32>(&Attention::new(), [1, 3, 16, 16], 1e-5);
}

/// The amx kernel through the model of AMX: the smallest calls that pass through every phase of that
/// kernel too.
#[test]
fn the_amx_kernel() {
    let model = || Level::by_name("amx-model").into_iter();
    let fast = Attention::new().precision(Precision::Fast);
    agrees_at::<bf16>(model(), &fast, [17, 5, 4, 3], 2e-2); // fewer queries would be decoded, not tiled
    if !cfg!(miri) {
        let exact = Attention::new().mask(Mask::causal(Align::BottomRight)).softcap(2.0);
        agrees_at::<bf16>(model(), &exact, [33, 70, 33, 9], 1e-2);
        agrees_at::<f16>(model(), &exact, [40, 90, 5, 35], 1e-3);
        agrees_at::<f32>(model(), &exact, [33, 65, 9, 5], 1e-5);
        for sizes in [[0, 3, 4, 4], [17, 0, 4, 4], [17, 3, 0, 4], [17, 3, 4, 0]] {
            agrees_at::<f32>(model(), &exact, sizes, 1e-5);
        }
    }
}

#[test]
fn empty_sizes() {
    for sizes in [[0, 3, 4, 4], [3, 0, 4, 4], [3, 3, 0, 4], [3, 3, 4, 0]] {
        agrees::<f32>(&Attention::new(), sizes, 1e-5);
    }
}

#[test]
fn masks_cut_tiles() {
    let window = Mask::window(6, 3, Align::BottomRight);
    agrees::<f32>(&Attention::new().mask(Mask::causal(Align::BottomRight)), [9, 20, 4, 3], 1e-5);
    agrees::<f32>(&Attention::new().mask(window).softcap(2.0), [9, 18, 4, 3], 1e-5);
    agrees::<f32>(&Attention::new().mask(Mask::kv_lens(&[0])), [3, 5, 4, 3], 0.0);
}

#[test]
fn halves_widen_while_loading() {
    agrees::<f16>(&Attention::new(), [3, 18, 5, 9], 1e-3);
    agrees::<bf16>(&Attention::new().mask(Mask::causal(Align::BottomRight)), [3, 18, 9, 5], 1e-2);
}
