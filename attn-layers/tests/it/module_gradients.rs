//! Gradients of modules: against differences, inputs that are used more than once, refusals.

use attn_core::dropout::Dropout;
use attn_core::{Align, Attention, Layout, Mask, View, ViewMut};
use attn_layers::LinearGradients;
use attn_layers::module::{InputGradients, ModuleGradients, Reference, Sources};

use crate::module::{Weights, run, scratch, tokens};
use attn_testing::numbers::{DIFFERENCE, EXACT, Numbers, assert_close, differences, inner};

#[test]
fn every_gradient_of_a_module_is_its_difference() {
    let (batch, q_len, kv_len) = (2, 3, 4);
    let weights = Weights::new([3, 4, 2], [4, 2], [2, 3], 3);
    let mut numbers = Numbers::new(9);
    let x = [numbers.take(batch * q_len * 3), numbers.take(batch * kv_len * 4), numbers.take(batch * kv_len * 2)];
    let (bias_kv, dy) = ([numbers.take(4), numbers.take(6)], numbers.take(batch * q_len * 3));
    let attn = Attention::new()
        .mask(Mask::causal(Align::BottomRight).and(Mask::kv_lens(&[4, 2])))
        .softcap(3.0)
        .temperature(1.2)
        .dropout(Dropout::Seeded { p: 0.3, seed: 1 });
    let loss = |x: &[Vec<f64>; 3], weights: &Weights, bias_kv: &[Vec<f64>; 2]| {
        let mha = weights.module().bias_kv(&bias_kv[0], &bias_kv[1]).unwrap().zero_attn();
        let inputs =
            Sources::new(tokens(&x[0], batch, q_len), tokens(&x[1], batch, kv_len), tokens(&x[2], batch, kv_len));
        inner(&run(&mha, &mut Reference, &attn, inputs), &dy)
    };

    let fresh = |like: &[f64]| vec![f64::NAN; like.len()];
    let mut dx: [Vec<f64>; 3] = std::array::from_fn(|n| fresh(&x[n]));
    let mut dw: [Vec<f64>; 4] = std::array::from_fn(|n| fresh(&weights.w[n]));
    let mut db: [Vec<f64>; 4] = std::array::from_fn(|n| fresh(&weights.b[n]));
    let mut dbias: [Vec<f64>; 2] = std::array::from_fn(|n| fresh(&bias_kv[n]));
    {
        let mha = weights.module().bias_kv(&bias_kv[0], &bias_kv[1]).unwrap().zero_attn();
        let inputs =
            Sources::new(tokens(&x[0], batch, q_len), tokens(&x[1], batch, kv_len), tokens(&x[2], batch, kv_len));
        let [query, key, value] = &mut dx;
        let sizes = |n: usize| [[batch, 1, q_len, 3], [batch, 1, kv_len, 4], [batch, 1, kv_len, 2]][n];
        let view = |data, n: usize| ViewMut::new(data, Layout::Bhsd, sizes(n)).unwrap();
        let [bias_k, bias_v] = &mut dbias;
        let mut layers = dw.iter_mut().zip(&mut db).map(|(w, b)| {
            let (d_in, d_out) = (w.len() / b.len(), b.len());
            LinearGradients::new(w, d_in, d_out).unwrap().bias(b)
        });
        let gradients = ModuleGradients::new()
            .inputs(InputGradients::Separate { query: view(query, 0), key: view(key, 1), value: view(value, 2) })
            .q(layers.next().unwrap())
            .k(layers.next().unwrap())
            .v(layers.next().unwrap())
            .out(layers.next().unwrap())
            .bias_kv(bias_k, bias_v);
        let mut room = scratch(mha.backward_scratch_len(&Reference, batch, q_len, kv_len).unwrap());
        mha.backward(&mut Reference, &attn, inputs, tokens(&dy, batch, q_len), gradients, &mut room).unwrap();
    }
    for n in 0..3 {
        let want = differences(&x[n], |moved| {
            let mut x = x.clone();
            x[n] = moved.to_vec();
            loss(&x, &weights, &bias_kv)
        });
        assert_close(&format!("input {n}"), &dx[n], &want, DIFFERENCE);
    }
    for n in 0..4 {
        let moved = |w: &[f64], b: &[f64]| {
            let mut all = Weights { w: weights.w.clone(), b: weights.b.clone(), ..weights };
            (all.w[n], all.b[n]) = (w.to_vec(), b.to_vec());
            loss(&x, &all, &bias_kv)
        };
        let (w, b) = (&weights.w[n], &weights.b[n]);
        assert_close(&format!("weight {n}"), &dw[n], &differences(w, |w| moved(w, b)), DIFFERENCE);
        assert_close(&format!("bias {n}"), &db[n], &differences(b, |b| moved(w, b)), DIFFERENCE);
    }
    for n in 0..2 {
        let want = differences(&bias_kv[n], |moved| {
            let mut bias_kv = bias_kv.clone();
            bias_kv[n] = moved.to_vec();
            loss(&x, &weights, &bias_kv)
        });
        assert_close(&format!("bias_kv {n}"), &dbias[n], &want, DIFFERENCE);
    }
    assert_eq!((weights.d_in, weights.d_out, weights.dims), ([3, 4, 2], 3, [2, 3]));
}

