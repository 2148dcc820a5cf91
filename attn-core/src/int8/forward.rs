//! The sweep over the keys of each query, in integers.

use core::ops::Range;

use super::options::Int8Attention;
use super::output::Int8Output;
use super::row::IntState;
use crate::error::{AttnError, Result};
use crate::resume::{self, Budget, Progress, Rows};
use crate::row::Row;
use crate::shape::AttnShape;
use crate::view::{View, ViewMut};

/// Elements of scratch that [`forward`] needs: one output row.
pub const fn scratch_len(shape: &AttnShape) -> usize {
    shape.value_dim
}

/// Computes attention over int8 tensors: q `[batch, q_heads, q_len, head_dim]`, k
/// `[batch, kv_heads, kv_len, head_dim]`, v `[batch, kv_heads, kv_len, value_dim]`, out
/// `[batch, q_heads, q_len, value_dim]`; `scratch` holds [`scratch_len`] elements. A row that sees nothing is the
/// output's zero point.
///
/// # Errors
/// Whatever does not fit, before anything is written.
pub fn forward<O: Int8Output>(
    attn: &Int8Attention<'_>,
    q: View<'_, i8>,
    k: View<'_, i8>,
    v: View<'_, i8>,
    mut out: ViewMut<'_, O>,
    scratch: &mut [i32],
) -> Result<()> {
    let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
    let acc = check(attn, &shape, out.sizes(), scratch)?;
    resume::run_all(&shape, &mut Int8Rows { attn, shape: &shape, q: &q, k: &k, v: &v, out: &mut out, acc })
}

/// As [`forward`], for some keys: goes on at the position of a [`Cursor`](resume::Cursor); says whether all rows are
/// done. Until then the caller hands over the same tensors, options and scratch, which holds the row that has begun.
/// See [`crate::resume`].
///
/// # Errors
/// As [`forward`]; [`AttnError::Index`] for a cursor of a call of another shape.
pub fn resume<O: Int8Output>(
    attn: &Int8Attention<'_>,
    q: View<'_, i8>,
    k: View<'_, i8>,
    v: View<'_, i8>,
    mut out: ViewMut<'_, O>,
    scratch: &mut [i32],
    budget: Budget<'_, IntState>,
) -> Result<Progress> {
    let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
    let acc = check(attn, &shape, out.sizes(), scratch)?;
    resume::run(&shape, &mut Int8Rows { attn, shape: &shape, q: &q, k: &k, v: &v, out: &mut out, acc }, budget)
}

/// Checks everything but the inputs' sizes. Returns the part of the scratch that is used.
fn check<'x>(
    attn: &Int8Attention<'_>,
    shape: &AttnShape,
    out: [usize; 4],
    scratch: &'x mut [i32],
) -> Result<&'x mut [i32]> {
    attn.check(shape)?;
    shape.check_output(out)?;
    AttnError::check_len("int8 scratch", scratch_len(shape), scratch.len())?;
    Ok(scratch.get_mut(..shape.value_dim).unwrap_or_default())
}

/// One call, checked. All by reference: copies would take stack, of which firmware has little.
struct Int8Rows<'x, 'a, 'o, O> {
    attn: &'x Int8Attention<'a>,
    shape: &'x AttnShape,
    q: &'x View<'x, i8>,
    k: &'x View<'x, i8>,
    v: &'x View<'x, i8>,
    out: &'x mut ViewMut<'o, O>,
    acc: &'x mut [i32],
}

impl<O: Int8Output> Rows for Int8Rows<'_, '_, '_, O> {
    type State = IntState;

    fn range(&self, [batch, head, query]: [usize; 3]) -> Range<usize> {
        self.attn.mask.row_range(self.shape, batch, head, query)
    }

    fn begin(&mut self) {
        self.acc.fill(0);
    }

    #[inline]
    fn take(&mut self, row: [usize; 3], keys: Range<usize>, state: &mut IntState) {
        let [batch, head, query] = row;
        let kv_head = self.shape.kv_head(head);
        let q_row = Query::new(self.attn, head, self.q.row(batch, head, query));
        let (k, v, acc) = (self.k, self.v, &mut *self.acc);
        self.attn.mask.for_each_in(self.shape, row, keys, |key| {
            q_row.take(k.row(batch, kv_head, key), v.row(batch, kv_head, key), state, acc);
        });
    }

    fn finish(&mut self, [batch, head, query]: [usize; 3], state: &IntState) {
        write_row(self.attn, head, state, self.acc, |d, x| self.out.set(batch, head, query, d, x));
    }
}

/// A query, and the sums that a dot product with it needs.
pub(super) struct Query<'x, 'a> {
    attn: &'x Int8Attention<'a>,
    head: usize,
    row: Row<'x, i8>,
    /// `z_k · Σ(q − z_q)`: the share of the keys' zero point in every dot product.
    offset: i32,
}

impl<'x, 'a> Query<'x, 'a> {
    pub(super) fn new(attn: &'x Int8Attention<'a>, head: usize, row: Row<'x, i8>) -> Self {
        let [zq, zk, ..] = attn.zero_points.map(i32::from);
        let offset = zk * row.iter().map(|q| i32::from(q) - zq).sum::<i32>();
        Self { attn, head, row, offset }
    }

    /// `Σ(q − z_q)(k − z_k)`, exactly: the sizes were checked so that it fits.
    #[inline]
    fn dot(&self, k: Row<'_, i8>) -> i32 {
        let [zq, ..] = self.attn.zero_points.map(i32::from);
        let times = |q: i8, k: i8| (i32::from(q) - zq) * i32::from(k);
        let sum: i32 = match (self.row.as_slice(), k.as_slice()) {
            (Some(q), Some(k)) => q.iter().zip(k).map(|(&q, &k)| times(q, k)).sum(),
            _ => self.row.iter().zip(k.iter()).map(|(q, k)| times(q, k)).sum(),
        };
        sum - self.offset
    }

    /// Takes one key and its value into a row's state and accumulators.
    #[inline]
    pub(super) fn take(&self, k: Row<'_, i8>, v: Row<'_, i8>, state: &mut IntState, acc: &mut [i32]) {
        let step = state.push(self.attn.of_head(self.head).score.apply(self.dot(k)));
        if step.shift != 0 {
            for a in acc.iter_mut() {
                *a = step.rescaled(*a);
            }
        }
        // At most 2²², so that it stays below 2³⁰ times any 8-bit number.
        let weight = step.weight as i32;
        if let Some(values) = v.as_slice() {
            for (a, &value) in acc.iter_mut().zip(values) {
                *a += weight * i32::from(value);
            }
        } else {
            for (a, value) in acc.iter_mut().zip(v.iter()) {
                *a += weight * i32::from(value);
            }
        }
    }
}

/// Divides a row by its sum and hands each element to `set`.
#[inline]
pub(super) fn write_row<O: Int8Output>(
    attn: &Int8Attention<'_>,
    head: usize,
    state: &IntState,
    acc: &[i32],
    mut set: impl FnMut(usize, O),
) {
    let [_, _, zv, zo] = attn.zero_points;
    let factor = O::factor(attn.of_head(head), state);
    // Σ w·(v − z_v); the sum is below 2²⁴.
    let shift = i32::from(zv) * state.sum() as i32;
    for (d, &a) in acc.iter().enumerate() {
        set(d, O::of(a - shift, factor, zo));
    }
}
