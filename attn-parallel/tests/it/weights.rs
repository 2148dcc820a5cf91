//! Weights as an output of the kernels: those of the reference, beside an output of the same bits as without them.

use attn_parallel::attn_core::dropout::Dropout;
use attn_parallel::attn_core::reference;
use attn_parallel::attn_core::score::At;
use attn_parallel::attn_simd::forward_at;
use attn_parallel::{
    Align, Attention, AttnError, AttnShape, Layout, Level, Mask, Outputs, Plan, Runner, View, ViewMut, Workspace,
};

use crate::threads::paint;

const HEADS: usize = 4;

fn view(out: &mut [f32], sizes: [usize; 4]) -> ViewMut<'_, f32> {
    ViewMut::new(out, Layout::Bhsd, sizes).unwrap()
}

/// Many queries (the tiled kernel) and few (the decode kernel), under options that each change the weights.
#[test]
fn the_references_weights_on_every_level() {
    for (q_len, kv_len) in [(70, 90), (2, 90), (3, 0)] {
        let (q, k) = (paint(2 * HEADS * q_len * 8, 1), paint(2 * 2 * kv_len * 8, 2));
        let sizes = [2, HEADS, q_len, 8];
        let q = View::new(&q, Layout::Bhsd, sizes).unwrap();
        let k = View::new(&k, Layout::Bhsd, [2, 2, kv_len, 8]).unwrap();
        let attn = Attention::new()
            .mask(Mask::causal(Align::BottomRight))
            .softcap(5.0)
            .sinks(&[0.5, -1.0, f32::NEG_INFINITY, 2.0])
            .dropout(Dropout::Seeded { p: 0.25, seed: 3 })
            .mask_mod(|at: At| at.key != 1);
        let (rows, len) = (2 * HEADS * q_len, 2 * HEADS * q_len * 8);

        let (mut out, mut want) = (vec![0.0f32; len], vec![9.0f32; rows * kv_len]);
        let outputs = Outputs::new(view(&mut out, sizes)).weights(&mut want);
        reference::forward(&attn, q, k, k, outputs, &mut vec![0.0; kv_len]).unwrap();
        for level in Level::available() {
            let (mut plain, mut plain_lse) = (vec![0.0f32; len], vec![0.0f32; rows]);
            let outputs = Outputs::new(view(&mut plain, sizes)).lse(&mut plain_lse);
            Runner::new().level(level).forward(&attn, q, k, k, outputs).unwrap();

            let (mut out, mut lse, mut got) = (vec![9.0f32; len], vec![9.0f32; rows], vec![9.0f32; rows * kv_len]);
            let outputs = Outputs::new(view(&mut out, sizes)).lse(&mut lse).weights(&mut got);
            Runner::new().level(level).forward(&attn, q, k, k, outputs).unwrap();
            assert_eq!((&out, &lse), (&plain, &plain_lse));
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() < 1e-5, "{}: {got} {want}", level.name());
                assert_eq!(*got == 0.0, *want == 0.0);
            }

            // On one thread, without an lse of the caller's: the same.
            let (mut out, mut alone) = (vec![9.0f32; len], vec![9.0f32; rows * kv_len]);
            let outputs = Outputs::new(view(&mut out, sizes)).weights(&mut alone);
            forward_at(level, &attn, q, k, k, outputs, &mut Workspace::new()).unwrap();
            assert_eq!((&out, &alone), (&plain, &got));
        }
    }
}

#[test]
fn a_wrong_length_is_refused_before_writing_and_a_plans_work_names_the_way() {
    let x = paint(4 * 9 * 8, 3);
    let sizes = [1, HEADS, 9, 8];
    let x = View::new(&x, Layout::Bhsd, sizes).unwrap();
    let (mut out, mut weights) = (vec![7.0f32; 4 * 9 * 8], vec![7.0f32; 4 * 9 * 9]);
    let attn = Attention::new();
    let to = view(&mut out, sizes);
    let error = attn_parallel::forward(&attn, x, x, x, Outputs::new(to).weights(&mut weights[1..])).unwrap_err();
    assert!(matches!(error, AttnError::Size { .. }));

    let plan = Plan::new(&attn, AttnShape::new(sizes, sizes, sizes).unwrap(), Level::detect()).unwrap();
    let to = view(&mut out, sizes);
    let error = plan.work(x, x, x, Outputs::new(to).weights(&mut weights)).unwrap_err();
    assert!(error.to_string().contains("attn_core::weights::head"), "{error}");
    assert!(out.iter().chain(&weights).all(|&x| x == 7.0));
}
