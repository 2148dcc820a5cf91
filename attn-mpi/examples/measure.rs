//! Samples of one call over the ranks of a job, as a line of JSON: `cargo xtask bench --ranks` starts this.
//!
//! ```sh
//! mpirun -n 2 --bind-to core measure prefill|backward causal|full TOKENS SAMPLES ranks|copies
//! ```
//!
//! One rank alone calls `attn-parallel`, without this crate: ranks are compared with it. Copies do the same: each rank
//! does all of the work for itself, at once. A sample is the slowest rank's time; `waited` is the longest time in it
//! that a rank only waited. One call that does not count precedes the samples. The sizes are those of `scaling`: 8
//! query heads over 2 key/value heads of 64, f32.

use std::time::Instant;

use attn_core::backward::Gradients;
use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut};
use attn_mpi::mpi::topology::SimpleCommunicator;
use attn_mpi::{Cluster, Method, Sharding, mpi};
use attn_simd::backward::Inputs;

/// Query heads, key/value heads, size of a head.
const HEADS: [usize; 3] = [8, 2, 64];
const USAGE: &str = "measure prefill|backward causal|full TOKENS SAMPLES ranks|copies";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [call, mask, tokens, samples, how] = args.as_slice() else { return Err(USAGE.into()) };
    let (tokens, samples): (usize, usize) = (tokens.parse()?, samples.parse()?);
    let mask = match mask.as_str() {
        "causal" => Mask::causal(Align::BottomRight),
        "full" => Mask::none(),
        _ => return Err(USAGE.into()),
    };
    let backward = match call.as_str() {
        "prefill" => false,
        "backward" => true,
        _ => return Err(USAGE.into()),
    };
    let copies = match how.as_str() {
        "ranks" => false,
        "copies" => true,
        _ => return Err(USAGE.into()),
    };
    let universe = mpi::initialize().ok_or("MPI was initialised before")?;
    let everyone = Cluster::new(&universe.world());
    let cluster = if copies { Cluster::new(&SimpleCommunicator::self_comm()) } else { Cluster::new(&universe.world()) };
    let cluster = cluster.method(Method::Ring);
    let mut job = Job::new(&cluster, Attention::new().mask(mask), tokens);
    job.prefill()?; // output and lse for the gradients, too
    let mut lines = Vec::new();
    for n in 0..=samples {
        let [seconds, waited, sent] = if backward { job.backward()? } else { job.prefill()? };
        let mine: Vec<u8> = [seconds, waited, sent].iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = everyone.all_gather(&mine)?;
        let all: Vec<f64> = all.as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x)).collect();
        let [seconds, waited, sent] = [0, 1, 2].map(|at| all.iter().skip(at).step_by(3).copied().fold(0.0, f64::max));
        if n > 0 {
            lines.push(serde_json::json!({ "seconds": seconds, "waited": waited, "sent": sent }));
        }
    }
    if everyone.rank() == 0 {
        println!("{}", serde_json::to_string(&lines)?);
    }
    Ok(())
}

/// This rank's tensors.
struct Job<'c> {
    cluster: &'c Cluster,
    attn: Attention<'c>,
    sharding: Sharding,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
    gradients: [Vec<f32>; 3],
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|n| (n as f32 * 0.37).sin()).collect()
}

impl<'c> Job<'c> {
    fn new(cluster: &'c Cluster, attn: Attention<'c>, tokens: usize) -> Self {
        let ([q_heads, kv_heads, dim], sharding) = (HEADS, Sharding::zigzag(tokens, cluster.ranks()));
        let n = sharding.local_len(cluster.rank());
        let (of_q, of_kv) = (q_heads * n * dim, kv_heads * n * dim);
        Self {
            cluster,
            attn,
            sharding,
            q: numbers(of_q),
            k: numbers(of_kv),
            v: numbers(of_kv),
            out: vec![0.0; of_q],
            lse: vec![0.0; q_heads * n],
            gradients: [of_q, of_kv, of_kv].map(|len| vec![0.0; len]),
        }
    }

    /// Sizes of q and of k.
    fn sizes(&self) -> [[usize; 4]; 2] {
        let ([q_heads, kv_heads, dim], n) = (HEADS, self.sharding.local_len(self.cluster.rank()));
        [[1, q_heads, n, dim], [1, kv_heads, n, dim]]
    }

    /// Seconds, seconds of waiting, bytes sent.
    fn prefill(&mut self) -> attn_mpi::Result<[f64; 3]> {
        let [of_q, of_kv] = self.sizes();
        let q = View::new(&self.q, Layout::Bhsd, of_q)?;
        let (k, v) = (View::new(&self.k, Layout::Bhsd, of_kv)?, View::new(&self.v, Layout::Bhsd, of_kv)?);
        let to = Outputs::new(ViewMut::new(&mut self.out, Layout::Bhsd, of_q)?).lse(&mut self.lse);
        if self.cluster.ranks() == 1 {
            let start = Instant::now();
            attn_parallel::forward(&self.attn, q, k, v, to)?;
            return Ok([start.elapsed().as_secs_f64(), 0.0, 0.0]);
        }
        let report = self.cluster.prefill(&self.attn, &self.sharding, &self.sharding, q, k, v, to)?;
        Ok([report.seconds, report.traffic.waited, report.traffic.sent as f64])
    }

    /// The same of the gradients, of the output as the gradient by it.
    fn backward(&mut self) -> attn_mpi::Result<[f64; 3]> {
        let [of_q, of_kv] = self.sizes();
        let q = View::new(&self.q, Layout::Bhsd, of_q)?;
        let (k, v) = (View::new(&self.k, Layout::Bhsd, of_kv)?, View::new(&self.v, Layout::Bhsd, of_kv)?);
        let out = View::new(&self.out, Layout::Bhsd, of_q)?;
        let inputs = Inputs { q, k, v, out, lse: &self.lse, dy: out };
        let [dq, dk, dv] = &mut self.gradients;
        let to = Gradients::new(
            ViewMut::new(dq, Layout::Bhsd, of_q)?,
            ViewMut::new(dk, Layout::Bhsd, of_kv)?,
            ViewMut::new(dv, Layout::Bhsd, of_kv)?,
        );
        if self.cluster.ranks() == 1 {
            let start = Instant::now();
            attn_parallel::backward(&self.attn, inputs, to)?;
            return Ok([start.elapsed().as_secs_f64(), 0.0, 0.0]);
        }
        let report = self.cluster.backward(&self.attn, &self.sharding, &self.sharding, inputs, to)?;
        Ok([report.seconds, report.traffic.waited, report.traffic.sent as f64])
    }
}
