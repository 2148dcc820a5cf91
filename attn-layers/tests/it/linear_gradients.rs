//! Gradients of linear attention: against differences, over calls of a stream, refusals.

use attn_core::backward::Gradients;
use attn_core::{Align, AttnError, AttnShape, Layout, View, ViewMut};
use attn_layers::variants::linear::{LinearAttention, LinearState};

use attn_testing::numbers::{DIFFERENCE, EXACT, Numbers, assert_close, differences, inner};

const Q: [usize; 4] = [2, 4, 5, 3];
const K: [usize; 4] = [2, 2, 6, 3];
const V: [usize; 4] = [2, 2, 6, 2];
const Y: [usize; 4] = [2, 4, 5, 2];

fn shape() -> AttnShape {
    AttnShape::new(Q, K, V).unwrap()
}

fn len(sizes: [usize; 4]) -> usize {
    sizes.iter().product()
}

/// q, k, v, then s and z of the state before the call: a stream that has seen keys.
fn inputs(seed: u64) -> [Vec<f64>; 5] {
    let mut numbers = Numbers::new(seed);
    let (s, z) = LinearAttention::state_len(&shape()).unwrap();
    let mut all = [len(Q), len(K), len(V), s, z].map(|n| numbers.take(n));
    all[4].iter_mut().for_each(|z| *z = z.abs() + 0.5); // a sum of features is above 0
    all
}

fn view(x: &[f64], sizes: [usize; 4]) -> View<'_, f64> {
    View::new(x, Layout::Bhsd, sizes).unwrap()
}

fn to(x: &mut [f64], sizes: [usize; 4]) -> ViewMut<'_, f64> {
    ViewMut::new(x, Layout::Bhsd, sizes).unwrap()
}

/// The output, and the state after the call.
fn forward(linear: LinearAttention, [q, k, v, s, z]: &[Vec<f64>; 5]) -> [Vec<f64>; 3] {
    let (mut y, mut s, mut z) = (vec![f64::NAN; len(Y)], s.clone(), z.clone());
    let state = LinearState { s: &mut s, z: &mut z };
    linear.forward(view(q, Q), view(k, K), view(v, V), &mut to(&mut y, Y), state, &mut [f64::NAN; 3]).unwrap();
    [y, s, z]
}

/// The gradients by all five inputs, from those by the output and the state after the call.
fn backward(linear: LinearAttention, [q, k, v, s, z]: &[Vec<f64>; 5], [dy, ds, dz]: &[Vec<f64>; 3]) -> [Vec<f64>; 5] {
    let [mut dq, mut dk, mut dv] = [Q, K, V].map(|sizes| vec![f64::NAN; len(sizes)]);
    let (mut s, mut z, mut ds, mut dz) = (s.clone(), z.clone(), ds.clone(), dz.clone());
    let gradients = Gradients::new(to(&mut dq, Q), to(&mut dk, K), to(&mut dv, V));
    let mut scratch = vec![f64::NAN; LinearAttention::backward_scratch_len(&shape()).unwrap()];
    let (state, by_state) = (LinearState { s: &mut s, z: &mut z }, LinearState { s: &mut ds, z: &mut dz });
    let (q, k, v, dy) = (view(q, Q), view(k, K), view(v, V), view(dy, Y));
    linear.backward(q, k, v, dy, gradients, state, by_state, &mut scratch).unwrap();
    [dq, dk, dv, ds, dz]
}

#[test]
fn every_gradient_is_its_difference() {
    for linear in [
        LinearAttention::new().eps(0.25),
        LinearAttention::new().causal(Align::TopLeft),
        LinearAttention::new().causal(Align::BottomRight).eps(1e-3),
        LinearAttention::new().causal(Align::Offset(-2)), // two rows see the state alone
    ] {
        let inputs = inputs(3);
        let mut numbers = Numbers::new(8);
        let by_outputs = forward(linear, &inputs).map(|out| numbers.take(out.len()));
        let found = backward(linear, &inputs, &by_outputs);
        for n in 0..5 {
            let want = differences(&inputs[n], |moved| {
                let mut inputs = inputs.clone();
                inputs[n] = moved.to_vec();
                forward(linear, &inputs).iter().zip(&by_outputs).map(|(out, by)| inner(out, by)).sum()
            });
            assert_close(&format!("{linear:?}, input {n}"), &found[n], &want, DIFFERENCE);
        }
    }
}

