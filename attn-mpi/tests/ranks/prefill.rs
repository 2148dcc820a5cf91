//! Prefill over ranks against one process: every mask and option, both methods, all shardings.

use attn_core::dropout::Dropout;
use attn_core::position::alibi::Alibi;
use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Outputs, View, ViewMut};
use attn_mpi::{Cluster, Method, Sharding};

use crate::calls::{Inputs, Tables, bools, numbers, rows_of};
use crate::compare::{Result, alone, near, near_lse, same_bits, score_bound};

/// Every way to share `len` positions out: even, zig-zag, very uneven with an empty shard, and in stripes.
pub(crate) fn shardings(len: usize, ranks: usize) -> Vec<(&'static str, Sharding)> {
    let mut lens = vec![0; ranks];
    let mut rest = len;
    for (rank, shard) in lens.iter_mut().enumerate().skip(usize::from(ranks > 2)) {
        *shard = if rank + 1 == ranks { rest } else { rest * (1 + rank % 2) / 3 };
        rest -= *shard;
    }
    let stripes = (0..ranks).map(|rank| {
        let first = (rank * 64..len).step_by(ranks * 64);
        first.map(|start| start..(start + 64).min(len)).collect()
    });
    vec![
        ("even", Sharding::even(len, ranks)),
        ("zigzag", Sharding::zigzag(len, ranks)),
        ("uneven", Sharding::contiguous(&lens).expect("no overflow")),
        ("stripes", Sharding::new(stripes.collect()).expect("each position once")),
    ]
}

pub(crate) fn run(mut cluster: Cluster) {
    // GQA, and cross-attention with more keys than queries: chunks of 512 keys that shards cut.
    let self_attention = AttnShape::new([2, 4, 560, 16], [2, 2, 560, 16], [2, 2, 560, 24]).expect("good sizes");
    let cross = AttnShape::new([1, 8, 130, 32], [1, 4, 1300, 32], [1, 4, 1300, 16]).expect("good sizes");
    for shape in [self_attention, cross] {
        let (inputs, tables) = (Inputs::new(shape), Tables::new(shape));
        let s = score_bound(&inputs, attn_core::score::default_scale(shape.head_dim));
        // All of them on some numbers of ranks, a third on each of the others: minutes less.
        let all = matches!(cluster.ranks(), 2 | 5 | 8);
        for (n, (name, mask)) in tables.masks().into_iter().enumerate() {
            if !all && n % 3 != cluster.ranks() % 3 {
                continue;
            }
            cluster = both(cluster, name, &Attention::new().mask(mask), &inputs, s);
        }
        cluster = options(cluster, &inputs, s);
    }
    let cluster = cluster.method(Method::Ring);
    many_pieces(&cluster);
    empty(&cluster);
}

/// As many pieces as there are keys: rounding does not add up. Equal weights give the value that all keys have.
fn many_pieces(cluster: &Cluster) {
    let shape = AttnShape::new([1, 1, 3, 4], [1, 1, 400, 4], [1, 1, 400, 32]).expect("good sizes");
    let values: Vec<f32> = numbers(12, 32).into_iter().map(|x| x + 2.0).collect();
    let inputs = Inputs { q: vec![0.0; 12], v: values.repeat(400), ..Inputs::new(shape) };
    let ranks = cluster.ranks();
    let of = |rank: usize| (rank..400).step_by(ranks).map(|at| at..at + 1).collect();
    let keys = Sharding::new((0..ranks).map(of).collect()).expect("each position once");
    let queries = Sharding::even(3, ranks);
    // Every key is seen; a window gets a call for each range.
    let attn = Attention::new().mask(Mask::window(400, 400, Align::TopLeft));
    let got = over_ranks(cluster, &attn, &inputs, &queries, &keys);
    let want = values.repeat(queries.local_len(cluster.rank()));
    near("many pieces", &got.out, &want, &want, 0.0);
}

/// Every other option.
fn options(mut cluster: Cluster, inputs: &Inputs, s: f64) -> Cluster {
    let AttnShape { q_heads, q_len, kv_len, .. } = inputs.shape;
    let base = || Attention::new().mask(Mask::causal(Align::BottomRight));
    let mut bias = numbers(7, q_heads * q_len * kv_len);
    bias.iter_mut().step_by(5).for_each(|x| *x = f32::NEG_INFINITY);
    let bias = View::new(&bias, Layout::Bhsd, [1, q_heads, q_len, kv_len]).expect("made for it");
    let row = numbers(8, q_len);
    let row = View::broadcast(&row, &[q_len, 1]).expect("made for it");
    let slopes: Vec<f32> = (0..q_heads).map(|h| 0.5f32.powi(h as i32 + 4)).collect();
    let sinks = numbers(9, q_heads);
    let keep = bools(10, q_len * kv_len);
    let keep = View::broadcast(&keep, &[q_len, kv_len]).expect("made for it");
    let far = kv_len as f64 / 16.0;
    cluster = both(cluster, "bias", &base().bias(bias), inputs, s + 1.0);
    cluster = both(cluster, "bias of rows", &base().bias(row), inputs, s + 1.0);
    cluster =
        both(cluster, "alibi", &base().alibi(Alibi { slopes: &slopes, align: Align::BottomRight }), inputs, s + far);
    cluster = both(cluster, "sinks", &base().sinks(&sinks), inputs, s);
    cluster = both(cluster, "dropout", &base().dropout(Dropout::Keep { mask: keep, p: 0.3 }), inputs, s);
    let factors = base().scale(0.3).softcap(20.0).temperature(0.7);
    cluster = both(cluster, "factors", &factors, inputs, 0.3 / 0.7 * s * (inputs.shape.head_dim as f64).sqrt());
    let mods = base()
        .score_mod(|s, at: At| s + (at.query + at.head) as f64 * 1e-3 - at.key as f64 * 1e-3)
        .mask_mod(|at| (at.query + at.key) % 3 != 0);
    both(cluster, "mods", &mods, inputs, s + 1.4)
}

