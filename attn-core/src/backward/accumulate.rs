//! The loops: every row of a key/value head's group into its `dk` and `dv`, each row's own `dq`.

use super::inputs::Inputs;
use super::outputs::Gradients;
use super::row::Facts;
use crate::element::{Element, Real};
use crate::row::Row;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::{At, AttnShape};
use crate::view::{View, ViewMut};

/// Computes all gradients; every size has been checked, and `scratch` holds [`scratch_len`](super::scratch_len)
/// elements.
pub(crate) fn all<T: Element, G: Element, O: Element, M: Mods>(
    problem: &Problem<'_, '_, M>,
    inputs: &Inputs<'_, T, G>,
    gradients: &mut Gradients<'_, O>,
    scratch: &mut [f64],
) {
    each_row(problem, inputs, gradients, scratch, |row| Facts::of(problem, inputs, row));
}

/// As [`all`], from the output and the log-sum-exps of a forward call, which may count keys that are not in `inputs`:
/// those that a module appends.
pub(crate) fn saved<T: Element, G: Element, R: Real, O: Element, M: Mods>(
    problem: &Problem<'_, '_, M>,
    inputs: &Inputs<'_, T, G>,
    saved: Saved<'_, R>,
    gradients: &mut Gradients<'_, O>,
    scratch: &mut [f64],
) {
    each_row(problem, inputs, gradients, scratch, |row| saved.facts(problem.shape(), inputs.dy, row));
}

/// What a forward call wrote.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'v, R> {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: View<'v, R>,
    /// `batch · q_heads · q_len`.
    pub lse: &'v [R],
}

impl<R: Real> Saved<'_, R> {
    pub(super) fn facts<G: Element>(
        &self,
        shape: &AttnShape,
        dy: View<'_, G>,
        (batch, head, query): (usize, usize, usize),
    ) -> Option<Facts> {
        let lse = self.lse.get(shape.row(batch, head, query)).map_or(f64::NEG_INFINITY, |lse| lse.to_f64());
        // An output of 0 counts nothing, whatever dy holds: a row that sees nothing has no gradient.
        let product = |(y, dy): (R, G)| if y.to_f64() == 0.0 { 0.0 } else { y.to_f64() * dy.to_f64() };
        let rows = self.out.row(batch, head, query).iter().zip(dy.row(batch, head, query).iter());
        Facts::saved(lse, rows.map(product).sum())
    }
}

/// Every row, from what is known of it.
fn each_row<T: Element, G: Element, O: Element, M: Mods>(
    problem: &Problem<'_, '_, M>,
    inputs: &Inputs<'_, T, G>,
    gradients: &mut Gradients<'_, O>,
    scratch: &mut [f64],
    facts: impl Fn((usize, usize, usize)) -> Option<Facts>,
) {
    let shape = *problem.shape();
    if let Some(bias) = &mut gradients.bias {
        clear(bias);
    }
    if let Some(sinks) = &mut gradients.sinks {
        sinks.fill(0.0);
    }
    let Some((dq, rest)) = scratch.split_at_mut_checked(shape.head_dim) else { return };
    let Some((dk, rest)) = rest.split_at_mut_checked(shape.kv_len * shape.head_dim) else { return };
    let Some(dv) = rest.get_mut(..shape.kv_len * shape.value_dim) else { return };
    for batch in 0..shape.batch {
        for kv_head in 0..shape.kv_heads {
            dk.fill(0.0);
            dv.fill(0.0);
            for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
                for query in 0..shape.q_len {
                    dq.fill(0.0);
                    if let Some(facts) = facts((batch, head, query)) {
                        row(problem, inputs, gradients, &facts, (batch, head, query), (dq, dk, dv));
                    }
                    for (d, &x) in dq.iter().enumerate() {
                        gradients.dq.set(batch, head, query, d, O::from_f64(x));
                    }
                }
            }
            write_head(&mut gradients.dk, batch, kv_head, dk);
            write_head(&mut gradients.dv, batch, kv_head, dv);
        }
    }
}

/// One query row into `dq` (its own) and `dk`, `dv` (those of its key/value head).
fn row<T: Element, G: Element, O, M: Mods>(
    problem: &Problem<'_, '_, M>,
    inputs: &Inputs<'_, T, G>,
    gradients: &mut Gradients<'_, O>,
    facts: &Facts,
    (batch, head, query): (usize, usize, usize),
    (dq, dk, dv): (&mut [f64], &mut [f64], &mut [f64]),
) {
    let shape = problem.shape();
    let kv_head = shape.kv_head(head);
    let (q_row, dy_row) = (inputs.q.row(batch, head, query), inputs.dy.row(batch, head, query));
    problem.for_each_visible(batch, head, query, |at| {
        let part = facts.key(problem, inputs, at);
        add(dq, part.by_dot, inputs.k.row(batch, kv_head, at.key));
        add(part_of(dk, at.key, shape.head_dim), part.by_dot, q_row);
        add(part_of(dv, at.key, shape.value_dim), part.by_value, dy_row);
        if let Some(bias) = &mut gradients.bias {
            add_broadcast(bias, at, part.by_bias);
        }
    });
    if let (Some(sink), Some(slot)) =
        (problem.sink(head), gradients.sinks.as_deref_mut().and_then(|sinks| sinks.get_mut(head)))
    {
        *slot -= facts.weight(f64::from(sink)) * facts.delta;
    }
}

/// `to += factor·x`.
fn add<X: Element>(to: &mut [f64], factor: f64, x: Row<'_, X>) {
    for (to, x) in to.iter_mut().zip(x.iter()) {
        *to += factor * x.to_f64();
    }
}

/// Row `n` of a matrix with rows of `dim`; empty if it is outside.
pub(super) fn part_of<R>(matrix: &mut [R], n: usize, dim: usize) -> &mut [R] {
    let start = n.saturating_mul(dim);
    matrix.get_mut(start..start.saturating_add(dim)).unwrap_or_default()
}

/// Adds to the element that broadcasts to `at`.
fn add_broadcast(to: &mut ViewMut<'_, f64>, at: At, value: f64) {
    let pick = |i: usize, n: usize| if n == 1 { 0 } else { i };
    let [nb, nh, nq, nk] = to.sizes();
    let (b, h, q, k) = (pick(at.batch, nb), pick(at.head, nh), pick(at.query, nq), pick(at.key, nk));
    let sum = to.as_view().at(b, h, q, k) + value;
    to.set(b, h, q, k, sum);
}

fn clear(view: &mut ViewMut<'_, f64>) {
    let [batch, heads, seq, dim] = view.sizes();
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..seq {
                for d in 0..dim {
                    view.set(b, h, s, d, 0.0);
                }
            }
        }
    }
}

/// Rounds one head's gradient into its place.
fn write_head<O: Element>(to: &mut ViewMut<'_, O>, batch: usize, head: usize, from: &[f64]) {
    let [_, _, _, dim] = to.sizes();
    for (key, row) in from.chunks_exact(dim.max(1)).enumerate() {
        for (d, &x) in row.iter().enumerate() {
            to.set(batch, head, key, d, O::from_f64(x));
        }
    }
}
