//! Attention over parts of the keys, joined, is attention over all of them.

use attn::types::{AttnDtype, AttnStatus, AttnTensor};

use crate::c::{self, Arguments, Plan, Workspace, floats, options, tensor_mut};

const Q: [usize; 4] = [2, 2, 3, 4];

/// Output and lse over the keys from `first` on, `count` of nine; causal, so that the first rows of the later part see
/// nothing.
fn part(first: usize, count: usize) -> (Vec<f32>, Vec<f32>) {
    let x: Vec<f32> = (0..2 * 2 * 9 * 4).map(|n| (n as f32 * 1.7).sin() * 2.0).collect();
    let whole = floats(&x, [2, 2, 9, 4]);
    let q = AttnTensor { shape: Q, ..whole };
    let kv = AttnTensor { shape: [2, 2, count, 4], offset: 4 * first, ..whole };
    let (mut out, mut lse) = (vec![f32::NAN; 48], vec![f32::NAN; 12]);
    let mut options = options();
    (options.causal, options.causal_offset) = (3, 5 - first as isize); // query i stands at key i + 5
    let status = c::forward(Arguments {
        options: Some(&options),
        q: Some(&q),
        k: Some(&kv),
        v: Some(&kv),
        out: Some(&tensor_mut(&mut out, AttnDtype::F32, Q)),
        lse: (lse.as_mut_ptr(), 12),
    });
    assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
    (out, lse)
}

#[test]
fn parts_joined_are_the_whole() {
    let (want, want_lse) = part(0, 9);
    for order in [[(0, 4), (4, 2), (6, 3)], [(6, 3), (0, 4), (4, 2)]] {
        let [(mut out, mut lse), second, third] = order.map(|(first, count)| part(first, count));
        assert!(order[0].0 == 0 || lse[0] == f32::NEG_INFINITY, "a row that sees nothing is part of this test");
        for (other, other_lse) in [second, third] {
            let to = tensor_mut(&mut out, AttnDtype::F32, Q);
            assert_eq!(c::merge(&to, &mut lse, &floats(&other, Q), &other_lse), AttnStatus::Ok);
        }
        for (found, want) in out.iter().zip(&want).chain(lse.iter().zip(&want_lse)) {
            assert!((found - want).abs() < 1e-5, "{found}, not {want}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let ((mut out, mut lse), (other, other_lse)) = (part(0, 4), part(4, 5));
    let before = out.clone();
    let to = tensor_mut(&mut out, AttnDtype::F32, Q);
    let given = floats(&other, Q);
    assert_eq!(c::merge(&to, &mut lse[..11], &given, &other_lse), AttnStatus::Shape);
    assert_eq!(c::merge(&to, &mut lse, &AttnTensor { shape: [2, 2, 3, 3], ..given }, &other_lse), AttnStatus::Shape);
    assert_eq!(c::merge(&to, &mut lse, &to, &other_lse), AttnStatus::Overlap);
    let halves = AttnTensor { dtype: AttnDtype::F16 as u32, ..given };
    assert_eq!(c::merge(&to, &mut lse, &halves, &other_lse), AttnStatus::Option);
    assert_eq!(out, before);
}

#[test]
fn merged_states_give_the_bits_of_the_whole() {
    const Q: [usize; 4] = [1, 4, 2, 8];
    let (keys, dim) = (1100, 8);
    let x: Vec<f32> = (0..2 * keys * dim).map(|n| (n as f32 * 1.3).sin()).collect();
    let sinks = [0.5f32, -1.0, 2.0, 0.0];
    let mut options = options();
    (options.causal, options.reproducible) = (2, 1);
    (options.sinks, options.sinks_len) = (sinks.as_ptr(), 4);
    let part = |first: usize, count: usize| AttnTensor {
        shape: [1, 2, count, dim],
        offset: first * dim,
        ..floats(&x, [1, 2, keys, dim])
    };
    let q = AttnTensor { shape: Q, strides: [0, 16, 8, 1], ..floats(&x, Q) };
    let (mut want, mut want_lse) = (vec![0.0f32; 64], vec![0.0f32; 8]);
    let status = c::forward(Arguments {
        options: Some(&options),
        q: Some(&q),
        k: Some(&part(0, keys)),
        v: Some(&part(0, keys)),
        out: Some(&tensor_mut(&mut want, AttnDtype::F32, Q)),
        lse: (want_lse.as_mut_ptr(), 8),
    });
    assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());

    let shape = attn::types::AttnShape { kv_heads: 2, ..c::sizes(Q, keys) };
    let plan = Plan::new(&options, &shape).unwrap();
    let workspace = Workspace::new(Some(&plan), 1).unwrap();
    assert_eq!(plan.state_len(), 8 * 10);
    // The tree over chunks of 512 keys: (0, 1), 2.
    let rows = [(0, 512, None), (512, 512, Some(&workspace)), (1024, 76, None)].map(|(first, count, workspace)| {
        let (mut rows, kv) = (vec![f32::NAN; 80], part(first, count));
        assert_eq!(plan.state(workspace, first, [&q, &kv, &kv], &mut rows), AttnStatus::Ok, "{}", c::last_error());
        rows
    });
    let [mut all, second, third] = rows;
    assert_eq!(c::merge_states(&mut all, &second, dim), AttnStatus::Ok);
    assert_eq!(c::merge_states(&mut all, &third, dim), AttnStatus::Ok);
    let (mut out, mut lse) = (vec![0.0f32; 64], vec![0.0f32; 8]);
    let to = tensor_mut(&mut out, AttnDtype::F32, Q);
    assert_eq!(plan.finish(&all, &to, &mut lse), AttnStatus::Ok, "{}", c::last_error());
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&out) == bits(&want) && bits(&lse) == bits(&want_lse));

    // What does not fit is refused before anything is written.
    let (kv, before) = (part(0, 77), bits(&all));
    assert_eq!(plan.state(None, 1024, [&q, &kv, &kv], &mut all), AttnStatus::Table);
    assert_eq!(c::last_error(), "the end of the part (first + its keys) is 1101, at most 1100 is allowed");
    assert_eq!(plan.state(None, usize::MAX, [&q, &kv, &kv], &mut all), AttnStatus::Overflow);
    assert_eq!(plan.state(None, 0, [&q, &kv, &kv], &mut all[..79]), AttnStatus::Shape);
    assert_eq!(c::merge_states(&mut all, &second, 7), AttnStatus::Shape);
    assert_eq!(c::merge_states(&mut all, &second, usize::MAX), AttnStatus::Overflow);
    assert_eq!(plan.finish(&all[..79], &to, &mut lse), AttnStatus::Shape);
    assert_eq!(plan.finish(&all, &AttnTensor { shape: [1, 4, 2, 7], ..to }, &mut lse), AttnStatus::Shape);
    assert!(bits(&all) == before && bits(&out) == bits(&want));
}
