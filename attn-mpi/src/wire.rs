//! Messages between ranks: non-blocking, cut where a count of MPI ends, and never waited for beyond the time-out.
//!
//! Every message is bytes. Counts of MPI are `int`, so that a message of more than 2³¹ − 1 bytes is sent in pieces; MPI
//! keeps the order of messages of one sender, tag and communicator. If nothing arrives for as long as the time-out, the
//! rank asks all others for a sign of life, names those that gave none, and aborts the job.

use std::io::Write;
use std::time::{Duration, Instant};

use mpi::request::{RequestCollection, multiple_scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};

/// Tag of the signs of life.
const ROLL_CALL: i32 = 7;

/// The exit code of a job that was given up.
const GAVE_UP: i32 = 70;

/// A communicator of our own, so that no message meets one of the caller's.
pub(crate) struct Wire {
    comm: SimpleCommunicator,
    /// How long nothing may arrive.
    pub(crate) timeout: Duration,
    /// The most bytes of one message of MPI.
    pub(crate) most: usize,
}

/// What was transferred, and how long the rank did nothing but wait for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes that this rank sent.
    pub sent: usize,
    /// Seconds that it waited.
    pub waited: f64,
}

impl Traffic {
    pub(crate) fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.waited += other.waited;
    }
}

impl Wire {
    pub(crate) fn new(comm: &impl Communicator) -> Self {
        Self { comm: comm.duplicate(), timeout: Duration::from_secs(60), most: 1 << 30 }
    }

    pub(crate) fn rank(&self) -> usize {
        usize::try_from(self.comm.rank()).unwrap_or(0)
    }

    pub(crate) fn ranks(&self) -> usize {
        usize::try_from(self.comm.size()).unwrap_or(1)
    }

    /// Sends and receives while `work` runs. `work` calls the function it is given now and then: MPI moves large
    /// messages only while it is called. Lengths are known to both sides.
    pub(crate) fn exchange<R>(
        &self,
        what: &str,
        tag: i32,
        sends: &[(usize, &[u8])],
        receives: Vec<(usize, &mut [u8])>,
        work: impl FnOnce(&mut dyn FnMut()) -> R,
    ) -> (R, Traffic) {
        let most = self.most.max(1);
        multiple_scope(sends.len() + receives.len(), |scope, requests| {
            let mut peers = Vec::new();
            for (from, bytes) in receives {
                for piece in bytes.chunks_mut(most) {
                    let source = self.comm.process_at_rank(from as i32);
                    requests.add(source.immediate_receive_into_with_tag(scope, piece, tag));
                    peers.push(Some(from));
                }
            }
            let mut sent = 0;
            for &(to, bytes) in sends {
                sent += bytes.len();
                for piece in bytes.chunks(most) {
                    let target = self.comm.process_at_rank(to as i32);
                    requests.add(target.immediate_send_with_tag(scope, piece, tag));
                    peers.push(Some(to));
                }
            }
            let result = work(&mut || progress(requests, &mut peers));
            let start = Instant::now();
            self.wait(what, requests, &mut peers);
            (result, Traffic { sent, waited: start.elapsed().as_secs_f64() })
        })
    }

    /// Waits until all requests have completed, or gives the job up.
    fn wait(&self, what: &str, requests: &mut RequestCollection<'_, [u8]>, peers: &mut [Option<usize>]) {
        let (mut last, mut left, mut polls) = (Instant::now(), requests.incomplete(), 0u32);
        while left > 0 {
            progress(requests, peers);
            let now = requests.incomplete();
            if now != left {
                (last, left, polls) = (Instant::now(), now, 0);
            } else if last.elapsed() > self.timeout {
                let mut waiting: Vec<usize> = peers.iter().flatten().copied().collect();
                waiting.sort_unstable();
                waiting.dedup();
                self.give_up(what, &waiting);
            } else {
                polls += 1;
                // Whoever else has this core goes first: ranks may share cores.
                if polls < 1000 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
            }
        }
    }

    /// Asks all ranks for a sign of life, says who gave none, and ends the job. Ranks that live wait for the same
    /// silent one, and answer within the time-out.
    fn give_up(&self, what: &str, waiting: &[usize]) -> ! {
        let (me, ranks) = (self.rank(), self.ranks());
        let (sign, mut signs) = ([1u8], vec![[0u8; 1]; ranks]);
        multiple_scope(2 * ranks, |scope, requests| {
            let mut silent = Vec::new();
            for (rank, to) in signs.iter_mut().enumerate().filter(|(rank, _)| *rank != me) {
                let other = self.comm.process_at_rank(rank as i32);
                requests.add(other.immediate_receive_into_with_tag(scope, &mut to[..], ROLL_CALL));
                silent.push(Some(rank));
            }
            let answers = silent.len();
            for rank in (0..ranks).filter(|&rank| rank != me) {
                let other = self.comm.process_at_rank(rank as i32);
                requests.add(other.immediate_send_with_tag(scope, &sign[..], ROLL_CALL));
                silent.push(None);
            }
            let start = Instant::now();
            while start.elapsed() < self.timeout && silent.iter().take(answers).any(Option::is_some) {
                progress(requests, &mut silent);
                std::thread::sleep(Duration::from_millis(1));
            }
            let silent: Vec<usize> = silent.into_iter().take(answers).flatten().collect();
            let seconds = self.timeout.as_secs_f64();
            // In one piece: other ranks write to the same terminal.
            let text = format!(
                "attn-mpi: rank {me} waited {seconds} s for {what} with ranks {waiting:?}; \
                 no sign of life from ranks {silent:?}. The job is aborted.\n"
            );
            let _ = std::io::stderr().write_all(text.as_bytes());
            self.comm.abort(GAVE_UP)
        })
    }

    /// What every rank has, in the order of the ranks; all have as many bytes. Takes `⌈log₂ ranks⌉` messages of each
    /// rank (Bruck et al. 1997).
    pub(crate) fn all_gather(&self, what: &str, tag: i32, mine: &[u8]) -> (Vec<u8>, Traffic) {
        let (me, ranks, size) = (self.rank(), self.ranks(), mine.len());
        // Block `n` is that of rank `me + n`.
        let mut blocks = vec![0u8; ranks * size];
        blocks[..size].copy_from_slice(mine);
        let (mut have, mut traffic) = (1, Traffic::default());
        while have < ranks {
            let count = have.min(ranks - have);
            let (known, rest) = blocks.split_at_mut(have * size);
            let (to, from) = ((me + ranks - have) % ranks, (me + have) % ranks);
            let receives = vec![(from, &mut rest[..count * size])];
            traffic.add(self.exchange(what, tag, &[(to, &known[..count * size])], receives, |_| ()).1);
            have += count;
        }
        if size > 0 {
            blocks.rotate_right(me * size);
        }
        (blocks, traffic)
    }
}

/// Lets MPI work, and notes which requests have completed.
fn progress(requests: &mut RequestCollection<'_, [u8]>, peers: &mut [Option<usize>]) {
    if requests.incomplete() > 0 {
        let mut done = Vec::new();
        requests.test_some(&mut done);
        for (index, ..) in done {
            peers[index] = None;
        }
    }
}