/// A row that sees nothing is 0, and adds nothing to any gradient.
#[test]
fn rows_without_keys_have_no_gradient() {
    let mut inputs = inputs(5);
    inputs[3].fill(0.0);
    inputs[4].fill(0.0);
    let linear = LinearAttention::new().causal(Align::Offset(-2));
    let [y, s, z] = forward(linear, &inputs);
    let [dq, dk, ..] = backward(linear, &inputs, &[vec![1.0; y.len()], vec![0.0; s.len()], vec![0.0; z.len()]]);
    assert!(dq.iter().chain(&dk).all(|x| x.is_finite()));
    assert!(dq.chunks(5 * 3).all(|head| head[..6].iter().all(|&x| x == 0.0) && head[9..].iter().any(|&x| x != 0.0)));
}

/// Two calls, gone back through from the second to the first, are one.
#[test]
fn a_stream_is_gone_back_through_call_by_call() {
    let (sizes, half) = ([1, 1, 6, 2], [1, 1, 3, 2]);
    let mut numbers = Numbers::new(2);
    let [q, k, v, dy] = [(); 4].map(|()| numbers.take(12));
    let linear = LinearAttention::new().causal(Align::TopLeft);
    let run = |range: std::ops::Range<usize>, sizes: [usize; 4], state: &mut [f64; 6], by_state: &mut [f64; 6]| {
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![f64::NAN; range.len()]);
        let gradients = Gradients::new(to(&mut dq, sizes), to(&mut dk, sizes), to(&mut dv, sizes));
        let ((s, z), (ds, dz)) = (state.split_at_mut(4), by_state.split_at_mut(4));
        let [q, k, v, dy] = [&q, &k, &v, &dy].map(|x| view(&x[range.clone()], sizes));
        let (state, by_state) = (LinearState { s, z }, LinearState { s: ds, z: dz });
        linear.backward(q, k, v, dy, gradients, state, by_state, &mut [0.0; 14]).unwrap();
        [dq, dk, dv]
    };
    let whole = run(0..12, sizes, &mut [0.0; 6], &mut [0.0; 6]);

    // The state before the second call is what the first leaves.
    let mut between = [0.0; 6];
    let _ = run(0..6, half, &mut between, &mut [0.0; 6]);
    let mut by_state = [0.0; 6];
    let second = run(6..12, half, &mut between, &mut by_state);
    let first = run(0..6, half, &mut [0.0; 6], &mut by_state);
    for ((first, second), whole) in first.iter().zip(&second).zip(&whole) {
        assert_close("stream", &[&first[..], second].concat(), whole, EXACT);
    }
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let x = [1.0f64; 4];
    let x = View::matrix(&x, 2, 2).unwrap();
    let mut all = [[7.0f64; 4]; 3];
    let mut run = |s_len: usize, z_len: usize, scratch: usize, eps: f64, bias: bool| {
        let [dq, dk, dv] = &mut all;
        let [dq, dk, dv] = [dq, dk, dv].map(|x| ViewMut::matrix(x, 2, 2).unwrap());
        let mut by_bias = [0.0; 4];
        let mut gradients = Gradients::new(dq, dk, dv);
        if bias {
            gradients = gradients.bias(ViewMut::matrix(&mut by_bias, 2, 2).unwrap());
        }
        let (mut s, mut z, mut ds, mut dz) = (vec![0.0; 4], vec![1.0; 2], vec![0.0; s_len], vec![0.0; z_len]);
        let (state, by_state) = (LinearState { s: &mut s, z: &mut z }, LinearState { s: &mut ds, z: &mut dz });
        LinearAttention::new().eps(eps).backward(x, x, x, x, gradients, state, by_state, &mut vec![0.0; scratch])
    };
    assert!(matches!(run(3, 2, 6, 0.0, false), Err(AttnError::Size { .. })));
    assert!(matches!(run(4, 1, 6, 0.0, false), Err(AttnError::Size { .. })));
    assert!(matches!(run(4, 2, 5, 0.0, false), Err(AttnError::TooShort { .. })));
    assert!(matches!(run(4, 2, 6, f64::NAN, false), Err(AttnError::Option { .. })));
    assert!(matches!(run(4, 2, 6, 0.0, true), Err(AttnError::Unsupported { .. })));
    assert_eq!(all, [[7.0; 4]; 3]);
}
