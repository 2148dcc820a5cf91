//! A rank's queries in blocks, and the places of a block's rows among those of the rank.

use std::ops::Range;

use attn_core::AttnShape;

use crate::call::Call;

/// Queries that are computed together: a range of the whole, and the row at which it begins in the rank's tensor.
#[derive(Clone, Debug)]
pub(super) struct Queries {
    pub(super) row: usize,
    pub(super) range: Range<usize>,
}

/// A rank's queries in blocks of at most so many.
pub(super) fn blocks<T, M>(call: &Call<'_, '_, T, M>, most: usize) -> Vec<Queries> {
    let cut = |(row, range): (usize, Range<usize>)| {
        range.clone().step_by(most).map(move |start| {
            let end = (start + most).min(range.end);
            Queries { row: row + start - range.start, range: start..end }
        })
    };
    call.queries.rows(call.cluster.rank()).flat_map(cut).collect()
}

/// Copies the rows of a block, `[batch, q_heads, n]`, to those of the rank, `[batch, q_heads, all]`.
pub(super) fn place(shape: &AttnShape, queries: &Queries, all: usize, from: &[f32], to: &mut [f32]) {
    let (row, n) = (shape.value_dim + 2, queries.range.len());
    for (pair, rows) in from.chunks_exact((n * row).max(1)).enumerate() {
        let start = (pair * all + queries.row) * row;
        to[start..start + n * row].copy_from_slice(rows);
    }
}
