//! Algebra: consequences of the formula for any numbers.

use attn_core::dropout::Dropout;
use attn_core::softmax::RowState;
use attn_core::{Align, Attention, AttnShape, Dtype, Mask, View};

use super::{attend, attend_views, oracle, same_bits, share};
use crate::cases::{Inputs, Memory, Tensor4, kinds, shape};
use crate::engine::Engine;
use crate::paint::{Paint, bools};
use crate::tolerance::{ETA, TWICE, U32, WEIGHT};

/// The mean of ones is one, and of nothing zero.
pub fn values_of_ones_give_ones<E: Engine>(engine: &E) {
    let dims = shape((2, 2, 1, 33, 70, 8, 5));
    let mut inputs = Inputs::<f32>::plain(dims, 91);
    inputs.v.each(|_, x| *x = 1.0);
    for term in kinds(&dims, 92) {
        let answer = attend(engine, &Attention::new().mask(term.mask()), &inputs);
        for (n, &x) in answer.out.iter().enumerate() {
            let want = if answer.lse[n / 5] == f32::NEG_INFINITY { 0.0 } else { 1.0 };
            // A weighted mean whose weights are normalised by their own sum: some roundings per key, whatever S is.
            assert!((f64::from(x) - want).abs() <= 70.0 * U32, "{}: {term:?}: {x}, not {want}", engine.label());
        }
    }
}

/// With V the identity the output is the weights: not negative, and their sum 1.
pub fn identity_values_give_the_weights<E: Engine>(engine: &E) {
    let dims = shape((1, 2, 1, 21, 40, 8, 40));
    let mut inputs = Inputs::<f32>::plain(dims, 93);
    inputs.v.each(|[_, _, j, d], x| *x = f32::from(u8::from(j == d)));
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
    let answer = attend(engine, &attn, &inputs);
    let want = oracle(&attn, &inputs);
    want.check(ETA, &answer, &engine.label());
    for row in answer.out.chunks(40) {
        assert!(row.iter().all(|&w| w >= 0.0), "{}: a negative weight", engine.label());
        let sum: f64 = row.iter().map(|&w| f64::from(w)).sum();
        assert!((sum - 1.0).abs() < 40.0 * U32, "{}: weights sum to {sum}", engine.label());
    }
    // The library's own rows from this engine's lse agree with them.
    let (q, k) = (inputs.q.view(), inputs.k.view());
    for (row, got) in answer.out.chunks(40).enumerate() {
        let at = attn_core::weights::RowAt { batch: 0, head: row / 21, query: row % 21 };
        let mut weights = [0.0f32; 40];
        attn_core::weights::row(&attn, q, k, at, &answer.lse, &mut weights).expect("a row");
        for (got, weight) in got.iter().zip(weights) {
            let allowed =
                WEIGHT.bound(Dtype::F32, want.score_bound[row]) * f64::from(weight) + f64::from(f32::MIN_POSITIVE);
            let close = share(f64::from(*got), f64::from(weight), allowed) <= 1.0;
            assert!(close, "{}: weight {got} beside {weight}", engine.label());
        }
    }
}

/// Outputs are between the least and the largest value that the row sees.
pub fn outputs_stay_in_the_hull_of_values<E: Engine>(engine: &E) {
    let dims = shape((1, 2, 1, 33, 50, 8, 6));
    let mut inputs = Inputs::<f32>::plain(dims, 94);
    inputs.v.each(|_, x| *x = 3.0 + 0.1 * *x);
    let answer = attend(engine, &Attention::new().mask(Mask::causal(Align::BottomRight)), &inputs);
    for (n, &x) in answer.out.iter().enumerate() {
        let (query, d) = (n / 6 % 33, n % 6);
        let column = (0..query + 18).map(|j| inputs.v.at([0, 0, j, d]));
        let (low, high) = column.fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let slack = 4.0 * 50.0 * U32 as f32;
        assert!(x >= low - slack && x <= high + slack, "{}: {x} outside {low}..{high}", engine.label());
    }
}

/// The order of keys does not matter when values follow them.
pub fn permuted_keys_change_nothing<E: Engine>(engine: &E) {
    let kv_len = 70;
    let inputs = Inputs::<f32>::plain(shape((2, 2, 1, 20, kv_len, 8, 5)), 95);
    let mut order: Vec<usize> = (0..kv_len).collect();
    let mut paint = Paint::new(96);
    for n in (1..kv_len).rev() {
        order.swap(n, paint.below(n + 1));
    }
    let mut moved = inputs.clone();
    moved.k.each(|[b, h, j, d], x| *x = inputs.k.at([b, h, order[j], d]));
    moved.v.each(|[b, h, j, d], x| *x = inputs.v.at([b, h, order[j], d]));
    let want: Vec<f64> = attend(engine, &Attention::new(), &inputs).out.iter().map(|&x| f64::from(x)).collect();
    let got = attend(engine, &Attention::new(), &moved);
    oracle(&Attention::new(), &inputs).near(TWICE, &got.out, &want, &engine.label());
}

