//! Decode over ranks against one process: caches that grow token by token, and caches of prefilled shards.

use std::ops::Range;

use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnError, AttnShape, Layout, Mask, Outputs, View, ViewMut};
use attn_mpi::mpi::topology::SimpleCommunicator;
use attn_mpi::{Cluster, Error, ShardedCache};

use crate::calls::{Inputs, Tables, numbers, rows_of};
use crate::compare::{Result, alone, near, near_lse, same_bits, score_bound};
use crate::prefill::shardings;

pub(crate) fn run(cluster: Cluster) {
    grown(&cluster);
    of_shards(&cluster);
    other_queries(&cluster);
    other_caches(&cluster);
}

/// A cache that grows from nothing, over ends of chunks and blocks.
fn grown(cluster: &Cluster) {
    let whole = Inputs::new(AttnShape::new([2, 4, 1, 16], [2, 2, 3000, 16], [2, 2, 3000, 8]).expect("good sizes"));
    let mut cache = ShardedCache::new(cluster, [2, 2, 16, 8], 700);
    for len in [0, 1, 2, 511, 512, 513, 1024, 1025, 2300, 3000] {
        let more = cache.len()..len;
        append(&mut cache, &whole, more.clone());
        assert_eq!(cache.len(), len);
        let shape = AttnShape { kv_len: len, ..whole.shape };
        let [q, k, v] = whole.views();
        let (one, all) = (0..1, 0..len);
        let first = |x, range: &Range<usize>| rows_of(x, std::slice::from_ref(range));
        let so_far = Inputs { shape, q: first(q, &one), k: first(k, &all), v: first(v, &all) };
        step(cluster, &format!("{len} tokens"), &Attention::new(), &so_far, &cache);
    }
    let share = cache.bytes() as f64 / (4.0 * 2.0 * 2.0 * 24.0 * 3000.0);
    let fair = if cluster.ranks() == 1 { 1.0 } else { 1.0 / cluster.ranks() as f64 + 0.35 };
    assert!(share <= fair, "rank {} holds {share} of all tokens", cluster.rank());
}

fn append(cache: &mut ShardedCache<f32>, whole: &Inputs, tokens: Range<usize>) {
    let ([_, k, v], n) = (whole.views(), tokens.len());
    let tokens = std::slice::from_ref(&tokens);
    let (k, v) = (rows_of(k, tokens), rows_of(v, tokens));
    let AttnShape { batch, kv_heads, head_dim, value_dim, .. } = whole.shape;
    let k = View::new(&k, Layout::Bhsd, [batch, kv_heads, n, head_dim]).expect("cut to it");
    let v = View::new(&v, Layout::Bhsd, [batch, kv_heads, n, value_dim]).expect("cut to it");
    cache.append(k, v).expect("tokens of its sizes");
}

/// Caches of shards that cut chunks, every mask, several queries; then some tokens more.
fn of_shards(cluster: &Cluster) {
    let shape = AttnShape::new([2, 4, 5, 16], [2, 2, 1301, 16], [2, 2, 1301, 8]).expect("good sizes");
    let (inputs, tables) = (Inputs::new(shape), Tables::new(shape));
    for (kind, keys) in shardings(1290, cluster.ranks()) {
        let [_, k, v] = inputs.views();
        let ranges = keys.of(cluster.rank());
        let (k, v, n) = (rows_of(k, ranges), rows_of(v, ranges), keys.local_len(cluster.rank()));
        let k = View::new(&k, Layout::Bhsd, [2, 2, n, 16]).expect("cut to it");
        let v = View::new(&v, Layout::Bhsd, [2, 2, n, 8]).expect("cut to it");
        let mut cache = ShardedCache::of_shards(cluster, &keys, k, v, 512).expect("good shards");
        append(&mut cache, &inputs, 1290..1301);
        for (name, mask) in tables.masks() {
            step(cluster, &format!("{kind}, {name}"), &Attention::new().mask(mask), &inputs, &cache);
        }
        let sinks = numbers(9, 4);
        let attn = Attention::new().mask(Mask::causal(Align::BottomRight)).sinks(&sinks).softcap(9.0);
        step(cluster, &format!("{kind}, sinks"), &attn, &inputs, &cache);
    }
}

