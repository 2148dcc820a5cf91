//! Attention over parts of the keys, joined, is attention over all of them.

use attn::types::{AttnDtype, AttnStatus, AttnTensor};

use crate::c::{self, Arguments, floats, options, tensor_mut};

const Q: [usize; 4] = [2, 2, 3, 4];

/// Output and lse over the keys from `first` on, `count` of nine; causal, so that the first rows of the later part see nothing.
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
