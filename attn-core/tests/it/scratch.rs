//! Scratch of the two engines: exactly as much as they say is enough, one element less is refused before anything is
//! written.

use attn_core::score::{At, Problem};
use attn_core::{Align, Attention, AttnError, Layout, Mask, Outputs, ViewMut, reference, streaming};
use attn_testing::cases::{Inputs, shape};

#[test]
fn scratch_is_checked_before_writing() {
    let dims = shape((1, 2, 1, 3, 7, 4, 5));
    let inputs = Inputs::<f32>::plain(dims, 1);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    assert_eq!((reference::scratch_len(&dims), streaming::scratch_len(&dims)), (7, 5));
    for missing in [0, 1] {
        let mut out = [-777.0f32; 30];
        let mut lse = [-777.0f32; 6];
        fn view(out: &mut [f32]) -> ViewMut<'_, f32> {
            ViewMut::new(out, Layout::Bhsd, [1, 2, 3, 5]).unwrap()
        }
        let outputs = Outputs::new(view(&mut out)).lse(&mut lse);
        let result = reference::forward(&Attention::new(), q, k, v, outputs, &mut vec![0.0; 7 - missing]);
        assert_eq!(result.is_err(), missing == 1);
        assert_eq!(out.iter().chain(&lse).all(|&x| x == -777.0), missing == 1);

        let (mut out, mut lse) = ([-777.0f32; 30], [-777.0f32; 6]);
        let outputs = Outputs::new(view(&mut out)).lse(&mut lse);
        let result = streaming::forward(&Attention::new(), q, k, v, outputs, &mut vec![0.0; 5 - missing]);
        assert!(missing == 0 || matches!(result, Err(AttnError::TooShort { needed: 5, found: 4, .. })));
        assert_eq!(out.iter().chain(&lse).all(|&x| x == -777.0), missing == 1);
    }
}

#[test]
fn weights_of_the_reference_explain_its_output() {
    let dims = shape((2, 4, 2, 6, 11, 4, 3));
    let inputs = Inputs::<f64>::plain(dims, 2);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let attn = Attention::new().softcap(3.0).mask(Mask::causal(Align::BottomRight));
    let (mut out, mut weights) = (vec![0.0f64; dims.rows() * 3], vec![-777.0f64; dims.rows() * 11]);
    let view = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).unwrap();
    let outputs = Outputs::new(view).weights(&mut weights);
    reference::forward(&attn, q, k, v, outputs, &mut [0.0; 11]).unwrap();
    let problem = Problem::of_shape(&attn, dims).unwrap();
    for row in 0..dims.rows() {
        let (batch, head, query) = (row / 24, row / 6 % 4, row % 6);
        let weights = &weights[row * 11..][..11];
        assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-14);
        for (key, &w) in weights.iter().enumerate() {
            let sees = problem.visible(At { batch, head, query, key });
            assert_eq!(w > 0.0, sees, "row {row}, key {key}: {w}");
        }
        for d in 0..3 {
            let mean: f64 = weights.iter().enumerate().map(|(j, w)| w * inputs.v.at([batch, head / 2, j, d])).sum();
            assert!((mean - out[row * 3 + d]).abs() < 1e-14);
        }
    }
}