/// A step in both ways against one process.
fn step<M: Mods + Sync>(
    cluster: &Cluster,
    what: &str,
    attn: &Attention<'_, M>,
    inputs: &Inputs,
    cache: &ShardedCache<f32>,
) {
    let sizes: Vec<f32> = inputs.v.iter().map(|x| x.abs()).collect();
    let s = score_bound(inputs, attn_core::score::default_scale(inputs.shape.head_dim));
    let what = format!("{what}, rank {} of {}", cluster.rank(), cluster.ranks());
    let (want, size) = (alone(attn, inputs, &inputs.v), alone(attn, inputs, &sizes));
    let got = over_ranks(cluster, attn, inputs, cache);
    near(&what, &got.out, &want.out, &size.out, s);
    near_lse(&what, &got.lse, &want.lse, s);
    let fixed = attn.by_ref().reproducible();
    let (want, got) = (alone(&fixed, inputs, &inputs.v), over_ranks(cluster, &fixed, inputs, cache));
    same_bits(&what, &got.out, &want.out);
    same_bits(&what, &got.lse, &want.lse);
}

fn over_ranks<M: Mods + Sync>(
    cluster: &Cluster,
    attn: &Attention<'_, M>,
    inputs: &Inputs,
    cache: &ShardedCache<f32>,
) -> Result {
    let (shape, [q, ..]) = (inputs.shape, inputs.views());
    let (mut out, mut lse) = (vec![f32::NAN; shape.rows() * shape.value_dim], vec![f32::NAN; shape.rows()]);
    let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).expect("as large as the output");
    cluster.decode(attn, q, cache, Outputs::new(to).lse(&mut lse)).expect("a good step");
    Result { out, lse }
}

/// Queries that differ between ranks are an error on every rank.
fn other_queries(cluster: &Cluster) {
    let cache = ShardedCache::<f32>::new(cluster, [1, 1, 4, 4], 512);
    let q = [cluster.rank() as f32; 4];
    let mut out = [7.0f32; 4];
    let q = View::matrix(&q, 1, 4).expect("four numbers");
    let to = ViewMut::matrix(&mut out, 1, 4).expect("four numbers");
    match cluster.decode(&Attention::new(), q, &cache, to) {
        Err(attn_mpi::Error::Disagree { what: "the queries", rank: 1, .. }) => assert_eq!(out, [7.0; 4]),
        other => assert!(cluster.ranks() == 1 && other.is_ok(), "{other:?}"),
    }
}

/// Caches that do not belong together are an error on every rank.
fn other_caches(cluster: &Cluster) {
    let (me, ranks) = (cluster.rank(), cluster.ranks());
    let tokens = vec![0.5f32; 1100 * 4];
    let tokens = View::new(&tokens, Layout::Bhsd, [1, 1, 1100, 4]).expect("made for it");
    let step = |mut cache: ShardedCache<f32>| {
        cache.append(tokens, tokens).expect("tokens of its sizes");
        let (q, mut out) = ([0.5f32; 4], [7.0f32; 4]);
        let q = View::matrix(&q, 1, 4).expect("four numbers");
        let result = cluster.decode(&Attention::new(), q, &cache, ViewMut::matrix(&mut out, 1, 4).expect("four"));
        assert!(out == [if result.is_ok() { 0.5 } else { 7.0 }; 4]);
        result.map(|_| ())
    };
    // Blocks that differ: some tokens would be on two ranks, others on none.
    let block = if me + 1 == ranks && ranks > 1 { 1024 } else { 512 };
    match step(ShardedCache::new(cluster, [1, 1, 4, 4], block)) {
        Err(Error::Disagree { what: "which rank holds which tokens", rank, .. }) => assert_eq!(rank, ranks - 1),
        other => assert!(ranks == 1 && other.is_ok(), "{other:?}"),
    }
    // The cache of a cluster of other ranks.
    let alone = Cluster::new(&SimpleCommunicator::self_comm());
    match step(ShardedCache::new(&alone, [1, 1, 4, 4], 512)) {
        Err(Error::Attn(AttnError::Size { what: "ranks of the cache", expected, found: 1 })) => {
            assert_eq!(expected, ranks)
        }
        other => assert!(ranks == 1 && other.is_ok(), "{other:?}"),
    }
}
