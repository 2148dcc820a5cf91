//! Scratch that cannot be had is an error, not an abort.

use attn_core::{Attention, AttnError, AttnShape, Layout, Outputs, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::{Level, Plan};

#[test]
fn heads_too_wide_for_any_memory_are_an_error() {
    // One number serves all channels, so that such tensors can be.
    let (one, attn) = ([1.0f32], Attention::new());
    for power in [45, 50, 54, 56, 58, 59] {
        for q_len in [1, 3, 100] {
            let wide = |sizes: [usize; 4]| View::strided(&one, sizes, [0; 4], 0).unwrap();
            let (q, k) = ([1, 2, q_len, 1 << power], [1, 1, 5, 1 << power]);
            let v = [0.5f32; 40];
            let v = View::new(&v, Layout::Bhsd, [1, 1, 5, 8]).unwrap();
            let Ok(shape) = AttnShape::new(q, k, [1, 1, 5, 8]) else {
                assert!(power > 50, "sizes that wrap are refused before");
                continue;
            };
            for level in Level::available().chain(Level::model_names().filter_map(|name| Level::by_name(name).ok())) {
                let plan = match Plan::new(&attn, shape, level) {
                    Err(AttnError::Overflow { .. }) if power > 50 => continue,
                    plan => plan.unwrap(),
                };
                let mut out = vec![7.0f32; 2 * q_len * 8];
                let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap();
                let result = Runner::new().forward_planned(&plan, wide(q), wide(k), v, Outputs::new(to));
                assert!(matches!(result, Err(AttnError::Memory { .. })), "2^{power} {level:?} {q_len}: {result:?}");
                assert!(out.iter().all(|&x| x == 7.0), "nothing is written");
            }
        }
    }
}
