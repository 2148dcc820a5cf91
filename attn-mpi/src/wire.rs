//! Messages between ranks: non-blocking, cut at the largest count of MPI, and never waited for beyond the time-out.
//!
//! Every message is bytes. Counts of MPI are `int`, so that a message of more than 2³¹ − 1 bytes is sent in pieces; MPI
//! keeps the order of messages of one sender, tag and communicator. If nothing arrives for as long as the time-out, the
//! rank asks all others for a sign of life: `roll_call`.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use mpi::request::{RequestCollection, multiple_scope};
use mpi::traits::{Communicator, Destination, Source};

use crate::line::{self, Awake, EndsPanicked, Line};

/// The most bytes of one message of MPI, unless all ranks have agreed on another number.
const MOST: usize = 1 << 30;

/// The messages of a cluster.
pub(crate) struct Wire {
    pub(crate) line: Rc<Line>,
    /// The most bytes of one message of MPI.
    pub(crate) most: usize,
    /// Number of the last roll call of this rank.
    pub(crate) round: Cell<u64>,
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
        Self { line: Line::new(comm), most: MOST, round: Cell::new(0) }
    }

    pub(crate) fn rank(&self) -> usize {
        usize::try_from(self.line.comm.rank()).unwrap_or(0)
    }

    pub(crate) fn ranks(&self) -> usize {
        usize::try_from(self.line.comm.size()).unwrap_or(1)
    }

    /// Sends and receives while `work` runs. `work` calls the function it is given now and then: MPI moves large
    /// messages only while it is called, and others may ask for a sign of life. Lengths are known to both sides.
    pub(crate) fn exchange<R>(
        &self,
        what: &str,
        tag: i32,
        sends: &[(usize, &[u8])],
        receives: Vec<(usize, &mut [u8])>,
        work: impl FnOnce(&mut dyn FnMut()) -> R,
    ) -> (R, Traffic) {
        self.exchange_in(self.most, what, tag, sends, receives, work)
    }

    /// As [`exchange`](Self::exchange), in messages of at most so many bytes.
    fn exchange_in<R>(
        &self,
        most: usize,
        what: &str,
        tag: i32,
        sends: &[(usize, &[u8])],
        receives: Vec<(usize, &mut [u8])>,
        work: impl FnOnce(&mut dyn FnMut()) -> R,
    ) -> (R, Traffic) {
        let most = most.max(1);
        multiple_scope(sends.len() + receives.len(), |scope, requests| {
            // Before the requests are dropped, which must not be under way then.
            let _ends = EndsPanicked(&self.line);
            let mut peers = Vec::new();
            for (from, bytes) in receives {
                for piece in bytes.chunks_mut(most) {
                    let source = self.line.comm.process_at_rank(from as i32);
                    requests.add(source.immediate_receive_into_with_tag(scope, piece, tag));
                    peers.push(Some(from));
                }
            }
            let mut sent = 0;
            for &(to, bytes) in sends {
                sent += bytes.len();
                for piece in bytes.chunks(most) {
                    let target = self.line.comm.process_at_rank(to as i32);
                    requests.add(target.immediate_send_with_tag(scope, piece, tag));
                    peers.push(Some(to));
                }
            }
            let result = work(&mut || {
                progress(requests, &mut peers);
                line::answer();
            });
            let start = Instant::now();
            self.wait(what, requests, &mut peers);
            (result, Traffic { sent, waited: start.elapsed().as_secs_f64() })
        })
    }

    /// Waits until all requests have completed, or gives the job up.
    fn wait(&self, what: &str, requests: &mut RequestCollection<'_, [u8]>, peers: &mut [Option<usize>]) {
        let (mut quiet, mut left, mut polls) = (Awake::new(), requests.incomplete(), 0u32);
        let mut asked = Duration::ZERO;
        while left > 0 {
            progress(requests, peers);
            let now = requests.incomplete();
            if now != left {
                (quiet, left, polls) = (Awake::new(), now, 0);
                asked = Duration::ZERO;
            }
            let waited = quiet.elapsed();
            line::waits_for(Some(waited));
            if waited - asked > self.line.timeout.get() {
                let peers_left = &mut *peers;
                self.roll_call(what, &mut quiet, &mut || {
                    progress(requests, peers_left);
                    let waiting = peers_left.iter().flatten().copied().collect();
                    if requests.incomplete() == left { Some(waiting) } else { None }
                });
                asked = quiet.elapsed();
            } else {
                polls += 1;
                if polls % 64 == 0 {
                    line::answer();
                }
                // Whoever else has this core goes first: ranks may share cores.
                if polls < 1000 { std::thread::yield_now() } else { std::thread::sleep(Duration::from_micros(50)) }
            }
        }
        line::waits_for(None);
    }

    /// What every rank has, in the order of the ranks; all have as many bytes. Takes `⌈log₂ ranks⌉` messages of each
    /// rank (Bruck et al. 1997).
    pub(crate) fn all_gather(&self, what: &str, tag: i32, mine: &[u8]) -> (Vec<u8>, Traffic) {
        self.all_gather_in(self.most, what, tag, mine)
    }

    /// As [`all_gather`](Self::all_gather), before ranks have agreed on the bytes of a message.
    pub(crate) fn all_gather_first(&self, what: &str, tag: i32, mine: &[u8]) -> (Vec<u8>, Traffic) {
        self.all_gather_in(MOST, what, tag, mine)
    }

    fn all_gather_in(&self, most: usize, what: &str, tag: i32, mine: &[u8]) -> (Vec<u8>, Traffic) {
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
            let sends = [(to, &known[..count * size])];
            traffic.add(self.exchange_in(most, what, tag, &sends, receives, |_| ()).1);
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
