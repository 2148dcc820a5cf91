//! The ring by the fastest kernels: each part of the call gives an output and its lse, merged into the block's states.

use attn_core::score_mod::Mods;
use attn_core::{AttnShape, Layout, Outputs, Result, View, ViewMut, state};
use attn_parallel::Runner;
use attn_simd::KernelElement;

use super::blocks::{Queries, blocks, place};
use crate::call::Call;
use crate::part::{Local, Part};
use crate::tensors::{Shard, rows_of};

/// Queries of a block: enough to keep many threads busy, few enough to let MPI work between two calls.
const QUERIES: usize = 4096;

/// Blocks of queries, and the states of their rows so far.
pub(super) struct Blocks<'c, T> {
    blocks: Vec<(Queries, View<'c, T>, Vec<f32>)>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl<'c, T: KernelElement> Blocks<'c, T> {
    pub(super) fn new<M: Mods + Sync>(call: &Call<'c, '_, T, M>) -> Result<Self> {
        let block = |queries: Queries| {
            let n = queries.range.len();
            let mut rows = vec![0.0; state::len(&AttnShape { q_len: n, ..call.shape })?];
            state::clear(&mut rows, call.shape.value_dim);
            let q = rows_of(call.q, queries.row..queries.row + n);
            Ok((queries, q, rows))
        };
        let blocks = blocks(call, QUERIES).into_iter().map(block).collect::<Result<_>>()?;
        Ok(Self { blocks, out: Vec::new(), lse: Vec::new() })
    }

    /// Attends to a shard.
    pub(super) fn take<M: Mods + Sync>(
        &mut self,
        call: &Call<'_, '_, T, M>,
        owner: usize,
        shard: Shard<'_, T>,
        poll: &mut dyn FnMut(),
    ) -> Result<()> {
        let Self { blocks, out, lse } = self;
        for (queries, q, rows) in blocks {
            for (row, keys) in call.keys.rows(owner) {
                poll();
                let part = shard.rows(row..row + keys.len());
                let wanted = Part { queries: queries.range.clone(), keys, ..Part::whole(&call.shape) };
                let local = Local::new(call.attn, call.shape, wanted);
                if !local.sees_anything() {
                    continue;
                }
                let shape = AttnShape::new(q.sizes(), part.k.sizes(), part.v.sizes())?;
                out.resize(shape.rows() * shape.value_dim, 0.0);
                lse.resize(shape.rows(), 0.0);
                let to = Outputs::new(ViewMut::new(out, Layout::Bhsd, shape.output())?).lse(lse);
                let mut runner = Runner::new().level(call.cluster.level).threads(call.cluster.threads);
                runner.forward(&local.attention(), *q, part.k, part.v, to)?;
                merge(rows, out, lse, shape.value_dim)?;
            }
        }
        Ok(())
    }

    /// The states of all rows of the rank.
    pub(super) fn rows<M: Mods + Sync>(self, call: &Call<'_, '_, T, M>) -> Result<Vec<f32>> {
        let shape = AttnShape { q_len: call.q.sizes()[2], ..call.shape };
        let mut all = vec![0.0; state::len(&shape)?];
        for (queries, _, rows) in self.blocks {
            place(&shape, &queries, shape.q_len, &rows, &mut all);
        }
        Ok(all)
    }
}

/// Joins finished outputs to states.
fn merge(rows: &mut [f32], out: &[f32], lse: &[f32], value_dim: usize) -> Result<()> {
    let mut one = vec![0.0; value_dim + 2];
    for (n, (row, &lse)) in rows.chunks_exact_mut(value_dim + 2).zip(lse).enumerate() {
        state::from_output(&out[n * value_dim..][..value_dim], lse, &mut one);
        state::merge_states(row, &one, value_dim)?;
    }
    Ok(())
}
