//! Strong and weak scaling of prefill and decode over the ranks of a job, beside one rank alone.
//!
//! ```sh
//! RAYON_NUM_THREADS=1 mpirun -n 2 --bind-to core scaling [tokens] [causal|full] [ring|heads]
//! ```
//!
//! Each line is the best of three calls: seconds, speed against rank 0 alone, the share of the time that ranks only
//! waited, and the prediction of `explain` from the measured speed of rank 0. Strong: the same tokens. Weak: `√ranks`
//! times as many, so that each rank computes as much as one alone.

use std::time::Instant;

use attn_core::{Align, Attention, AttnShape, Layout, Mask, View, ViewMut};
use attn_mpi::{Cluster, Method, ShardedCache, Sharding, mpi};

/// Query heads, key/value heads, size of a head.
const HEADS: [usize; 3] = [8, 2, 64];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let word = |n: usize| args.get(n).map(String::as_str);
    let tokens: usize = word(0).unwrap_or("4096").parse()?;
    let mask = match word(1) {
        None | Some("causal") => Mask::causal(Align::BottomRight),
        Some("full") => Mask::none(),
        Some(other) => return Err(format!("causal or full, not {other}").into()),
    };
    let universe = mpi::initialize().ok_or("MPI was initialised before")?;
    let mut cluster = Cluster::new(&universe.world());
    match word(2) {
        None => {}
        Some("ring") => cluster = cluster.method(Method::Ring),
        Some("heads") => cluster = cluster.method(Method::Heads),
        Some(other) => return Err(format!("ring or heads, not {other}").into()),
    }
    let (ranks, attn) = (cluster.ranks(), Attention::new().mask(mask));
    // The others wait for rank 0.
    let alone = if cluster.rank() == 0 { one_rank(&attn, tokens)? } else { 0.0 };
    let all = cluster.all_gather(&alone.to_le_bytes())?;
    let alone = all.first_chunk().map_or(0.0, |bytes| f64::from_le_bytes(*bytes));
    let link = cluster.get_link();
    let cluster = cluster.link(link.flops(flops(tokens, mask.is_none()) / alone));
    if cluster.rank() == 0 {
        println!("one rank alone, {tokens} tokens: {alone:.4} s");
    }
    let weak = (tokens as f64 * (ranks as f64).sqrt()) as usize;
    for (kind, tokens, ideal) in [("strong", tokens, ranks as f64), ("weak", weak, 1.0)] {
        let (seconds, waited) = prefill(&cluster, &attn, tokens)?;
        let explain = cluster.explain(&shape(tokens)?, [4, 4]);
        let cost = if explain.method == Method::Ring { explain.ring } else { explain.heads.unwrap_or(explain.ring) };
        let predicted = if mask.is_none() { cost.seconds } else { cost.seconds / 2.0 };
        if cluster.rank() == 0 {
            let share = 100.0 * waited / seconds;
            println!(
                "{kind}, {ranks} ranks, {tokens} tokens, {:?}: {seconds:.4} s, speed-up {:.2} of {ideal}, waiting \
                 {share:.1} %, predicted {predicted:.4} s",
                explain.method,
                alone / seconds,
            );
        }
    }
    let (seconds, bytes) = decode(&cluster, tokens)?;
    if cluster.rank() == 0 {
        println!("decode, {ranks} ranks, {tokens} tokens: {:.1} µs a step, {bytes} bytes sent", seconds * 1e6);
    }
    Ok(())
}

/// The call of so many tokens.
fn shape(tokens: usize) -> attn_core::Result<AttnShape> {
    let [q_heads, kv_heads, dim] = HEADS;
    let kv = [1, kv_heads, tokens, dim];
    AttnShape::new([1, q_heads, tokens, dim], kv, kv)
}

/// Operations of the call.
fn flops(tokens: usize, full: bool) -> f64 {
    let [q_heads, _, dim] = HEADS;
    let pairs = tokens as f64 * tokens as f64 * if full { 1.0 } else { 0.5 };
    4.0 * pairs * (q_heads * dim) as f64
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|n| (n as f32 * 0.37).sin()).collect()
}

/// Seconds of one rank without the others, the best of three.
fn one_rank(attn: &Attention<'_>, tokens: usize) -> attn_core::Result<f64> {
    let [q_heads, kv_heads, dim] = HEADS;
    let (q, kv, mut out) =
        (numbers(q_heads * tokens * dim), numbers(kv_heads * tokens * dim), vec![0.0f32; q_heads * tokens * dim]);
    let q = View::new(&q, Layout::Bhsd, [1, q_heads, tokens, dim])?;
    let kv = View::new(&kv, Layout::Bhsd, [1, kv_heads, tokens, dim])?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        attn_parallel::forward(attn, q, kv, kv, ViewMut::new(&mut out, Layout::Bhsd, q.sizes())?)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Seconds of a call, and seconds that this rank waited in it.
fn prefill(cluster: &Cluster, attn: &Attention<'_>, tokens: usize) -> attn_mpi::Result<(f64, f64)> {
    let ([q_heads, kv_heads, dim], sharding) = (HEADS, Sharding::zigzag(tokens, cluster.ranks()));
    let n = sharding.local_len(cluster.rank());
    let (q, kv, mut out) = (numbers(q_heads * n * dim), numbers(kv_heads * n * dim), vec![0.0f32; q_heads * n * dim]);
    let q = View::new(&q, Layout::Bhsd, [1, q_heads, n, dim])?;
    let kv = View::new(&kv, Layout::Bhsd, [1, kv_heads, n, dim])?;
    let mut best = (f64::INFINITY, 0.0);
    for _ in 0..3 {
        let to = ViewMut::new(&mut out, Layout::Bhsd, q.sizes())?;
        let report = cluster.prefill(attn, &sharding, &sharding, q, kv, kv, to)?;
        if report.seconds < best.0 {
            best = (report.seconds, report.traffic.waited);
        }
    }
    Ok(best)
}

/// Seconds and bytes of a step over so many tokens.
fn decode(cluster: &Cluster, tokens: usize) -> attn_mpi::Result<(f64, usize)> {
    let ([q_heads, kv_heads, dim], sharding) = (HEADS, Sharding::even(tokens, cluster.ranks()));
    let n = sharding.local_len(cluster.rank());
    let kv = numbers(kv_heads * n * dim);
    let kv = View::new(&kv, Layout::Bhsd, [1, kv_heads, n, dim])?;
    let cache = ShardedCache::of_shards(cluster, &sharding, kv, kv, 4096)?;
    let (q, mut out) = (numbers(q_heads * dim), vec![0.0f32; q_heads * dim]);
    let q = View::new(&q, Layout::Bhsd, [1, q_heads, 1, dim])?;
    let (mut best, mut bytes) = (f64::INFINITY, 0);
    for _ in 0..20 {
        let start = Instant::now();
        let to = ViewMut::new(&mut out, Layout::Bhsd, q.sizes())?;
        bytes = cluster.decode(&Attention::new(), q, &cache, to)?.sent;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok((best, bytes))
}