/// Queries, heads and sequences in another order give the same rows in that order, bit for bit.
pub fn permuted_queries_permute_rows<E: Engine>(engine: &E) {
    for q_len in [3, 50] {
        let dims = shape((3, 2, 2, q_len, 40, 8, 5));
        let inputs = Inputs::<f32>::plain(dims, 97);
        let place = |[b, h, s, d]: [usize; 4]| [(b + 1) % 3, 1 - h, s, d];
        let mut moved = inputs.clone();
        moved.q.each(|[b, h, s, d], x| *x = inputs.q.at(place([b, h, q_len - 1 - s, d])));
        moved.k.each(|at, x| *x = inputs.k.at(place(at)));
        moved.v.each(|at, x| *x = inputs.v.at(place(at)));
        let (before, after) = (attend(engine, &Attention::new(), &inputs), attend(engine, &Attention::new(), &moved));
        for b in 0..3 {
            for h in 0..2 {
                for s in 0..q_len {
                    let [ob, oh, os, _] = place([b, h, q_len - 1 - s, 0]);
                    let (new, old) = (dims.row(b, h, s), dims.row(ob, oh, os));
                    same_bits(
                        &after.out[new * 5..][..5],
                        &before.out[old * 5..][..5],
                        &(engine.label(), q_len, b, h, s),
                    );
                }
            }
        }
    }
}

/// Softmax sees differences only; the lse moves by the constant.
pub fn a_constant_on_all_scores_changes_nothing<E: Engine>(engine: &E) {
    let inputs = Inputs::<f32>::plain(shape((1, 2, 1, 20, 70, 8, 5)), 98);
    let plain = attend(engine, &Attention::new(), &inputs);
    let want: Vec<f64> = plain.out.iter().map(|&x| f64::from(x)).collect();
    for constant in [-300.0f32, -1.0, 7.5, 1000.0] {
        let bias = [constant];
        let attn = Attention::new().bias(View::broadcast(&bias, &[]).expect("a scalar"));
        let got = attend(engine, &attn, &inputs);
        oracle(&attn, &inputs).near(TWICE, &got.out, &want, &(engine.label(), constant));
        for (a, b) in got.lse.iter().zip(&plain.lse) {
            assert!(
                (a - b - constant).abs() <= 1e-6 * (10.0 + constant.abs()),
                "{}: {a} {b} {constant}",
                engine.label()
            );
        }
    }
}

/// Row `i` of a causal call is a call with the first `i + 1` keys.
pub fn a_causal_row_equals_a_shorter_run<E: Engine>(engine: &E) {
    let len = 70;
    let inputs = Inputs::<f32>::plain(shape((1, 2, 1, len, len, 8, 5)), 99);
    let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
    let whole = attend(engine, &causal, &inputs);
    for i in [0, 1, 15, 16, 31, 47, 48, 63, 64, 69] {
        let mut part = Inputs::<f32>::plain(shape((1, 2, 1, 1, i + 1, 8, 5)), 99);
        part.q.each(|[b, h, _, d], x| *x = inputs.q.at([b, h, i, d]));
        part.k.each(|at, x| *x = inputs.k.at(at));
        part.v.each(|at, x| *x = inputs.v.at(at));
        let got = attend(engine, &Attention::new(), &part);
        let want: Vec<f64> =
            (0..2).flat_map(|h| whole.out[(h * len + i) * 5..][..5].iter().map(|&x| f64::from(x))).collect();
        oracle(&Attention::new(), &part).near(TWICE, &got.out, &want, &(engine.label(), i));
    }
}

/// Two halves of the keys, each with its lse, merge into the whole.
pub fn split_and_merge_equals_one_sweep<E: Engine>(engine: &E) {
    let (kv_len, dim) = (100, 5);
    let dims = shape((1, 2, 1, 20, kv_len, 8, dim));
    let inputs = Inputs::<f32>::plain(dims, 101);
    let want = oracle(&Attention::new(), &inputs);
    for cut in [0, 1, 33, 64, 99, 100] {
        let part = |keys: core::ops::Range<usize>| {
            let one = AttnShape { kv_len: keys.len(), ..dims };
            let mut part = Inputs::<f32>::plain(one, 0);
            part.q = inputs.q.clone();
            part.k.each(|[b, h, j, d], x| *x = inputs.k.at([b, h, keys.start + j, d]));
            part.v.each(|[b, h, j, d], x| *x = inputs.v.at([b, h, keys.start + j, d]));
            attend(engine, &Attention::new(), &part)
        };
        let (left, right) = (part(0..cut), part(cut..kv_len));
        let mut merged = left.clone();
        for row in 0..dims.rows() {
            let state = |lse: f32| RowState { max: lse, sum: if lse == f32::NEG_INFINITY { 0.0 } else { 1.0 } };
            let mut whole = state(left.lse[row]);
            let (a, b) = whole.merge(state(right.lse[row]));
            for d in row * dim..(row + 1) * dim {
                merged.out[d] = (a * left.out[d] + b * right.out[d]) * whole.finish();
            }
            merged.lse[row] = whole.lse();
        }
        want.check(TWICE, &merged, &(engine.label(), cut));
    }
}

