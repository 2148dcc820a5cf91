//! The ring of gradients: keys and values travel as in a prefill, and their sums of `dk` and `dv` travel behind them.
//!
//! In each step a rank computes what its queries add to the gradients of the shard that it holds. Meanwhile the next
//! shard arrives, and so do the sums that all ranks before it have made for the present one. The sums of the last step
//! leave. After `ranks` steps one more transfer brings the sums home. Everything that travels hides behind computation,
//! but for that last transfer.
//!
//! Sums are f32, and each is a chain in the order of the ring, which begins at the rank that holds the keys.

use std::ops::Range;

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{AttnShape, Layout, Result, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::KernelElement;
use attn_simd::backward::Inputs;
use bytemuck::Pod;

use super::blocks::{Queries, blocks};
use crate::call::Call;
use crate::part::{Local, Part};
use crate::tensors::{Shard, pack, rows_of, zeros};
use crate::wire::Traffic;

/// Tag of travelling shards and sums.
const TAG: i32 = 9;
/// Queries of a block.
const QUERIES: usize = 4096;
/// Keys of a part at most: each thread of the kernels keeps sums of its `dk` and `dv`.
const KEYS: usize = 8192;

/// The gradients on a rank, in f32.
pub(crate) struct Sums {
    /// `[batch, q_heads, positions of queries, head_dim]`.
    pub(crate) dq: Vec<f32>,
    /// Those of its keys and values, as [`Shard`] has them.
    pub(crate) of_keys: Vec<f32>,
}

/// Runs a call that has been agreed on. An error of the kernels stops this rank's computation, and none of its
/// messages: the others wait for them.
pub(crate) fn run<T, G, M>(call: &Call<'_, '_, T, M>, inputs: &Inputs<'_, T, G>) -> (Result<Sums>, Traffic)
where
    T: KernelElement + Pod,
    G: KernelElement,
    M: Mods + Sync,
{
    let (me, ranks, sizes) = (call.cluster.rank(), call.cluster.ranks(), call.kv_sizes());
    let [batch, heads, head_dim, value_dim] = sizes;
    let floats = |rank: usize| batch * heads * call.keys.local_len(rank) * (head_dim + value_dim);
    let longest = (0..ranks).map(floats).max().unwrap_or(0);
    let mut blocks = Blocks::new(call, inputs);
    let mut held: Vec<T> = Vec::with_capacity(longest);
    pack(call.k, 0..heads, &mut held);
    pack(call.v, 0..heads, &mut held);
    held.resize(longest, T::zeroed());
    let mut next: Vec<T> = zeros(if ranks > 1 { longest } else { 0 });
    // What this step adds; the sums that it is added to; those that leave.
    let mut added: Vec<f32> = zeros(longest);
    let mut arriving: Vec<f32> = zeros(if ranks > 1 { longest } else { 0 });
    let mut leaving: Vec<f32> = arriving.clone();
    let (right, left) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    let owner = |step: usize| (me + 2 * ranks - step) % ranks;
    let (mut result, mut traffic) = (Ok(()), Traffic::default());
    for step in 0..ranks {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        if step + 1 < ranks {
            sends.push((right, bytemuck::cast_slice::<T, u8>(&held[..floats(owner(step))])));
            receives.push((left, bytemuck::cast_slice_mut::<T, u8>(&mut next[..floats(owner(step + 1))])));
        }
        if step > 0 {
            sends.push((right, bytemuck::cast_slice::<f32, u8>(&leaving[..floats(owner(step - 1))])));
            receives.push((left, bytemuck::cast_slice_mut::<f32, u8>(&mut arriving[..floats(owner(step))])));
        }
        let added = &mut added[..floats(owner(step))];
        let work = |poll: &mut dyn FnMut()| {
            added.fill(0.0);
            let shard = Shard::new(&held, sizes, call.keys.local_len(owner(step)))?;
            if result.is_ok() { blocks.take(call, owner(step), shard, added, poll) } else { Ok(()) }
        };
        let what = "keys, values and gradients of the ring";
        let (this, more) = call.cluster.wire.exchange(what, TAG, &sends, receives, work);
        result = result.and(this);
        traffic.add(more);
        if step > 0 {
            added.iter_mut().zip(&arriving).for_each(|(to, before)| *to += before);
        }
        if ranks > 1 {
            leaving[..added.len()].copy_from_slice(added);
        }
        std::mem::swap(&mut held, &mut next);
    }
    if ranks > 1 {
        let sends = [(right, bytemuck::cast_slice(&leaving[..floats(right)]))];
        let receives = vec![(left, bytemuck::cast_slice_mut(&mut added[..floats(me)]))];
        let what = "gradients of the ring, at its end";
        traffic.add(call.cluster.wire.exchange(what, TAG, &sends, receives, |_| ()).1);
    }
    added.truncate(floats(me));
    (result.map(|()| Sums { dq: blocks.dq, of_keys: added }), traffic)
}

/// Queries that are computed together, with their rows of what the gradients are computed from.
struct Block<'c, T, G> {
    queries: Queries,
    q: View<'c, T>,
    out: View<'c, G>,
    dy: View<'c, G>,
    lse: Vec<f32>,
}

/// Blocks of queries, the sums of their `dq`, and room for what one call of the kernels gives.
struct Blocks<'c, T, G> {
    blocks: Vec<Block<'c, T, G>>,
    dq: Vec<f32>,
    given: [Vec<f32>; 3],
}

