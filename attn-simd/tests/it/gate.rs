//! The accuracy gate where it is tightest: wide scores, of which a few compete for the weight, so that an output takes
//! the whole error of a dot product.

use attn_core::{Attention, AttnShape, Dtype, Layout, ViewMut};
use attn_simd::{Level, Workspace, forward_at};
use attn_testing::cases::{Inputs, Memory};
use attn_testing::laws::oracle;
use attn_testing::tolerance::{ETA, rounding};

/// The largest share of the gate that an output of one call takes.
fn worst(level: Level, dim: usize, seed: u64) -> f64 {
    let shape = AttnShape { batch: 1, q_heads: 2, kv_heads: 2, q_len: 64, kv_len: 200, head_dim: dim, value_dim: 32 };
    let inputs = Inputs::<f32>::painted(shape, Memory::Bhsd, seed, 3.0);
    let attn = Attention::new();
    let oracle = oracle(&attn, &inputs);
    let mut out = vec![f32::NAN; shape.rows() * shape.value_dim];
    let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap();
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    forward_at(level, &attn, q, k, v, to, &mut Workspace::new()).unwrap();
    let share = |(n, x): (usize, &f32)| {
        let gate = ETA.bound(Dtype::F32, oracle.score_bound[n / shape.value_dim]) * oracle.magnitude[n];
        (f64::from(*x) - oracle.out[n]).abs() / (gate + 2.0 * rounding::<f32>(oracle.out[n]))
    };
    out.iter().enumerate().map(share).fold(0.0, f64::max)
}

#[test]
fn wide_scores_stay_within_it_at_every_dim() {
    let seeds = if attn_testing::is_emulated() { 1 } else { 6 };
    for dim in [8, 16, 24, 33, 40, 64, 96, 128] {
        for seed in 0..seeds {
            for level in Level::available().filter(|level| !level.multiplies_bf16()) {
                let worst = worst(level, dim, 1000 + 17 * seed);
                assert!(worst <= 1.0, "{level:?}, dim {dim}, seed {seed}: {worst} of the gate");
            }
        }
    }
}
