//! A decode call on tensors, as a plan makes it: all sequences have one length.

use attn_core::kv_cache::{CacheView, Queries};
use attn_core::{AttnShape, Outputs, Result, View};

use super::call::{CHUNK, Call, MAX_ROWS, RowAt, Sequences, Sizes, state_lines};
use super::kernel::{Buffers, compute};
use super::pieces::Pieces;
use super::rounds::Round;
use super::run::DecodeCall;
use super::tree;
use crate::dtype::{Input, KernelElement, Source};
use crate::level::Level;
use crate::scoring::Scoring;
use crate::workspace::{Cutter, Line};

/// The largest number of queries that a plan decodes. A call with more may run on AMX: this number is the limit of
/// both.
pub(crate) const MAX_QUERIES: usize = 16;

/// Whether a plan decodes calls of this shape: each key/value head has few rows.
pub(crate) fn is_few(shape: &AttnShape) -> bool {
    shape.q_len <= MAX_QUERIES && shape.group().saturating_mul(shape.q_len) <= MAX_ROWS
}

/// Lines of scratch of one thread, for a shape.
pub(crate) fn lines(level: Level, shape: &AttnShape) -> usize {
    if shape.rows() == 0 {
        return 0; // no piece needs scratch, and the dims of a tensor without rows may be anything
    }
    sizes(level, shape).lines() + state_lines(shape.value_dim)
}

/// Sizes of one thread's scratch, for a shape.
fn sizes(level: Level, shape: &AttnShape) -> Sizes {
    if shape.rows() == 0 {
        return Sizes::default();
    }
    let rows = shape.group().saturating_mul(shape.q_len);
    let slots = tree::slots_for(shape.kv_len.div_ceil(CHUNK));
    // Whatever the strides, which a plan does not know.
    Sizes::new(level, (rows, shape.kv_heads), [shape.head_dim, shape.value_dim], slots)
}

fn call<'w>(scoring: Scoring<'w>, shape: AttnShape, q: Input<'w>, source: Source<'w>) -> Call<'w> {
    let sequences = Sequences { shape, queries: Queries::All, lens: None };
    let (sizes, beside) = (sizes(scoring.level, &shape), source.has_heads_beside());
    Call { sizes, scoring, sequences, source, prefix: None, q, beside }
}

/// A call on tensors.
pub(crate) fn split<'w, T: KernelElement, O: KernelElement>(
    (scoring, shape): (Scoring<'w>, AttnShape),
    q: View<'w, T>,
    k: View<'w, T>,
    v: View<'w, T>,
    outputs: Outputs<'w, O>,
) -> Result<DecodeCall<'w>> {
    let Outputs { out, lse, .. } = outputs;
    let call = call(scoring, shape, T::input(q), T::source(CacheView::of_tensors(k, v)?));
    Ok(DecodeCall::new(call, O::row_target(out), lse))
}

/// Writes the states of all rows over the keys of `source`, `[batch, q_heads, q_len]` of `2 + value_dim` numbers. The
/// shape has rows, and `workspace` as many [`lines`] as it needs.
pub(crate) fn states(
    (scoring, shape): (Scoring<'_>, AttnShape),
    q: Input<'_>,
    source: Source<'_>,
    states: &mut [f32],
    workspace: &mut [Line],
) {
    let call = call(scoring, shape, q, source);
    let (state, lines) = workspace.split_at_mut(state_lines(shape.value_dim));
    let state = Cutter::new(state).floats(call.state_len(MAX_ROWS));
    let mut buffers = Buffers::new(lines, &call.sizes);
    let row_len = call.state_len(1);
    for piece in Pieces::new(&call, Round::WHOLE) {
        let (state, mut places) = (&mut state[..piece.state_len()], [RowAt::default(); MAX_ROWS]);
        compute(&call, &piece, state, &mut buffers);
        for (row, at) in state.chunks_exact(row_len).zip(call.rows_of(piece.group(), &mut places).at) {
            let at = shape.row(at.sequence, at.head, at.query) * row_len;
            states[at..at + row_len].copy_from_slice(row);
        }
    }
}
