//! The share of the keys that a module appends: in `dq`, and their own gradients. The engine that computes the rest
//! sees these keys only in the log-sum-exp and the output.

use super::accumulate::{Saved, part_of};
use super::inputs::dot;
use super::outputs::AppendedGradients;
use super::slopes;
use crate::appended::Appended;
use crate::element::{Element, Real};
use crate::row::Row;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::At;
use crate::view::{View, ViewMut};

/// Adds their part to `dq`, and writes their gradients; every size has been checked. `saved` counts them.
pub fn add_appended<R: Real, T: Element, M: Mods>(
    problem: &Problem<'_, '_, M>,
    appended: &Appended<'_, T>,
    (q, dy): (View<'_, R>, View<'_, R>),
    saved: Saved<'_, R>,
    dq: &mut ViewMut<'_, R>,
    to: AppendedGradients<'_, R>,
) {
    let shape = problem.shape();
    to.k.fill(R::ZERO);
    to.v.fill(R::ZERO);
    // The zeros have no gradient, and zeros as keys add nothing to dq: their scores and values are constants.
    let Some((keys, values)) = appended.bias else { return };
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            let kv_head = shape.kv_head(head);
            let (key, value) = (keys.row(0, kv_head, 0), values.row(0, kv_head, 0));
            for query in 0..shape.q_len {
                let Some(facts) = saved.facts(shape, dy, (batch, head, query)) else { continue };
                let (q_row, dy_row) = (q.row(batch, head, query), dy.row(batch, head, query));
                let product = dot(q_row, key);
                let factor = problem.dropout_factor(At { batch, head, query, key: shape.kv_len });
                let weight = facts.weight(appended.score(problem, product));
                let by_score = weight * (factor * dot(dy_row, value) - facts.delta);
                let by_dot = by_score * slopes::by_dot(problem, product);
                for (d, k) in key.iter().enumerate() {
                    let sum = dq.as_view().at(batch, head, query, d).to_f64() + by_dot * k.to_f64();
                    dq.set(batch, head, query, d, R::of(sum));
                }
                add(part_of(to.k, kv_head, shape.head_dim), by_dot, q_row);
                add(part_of(to.v, kv_head, shape.value_dim), weight * factor, dy_row);
            }
        }
    }
}

/// `to += factor·x`.
fn add<R: Real>(to: &mut [R], factor: f64, x: Row<'_, R>) {
    for (to, x) in to.iter_mut().zip(x.iter()) {
        *to += R::of(factor * x.to_f64());
    }
}
