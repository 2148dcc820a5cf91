//! The measurement of a shape: samples of every pass, ours and the peers', and the conclusions from them.

use serde::{Deserialize, Serialize};

use super::shapes::Kernel;
use crate::clock::{Samples, median};
use crate::format::FORMAT;
use crate::machine::Machine;

/// Another library on the same inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerResult {
    /// Its name.
    pub name: String,
    /// Median seconds per call.
    pub seconds: f64,
    /// Median over the rounds of its time over ours: above 1, ours is faster.
    pub ratio: f64,
    /// Seconds per call of each sample.
    pub samples: Samples,
    /// Largest difference between its output and ours; `None` if they are not comparable (dropout draws
    /// differently).
    pub difference: Option<f64>,
    /// Its largest distance from the reference in f64, over the last queries of each head; plain kernels only.
    pub error: Option<f64>,
    /// Growth of its process's resident set over one call, in bytes.
    pub resident_bytes: Option<usize>,
}

/// A kernel, measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelResult {
    /// The row of the table.
    pub kernel: Kernel,
    /// The level it ran at.
    pub level: String,
    /// Threads of ours and of the peers.
    pub threads: usize,
    /// Median seconds per call.
    pub seconds: f64,
    /// FLOPs per call / `seconds` / 1e9.
    pub gflops: f64,
    /// Median over the rounds of rate / probe's rate.
    pub share_of_peak: f64,
    /// Seconds per call of each sample, by the wall's clock.
    pub samples: Samples,
    /// The same by the clock of the thread; empty on several threads.
    pub thread: Vec<f64>,
    /// FLOP/s of the probes beside each sample.
    pub peaks: Vec<f64>,
    /// The pass that took each sample.
    pub passes: Vec<usize>,
    /// Our largest distance from the reference in f64, over the last queries of each head; plain kernels only.
    pub error: Option<f64>,
    /// Growth of the resident set over our first call, in bytes.
    pub resident_bytes: Option<usize>,
    /// Other libraries.
    pub peers: Vec<PeerResult>,
}

/// What `cargo xtask bench --kernels --json` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelReport {
    /// [`FORMAT`].
    pub format: String,
    /// `kernels`.
    pub kind: String,
    /// Where it was measured.
    pub machine: Machine,
    /// Versions of the peers, by level.
    pub peers: Vec<String>,
    /// The shapes.
    pub results: Vec<KernelResult>,
    /// What went wrong with peers.
    pub notes: Vec<String>,
}

impl KernelReport {
    /// Without results yet.
    pub fn new(machine: Machine) -> Self {
        let (format, kind) = (FORMAT.into(), "kernels".into());
        Self { format, kind, machine, peers: Vec::new(), results: Vec::new(), notes: Vec::new() }
    }

    /// Adds a result, or its samples if an earlier pass measured the same.
    pub fn take(&mut self, result: KernelResult) {
        match self.results.iter_mut().find(|known| known.name() == result.name()) {
            Some(known) => known.join(result),
            None => self.results.push(result),
        }
    }
}

/// The name of a row at a level, for filters and comparisons.
pub fn case_name(kernel: &Kernel, level: &str, threads: usize) -> String {
    format!("kernels/{}/{level}/t{threads}", kernel.name)
}

impl KernelResult {
    /// [`case_name`].
    pub fn name(&self) -> String {
        case_name(&self.kernel, &self.level, self.threads)
    }

    /// Seconds of each sample, by the clock that counts.
    pub fn times(&self) -> &[f64] {
        if self.thread.is_empty() { &self.samples.0 } else { &self.thread }
    }

    /// Takes the samples of another pass.
    pub(super) fn join(&mut self, other: Self) {
        self.samples.0.extend(other.samples.0);
        self.thread.extend(other.thread);
        self.peaks.extend(other.peaks);
        self.passes.extend(other.passes);
        // A peer that one of the passes lacks has no partner for some of our samples.
        self.peers.retain(|peer| other.peers.iter().any(|p| p.name == peer.name));
        for peer in &mut self.peers {
            if let Some(more) = other.peers.iter().find(|p| p.name == peer.name) {
                peer.samples.0.extend(&more.samples.0);
                peer.difference = peer.difference.zip(more.difference).map(|(a, b)| a.max(b));
            }
        }
        self.summarise();
    }

    /// Draws the conclusions from the samples.
    pub(super) fn summarise(&mut self) {
        let (flops, times) = (self.kernel.flops(), self.times().to_vec());
        self.seconds = median(&times);
        self.gflops = flops / self.seconds / 1e9;
        let shares: Vec<f64> = times.iter().zip(&self.peaks).map(|(seconds, peak)| flops / seconds / peak).collect();
        self.share_of_peak = median(&shares);
        for peer in &mut self.peers {
            peer.seconds = median(&peer.samples.0);
            let ratios: Vec<f64> = peer.samples.0.iter().zip(&times).map(|(theirs, ours)| theirs / ours).collect();
            peer.ratio = median(&ratios);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shapes::parse;
    use super::*;

    #[test]
    fn passes_are_joined_and_a_peer_must_be_in_all() {
        let peer = |name: &str, seconds: &[f64]| PeerResult {
            name: name.into(),
            seconds: 0.0,
            ratio: 0.0,
            samples: Samples(seconds.to_vec()),
            difference: Some(1e-7),
            error: None,
            resident_bytes: None,
        };
        let pass = |pass: usize, ours: f64, peers: Vec<PeerResult>| KernelResult {
            kernel: parse("k 1 1 1 10 10 5 0 plain -").unwrap().remove(0),
            level: "avx2".into(),
            threads: 1,
            seconds: 0.0,
            gflops: 0.0,
            share_of_peak: 0.0,
            samples: Samples(vec![9.0; 2]),
            thread: vec![ours; 2],
            peaks: vec![2000.0; 2],
            passes: vec![pass; 2],
            error: None,
            resident_bytes: None,
            peers,
        };
        let mut report = KernelReport::new(Machine::default());
        report.take(pass(0, 1.0, vec![peer("a", &[3.0, 3.0]), peer("b", &[5.0, 5.0])]));
        report.take(pass(1, 2.0, vec![peer("a", &[6.0, 6.0])]));
        let [result] = &report.results[..] else { panic!("two results of one name") };
        assert_eq!((result.name(), &result.passes), ("kernels/k/avx2/t1".into(), &vec![0, 0, 1, 1]));
        assert_eq!((result.seconds, result.gflops), (1.5, 2000.0 / 1.5 / 1e9));
        assert_eq!(result.share_of_peak, 0.75, "of 1 and 1/2");
        let [a] = &result.peers[..] else { panic!("b has no second pass") };
        assert_eq!((a.ratio, a.seconds, a.samples.0.len()), (3.0, 4.5, 4));
        let json = serde_json::to_string(&report).unwrap();
        assert!(crate::compare::Run::read(&json).unwrap().cases.len() == 1);
    }
}
