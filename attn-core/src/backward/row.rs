//! One query row: first its softmax and `δ`, then what each key contributes.

use super::inputs::Inputs;
use super::slopes;
use crate::element::{Element, Real};
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::At;
use crate::softmax::RowState;

/// What a first sweep over the keys of a row finds out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    state: RowState<f64>,
    /// `dy·y`.
    pub(super) delta: f64,
}

/// What one key contributes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contribution {
    /// Factor on `k` in `dq`, and on `q` in `dk`.
    pub(super) by_dot: f64,
    /// Gradient by the bias.
    pub(super) by_bias: f64,
    /// Factor on `dy` in `dv`.
    pub(super) by_value: f64,
}

impl Facts {
    /// Sweeps over the keys of a row; `None` for a row that saw nothing and so contributes nothing.
    pub(super) fn of<T: Element, G: Element, M: Mods>(
        problem: &Problem<'_, '_, M>,
        inputs: &Inputs<'_, T, G>,
        (batch, head, query): (usize, usize, usize),
    ) -> Option<Self> {
        let shape = problem.shape();
        let (mut state, mut delta) = (RowState::new(), 0.0);
        problem.for_each_visible(batch, head, query, |at| {
            let step = state.push(problem.score(inputs.dot(shape, at), at));
            delta = delta * step.rescale + step.weight * problem.dropout_factor(at) * inputs.dy_dot_v(shape, at);
        });
        if let Some(sink) = problem.sink(head) {
            delta *= state.push(f64::from(sink)).rescale;
        }
        (state.sum != 0.0).then(|| Self { state, delta: delta * state.finish() })
    }

    /// What a forward call has found out: its log-sum-exp, and `δ` of its output.
    pub(super) fn saved(lse: f64, delta: f64) -> Option<Self> {
        (lse != f64::NEG_INFINITY).then_some(Self { state: RowState { max: lse, sum: 1.0 }, delta })
    }

    /// The weight of a score before dropout.
    pub(super) fn weight(&self, score: f64) -> f64 {
        Real::exp(score - self.state.max) * self.state.finish()
    }

    /// The contribution of a visible key.
    pub(super) fn key<T: Element, G: Element, M: Mods>(
        &self,
        problem: &Problem<'_, '_, M>,
        inputs: &Inputs<'_, T, G>,
        at: At,
    ) -> Contribution {
        let shape = problem.shape();
        // The derivative is known: `check_derivatives` came before. NaN shows a mods that changed its mind.
        let unknown = slopes::Slopes { score: f64::NAN, by_dot: f64::NAN, by_bias: f64::NAN };
        let slopes = slopes::of(problem, inputs.dot(shape, at), at).unwrap_or(unknown);
        let (weight, factor) = (self.weight(slopes.score), problem.dropout_factor(at));
        let by_score = weight * (factor * inputs.dy_dot_v(shape, at) - self.delta);
        Contribution { by_dot: by_score * slopes.by_dot, by_bias: by_score * slopes.by_bias, by_value: weight * factor }
    }
}