impl<'c, T: KernelElement + Pod, G: KernelElement> Blocks<'c, T, G> {
    fn new<M: Mods + Sync>(call: &Call<'c, '_, T, M>, inputs: &Inputs<'c, T, G>) -> Self {
        let [batch, heads, all, head_dim] = call.q.sizes();
        let block = |queries: Queries| {
            let rows = queries.row..queries.row + queries.range.len();
            let lse = inputs.lse.chunks_exact(all.max(1)).flat_map(|pair| &pair[rows.clone()]).copied().collect();
            let (out, dy) = (rows_of(inputs.out, rows.clone()), rows_of(inputs.dy, rows.clone()));
            Block { queries, q: rows_of(call.q, rows), out, dy, lse }
        };
        let blocks = blocks(call, QUERIES).into_iter().map(block).collect();
        Self { blocks, dq: zeros(batch * heads * all * head_dim), given: Default::default() }
    }

    /// Adds to `dq`, and to the sums of a shard, what they give each other.
    fn take<M: Mods + Sync>(
        &mut self,
        call: &Call<'_, '_, T, M>,
        owner: usize,
        shard: Shard<'_, T>,
        sums: &mut [f32],
        poll: &mut dyn FnMut(),
    ) -> Result<()> {
        let (all_queries, all_keys) = (call.q.sizes()[2], call.keys.local_len(owner));
        let [batch, kv_heads, head_dim, value_dim] = call.kv_sizes();
        let (sums_k, sums_v) = sums.split_at_mut(batch * kv_heads * all_keys * head_dim);
        for Block { queries, q, out, dy, lse } in &self.blocks {
            for (row, keys) in call.keys.rows(owner).flat_map(cut) {
                poll();
                let part = shard.rows(row..row + keys.len());
                let m = keys.len();
                let wanted = Part { queries: queries.range.clone(), keys, ..Part::whole(&call.shape) };
                let local = Local::new(call.attn, call.shape, wanted);
                if !local.sees_anything() {
                    continue;
                }
                let shape = AttnShape::new(q.sizes(), part.k.sizes(), part.v.sizes())?;
                let [dq, dk, dv] = &mut self.given;
                dq.resize(shape.batch * shape.q_heads * shape.q_len * head_dim, 0.0);
                dk.resize(batch * kv_heads * m * head_dim, 0.0);
                dv.resize(batch * kv_heads * m * value_dim, 0.0);
                let gradients = Gradients::new(
                    ViewMut::new(dq, Layout::Bhsd, q.sizes())?,
                    ViewMut::new(dk, Layout::Bhsd, part.k.sizes())?,
                    ViewMut::new(dv, Layout::Bhsd, part.v.sizes())?,
                );
                let inputs = Inputs { q: *q, k: part.k, v: part.v, out: *out, lse, dy: *dy };
                let mut runner = Runner::new().level(call.cluster.level).threads(call.cluster.threads);
                runner.backward(&local.attention(), inputs, gradients)?;
                add(dq, shape.q_len * head_dim, &mut self.dq, all_queries * head_dim, queries.row * head_dim);
                add(dk, m * head_dim, sums_k, all_keys * head_dim, row * head_dim);
                add(dv, m * value_dim, sums_v, all_keys * value_dim, row * value_dim);
            }
        }
        Ok(())
    }
}

/// A range of keys in pieces of at most [`KEYS`], each with its first row.
fn cut((row, range): (usize, Range<usize>)) -> impl Iterator<Item = (usize, Range<usize>)> {
    let Range { start, end } = range;
    (start..end).step_by(KEYS).map(move |first| (row + first - start, first..end.min(first + KEYS)))
}

/// Adds the rows of a part, so many floats for each batch entry and head, to those of the whole from `first` on.
fn add(from: &[f32], part: usize, to: &mut [f32], whole: usize, first: usize) {
    for (pair, from) in from.chunks_exact(part.max(1)).enumerate() {
        let to = &mut to[pair * whole + first..][..part];
        to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
    }
}
