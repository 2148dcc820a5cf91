//! Gradients of a row of the table: the tensors of the backward call, and its time.
//!
//! The forward call and its log-sum-exp are computed once, outside of the timed part, as they are in training.

use attn_core::backward::Gradients;
use attn_core::{Attention, AttnError, Layout, Outputs, View, ViewMut};
use attn_simd::KernelElement;
use attn_simd::backward::Inputs;

use super::ours::Ours;
use crate::case::{Case, Stored, Tensors};
use crate::clock::both;
use crate::engine;

/// What a backward call takes and gives besides the tensors of the forward call.
#[derive(Clone, Debug)]
pub(super) struct Backward<T> {
    /// The gradient of the loss by the output.
    dy: Vec<T>,
    /// Of the forward call; empty before it.
    lse: Vec<f32>,
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
}

impl<T: Stored + KernelElement> Backward<T> {
    /// Before the forward call. `dy` is rounded to the type, in place.
    pub(super) fn new(case: Case, dy: &mut Vec<f32>) -> Self {
        let stored = T::stored(core::mem::take(dy));
        *dy = stored.iter().map(|x| x.to_f64() as f32).collect();
        let [q, kv] = [case.q_sizes(), case.kv_sizes()].map(|sizes| vec![T::ZERO; sizes.iter().product()]);
        Self { dy: stored, lse: Vec::new(), dq: q, dk: kv.clone(), dv: kv }
    }

    /// Seconds per backward call: the wall's and the thread's.
    pub(super) fn time(
        &mut self,
        attn: &Attention<'_>,
        tensors: &mut Tensors<T>,
        Ours { engine, pool, runner }: Ours<'_, '_>,
        calls: u32,
    ) -> Result<(f64, f64), AttnError> {
        let case = tensors.case;
        let (q_sizes, kv_sizes) = (case.q_sizes(), case.kv_sizes());
        if self.lse.is_empty() {
            self.lse = vec![0.0; case.batch * case.q_heads * case.q_len];
            let (q, k, v, out) = tensors.views()?;
            runner.run(engine, attn, q, k, v, Outputs::new(out).lse(&mut self.lse))?;
        }
        let view = |x, sizes| View::new(x, Layout::Bhsd, sizes);
        let (q, k, v) = (view(&tensors.q, q_sizes)?, view(&tensors.k, kv_sizes)?, view(&tensors.v, kv_sizes)?);
        let (out, dy) = (view(&tensors.out, q_sizes)?, view(&self.dy, q_sizes)?);
        let Self { lse, dq, dk, dv, .. } = self;
        let once = || -> Result<(), AttnError> {
            let to = Gradients::new(
                ViewMut::new(dq, Layout::Bhsd, q_sizes)?,
                ViewMut::new(dk, Layout::Bhsd, kv_sizes)?,
                ViewMut::new(dv, Layout::Bhsd, kv_sizes)?,
            );
            runner.backward(engine, attn, Inputs { q, k, v, out, lse, dy }, to)
        };
        engine::inside(engine, pool, || both(calls, once))
    }

    /// All gradients, one after the other.
    pub(super) fn all(&self) -> Vec<f32> {
        self.dq.iter().chain(&self.dk).chain(&self.dv).map(|x| x.to_f64() as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use attn_core::AttnShape;
    use attn_core::backward;
    use attn_simd::Level;

    use super::super::shapes::parse;
    use super::*;
    use crate::engine::{Engine, Runner, pool};

    #[test]
    fn what_is_timed_are_the_gradients() {
        for causal in [0, 1] {
            let row = parse(&format!("k 1 4 2 20 20 8 {causal} backward -")).unwrap().remove(0);
            assert_eq!(row.flops(), 2.5 * row.case.flops());
            let (q_sizes, kv_sizes) = (row.case.q_sizes(), row.case.kv_sizes());
            let shape = AttnShape::new(q_sizes, kv_sizes, kv_sizes).unwrap();
            for threads in [1, 2] {
                let (pool, engine) = (pool(threads).unwrap(), [Engine::Simd, Engine::Parallel][threads - 1]);
                let (mut inputs, level) = (row.inputs(), Level::detect());
                let ours = Ours { engine, pool: &pool, runner: &mut Runner::new(level, &pool) };
                assert!(inputs.time(&row, ours, 2).unwrap().0 > 0.0);
                let [mut dq, mut dk, mut dv] = [q_sizes, kv_sizes, kv_sizes].map(|s| vec![0.0f64; s.iter().product()]);
                let to = |x, sizes| ViewMut::new(x, Layout::Bhsd, sizes).unwrap();
                let to = Gradients::new(to(&mut dq, q_sizes), to(&mut dk, kv_sizes), to(&mut dv, kv_sizes));
                let view = |x, sizes| View::new(x, Layout::Bhsd, sizes).unwrap();
                let (q, k) = (view(&inputs.tensors.q, q_sizes), view(&inputs.tensors.k, kv_sizes));
                let (v, dy) = (view(&inputs.tensors.v, kv_sizes), view(inputs.extra(), q_sizes));
                let mut scratch = vec![0.0; backward::scratch_len(&shape).unwrap()];
                backward::gradients(&row.case.attention(), q, k, v, dy, to, &mut scratch).unwrap();
                let (got, want) = (inputs.out(), dq.into_iter().chain(dk).chain(dv));
                assert_eq!(got.len(), 640 + 2 * 320);
                for (n, (got, want)) in got.into_iter().zip(want).enumerate() {
                    assert!((f64::from(got) - want).abs() < 1e-5, "{causal} {threads}: {n} is {got}, not {want}");
                }
            }
        }
    }
}
