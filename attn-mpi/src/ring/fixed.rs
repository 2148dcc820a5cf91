//! The ring with the bits of one process: states of whole chunks of 512 keys, merged in the tree of their positions.
//!
//! A chunk that is spread over several shards is put together first, when its last key arrives. The kernel of
//! reproducible calls of one process computes it.

use std::collections::BTreeMap;

use attn_core::score_mod::Mods;
use attn_core::{AttnShape, Result, View, state};
use attn_simd::{KernelElement, Plan, Workspace};
use bytemuck::Pod;
use rayon::prelude::*;

use super::blocks::{Queries, blocks, place};
use super::pieces::{WORK, pair};
use crate::call::Call;
use crate::nodes::{CHUNK, Node, Nodes, cover, keys_of, parts_of, whole_chunks};
use crate::part::{Local, Part};
use crate::tensors::{Shard, rows_of, zeros};

/// Queries of a block: what one thread computes with a node.
const QUERIES: usize = 64;

/// Multiplications between two calls of MPI: the kernel of decoding is slower than that of many queries.
const DECODED: usize = WORK / 8;

/// Blocks of queries with the nodes that they have seen, and chunks of which some keys are there.
pub(super) struct Blocks<'c, T> {
    /// The highest level of a node that one thread computes at once.
    largest: u32,
    blocks: Vec<(Queries, View<'c, T>, Nodes)>,
    chunks: BTreeMap<usize, Chunk<T>>,
}

/// A chunk that lies in several shards: keys and values as a shard's, and how many of them are there.
struct Chunk<T> {
    buffer: Vec<T>,
    there: usize,
}

impl<'c, T: KernelElement + Pod> Blocks<'c, T> {
    pub(super) fn new<M: Mods + Sync>(call: &Call<'c, '_, T, M>) -> Self {
        let block = |queries: Queries| {
            let q = rows_of(call.q, queries.row..queries.row + queries.range.len());
            (queries, q, Nodes::default())
        };
        let keys = DECODED / QUERIES / pair(call).max(1);
        let largest = (keys / CHUNK).checked_ilog2().unwrap_or(0);
        Self { largest, blocks: blocks(call, QUERIES).into_iter().map(block).collect(), chunks: BTreeMap::new() }
    }

    /// Attends to the chunks of a shard, and to those that it completes.
    pub(super) fn take<M: Mods + Sync>(
        &mut self,
        call: &Call<'_, '_, T, M>,
        owner: usize,
        shard: Shard<'_, T>,
        poll: &mut dyn FnMut(),
    ) -> Result<()> {
        let (kv_len, largest) = (call.shape.kv_len, self.largest);
        for (row, range) in call.keys.rows(owner) {
            let whole = whole_chunks(&range, kv_len);
            for node in cover(whole.clone()).into_iter().flat_map(|node| parts_of(node, largest)) {
                let keys = keys_of(node, kv_len);
                if !keys.is_empty() {
                    let part = shard.rows(row + keys.start - range.start..row + keys.end - range.start);
                    self.node(call, node, part, poll)?;
                }
            }
            // What lies before and behind the whole chunks, chunk by chunk.
            let mut at = range.start;
            while at < range.end {
                let number = at / CHUNK;
                let end = range.end.min((number + 1) * CHUNK);
                if !whole.contains(&number) {
                    let part = shard.rows(row + at - range.start..row + end - range.start);
                    if let Some(buffer) = self.stash(call, number, at, part)? {
                        let len = keys_of((0, number), kv_len).len();
                        self.node(call, (0, number), Shard::new(&buffer, call.kv_sizes(), len)?, poll)?;
                    }
                }
                at = end;
            }
        }
        Ok(())
    }

    /// Keeps some keys of a chunk; the chunk, if it is whole now.
    fn stash<M: Mods + Sync>(
        &mut self,
        call: &Call<'_, '_, T, M>,
        number: usize,
        first: usize,
        part: Shard<'_, T>,
    ) -> Result<Option<Vec<T>>> {
        let (keys, [batch, heads, head_dim, value_dim]) = (keys_of((0, number), call.shape.kv_len), call.kv_sizes());
        let len = keys.len();
        let all = batch * heads * len * (head_dim + value_dim);
        let chunk = self.chunks.entry(number).or_insert_with(|| Chunk { buffer: zeros(all), there: 0 });
        let (k, v) = chunk.buffer.split_at_mut(batch * heads * len * head_dim);
        for (to, from, dim) in [(k, part.k, head_dim), (v, part.v, value_dim)] {
            for pair in 0..batch * heads {
                for n in 0..from.sizes()[2] {
                    let start = (pair * len + first - keys.start + n) * dim;
                    let row = from.row(pair / heads, pair % heads, n);
                    to[start..start + dim].iter_mut().zip(row.iter()).for_each(|(to, x)| *to = x);
                }
            }
        }
        chunk.there += part.k.sizes()[2];
        Ok((chunk.there == len).then(|| self.chunks.remove(&number)).flatten().map(|chunk| chunk.buffer))
    }

    /// Computes the state of a node for all blocks, each on one thread. Some blocks at a time: MPI is called between.
    fn node<M: Mods + Sync>(
        &mut self,
        call: &Call<'_, '_, T, M>,
        node: Node,
        part: Shard<'_, T>,
        poll: &mut dyn FnMut(),
    ) -> Result<()> {
        let work = QUERIES.saturating_mul(part.k.sizes()[2]).saturating_mul(pair(call));
        let at_once = (DECODED / work.max(1)).max(rayon::current_num_threads());
        let (first, value_dim) = (keys_of(node, call.shape.kv_len).start, call.shape.value_dim);
        // Only this thread calls MPI: the others get what they compute with.
        let (whole, attn, level) = (call.shape, call.attn, call.cluster.level);
        let compute = |workspace: &mut Workspace, (queries, q, nodes): &mut (Queries, View<'_, T>, Nodes)| {
            let shape = AttnShape { q_len: queries.range.len(), ..whole };
            let wanted = Part { queries: queries.range.clone(), ..Part::whole(&whole) };
            let local = Local::new(attn, whole, wanted);
            let attn = local.attention();
            let plan = Plan::new(&attn, shape, level)?;
            let mut rows = vec![0.0; state::len(&shape)?];
            let lines = workspace.try_lines(plan.states_lines())?;
            plan.states(first, *q, part.k, part.v, &mut rows, lines)?;
            nodes.insert(node, rows, value_dim)
        };
        self.blocks.chunks_mut(at_once).try_for_each(|blocks| {
            poll();
            blocks.par_iter_mut().try_for_each_init(Workspace::new, compute)
        })
    }

    /// The states of all rows of the rank.
    pub(super) fn rows<M: Mods + Sync>(self, call: &Call<'_, '_, T, M>) -> Result<Vec<f32>> {
        let shape = AttnShape { q_len: call.q.sizes()[2], ..call.shape };
        let mut all = vec![0.0; state::len(&shape)?];
        state::clear(&mut all, shape.value_dim);
        for (queries, _, nodes) in self.blocks {
            if let Some(rows) = nodes.finish(shape.value_dim)? {
                place(&shape, &queries, shape.q_len, &rows, &mut all);
            }
        }
        Ok(all)
    }
}
