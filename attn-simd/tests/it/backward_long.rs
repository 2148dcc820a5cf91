//! The gate of long sums of gradients: how far sums of equal terms drift with the number of rows, and of keys.
//!
//! Equal terms tell most: a running sum rounds them the same way at each step. Here every term of a gradient is one
//! number, so that its sum is known without adding anything up.

use attn_core::backward::Gradients;
use attn_core::{Attention, AttnShape, Dtype, Layout, View, ViewMut};
use attn_simd::backward::{self, Inputs};
use attn_simd::{Level, Workspace};
use attn_testing::tolerance::{GRADIENT_DRIFT, GRADIENT_ETA};

/// Rows, or keys, that are added up.
const LENGTHS: [usize; 6] = [32, 100, 1024, 8192, 16_384, 131_072];
/// Channels of queries and keys, and of values.
const DIMS: [usize; 2] = [4, 8];
/// Numbers whose sums drift by various amounts.
const TERMS: [f32; 4] = [0.1, 1.0 / 3.0, 0.7, core::f32::consts::FRAC_PI_2];

/// The largest share of a gradient that an element is off by: all are ±`want`.
fn off(found: &[f32], want: f64) -> f64 {
    found.iter().map(|x| (f64::from(*x).abs() / want - 1.0).abs()).fold(0.0, f64::max)
}

/// The gradients of `heads` heads, each of its own keys: dq if `of_k` is not 0, else dk and dv. Each row is one number,
/// and those of k and v have the other sign at every second key. Weights are equal, so that outputs are 0.
fn gradients(level: Level, heads: usize, [q_len, kv_len]: [usize; 2], x: f32, of_k: f32) -> [Vec<f32>; 3] {
    let [dim, value_dim] = DIMS;
    let shape = AttnShape { batch: 1, q_heads: heads, kv_heads: heads, q_len, kv_len, head_dim: dim, value_dim };
    let sizes = [[1, heads, q_len, dim], [1, heads, kv_len, dim], [1, heads, kv_len, value_dim]];
    let rows = |len: usize, dim: usize, of: &dyn Fn(usize) -> f32| -> Vec<f32> {
        (0..heads * len * dim).map(|n| of(n / dim % len)).collect()
    };
    let sign = |key: usize| if key.is_multiple_of(2) { 1.0 } else { -1.0 };
    let q = rows(q_len, dim, &|_| if of_k == 0.0 { x } else { 0.0 });
    let k = rows(kv_len, dim, &|key| of_k * sign(key));
    let v = rows(kv_len, value_dim, &sign);
    let dy = rows(q_len, value_dim, &|_| x);
    let (out, lse) = (vec![0.0f32; dy.len()], vec![(kv_len as f64).ln() as f32; shape.rows()]);
    let view = |data, sizes| View::new(data, Layout::Bhsd, sizes).unwrap();
    let saved = Inputs {
        q: view(&q, sizes[0]),
        k: view(&k, sizes[1]),
        v: view(&v, sizes[2]),
        out: view(&out, shape.output()),
        lse: &lse,
        dy: view(&dy, shape.output()),
    };
    let mut to = sizes.map(|sizes| vec![f32::NAN; sizes.iter().product()]);
    let [dq, dk, dv] = &mut to;
    let into = Gradients::new(
        ViewMut::new(dq, Layout::Bhsd, sizes[0]).unwrap(),
        ViewMut::new(dk, Layout::Bhsd, sizes[1]).unwrap(),
        ViewMut::new(dv, Layout::Bhsd, sizes[2]).unwrap(),
    );
    backward::gradients_at(level, &Attention::new().scale(1.0), saved, into, &mut Workspace::new()).unwrap();
    to
}

#[test]
fn sums_of_equal_terms_drift_no_further_than_promised() {
    let emulated = attn_testing::is_emulated();
    let mut worst = 0.0f64;
    for level in Level::available() {
        for n in LENGTHS.into_iter().filter(|n| !emulated || *n <= 1024) {
            let bound = GRADIENT_ETA.bound(Dtype::F32, 0.0) + GRADIENT_DRIFT * n as f64;
            for x in TERMS {
                let (wide, size) = (f64::from(x), DIMS[1] as f64);
                // Over rows: one part of each of sixteen heads, and parts of one head.
                for heads in if n < 1 << 17 { &[16, 1][..] } else { &[1] } {
                    let [_, dk, dv] = gradients(level, *heads, [n, 2], x, 0.0);
                    let (rows, weight) = (n as f64, 0.5);
                    for (what, off) in
                        [("dk", off(&dk, rows * weight * size * wide * wide)), ("dv", off(&dv, rows * weight * wide))]
                    {
                        eprintln!(
                            "{what} {} {n} rows of {x}, {heads} heads: {:.1}u",
                            level.name(),
                            off * 2f64.powi(24)
                        );
                        worst = worst.max(off / bound);
                    }
                }
                let [dq, ..] = gradients(level, 1, [3, n], x, 1.0);
                let off = off(&dq, size * wide);
                eprintln!("dq {} {n} keys of {x}: {:.1}u", level.name(), off * 2f64.powi(24));
                worst = worst.max(off / bound);
            }
        }
    }
    assert!(worst <= 1.0, "{worst} of the tolerance");
}
