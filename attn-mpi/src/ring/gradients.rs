//! The ring of gradients: keys and values travel as in a prefill, and their sums of `dk` and `dv` travel behind them.
//!
//! In each step a rank computes the share of its queries in the gradients of its present shard. Meanwhile the next
//! shard arrives, and so do the sums of all earlier ranks for the present one. The sums of the last step leave. After
//! `ranks` steps one more transfer brings the sums home. Computation hides all transfers but this last one.
//!
//! Sums are f32, and each is a chain in the order of the ring, which begins at the rank that holds the keys.

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{Layout, Result, ViewMut};
use attn_parallel::Runner;
use attn_simd::KernelElement;
use attn_simd::backward::Inputs;
use bytemuck::Pod;

use super::pieces::{Most, Piece, WORK, pair, pieces};
use crate::call::Call;
use crate::scratch::Lent;
use crate::tensors::{Shard, pack_shard, rows_of};
use crate::wire::Traffic;

/// Tag of travelling shards and sums.
const TAG: i32 = 9;
/// Queries of a piece at least, if one call of the kernels does not take too long.
const QUERIES: usize = 2048;
/// Keys of a piece at most: each thread of the kernels keeps sums of its `dk` and `dv`.
const KEYS: usize = 8192;

/// The gradients on a rank, in f32.
pub(crate) struct Sums<'s> {
    /// `[batch, q_heads, positions of queries, head_dim]`.
    pub(crate) dq: Lent<'s, f32>,
    /// Those of its keys and values, as [`Shard`] has them; there may be room behind them.
    pub(crate) of_keys: Lent<'s, f32>,
}

/// Runs a call that has been agreed on. An error of the kernels stops this rank's computation, and none of its
/// messages: the others wait for them.
pub(crate) fn run<'s, T, G, M>(call: &Call<'s, '_, T, M>, inputs: &Inputs<'_, T, G>) -> (Result<Sums<'s>>, Traffic)
where
    T: KernelElement + Pod,
    G: KernelElement,
    M: Mods + Sync,
{
    let (me, ranks, sizes) = (call.cluster.rank(), call.cluster.ranks(), call.kv_sizes());
    let [batch, heads, head_dim, value_dim] = sizes;
    let floats = |rank: usize| batch * heads * call.keys.local_len(rank) * (head_dim + value_dim);
    let longest = (0..ranks).map(floats).max().unwrap_or(0);
    let mut rows = Rows::new(call, inputs);
    let (scratch, travelling) = (&call.cluster.scratch, if ranks > 1 { longest } else { 0 });
    let mut held = scratch.lend::<T>(longest);
    pack_shard(call.k, call.v, &mut held);
    let mut next = scratch.lend::<T>(travelling);
    // What this step adds; the sums that it is added to; those that leave.
    let mut added = scratch.lend::<f32>(longest);
    let mut arriving = scratch.lend::<f32>(travelling);
    let mut leaving = scratch.lend::<f32>(travelling);
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
            if result.is_ok() { rows.take(call, owner(step), shard, added, poll) } else { Ok(()) }
        };
        let what = "keys, values and gradients of the ring";
        let (this, more) = call.cluster.wire.exchange(what, TAG, &sends, receives, work);
        result = result.and(this);
        traffic.add(more);
        if step > 0 {
            added.iter_mut().zip(arriving.iter()).for_each(|(to, before)| *to += before);
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
    (result.map(|()| Sums { dq: rows.dq, of_keys: added }), traffic)
}

/// The sums of the rank's `dq`, and room for what one call of the kernels gives.
struct Rows<'i, 's, T, G> {
    most: Most,
    inputs: &'i Inputs<'i, T, G>,
    dq: Lent<'s, f32>,
    given: [Lent<'s, f32>; 3],
    lse: Vec<f32>,
}

impl<'i, 's, T: KernelElement + Pod, G: KernelElement> Rows<'i, 's, T, G> {
    fn new<M: Mods + Sync>(call: &Call<'s, '_, T, M>, inputs: &'i Inputs<'i, T, G>) -> Self {
        let ([batch, heads, all, head_dim], scratch) = (call.q.sizes(), &call.cluster.scratch);
        let most = Most::new(pair(call), all, QUERIES, KEYS, WORK / 4);
        let [_, kv_heads, _, value_dim] = call.kv_sizes();
        let (n, m) = (all.min(most.queries), call.keys.longest().min(most.keys));
        let given = [heads * n * head_dim, kv_heads * m * head_dim, kv_heads * m * value_dim];
        let given = given.map(|floats| scratch.lend(batch * floats));
        Self { most, inputs, dq: scratch.zeros(batch * heads * all * head_dim), given, lse: Vec::new() }
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
        let ([batch, heads, all, head_dim], all_keys) = (call.q.sizes(), call.keys.local_len(owner));
        let [_, kv_heads, _, value_dim] = call.kv_sizes();
        let (sums_k, sums_v) = sums.split_at_mut(batch * kv_heads * all_keys * head_dim);
        for Piece { queries, keys, local } in pieces(call, owner, self.most) {
            poll();
            let (n, m) = (queries.len(), keys.len());
            let rows = |x| rows_of(x, queries.clone());
            let (part, q) = (shard.rows(keys.clone()), rows_of(call.q, queries.clone()));
            self.lse.clear();
            self.lse.extend(self.inputs.lse.chunks_exact(all.max(1)).flat_map(|pair| &pair[queries.clone()]));
            let (out, dy) = (rows(self.inputs.out), rows(self.inputs.dy));
            let [dq, dk, dv] = &mut self.given;
            let dq = &mut dq[..batch * heads * n * head_dim];
            let dk = &mut dk[..batch * kv_heads * m * head_dim];
            let dv = &mut dv[..batch * kv_heads * m * value_dim];
            let gradients = Gradients::new(
                ViewMut::new(dq, Layout::Bhsd, q.sizes())?,
                ViewMut::new(dk, Layout::Bhsd, part.k.sizes())?,
                ViewMut::new(dv, Layout::Bhsd, part.v.sizes())?,
            );
            let inputs = Inputs { q, k: part.k, v: part.v, out, lse: &self.lse, dy };
            let mut runner = Runner::new().level(call.cluster.level).threads(call.cluster.threads);
            runner.backward(&local.attention(), inputs, gradients)?;
            add(dq, n * head_dim, &mut self.dq, all * head_dim, queries.start * head_dim);
            add(dk, m * head_dim, sums_k, all_keys * head_dim, keys.start * head_dim);
            add(dv, m * value_dim, sums_v, all_keys * value_dim, keys.start * value_dim);
        }
        Ok(())
    }
}

/// Adds the rows of a part, so many floats for each batch entry and head, to those of the whole from `first` on.
fn add(from: &[f32], part: usize, to: &mut [f32], whole: usize, first: usize) {
    for (pair, from) in from.chunks_exact(part.max(1)).enumerate() {
        let to = &mut to[pair * whole + first..][..part];
        to.iter_mut().zip(from).for_each(|(to, x)| *to += x);
    }
}