/// Grouped heads give the outputs of repeated keys and values.
pub fn grouped_heads_are_repeated_heads<E: Engine>(engine: &E) {
    for (q_heads, kv_heads, q_len) in [(4, 1, 20), (6, 3, 1), (8, 2, 33), (3, 3, 5)] {
        let dims = shape((2, q_heads, kv_heads, q_len, 40, 8, 5));
        let grouped = Inputs::<f32>::plain(dims, 102);
        let group = dims.group();
        let mut repeated = Inputs::<f32>::plain(AttnShape { kv_heads: q_heads, ..dims }, 0);
        repeated.q = grouped.q.clone();
        repeated.k.each(|[b, h, j, d], x| *x = grouped.k.at([b, h / group, j, d]));
        repeated.v.each(|[b, h, j, d], x| *x = grouped.v.at([b, h / group, j, d]));
        let want: Vec<f64> = attend(engine, &Attention::new(), &repeated).out.iter().map(|&x| x.into()).collect();
        let got = attend(engine, &Attention::new(), &grouped);
        oracle(&Attention::new(), &grouped).near(TWICE, &got.out, &want, &(engine.label(), dims));
    }
}

/// The output is linear in the values, and exactly so for a power of two.
pub fn doubled_values_double_the_output<E: Engine>(engine: &E) {
    let dims = shape((1, 2, 1, 33, 50, 8, 6));
    let inputs = Inputs::<f32>::plain(dims, 103);
    let mut doubled = inputs.clone();
    doubled.v.each(|_, x| *x *= -2.0);
    let want: Vec<f32> = attend(engine, &Attention::new(), &inputs).out.iter().map(|x| -2.0 * x).collect();
    same_bits(&attend(engine, &Attention::new(), &doubled).out, &want, &engine.label());
}

/// A sink is one more key with that score, and a value of 0.
pub fn a_sink_is_a_key_without_value<E: Engine>(engine: &E) {
    let dims = shape((1, 1, 1, 20, 40, 1, 5));
    let inputs = Inputs::<f32>::plain(dims, 104);
    for sink in [-5.0f32, 0.0, 3.0, 40.0] {
        let sinks = [sink];
        let attn = Attention::new().sinks(&sinks);
        let got = attend(engine, &attn, &inputs);
        // A bias raises the added key, which is 0, to the sink's score.
        let (mut bias, mut longer) = (vec![0.0f32; 41], Inputs::<f32>::plain(AttnShape { kv_len: 41, ..dims }, 0));
        bias[40] = sink;
        longer.q = inputs.q.clone();
        longer.k.each(|[b, h, j, d], x| *x = if j < 40 { inputs.k.at([b, h, j, d]) } else { 0.0 });
        longer.v.each(|[b, h, j, d], x| *x = if j < 40 { inputs.v.at([b, h, j, d]) } else { 0.0 });
        let keyed = Attention::new().bias(View::broadcast(&bias, &[41]).expect("bias"));
        let want = attend_views(engine, &keyed, longer.q.view(), longer.k.view(), longer.v.view()).expect("accepted");
        let numbers: Vec<f64> = want.out.iter().map(|&x| x.into()).collect();
        oracle(&keyed, &longer).near(TWICE, &got.out, &numbers, &(engine.label(), sink));
        for (a, b) in got.lse.iter().zip(&want.lse) {
            assert!((a - b).abs() <= 4e-6 * (1.0 + b.abs()), "{}: lse {a} and {b}", engine.label());
        }
    }
}

/// A dropped weight takes its value away and leaves the other weights as they were, but for the factor 1/(1 − p).
pub fn weights_of_dropped_keys_vanish<E: Engine>(engine: &E) {
    let dims = shape((1, 2, 1, 20, 40, 8, 40));
    let mut inputs = Inputs::<f32>::plain(dims, 105);
    inputs.v = Tensor4::new([1, 1, 40, 40], Memory::Bhsd, |[_, _, j, d]| f64::from(u8::from(j == d)));
    let full = attend(engine, &Attention::new(), &inputs);
    let keep = bools(106, 2 * 20 * 40, 0.7);
    let drawn = Dropout::Seeded { p: 0.25, seed: 107 };
    let given = Dropout::Keep { mask: View::broadcast(&keep, &[2, 20, 40]).expect("full size"), p: 0.3 };
    for dropout in [drawn, given] {
        let dropped = attend(engine, &Attention::new().dropout(dropout), &inputs);
        for (n, (&got, &whole)) in dropped.out.iter().zip(&full.out).enumerate() {
            let (row, key) = (n / 40, n % 40);
            let at = attn_core::score::At { batch: 0, head: row / 20, query: row % 20, key };
            let want = if dropout.keeps(at) { f64::from(whole) * dropout.factor() } else { 0.0 };
            assert!((f64::from(got) - want).abs() <= 8.0 * U32 * want.abs(), "{}: {got}, not {want}", engine.label());
        }
    }
}
