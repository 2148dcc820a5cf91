//! Two results of one call: equal bits, or within the table of tolerances.

use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Dtype, Layout, Outputs, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::Level;

use crate::calls::Inputs;
use crate::tolerance;

/// Output and lse of a call on one process.
pub(crate) struct Result {
    pub(crate) out: Vec<f32>,
    pub(crate) lse: Vec<f32>,
}

/// The call on this process alone.
pub(crate) fn alone<M: Mods + Sync>(attn: &Attention<'_, M>, inputs: &Inputs, v: &[f32]) -> Result {
    let (shape, [q, k, whole_v]) = (inputs.shape, inputs.views());
    let v = View::new(v, Layout::Bhsd, whole_v.sizes()).expect("as large as v");
    let (mut out, mut lse) = (vec![0.0; shape.rows() * shape.value_dim], vec![0.0; shape.rows()]);
    let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).expect("as large as the output");
    Runner::new()
        .level(Level::detect())
        .threads(1)
        .forward(attn, q, k, v, Outputs::new(to).lse(&mut lse))
        .expect("a good call");
    Result { out, lse }
}

/// The largest `scale·Σ|q·k|` of the inputs: above the score bound of each row.
pub(crate) fn score_bound(inputs: &Inputs, scale: f64) -> f64 {
    let (AttnShape { batch, q_heads, q_len, kv_len, .. }, [q, k, _]) = (inputs.shape, inputs.views());
    let mut most = 0.0f64;
    for (b, h, i) in (0..batch).flat_map(|b| (0..q_heads).flat_map(move |h| (0..q_len).map(move |i| (b, h, i)))) {
        let q: Vec<f32> = q.row(b, h, i).iter().collect();
        for j in (0..kv_len).step_by(3) {
            let dot: f32 = q.iter().zip(k.row(b, inputs.shape.kv_head(h), j).iter()).map(|(x, y)| (x * y).abs()).sum();
            most = most.max(scale * f64::from(dot));
        }
    }
    most
}

/// Whether all bits are equal, and if not, where.
pub(crate) fn same_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let differs = got.iter().zip(want).position(|(x, y)| x.to_bits() != y.to_bits());
    assert!(differs.is_none(), "{what}: bits differ at {differs:?}");
}

/// Whether an output is another one but for rounding; `size` holds `Σ p|v|` of each element.
pub(crate) fn near(what: &str, got: &[f32], want: &[f32], size: &[f32], s: f64) {
    let bound = tolerance::TWICE.bound(Dtype::F32, s);
    for (n, ((&x, &y), &size)) in got.iter().zip(want).zip(size).enumerate() {
        let error = f64::from((x - y).abs());
        assert!(error <= bound * f64::from(size), "{what}: {x} for {y} at {n}, {error:e}");
    }
}

/// Whether an lse is another one but for rounding.
pub(crate) fn near_lse(what: &str, got: &[f32], want: &[f32], s: f64) {
    let bound = 2.0 * tolerance::LSE.bound(Dtype::F32, s);
    for (n, (&x, &y)) in got.iter().zip(want).enumerate() {
        assert!(x == y || f64::from((x - y).abs()) <= bound, "{what}: lse {x} for {y} at {n}");
    }
}
