//! The all-to-all of the heads: every rank gets some heads of the whole sequence, computes them as one process would,
//! and sends each rank its rows of the result.

use attn_core::score_mod::Mods;
use attn_core::{AttnShape, Layout, Outputs, Result, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::KernelElement;
use bytemuck::{Pod, cast_slice, cast_slice_mut};

use crate::call::Call;
use crate::line;
use crate::part::{Local, Part};
use crate::ring::pieces::WORK;
use crate::sharding::Sharding;
use crate::split::Split;
use crate::tensors::{pack, rows_of, write_row, zeros};
use crate::wire::Traffic;

/// Tags: inputs, outputs, lse.
const TAGS: [i32; 3] = [5, 6, 8];

/// Runs a call that has been agreed on.
pub(crate) fn run<T, O, M>(call: &Call<'_, '_, T, M>, outputs: Outputs<'_, O>) -> Result<Traffic>
where
    T: KernelElement + Pod,
    O: KernelElement + Pod,
    M: Mods + Sync,
{
    let (me, ranks, whole) = (call.cluster.rank(), call.cluster.ranks(), call.shape);
    let splits = Split::of(whole.q_heads, whole.kv_heads, ranks).unwrap_or_default();
    let mine = splits[me].clone();
    let shape = AttnShape { q_heads: mine.heads.len(), kv_heads: mine.kv_heads.len(), ..whole };
    let ([q, k, v], mut traffic) = gather_heads(call, &splits, &shape)?;
    let (rows, dim) = (shape.rows(), shape.value_dim);
    let (mut out, mut lse): (Vec<O>, Vec<f32>) = (zeros(rows * dim), zeros(rows));
    let view = |x, heads, len, dim| View::new(x, Layout::Bhsd, [shape.batch, heads, len, dim]);
    let q = view(&q, shape.q_heads, shape.q_len, shape.head_dim)?;
    let k = view(&k, shape.kv_heads, shape.kv_len, shape.head_dim)?;
    let v = view(&v, shape.kv_heads, shape.kv_len, shape.value_dim)?;
    let mut runner = Runner::new().level(call.cluster.level).threads(call.cluster.threads);
    // As many queries as one call of the kernels computes in some seconds: others may ask for a sign of life.
    let row = shape.batch * shape.q_heads * (shape.head_dim + shape.value_dim);
    let at_once = (WORK / row.saturating_mul(shape.kv_len).max(1)).max(64);
    for first in (0..shape.q_len).step_by(at_once) {
        line::answer();
        let queries = first..shape.q_len.min(first + at_once);
        let sizes = [shape.batch, shape.q_heads, queries.len(), dim];
        let strides = [shape.q_heads * shape.q_len * dim, shape.q_len * dim, dim, 1].map(usize::cast_signed);
        let mut some = zeros(shape.batch * shape.q_heads * queries.len());
        let to = Outputs::new(ViewMut::strided(&mut out, sizes, strides, first * dim)?).lse(&mut some);
        let part = Part { heads: mine.heads.clone(), queries: queries.clone(), ..Part::whole(&whole) };
        let local = Local::new(call.attn, whole, part);
        runner.forward(&local.with_sinks(), rows_of(q, queries.clone()), k, v, to)?;
        for (to, some) in lse.chunks_exact_mut(shape.q_len).zip(some.chunks_exact(queries.len())) {
            to[queries.clone()].copy_from_slice(some);
        }
    }

    let Outputs { out: mut target, lse: target_lse, .. } = outputs;
    let n = call.q.sizes()[2];
    let (rows, more) = scatter_rows(call, &splits, &out, dim, TAGS[1]);
    traffic.add(more);
    for_each_row(&splits, shape.batch, n, &rows, dim, |at, row| write_row(&mut target, at, row));
    if let Some(target) = target_lse {
        let (rows, more) = scatter_rows(call, &splits, &lse, 1, TAGS[2]);
        traffic.add(more);
        for_each_row(&splits, shape.batch, n, &rows, 1, |[b, h, i], row| {
            target[(b * whole.q_heads + h) * n + i] = row[0];
        });
    }
    Ok(traffic)
}

/// This rank's heads of q, k and v over all positions.
fn gather_heads<T, M>(call: &Call<'_, '_, T, M>, splits: &[Split], shape: &AttnShape) -> Result<([Vec<T>; 3], Traffic)>
where
    T: KernelElement + Pod,
    M: Mods + Sync,
{
    let AttnShape { batch, q_heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let sends: Vec<Vec<T>> = splits
        .iter()
        .map(|split| {
            let mut buffer = Vec::new();
            pack(call.q, split.heads.clone(), &mut buffer);
            pack(call.k, split.kv_heads.clone(), &mut buffer);
            pack(call.v, split.kv_heads.clone(), &mut buffer);
            buffer
        })
        .collect();
    let parts = |rank: usize| {
        let (n, m) = (batch * call.queries.local_len(rank), batch * call.keys.local_len(rank));
        [n * q_heads * head_dim, m * kv_heads * head_dim, m * kv_heads * value_dim]
    };
    let mut received: Vec<Vec<T>> = (0..splits.len()).map(|rank| zeros(parts(rank).iter().sum())).collect();
    let outgoing: Vec<(usize, &[u8])> = sends.iter().map(|x| cast_slice(x)).enumerate().collect();
    let incoming: Vec<(usize, &mut [u8])> = received.iter_mut().map(|x| cast_slice_mut(x)).enumerate().collect();
    let what = "heads of the all-to-all";
    let ((), traffic) = call.cluster.wire.exchange(what, TAGS[0], &outgoing, incoming, |_| ());
    drop(sends);
    let mut all =
        [(call.queries, q_heads, head_dim), (call.keys, kv_heads, head_dim), (call.keys, kv_heads, value_dim)]
            .map(|(sharding, heads, dim)| zeros(batch * heads * sharding.len() * dim));
    for (rank, buffer) in received.iter().enumerate() {
        let [q_part, k_part, _] = parts(rank);
        let (q, kv) = buffer.split_at(q_part);
        let (k, v) = kv.split_at(k_part);
        put_rows(call.queries, rank, q, head_dim, &mut all[0]);
        put_rows(call.keys, rank, k, head_dim, &mut all[1]);
        put_rows(call.keys, rank, v, value_dim, &mut all[2]);
    }
    Ok((all, traffic))
}

/// Puts a rank's rows, `[batch · heads, its positions, dim]`, where they are in `[batch · heads, all positions, dim]`.
fn put_rows<T: Copy>(sharding: &Sharding, rank: usize, from: &[T], dim: usize, to: &mut [T]) {
    let (n, len) = (sharding.local_len(rank), sharding.len());
    for (pair, rows) in from.chunks_exact((n * dim).max(1)).enumerate() {
        for (row, range) in sharding.rows(rank) {
            let (from, to_start) = (row * dim..(row + range.len()) * dim, (pair * len + range.start) * dim);
            to[to_start..to_start + from.len()].copy_from_slice(&rows[from]);
        }
    }
}

/// Sends each rank its rows of what this rank has computed; gives this rank's rows of what each has.
fn scatter_rows<E: Pod, T, M>(
    call: &Call<'_, '_, T, M>,
    splits: &[Split],
    all: &[E],
    dim: usize,
    tag: i32,
) -> (Vec<Vec<E>>, Traffic)
where
    T: KernelElement,
    M: Mods + Sync,
{
    let (len, batch, me) = (call.queries.len(), call.shape.batch, call.cluster.rank());
    let of = |rank: usize| {
        let mut buffer = Vec::new();
        for rows in all.chunks_exact((len * dim).max(1)) {
            for range in call.queries.of(rank) {
                buffer.extend_from_slice(&rows[range.start * dim..range.end * dim]);
            }
        }
        buffer
    };
    let sends: Vec<Vec<E>> = (0..splits.len()).map(of).collect();
    let n = call.queries.local_len(me);
    let mut received: Vec<Vec<E>> = splits.iter().map(|split| zeros(batch * split.heads.len() * n * dim)).collect();
    let outgoing: Vec<(usize, &[u8])> = sends.iter().map(|x| cast_slice(x)).enumerate().collect();
    let incoming: Vec<(usize, &mut [u8])> = received.iter_mut().map(|x| cast_slice_mut(x)).enumerate().collect();
    let what = "rows of the all-to-all";
    let ((), traffic) = call.cluster.wire.exchange(what, tag, &outgoing, incoming, |_| ());
    (received, traffic)
}

/// Calls `f` with every row that was received, and its place `[batch, head, query]` on this rank.
fn for_each_row<E>(
    splits: &[Split],
    batch: usize,
    n: usize,
    received: &[Vec<E>],
    dim: usize,
    mut f: impl FnMut([usize; 3], &[E]),
) {
    for (split, rows) in splits.iter().zip(received) {
        for (pair, at) in (0..batch).flat_map(|b| split.heads.clone().map(move |h| [b, h])).enumerate() {
            for i in 0..n {
                f([at[0], at[1], i], &rows[(pair * n + i) * dim..][..dim]);
            }
        }
    }
}
