//! Decode: few queries over a cache whose tokens are shared out. Queries are on every rank; states come back in one
//! small all-gather, and every rank merges them in the same order.

use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Outputs, View, state};
use attn_simd::{KernelElement, Plan, Workspace};
use bytemuck::{Pod, cast_slice};
use rayon::prelude::*;

use crate::agree::{Record, text, view_hash};
use crate::cache::ShardedCache;
use crate::cluster::Cluster;
use crate::error::Result;
use crate::line;
use crate::nodes::{Node, Nodes, cover, joined, keys_of, parts_of, whole_chunks};
use crate::wire::Traffic;

/// Tag of the states.
const TAG: i32 = 10;

/// Chunks of a piece that one thread computes, as a power of two: 4096 keys.
const PIECE: u32 = 3;

/// Pieces that are computed before this rank looks whether others ask for a sign of life.
const AT_ONCE: usize = 4096;

impl Cluster {
    /// Attends with a few queries, `[batch, q_heads, q_len, head_dim]`, to all tokens of a cache. Every rank passes the
    /// same queries (checked by a hash) and gets the whole output, `[batch, q_heads, q_len, value_dim]`. Options mean
    /// the whole call, as in one over tensors of all keys: several new tokens want `Mask::causal(Align::BottomRight)`.
    ///
    /// A rank sends one state of `2 + value_dim` numbers for each row; with [`Attention::reproducible`] one for each
    /// node of the tree of positions that it holds whole: as many as there are runs of blocks, times the logarithm of
    /// their length. Then the result has the bits of one process.
    ///
    /// # Errors
    /// On every rank if one of them has arguments that do not fit, or if they disagree. No output has been written
    /// then.
    pub fn decode<'o, Q, T, O, M>(
        &self,
        attn: &Attention<'_, M>,
        q: View<'_, Q>,
        cache: &ShardedCache<T>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<Traffic>
    where
        Q: KernelElement,
        T: KernelElement + Pod,
        O: KernelElement,
        M: Mods + Sync,
    {
        let outputs = outputs.into();
        let ([batch, q_heads, q_len, head_dim], [.., value_dim]) = (q.sizes(), cache.sizes());
        let [kv_batch, kv_heads, k_dim, _] = cache.sizes();
        let check = || {
            cache.check_ranks(self)?;
            let kv = [kv_batch, kv_heads, cache.len()];
            let (k, v) = ([kv[0], kv[1], kv[2], k_dim], [kv[0], kv[1], kv[2], value_dim]);
            let shape = AttnShape::new(q.sizes(), k, v)?;
            outputs.check(&shape)?;
            if outputs.weights.is_some() {
                return Err(AttnError::Unsupported { what: "weights over ranks (attn_core::weights with the lse)" });
            }
            Plan::new(attn, shape, self.level)
        };
        let mut record = Record::new("decode", self.level, self.mixed);
        for (what, number) in [
            ("batch", batch),
            ("q_heads", q_heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
            ("q_len", q_len),
            ("kv_len", cache.len()),
        ] {
            record = record.with(what, number as u64);
        }
        let plan = record
            .with("the element type of the queries", text(Q::DTYPE.name()))
            .with("the element type of the cache", text(T::DTYPE.name()))
            .with("the element type of the output", text(O::DTYPE.name()))
            .with("whether an lse is wanted", u64::from(outputs.lse.is_some()))
            .with("the bytes of a message", self.wire.most as u64)
            .with("the queries", view_hash(q))
            .with_ranges("which rank holds which tokens", cache.held())
            .with_options(attn)
            .agree(&self.wire, check().map_err(Into::into))?;
        let states = self.own_states(&plan, q, cache)?;
        let (rows, traffic) = self.merged(&plan, cache, states)?;
        plan.finish(&rows, outputs)?;
        Ok(traffic)
    }

    /// The nodes that this rank can compute.
    fn own_states<Q, T, M>(
        &self,
        plan: &Plan<'_, '_, M>,
        q: View<'_, Q>,
        cache: &ShardedCache<T>,
    ) -> attn_core::Result<Nodes>
    where
        Q: KernelElement,
        T: KernelElement + Pod,
        M: Mods + Sync,
    {
        let (len, shape) = (cache.len(), *plan.shape());
        let compute = |workspace: &mut Workspace, node: Node| {
            let keys = keys_of(node, len);
            let part = cache.part(keys.clone())?;
            let mut rows = vec![0.0; state::len(&shape)?];
            plan.states(keys.start, q, part.k, part.v, &mut rows, workspace.try_lines(plan.states_lines())?)?;
            Ok((node, rows))
        };
        let (own, mut states) = (own_nodes(cache, self.rank()), Vec::new());
        let at_once = AT_ONCE.max(rayon::current_num_threads());
        for some in own.chunks(at_once) {
            line::answer();
            let some = some.par_iter().map_init(Workspace::new, |workspace, &node| compute(workspace, node));
            states.extend(some.collect::<attn_core::Result<Vec<_>>>()?);
        }
        let mut nodes = Nodes::default();
        for (node, rows) in states {
            nodes.insert(node, rows, shape.value_dim)?;
        }
        Ok(nodes)
    }

    /// The states of all ranks, merged in an order that every rank knows.
    fn merged<T, M>(
        &self,
        plan: &Plan<'_, '_, M>,
        cache: &ShardedCache<T>,
        nodes: Nodes,
    ) -> attn_core::Result<(Vec<f32>, Traffic)>
    where
        T: KernelElement + Pod,
        M: Mods + Sync,
    {
        let (shape, ranks) = (*plan.shape(), self.ranks());
        let (size, value_dim) = (state::len(&shape)?, shape.value_dim);
        let mut nothing = vec![0.0; size];
        state::clear(&mut nothing, value_dim);
        let what = "states of a decode step";
        if plan.attn().is_reproducible() {
            let all: Vec<Vec<Node>> = (0..ranks).map(|rank| joined(own_nodes(cache, rank))).collect();
            let most = all.iter().map(Vec::len).max().unwrap_or(0);
            let mut mine = nodes.into_rows().concat();
            mine.resize(most * size, 0.0);
            let (bytes, traffic) = self.wire.all_gather(what, TAG, cast_slice(&mine));
            let mut tree = Nodes::default();
            for (rank, nodes) in all.iter().enumerate() {
                for (n, &node) in nodes.iter().enumerate() {
                    tree.insert(node, floats(&bytes, rank * most + n, size), value_dim)?;
                }
            }
            return Ok((tree.finish(value_dim)?.unwrap_or(nothing), traffic));
        }
        let mine = nodes.finish(value_dim)?.unwrap_or(nothing);
        let (bytes, traffic) = self.wire.all_gather(what, TAG, cast_slice(&mine));
        let mut tree = Nodes::default();
        for rank in 0..ranks {
            tree.insert((0, rank), floats(&bytes, rank, size), value_dim)?;
        }
        Ok((tree.finish(value_dim)?.unwrap_or(mine), traffic))
    }
}

/// The pieces that a rank computes.
fn own_nodes<T: KernelElement + Pod>(cache: &ShardedCache<T>, rank: usize) -> Vec<Node> {
    let ranges = cache.held_by(rank).iter().map(|range| whole_chunks(range, cache.len()));
    let nodes = ranges.flat_map(cover);
    nodes.flat_map(|node| parts_of(node, PIECE)).filter(|node| !keys_of(*node, cache.len()).is_empty()).collect()
}

/// The `n`-th block of so many floats.
fn floats(bytes: &[u8], n: usize, size: usize) -> Vec<f32> {
    let block = &bytes[n * size * 4..(n + 1) * size * 4];
    block.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x)).collect()
}
