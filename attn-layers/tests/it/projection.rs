//! `Linear`: both weight conventions, heads as strides, precision, gradients, refusals.

use attn_core::half::bf16;
use attn_core::{AttnError, Layout, View, ViewMut};
use attn_layers::{Linear, LinearGradients};

use attn_testing::numbers::{DIFFERENCE, EXACT, Numbers, assert_close, differences, inner};

fn transpose(w: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|n| w[n % rows * columns + n / rows]).collect()
}

/// The definition, index by index.
fn naive(x: &[f64], w: &[f64], b: &[f64], d_in: usize, d_out: usize) -> Vec<f64> {
    let positions = x.len() / d_in;
    let mut y = vec![0.0; positions * d_out];
    for p in 0..positions {
        for o in 0..d_out {
            y[p * d_out + o] = b[o] + (0..d_in).map(|i| x[p * d_in + i] * w[i * d_out + o]).sum::<f64>();
        }
    }
    y
}

#[test]
fn both_weight_conventions_are_the_definition() {
    for (d_in, d_out) in [(1, 1), (3, 5), (7, 4), (8, 8)] {
        let mut numbers = Numbers::new(1);
        let (x, w, b) = (numbers.take(6 * d_in), numbers.take(d_in * d_out), numbers.take(d_out));
        let want = naive(&x, &w, &b, d_in, d_out);
        let wt = transpose(&w, d_in, d_out);
        let x = View::new(&x, Layout::Bhsd, [2, 1, 3, d_in]).unwrap();
        for layer in [Linear::new(&w, d_in, d_out), Linear::transposed(&wt, d_in, d_out)] {
            let layer = layer.unwrap().bias(&b).unwrap();
            let mut y = vec![0.0; 6 * d_out];
            layer.forward(x, &mut ViewMut::new(&mut y, Layout::Bhsd, [2, 1, 3, d_out]).unwrap()).unwrap();
            assert_close("y", &y, &want, EXACT);
        }
    }
}

#[test]
fn heads_are_features_side_by_side() {
    let mut numbers = Numbers::new(2);
    let (x, w) = (numbers.take(2 * 3 * 4), numbers.take(4 * 6));
    let layer = Linear::new(&w, 4, 6).unwrap();
    let flat = naive(&x, &w, &[0.0; 6], 4, 6);
    let mut heads = vec![0.0; 2 * 3 * 6];
    let x = View::new(&x, Layout::Bhsd, [2, 1, 3, 4]).unwrap();
    layer.forward(x, &mut ViewMut::new(&mut heads, Layout::Bhsd, [2, 3, 3, 2]).unwrap()).unwrap();
    let heads = View::new(&heads, Layout::Bhsd, [2, 3, 3, 2]).unwrap();
    for (b, h, s, d) in [(0, 0, 0, 0), (0, 2, 1, 1), (1, 1, 2, 0), (1, 2, 2, 1)] {
        assert!((heads.at(b, h, s, d) - flat[(b * 3 + s) * 6 + h * 2 + d]).abs() < EXACT);
    }
    // One head is the layer of its columns; and a layer reads heads as it wrote them.
    let mut one = vec![0.0; 2 * 3 * 2];
    let column = layer.outputs(4..6).unwrap();
    column.forward(x, &mut ViewMut::new(&mut one, Layout::Bhsd, [2, 1, 3, 2]).unwrap()).unwrap();
    let third: Vec<f64> = (0..6).flat_map(|p| [flat[p * 6 + 4], flat[p * 6 + 5]]).collect();
    assert_close("one head", &one, &third, EXACT);
    let w_o = numbers.take(6 * 5);
    let mut y = vec![0.0; 2 * 3 * 5];
    let out = Linear::new(&w_o, 6, 5).unwrap();
    out.forward(heads, &mut ViewMut::new(&mut y, Layout::Sbhd, [2, 1, 3, 5]).unwrap()).unwrap();
    let want = naive(&flat, &w_o, &[0.0; 5], 6, 5);
    let sequence_first: Vec<f64> =
        (0..30).map(|n| (n / 10, n / 5 % 2, n % 5)).map(|(s, b, d)| want[(b * 3 + s) * 5 + d]).collect();
    assert_close("sequence first", &y, &sequence_first, EXACT);
}

#[test]
fn halves_are_rounded_once() {
    let w: Vec<bf16> = (0..64).map(|n| bf16::from_f32(1.0 + n as f32 / 64.0)).collect();
    let x = [bf16::ONE; 64];
    let mut y = [bf16::ZERO; 1];
    let layer = Linear::new(&w, 64, 1).unwrap();
    layer.forward(View::matrix(&x, 1, 64).unwrap(), &mut ViewMut::matrix(&mut y, 1, 1).unwrap()).unwrap();
    let exact: f32 = w.iter().map(|w| w.to_f32()).sum();
    assert_eq!(y[0], bf16::from_f32(exact)); // a bf16 accumulator would stop at 2⁸ times its step
    let mut single = [bf16::ZERO; 1];
    let mut out = ViewMut::matrix(&mut single, 1, 1).unwrap();
    layer.forward_in::<f32, _, _>(View::matrix(&x, 1, 64).unwrap(), &mut out).unwrap();
    assert_eq!(single, y);
}

