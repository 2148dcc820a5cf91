//! Positions behind the last key that a module adds itself: torch's `add_bias_kv` and `add_zero_attn`.
//!
//! They are the same for every sequence and never masked. Scale, soft-cap and temperature apply to their scores; biases
//! and mods do not. An engine does not know of them: its output and lse are the state of a row over the given keys, and
//! a module merges the appended keys into this state afterwards, exactly (see [`RowState`]).

use crate::dropout::Dropout;
use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::row::Row;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::At;
use crate::softmax::RowState;
use crate::view::View;

/// A learned key and value, then a key and value of zeros; each may be absent.
#[derive(Clone, Copy, Debug)]
pub struct Appended<'a, T> {
    /// `[1, kv_heads, 1, head_dim]` and `[1, kv_heads, 1, value_dim]`.
    pub bias: Option<(View<'a, T>, View<'a, T>)>,
    /// A key and a value of zeros at the end.
    pub zero: bool,
}

impl<'a, T: Element> Appended<'a, T> {
    /// No positions.
    pub const fn none() -> Self {
        Self { bias: None, zero: false }
    }

    /// How many positions.
    pub fn count(&self) -> usize {
        usize::from(self.bias.is_some()) + usize::from(self.zero)
    }

    /// Key `n` of a head; `None` for zeros.
    pub fn key(&self, kv_head: usize, n: usize) -> Option<Row<'a, T>> {
        self.bias.filter(|_| n == 0).map(|(k, _)| k.row(0, kv_head, 0))
    }

    /// Value `n` of a head; `None` for zeros.
    pub fn value(&self, kv_head: usize, n: usize) -> Option<Row<'a, T>> {
        self.bias.filter(|_| n == 0).map(|(_, v)| v.row(0, kv_head, 0))
    }

    /// The finished score of an appended key.
    pub fn score<R: Real, M: Mods>(&self, problem: &Problem<'_, '_, M>, dot: R) -> R {
        let s = problem.factors().capped(dot);
        problem.attn().get_temperature().map_or(s, |t| s / R::of(t))
    }

    /// Refuses options that have no meaning with appended positions.
    pub fn check<M: Mods>(&self, problem: &Problem<'_, '_, M>) -> Result<()> {
        if self.count() != 0 && matches!(problem.attn().get_dropout(), Dropout::Keep { .. }) {
            return Err(AttnError::Unsupported { what: "a dropout mask with appended keys, which it does not cover" });
        }
        Ok(())
    }

    /// `q·k` of appended key `n`.
    pub fn dot<R: Real>(&self, q: Row<'_, R>, kv_head: usize, n: usize) -> R {
        let mut sum = R::ZERO;
        if let Some(key) = self.key(kv_head, n) {
            for (q, k) in q.iter().zip(key.iter()) {
                sum += q * R::of(k.to_f64());
            }
        }
        sum
    }

    /// Merges the appended positions into an engine's result: `context` `[batch, q_heads, q_len, value_dim]` and
    /// `lse`.
    pub fn merge<R: Real, M: Mods>(
        &self,
        problem: &Problem<'_, '_, M>,
        q: View<'_, R>,
        context: &mut [R],
        lse: &mut [R],
    ) {
        let shape = problem.shape();
        if self.count() == 0 {
            return;
        }
        for batch in 0..shape.batch {
            for head in 0..shape.q_heads {
                for query in 0..shape.q_len {
                    let row = shape.row(batch, head, query);
                    let start = row * shape.value_dim; // the context has that many rows
                    let (Some(lse), Some(y)) = (lse.get_mut(row), context.get_mut(start..start + shape.value_dim))
                    else {
                        return;
                    };
                    let at = At { batch, head, query, key: shape.kv_len };
                    *lse = self.merge_row(problem, q.row(batch, head, query), at, y, *lse);
                }
            }
        }
    }

    /// Merges into one row; `at` is the first appended position. Returns the new lse.
    fn merge_row<R: Real, M: Mods>(
        &self,
        problem: &Problem<'_, '_, M>,
        q: Row<'_, R>,
        at: At,
        y: &mut [R],
        lse: R,
    ) -> R {
        let kv_head = problem.shape().kv_head(at.head);
        // The finished row is the state of one score, its lse, with weight 1.
        let seen = lse != R::NEG_INFINITY;
        let mut state = if seen { RowState { max: lse, sum: R::ONE } } else { RowState::new() };
        for n in 0..self.count() {
            let step = state.push(self.score(problem, self.dot(q, kv_head, n)));
            y.iter_mut().for_each(|y| *y *= step.rescale);
            let factor = R::of(problem.dropout_factor(At { key: at.key.saturating_add(n), ..at }));
            if let Some(value) = self.value(kv_head, n) {
                for (y, v) in y.iter_mut().zip(value.iter()) {
                    *y += step.weight * factor * R::of(v.to_f64());
                }
            }
        }
        let finish = state.finish();
        y.iter_mut().for_each(|y| *y *= finish);
        state.lse()
    }
}