/// A call in all ways, with and without the bits of one process.
fn both<M: Mods + Sync>(mut cluster: Cluster, name: &str, attn: &Attention<'_, M>, inputs: &Inputs, s: f64) -> Cluster {
    let sizes: Vec<f32> = inputs.v.iter().map(|x| x.abs()).collect();
    let (want, size) = (alone(attn, inputs, &inputs.v), alone(attn, inputs, &sizes));
    let fixed = attn.by_ref().reproducible();
    let want_fixed = alone(&fixed, inputs, &inputs.v);
    let ranks = cluster.ranks();
    let AttnShape { q_heads, kv_heads, q_len, kv_len, .. } = inputs.shape;
    for ((kind, queries), (_, keys)) in shardings(q_len, ranks).into_iter().zip(shardings(kv_len, ranks)) {
        let ranges = queries.of(cluster.rank());
        let local = |x: &[f32], dim: usize| {
            let sizes = [inputs.shape.batch, q_heads, q_len, dim];
            rows_of(View::new(x, Layout::Bhsd, sizes).expect("whole"), ranges)
        };
        let (dim, what) = (inputs.shape.value_dim, format!("{name}, {kind}, rank {} of {ranks}", cluster.rank()));
        cluster = cluster.method(Method::Ring);
        let got = over_ranks(&cluster, attn, inputs, &queries, &keys);
        near(&what, &got.out, &local(&want.out, dim), &local(&size.out, dim), s);
        near_lse(&what, &got.lse, &local(&want.lse, 1), s);
        cluster = cluster.message_bytes(1000); // many pieces of a message
        let got = over_ranks(&cluster, &fixed, inputs, &queries, &keys);
        same_bits(&what, &got.out, &local(&want_fixed.out, dim));
        same_bits(&what, &got.lse, &local(&want_fixed.lse, 1));
        cluster = cluster.message_bytes(1 << 30);
        if ranks <= kv_heads && kind != "even" {
            cluster = cluster.method(Method::Heads);
            let got = over_ranks(&cluster, &fixed, inputs, &queries, &keys);
            same_bits(&format!("{what}, heads"), &got.out, &local(&want_fixed.out, dim));
            same_bits(&format!("{what}, heads"), &got.lse, &local(&want_fixed.lse, 1));
            let got = over_ranks(&cluster, attn, inputs, &queries, &keys);
            near(&format!("{what}, heads"), &got.out, &local(&want.out, dim), &local(&size.out, dim), s);
        }
    }
    cluster
}

/// The call over ranks: this rank's rows.
fn over_ranks<M: Mods + Sync>(
    cluster: &Cluster,
    attn: &Attention<'_, M>,
    inputs: &Inputs,
    queries: &Sharding,
    keys: &Sharding,
) -> Result {
    let (me, shape, [q, k, v]) = (cluster.rank(), inputs.shape, inputs.views());
    let (q, k, v) = (rows_of(q, queries.of(me)), rows_of(k, keys.of(me)), rows_of(v, keys.of(me)));
    let (n, m) = (queries.local_len(me), keys.local_len(me));
    let view = |x, heads, len, dim| View::new(x, Layout::Bhsd, [shape.batch, heads, len, dim]).expect("cut to it");
    let rows = shape.batch * shape.q_heads * n;
    let (mut out, mut lse) = (vec![f32::NAN; rows * shape.value_dim], vec![f32::NAN; rows]);
    let to = ViewMut::new(&mut out, Layout::Bhsd, [shape.batch, shape.q_heads, n, shape.value_dim]).expect("cut to it");
    let k = view(&k, shape.kv_heads, m, shape.head_dim);
    let v = view(&v, shape.kv_heads, m, shape.value_dim);
    let q = view(&q, shape.q_heads, n, shape.head_dim);
    cluster.prefill(attn, queries, keys, q, k, v, Outputs::new(to).lse(&mut lse)).expect("a good call");
    Result { out, lse }
}

/// Sizes of 0 are calls like any other.
fn empty(cluster: &Cluster) {
    for shape in [
        AttnShape::new([1, 2, 0, 8], [1, 2, 9, 8], [1, 2, 9, 8]).expect("good sizes"),
        AttnShape::new([1, 2, 9, 8], [1, 2, 0, 8], [1, 2, 0, 8]).expect("good sizes"),
        AttnShape::new([0, 2, 9, 8], [0, 2, 9, 8], [0, 2, 9, 8]).expect("good sizes"),
    ] {
        let (queries, keys) =
            (Sharding::even(shape.q_len, cluster.ranks()), Sharding::even(shape.kv_len, cluster.ranks()));
        for attn in [Attention::new(), Attention::new().reproducible()] {
            let got = over_ranks(cluster, &attn, &Inputs::new(shape), &queries, &keys);
            assert!(got.out.iter().all(|&x| x == 0.0) && got.lse.iter().all(|&x| x == f32::NEG_INFINITY));
        }
    }
}
