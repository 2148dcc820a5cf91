//! How far from the exact result an engine may be.

use attn_core::half::{bf16, f16};
use attn_core::{Attention, Dtype, Element, Layout, Outputs, ViewMut};

use super::{Answer, attend, oracle};
use crate::cases::{Case, Inputs, Memory, Tensor4, around_edges, shape};
use crate::engine::{Engine, Number};
use crate::tolerance::{ETA, TWICE};

fn grid<E: Engine, T: Number>(engine: &E, step: usize) {
    if !engine.supports_dtype(T::DTYPE) {
        return;
    }
    // Enough to meet each kind of edge: where every instruction is emulated, the whole grid takes minutes.
    let step = if crate::is_emulated() { 4 * step + 1 } else { step };
    for case in around_edges().iter().step_by(step) {
        let attn = case.options.attention();
        let inputs = case.inputs::<T>();
        // In doubles the oracle is off by as much as the engine.
        let entry = if T::DTYPE == Dtype::F64 { TWICE } else { ETA };
        let slack = if matches!(T::DTYPE, Dtype::F16 | Dtype::Bf16) { engine.half_slack() } else { 0.0 };
        oracle(&attn, &inputs).check_with(entry, slack, &attend(engine, &attn, &inputs), &(engine.label(), case));
    }
}

/// Singles, over the grid around tile edges.
pub fn f32_stays_within_the_gate<E: Engine>(engine: &E) {
    grid::<E, f32>(engine, 1);
}

/// Doubles, if the engine takes them.
pub fn f64_stays_within_its_gate<E: Engine>(engine: &E) {
    grid::<E, f64>(engine, 3);
}

/// Halves: the error of singles and one rounding.
pub fn halves_are_rounded_once<E: Engine>(engine: &E) {
    grid::<E, f16>(engine, 2);
    grid::<E, bf16>(engine, 2);
}

/// Halves in, singles out: no rounding to a half anywhere on the way.
pub fn halves_in_singles_out<E: Engine>(engine: &E) {
    fn run<E: Engine, T: Number>(engine: &E)
    where
        T::Compute: Number,
    {
        if !engine.supports_dtype(T::DTYPE) {
            return;
        }
        for seed in 0..4 {
            let case = Case::random(500 + seed);
            let attn = case.options.attention();
            let inputs = case.inputs::<T>();
            let rows = case.shape.rows();
            let mut out = vec![T::Compute::default(); rows * case.shape.value_dim];
            let mut lse = vec![Default::default(); rows];
            let view = ViewMut::new(&mut out, Layout::Bhsd, case.shape.output()).expect("output");
            let outputs = Outputs::new(view).lse(&mut lse);
            let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
            engine.forward_wide(&attn, q, k, v, outputs).expect("accepted");
            oracle(&attn, &inputs).check(ETA, &Answer { out, lse }, &(engine.label(), T::DTYPE, &case));
        }
    }
    run::<E, f16>(engine);
    run::<E, bf16>(engine);
    assert!(engine.supports_dtype(Dtype::F32));
}

/// Scores of hundreds to millions, and rows whose maximum keeps rising: the error of rescaling.
pub fn large_scores_and_late_maxima<E: Engine>(engine: &E) {
    for sigma in [10.0, 100.0, 1000.0] {
        let inputs = Inputs::<f32>::painted(shape((1, 2, 1, 17, 150, 16, 8)), Memory::Bhsd, 9, sigma);
        oracle(&Attention::new(), &inputs).check(ETA, &attend(engine, &Attention::new(), &inputs), &sigma);
    }
    for step in [0.01, 0.5, 3.0, -0.5] {
        // One-dimensional: the score of key j is step·j.
        let dims = shape((1, 1, 1, 3, 300, 1, 4));
        let mut inputs = Inputs::<f32>::plain(dims, 11);
        inputs.q = Tensor4::new([1, 1, 3, 1], Memory::Bhsd, |_| 1.0);
        inputs.k = Tensor4::new([1, 1, 300, 1], Memory::Bhsd, |[_, _, j, _]| f32::from_f64(step * j as f64).into());
        oracle(&Attention::new(), &inputs).check(ETA, &attend(engine, &Attention::new(), &inputs), &step);
    }
}
