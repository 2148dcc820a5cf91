//! Copies of rows between views and the contiguous buffers of messages.

use std::ops::Range;

use attn_core::{Layout, Result, View, ViewMut};
use bytemuck::Pod;

/// Appends rows to a buffer, `[batch, heads, seq, dim]` in this order.
pub(crate) fn pack<T: Copy>(view: View<'_, T>, heads: Range<usize>, to: &mut Vec<T>) {
    let [batch, _, seq, _] = view.sizes();
    for b in 0..batch {
        for h in heads.clone() {
            for s in 0..seq {
                let row = view.row(b, h, s);
                match row.as_slice() {
                    Some(row) => to.extend_from_slice(row),
                    None => to.extend(row.iter()),
                }
            }
        }
    }
}

/// Writes a rank's keys and values as they travel to the beginning of a buffer.
pub(crate) fn pack_shard<T: Copy>(k: View<'_, T>, v: View<'_, T>, to: &mut [T]) {
    let mut rest = to;
    for view in [k, v] {
        let [batch, heads, seq, dim] = view.sizes();
        let (mine, after) = rest.split_at_mut(batch * heads * seq * dim);
        for (n, to) in mine.chunks_exact_mut(dim.max(1)).enumerate() {
            let row = view.row(n / seq / heads, n / seq % heads, n % seq);
            match row.as_slice() {
                Some(row) => to.copy_from_slice(row),
                None => to.iter_mut().zip(row.iter()).for_each(|(to, x)| *to = x),
            }
        }
        rest = after;
    }
}

/// Keys and values of a shard, as they travel: `[batch, kv_heads, n, head_dim]`, then the same with `value_dim`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shard<'b, T> {
    pub(crate) k: View<'b, T>,
    pub(crate) v: View<'b, T>,
}

impl<'b, T: Copy> Shard<'b, T> {
    /// Of a buffer that holds at least `n` positions; `sizes` are `[batch, kv_heads, head_dim, value_dim]`.
    pub(crate) fn new(buffer: &'b [T], [batch, heads, head_dim, value_dim]: [usize; 4], n: usize) -> Result<Self> {
        let (k, v) = buffer.split_at(batch * heads * n * head_dim);
        Ok(Self {
            k: View::new(k, Layout::Bhsd, [batch, heads, n, head_dim])?,
            v: View::new(v, Layout::Bhsd, [batch, heads, n, value_dim])?,
        })
    }

    /// Some rows of it.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Self {
        Self { k: rows_of(self.k, rows.clone()), v: rows_of(self.v, rows) }
    }
}

/// Some positions of a view.
pub(crate) fn rows_of<T: Copy>(view: View<'_, T>, rows: Range<usize>) -> View<'_, T> {
    let [_, heads, _, dim] = view.sizes();
    crate::part::cut_view(view, [0..heads, rows, 0..dim])
}

/// Writes a row of an output.
pub(crate) fn write_row<O: Copy>(out: &mut ViewMut<'_, O>, [b, h, s]: [usize; 3], row: &[O]) {
    match out.row_mut(b, h, s) {
        Some(to) => to.copy_from_slice(row),
        None => row.iter().enumerate().for_each(|(d, &x)| out.set(b, h, s, d, x)),
    }
}

/// So many zeros.
pub(crate) fn zeros<T: Pod>(len: usize) -> Vec<T> {
    vec![T::zeroed(); len]
}