#[test]
fn an_input_used_twice_gets_both_gradients() {
    let (len, d) = (3, 4);
    let weights = Weights::new([d; 3], [2; 2], [2, 2], d);
    let mha = weights.heads_only();
    let mut numbers = Numbers::new(10);
    let (x, dy) = (numbers.take(len * d), numbers.take(len * 4));
    let (x, dy) = (View::matrix(&x, len, d).unwrap(), View::matrix(&dy, len, 4).unwrap());
    let attn = Attention::new();
    let mut d_each = [[0.0f64; 12]; 6];
    let [same, query, memory, q, k, v] = &mut d_each;
    let view = |data| ViewMut::matrix(data, len, d).unwrap();
    let mut room = scratch(mha.backward_scratch_len(&Reference, 1, len, len).unwrap());
    for inputs in [
        InputGradients::Same(view(same)),
        InputGradients::Cross { query: view(query), memory: view(memory) },
        InputGradients::Separate { query: view(q), key: view(k), value: view(v) },
    ] {
        mha.backward(&mut Reference, &attn, x, dy, ModuleGradients::new().inputs(inputs), &mut room).unwrap();
    }
    let sum = |parts: &[&[f64; 12]]| -> Vec<f64> { (0..12).map(|n| parts.iter().map(|part| part[n]).sum()).collect() };
    assert_close("memory", &memory[..], &sum(&[k, v]), EXACT);
    assert_close("same", &same[..], &sum(&[q, k, v]), EXACT);
    assert_eq!(query, q);
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let weights = Weights::new([4; 3], [2; 2], [2, 2], 4);
    let mha = weights.module();
    let x = [0.5f64; 12];
    let (good, short) = (View::matrix(&x, 3, 4).unwrap(), View::matrix(&x, 2, 4).unwrap());

    // What is not there; other sizes; too little scratch; a closure without derivative.
    let needed = mha.backward_scratch_len(&Reference, 1, 3, 3).unwrap();
    let mut d = vec![7.0f64; 16];
    let heads_only = weights.heads_only();
    let out = ModuleGradients::new().out(LinearGradients::new(&mut d, 4, 4).unwrap());
    assert!(heads_only.backward(&mut Reference, &Attention::new(), good, good, out, &mut vec![0.0; needed]).is_err());
    let (first, second) = d.split_at_mut(4);
    let bias_kv = ModuleGradients::new().bias_kv(first, &mut second[..4]);
    assert!(mha.backward(&mut Reference, &Attention::new(), good, good, bias_kv, &mut vec![0.0; needed]).is_err());
    let small = ModuleGradients::new().q(LinearGradients::new(&mut d[..12], 4, 3).unwrap());
    assert!(mha.backward(&mut Reference, &Attention::new(), good, good, small, &mut vec![0.0; needed]).is_err());
    fn whole(d: &mut [f64]) -> ModuleGradients<'_, f64> {
        ModuleGradients::new().q(LinearGradients::new(d, 4, 4).unwrap())
    }
    let cut = &mut vec![0.0; needed - 1];
    assert!(mha.backward(&mut Reference, &Attention::new(), good, good, whole(&mut d), cut).is_err());
    let closure = Attention::new().score_mod(|s, _| s);
    assert!(mha.backward(&mut Reference, &closure, good, good, whole(&mut d), &mut vec![0.0; needed]).is_err());
    assert!(
        mha.backward(&mut Reference, &Attention::new(), good, short, whole(&mut d), &mut vec![0.0; needed]).is_err()
    );
    assert_eq!(d, [7.0; 16]);
    mha.backward(&mut Reference, &Attention::new(), good, good, whole(&mut d), &mut vec![0.0; needed]).unwrap();
    assert!(d.iter().all(|&x| x != 7.0));
}
