//! Measures one shape in rounds of *probe, ours, probe, each peer*.

use attn_core::AttnError;
use attn_simd::Level;
use rayon::ThreadPool;

use super::inputs::Inputs;
use super::oracle::Oracle;
use super::ours::Ours;
use super::result::{KernelResult, PeerResult};
use super::shapes::{Kernel, What};
use crate::case::difference;
use crate::clock::{Repeat, SPIN, Samples};
use crate::engine::{Engine, Runner};
use crate::memory;
use crate::peer::{Peer, Request};
use crate::probe;

/// How a kernel is measured.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'s> {
    /// Level of our kernels and of the probe.
    pub level: Level,
    /// One thread: [`attn_simd`]; more: [`attn_parallel`] on this pool.
    pub pool: &'s ThreadPool,
    /// Rounds.
    pub repeat: Repeat,
    /// Shortest sample, in seconds: short calls are taken together until they fill it.
    pub sample_seconds: f64,
    /// Seconds of each probe.
    pub probe_seconds: f64,
}

/// Measures one kernel in one pass, beside the peers that can run it. A peer that fails is left out and said so in
/// `notes`.
///
/// # Errors
/// What our engine refuses.
pub fn measure(
    kernel: &Kernel,
    setup: &Setup<'_>,
    pass: usize,
    peers: &mut [Peer],
    notes: &mut Vec<String>,
) -> Result<KernelResult, AttnError> {
    let threads = setup.pool.current_num_threads();
    let engine = if threads == 1 { Engine::Simd } else { Engine::Parallel };
    let mut runner = Runner::new(setup.level, setup.pool);
    let mut inputs = kernel.inputs();
    let mut ours = |calls: u32| inputs.time(kernel, Ours { engine, pool: setup.pool, runner: &mut runner }, calls);
    let calls_for = |seconds: f64| (setup.sample_seconds / seconds.max(1e-9)).ceil().clamp(1.0, 1e6) as u32;
    let (first, resident_bytes) = memory::resident(|| ours(1));
    first?;
    let calls = calls_for(ours(1)?.0);
    let calls = calls_for(ours(calls)?.0);

    let mut note = |text: String| notes.push(format!("{}: {text}", kernel.name));
    let mut others: Vec<Other> = Vec::new();
    for (process, peer) in peers.iter_mut().enumerate() {
        let inputs = kernel.inputs();
        match peer.load(&request(kernel, &inputs)) {
            Ok(names) => {
                for name in names {
                    match peer.memory(&name).and_then(|resident| Ok((resident, peer.time(&name, 1)?))) {
                        Ok((resident, took)) => {
                            others.push(Other {
                                process,
                                name,
                                calls: calls_for(took.wall),
                                resident,
                                samples: Vec::new(),
                            });
                        }
                        Err(error) => note(format!("{}: {error}", peer.full_name(&name))),
                    }
                }
            }
            Err(error) => note(error.to_string()),
        }
    }

    let peak = || match threads {
        1 => probe::fma_peak(setup.level, setup.probe_seconds),
        _ => probe::fma_peak_of_pool(setup.level, setup.pool, setup.probe_seconds),
    };
    let (mut samples, mut thread, mut peaks, mut spent) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
    while setup.repeat.goes_on(samples.len(), spent, false) {
        if threads > 1 && !peers.is_empty() {
            // A peer's pool spins for a while after its last call, on the very cores that ours is about to use.
            std::thread::sleep(SPIN);
        }
        let before = peak();
        if threads > 1 {
            ours(1)?; // a pool that sleeps is woken, not measured; peers' below as well
        }
        let (wall, ran) = ours(calls)?;
        peaks.push(0.5 * (before + peak()));
        samples.push(wall);
        if threads == 1 {
            thread.push(ran);
        }
        spent += wall * f64::from(calls);
        let timed = |peer: &mut Peer, name: &str, calls: u32| {
            if threads > 1 {
                peer.time(name, 1)?;
            }
            peer.time(name, calls)
        };
        others.retain_mut(|other| match timed(&mut peers[other.process], &other.name, other.calls) {
            Ok(took) => {
                spent += took.wall * f64::from(other.calls);
                other.samples.push(if threads == 1 { took.processor } else { took.wall });
                true
            }
            Err(error) => {
                note(format!("{}: {error}", peers[other.process].full_name(&other.name)));
                false
            }
        });
    }
    let comparable = !matches!(kernel.what, What::Dropout(_));
    let oracle = if pass == 0 { Oracle::of(kernel, &inputs)? } else { None };
    let written = inputs.out();
    let error = |out: &[f32]| oracle.as_ref().map(|oracle| oracle.distance(out));
    let results = others
        .into_iter()
        .map(|other| {
            let peer = &mut peers[other.process];
            let out = if comparable { peer.out(&other.name).ok() } else { None };
            PeerResult {
                ratio: f64::NAN,
                seconds: f64::NAN,
                difference: out.as_ref().map(|out| difference(&written, out)),
                error: out.as_ref().and_then(|out| error(out)),
                resident_bytes: other.resident,
                samples: Samples(other.samples),
                name: peer.full_name(&other.name),
            }
        })
        .collect();
    let passes = vec![pass; samples.len()];
    let mut result = KernelResult {
        kernel: kernel.clone(),
        level: setup.level.name().to_string(),
        threads,
        seconds: 0.0,
        gflops: 0.0,
        share_of_peak: 0.0,
        samples: Samples(samples),
        thread,
        peaks,
        passes,
        error: error(&written),
        resident_bytes,
        peers: results,
    };
    result.summarise();
    Ok(result)
}

