//! The ring: each rank keeps its queries; shards of keys and values travel from rank to rank, each to the right.
//!
//! While a rank computes with its present shard, it sends that shard on and receives the next one: after `ranks − 1`
//! transfers every rank has seen all keys (Liu et al. 2023, Ring Attention, arXiv 2310.01889). This takes two buffers
//! of one shard.

mod blocks;
mod fixed;
pub(crate) mod gradients;
mod merged;
pub(crate) mod pieces;

use attn_core::dropout::Dropout;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Outputs, Result, View};
use attn_simd::{KernelElement, Plan};
use bytemuck::Pod;

use crate::call::Call;
use crate::tensors::{Shard, pack_shard};
use crate::wire::Traffic;

/// Tag of travelling shards.
const TAG: i32 = 4;

/// Runs a call that has been agreed on.
pub(crate) fn run<T, O, M>(call: &Call<'_, '_, T, M>, outputs: Outputs<'_, O>) -> Result<Traffic>
where
    T: KernelElement + Pod,
    O: KernelElement,
    M: Mods + Sync,
{
    if call.attn.is_reproducible() {
        let mut blocks = fixed::Blocks::new(call);
        let traffic = travel(call, |owner, shard, poll| blocks.take(call, owner, shard, poll))?;
        finish(call, &blocks.rows(call)?, outputs)?;
        return Ok(traffic);
    }
    let mut rows = merged::Rows::new(call)?;
    let traffic = travel(call, |owner, shard, poll| rows.take(call, owner, shard, poll))?;
    rows.finish(call.attn.get_sinks(), outputs);
    Ok(traffic)
}

/// Calls `take` with every shard, its owner, and the function that lets MPI work.
fn travel<T, M>(
    call: &Call<'_, '_, T, M>,
    mut take: impl FnMut(usize, Shard<'_, T>, &mut dyn FnMut()) -> Result<()>,
) -> Result<Traffic>
where
    T: KernelElement + Pod,
    M: Mods + Sync,
{
    let (me, ranks, sizes) = (call.cluster.rank(), call.cluster.ranks(), call.kv_sizes());
    let [batch, heads, head_dim, value_dim] = sizes;
    let floats = |rank: usize| batch * heads * call.keys.local_len(rank) * (head_dim + value_dim);
    let longest = (0..ranks).map(floats).max().unwrap_or(0);
    let mut held = call.cluster.scratch.lend::<T>(longest);
    pack_shard(call.k, call.v, &mut held);
    let mut next = call.cluster.scratch.lend::<T>(if ranks > 1 { longest } else { 0 });
    let (right, left) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    let mut traffic = Traffic::default();
    for step in 0..ranks {
        let (owner, after) = ((me + ranks - step) % ranks, (me + 2 * ranks - step - 1) % ranks);
        let bytes: &[u8] = bytemuck::cast_slice(&held[..floats(owner)]);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        if step + 1 < ranks {
            sends.push((right, bytes));
            receives.push((left, bytemuck::cast_slice_mut::<T, u8>(&mut next[..floats(after)])));
        }
        let shard = Shard::new(&held, sizes, call.keys.local_len(owner))?;
        let what = "keys and values of the ring";
        let (result, more) = call.cluster.wire.exchange(what, TAG, &sends, receives, |poll| take(owner, shard, poll));
        result?;
        traffic.add(more);
        std::mem::swap(&mut held, &mut next);
    }
    Ok(traffic)
}

/// Takes the sinks and dropout's factor in, divides, and writes.
fn finish<T, O, M>(call: &Call<'_, '_, T, M>, rows: &[f32], outputs: Outputs<'_, O>) -> Result<()>
where
    T: KernelElement,
    O: KernelElement,
    M: Mods + Sync,
{
    let mut attn = Attention::new();
    if let Some(sinks) = call.attn.get_sinks() {
        attn = attn.sinks(sinks);
    }
    if let Dropout::Keep { p, .. } = call.attn.get_dropout() {
        attn = attn.dropout(Dropout::Keep { mask: View::broadcast(&[true], &[])?, p: *p });
    }
    let shape = AttnShape { q_len: call.q.sizes()[2], kv_len: 0, ..call.shape };
    Plan::new(&attn, shape, call.cluster.level)?.finish(rows, outputs)
}
