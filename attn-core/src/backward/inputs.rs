//! The inputs of a backward call, and the dot products of their rows.

use crate::element::Element;
use crate::row::Row;
use crate::shape::{At, AttnShape};
use crate::view::View;

/// The inputs of a backward call.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'v, T, G> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'v, T>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: View<'v, T>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: View<'v, T>,
    /// The gradient by the output, of its shape.
    pub dy: View<'v, G>,
}

impl<T: Element, G: Element> Inputs<'_, T, G> {
    pub(super) fn dot(&self, shape: &AttnShape, at: At) -> f64 {
        dot(self.q.row(at.batch, at.head, at.query), self.k.row(at.batch, shape.kv_head(at.head), at.key))
    }

    pub(super) fn dy_dot_v(&self, shape: &AttnShape, at: At) -> f64 {
        dot(self.dy.row(at.batch, at.head, at.query), self.v.row(at.batch, shape.kv_head(at.head), at.key))
    }
}

pub(super) fn dot<A: Element, B: Element>(a: Row<'_, A>, b: Row<'_, B>) -> f64 {
    a.iter().zip(b.iter()).map(|(a, b)| a.to_f64() * b.to_f64()).sum()
}