#[test]
fn gradients_are_the_differences() {
    let (d_in, d_out) = (3, 4);
    let mut numbers = Numbers::new(3);
    let (x, w, b, dy) =
        (numbers.take(6 * d_in), numbers.take(d_in * d_out), numbers.take(d_out), numbers.take(6 * d_out));
    let loss = |x: &[f64], w: &[f64], b: &[f64]| inner(&naive(x, w, b, d_in, d_out), &dy);
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; d_out]);
    Linear::new(&w, d_in, d_out)
        .unwrap()
        .backward(
            View::new(&x, Layout::Bhsd, [2, 1, 3, d_in]).unwrap(),
            View::new(&dy, Layout::Bshd, [2, 2, 3, 2]).unwrap(), // as two heads: the same features
            Some(&mut ViewMut::new(&mut dx, Layout::Bhsd, [2, 1, 3, d_in]).unwrap()),
            Some(&mut LinearGradients::new(&mut dw, d_in, d_out).unwrap().bias(&mut db)),
        )
        .unwrap();
    assert_close("dx", &dx, &differences(&x, |x| loss(x, &w, &b)), DIFFERENCE);
    assert_close("dw", &dw, &differences(&w, |w| loss(&x, w, &b)), DIFFERENCE);
    assert_close("db", &db, &differences(&b, |b| loss(&x, &w, b)), DIFFERENCE);

    // The transposed convention gives the same numbers, transposed.
    let wt = transpose(&w, d_in, d_out);
    let mut dwt = vec![0.0; w.len()];
    Linear::transposed(&wt, d_in, d_out)
        .unwrap()
        .backward(
            View::new(&x, Layout::Bhsd, [2, 1, 3, d_in]).unwrap(),
            View::new(&dy, Layout::Bhsd, [2, 1, 3, d_out]).unwrap(),
            None,
            Some(&mut LinearGradients::transposed(&mut dwt, d_in, d_out).unwrap()),
        )
        .unwrap();
    assert_close("dwt", &dwt, &transpose(&dw, d_in, d_out), EXACT);
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let w = [0.0f32; 6];
    assert_eq!(
        Linear::new(&w, 2, 4).unwrap_err(),
        AttnError::Size { what: "weight (d_in · d_out)", expected: 8, found: 6 }
    );
    assert_eq!(Linear::new(&w, usize::MAX, 2).unwrap_err(), AttnError::Overflow { what: "d_in · d_out" });
    let layer = Linear::new(&w, 2, 3).unwrap();
    assert!(layer.bias(&[0.0; 2]).is_err());
    assert!(layer.outputs(2..4).is_err());
    let backwards = core::ops::Range { start: 2, end: 1 };
    assert!(layer.outputs(backwards).is_err());
    assert_eq!(layer.outputs(3..3).unwrap().d_out(), 0);
    let x = [1.0f32; 4];
    let mut y = [7.0f32; 6];
    for (x_dim, y_sizes) in [(1, [1, 1, 2, 3]), (2, [1, 1, 2, 2]), (2, [1, 1, 1, 3]), (2, [2, 1, 1, 3])] {
        let x = View::new(&x, Layout::Bhsd, [1, 1, 2, x_dim]).unwrap();
        let mut view = ViewMut::new(&mut y, Layout::Bhsd, y_sizes).unwrap();
        assert!(matches!(layer.forward(x, &mut view), Err(AttnError::Size { .. })));
    }
    assert_eq!(y, [7.0; 6]);
}

#[test]
fn empty_sizes_are_valid() {
    let none: [f32; 0] = [];
    let layer = Linear::new(&none, 0, 2).unwrap().bias(&[3.0, 4.0]).unwrap();
    let mut y = [0.0f32; 2];
    layer.forward(View::matrix(&none, 1, 0).unwrap(), &mut ViewMut::matrix(&mut y, 1, 2).unwrap()).unwrap();
    assert_eq!(y, [3.0, 4.0]); // an empty sum, and the bias
    let layer = Linear::new(&[1.0f32, 2.0], 2, 1).unwrap();
    let mut none_mut: [f32; 0] = [];
    layer.forward(View::matrix(&none, 0, 2).unwrap(), &mut ViewMut::matrix(&mut none_mut, 0, 1).unwrap()).unwrap();
}
