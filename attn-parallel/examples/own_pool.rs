//! An application with a rayon pool of its own runs attention on it: no second pool, no more threads than it allows,
//! and the same bits as on any other number of threads. Also: a bound on the threads of one call, and scratch that the
//! application keeps.
//!
//! ```sh
//! cargo run --release -p attn-parallel --example own_pool
//! ```

use attn_core::{Align, Attention, AttnShape, Layout, Mask, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::{Level, Plan, Workspace};
use rayon::prelude::*;

const SIZES: [usize; 4] = [1, 4, 256, 64]; // [batch, heads, seq, dim]

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).thread_name(|n| format!("app-{n}")).build()?;

    let x: Vec<f32> = (0..SIZES.iter().product()).map(|n: usize| (n as f32 * 0.1).sin()).collect();
    let view = View::new(&x, Layout::Bhsd, SIZES)?;
    let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
    let plan = Plan::new(&attn, AttnShape::new(SIZES, SIZES, SIZES)?, Level::detect())?;
    println!("{}", plan.explain(attn_core::Dtype::F32));

    // One large call, spread over the application's pool.
    let mut spread = vec![0.0f32; x.len()];
    let to = ViewMut::new(&mut spread, Layout::Bhsd, SIZES)?;
    pool.install(|| Runner::new().forward_planned(&plan, view, view, view, to))?;

    // Many calls at once from inside the pool: its threads work on all of them, none is waited for idly.
    let mut requests = vec![vec![0.0f32; x.len()]; 8];
    pool.install(|| {
        requests.par_iter_mut().try_for_each(|out| {
            Runner::new().forward_planned(&plan, view, view, view, ViewMut::new(out, Layout::Bhsd, SIZES)?)
        })
    })?;

    // On this thread alone, with scratch that is kept: nothing is allocated from the second call on.
    let (mut alone, mut kept) = (vec![0.0f32; x.len()], [Workspace::new()]);
    let mut runner = Runner::new().workspaces(&mut kept);
    for _ in 0..2 {
        runner.forward_planned(&plan, view, view, view, ViewMut::new(&mut alone, Layout::Bhsd, SIZES)?)?;
    }

    // On at most two threads of the pool.
    let mut two = vec![0.0f32; x.len()];
    let to = ViewMut::new(&mut two, Layout::Bhsd, SIZES)?;
    pool.install(|| Runner::new().threads(2).forward_planned(&plan, view, view, view, to))?;

    for (name, out) in [("in requests", &requests[7]), ("alone", &alone), ("on two threads", &two)] {
        let same = out.iter().zip(&spread).all(|(a, b)| a.to_bits() == b.to_bits());
        println!("{name}: {}", if same { "the same bits" } else { "DIFFERENT" });
        assert!(same);
    }
    Ok(())
}