/// What a peer is told of a kernel and its inputs (as f32, whatever its type: the peer rounds nothing).
fn request<'i>(kernel: &Kernel, inputs: &'i Inputs) -> Request<'i> {
    // Queries are sent multiplied: to a peer, these are plain ones.
    let (what, value) = if let What::Spread(_) = kernel.what { What::Plain } else { kernel.what }.parts();
    let tensors = [&inputs.tensors.q, &inputs.tensors.k, &inputs.tensors.v, inputs.extra()];
    Request { case: kernel.case, number: kernel.number.name(), what, value, tensors: tensors.map(Vec::as_slice) }
}

/// A peer while it is measured.
struct Other {
    process: usize,
    name: String,
    calls: u32,
    resident: Option<usize>,
    samples: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::super::shapes::{parse, types};
    use super::*;
    use crate::case::Number;
    use crate::engine;
    use attn_core::half::{bf16, f16};

    #[test]
    fn halves_are_measured_on_the_numbers_that_peers_get() {
        let pool = engine::pool(1).unwrap();
        let repeat = Repeat { at_least: 2, at_most: 2, seconds: 0.0 };
        let rows = types(&parse("k 1 2 1 40 40 8 1 plain types").unwrap());
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["k-f32", "k-f32-fast", "k-f16", "k-f16-fast", "k-bf16", "k-bf16-fast"]);
        let level = Level::by_name("amx-model").unwrap();
        let setup = Setup { level, pool: &pool, repeat, sample_seconds: 1e-6, probe_seconds: 1e-4 };
        for (row, worst) in rows.iter().zip([1e-6, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2]) {
            let inputs = row.inputs();
            let narrow = |x: &f32| match row.number {
                Number::F32 => *x,
                Number::F16 => f16::from_f32(*x).to_f32(),
                Number::Bf16 => bf16::from_f32(*x).to_f32(),
            };
            assert!(inputs.tensors.q.iter().chain(&inputs.tensors.v).all(|x| narrow(x) == *x), "{}", row.name);
            let error = measure(row, &setup, 0, &mut [], &mut Vec::new()).unwrap().error.unwrap();
            assert!(error > 0.0 && error < worst, "{}: {error:e}", row.name);
        }
    }

    #[test]
    fn every_feature_runs_and_is_right() {
        let pool = engine::pool(1).unwrap();
        let repeat = Repeat { at_least: 2, at_most: 2, seconds: 0.0 };
        let setup = Setup { level: Level::detect(), pool: &pool, repeat, sample_seconds: 1e-6, probe_seconds: 1e-4 };
        for what in ["plain", "window:3", "alibi", "bias", "keep", "softcap:2", "dropout:0.3", "spread:9"] {
            for causal in [0, 1] {
                let kernel = parse(&format!("k 1 4 2 20 20 8 {causal} {what} -")).unwrap().remove(0);
                let result = measure(&kernel, &setup, 0, &mut [], &mut Vec::new()).unwrap();
                assert!(result.seconds > 0.0 && result.gflops > 0.0 && result.samples.0.len() == 2);
                // The same options through the reference engine.
                let mut inputs = kernel.inputs();
                let want = inputs.with(&kernel, |attn, (q, k, v, out)| {
                    attn_core::reference::forward(attn, q, k, v, out, &mut [0.0; 20])
                });
                want.unwrap();
                let want = inputs.tensors.out.clone();
                let mut runner = Runner::new(Level::detect(), &pool);
                inputs.tensors.out.fill(f32::NAN);
                inputs.with(&kernel, |attn, (q, k, v, out)| runner.run(Engine::Simd, attn, q, k, v, out)).unwrap();
                let off = difference(&inputs.tensors.out, &want);
                assert!(off < 5e-6, "{what}, causal {causal}: {off}");
            }
        }
        let kernel = parse("k 2 4 2 20 20 8 1 backward -").unwrap().remove(0);
        let error = measure(&kernel, &setup, 0, &mut [], &mut Vec::new()).unwrap().error.unwrap();
        assert!(error > 0.0 && error < 1e-5, "{error}");
    }
}
