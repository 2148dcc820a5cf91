//! The ranks of a job, and how their calls run: level, method, time-out. A program makes one.

use std::time::Duration;

use attn_simd::Level;
use mpi::traits::Communicator;

use crate::agree::Record;
use crate::cost::Method;
use crate::error::Result;
use crate::line;
use crate::link::Link;
use crate::scratch::Scratch;
use crate::wire::{Traffic, Wire};

/// The ranks of a communicator, and how their calls run. Made once by all ranks together.
///
/// Messages go over a duplicate of the communicator: they never meet the program's own.
///
/// ```no_run
/// use attn_mpi::{Cluster, mpi};
/// let universe = mpi::initialize().expect("MPI is not initialised yet");
/// let cluster = Cluster::new(&universe.world()).timeout(std::time::Duration::from_secs(20));
/// println!("rank {} of {}", cluster.rank(), cluster.ranks());
/// ```
pub struct Cluster {
    pub(crate) wire: Wire,
    pub(crate) level: Level,
    pub(crate) mixed: bool,
    pub(crate) threads: usize,
    pub(crate) method: Option<Method>,
    pub(crate) link: Link,
    pub(crate) scratch: Scratch,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("level", &self.level)
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// The ranks of a communicator. All of them call this, and measure the latency and the bandwidth of their links by
    /// some messages. MPI duplicates the communicator: a rank that never comes here is waited for without a time-out.
    pub fn new(comm: &impl Communicator) -> Self {
        let mut wire = Wire::new(comm);
        let link = Link::measure(&mut wire);
        Self {
            wire,
            level: Level::detect(),
            mixed: false,
            threads: usize::MAX,
            method: None,
            link,
            scratch: Scratch::default(),
        }
    }

    /// How long a rank waits without anything arriving, 60 s unless said. Then it asks all ranks for a sign of life,
    /// and again each time that so much has passed. A rank that computes in a call answers between two calls of the
    /// kernels, which take seconds on one core; a slow function of the caller's makes them longer. The job is aborted
    /// with code 70 if a rank does not answer within this time, which is named on standard error, or if all ranks only
    /// wait for each other.
    ///
    /// A rank may have several clusters, and computes in one of them while ranks of another wait for it: it answers for
    /// all clusters that the same thread has made.
    ///
    /// A rank that does something else between two calls of a cluster is silent: the time must be longer, or the rank
    /// calls [`sign_of_life`](Self::sign_of_life) now and then. It must also be longer than a link takes for a
    /// [message](Self::message_bytes).
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        self.wire.line.timeout.set(timeout);
        self
    }

    /// Computes at this level instead of the machine's best.
    #[must_use]
    pub fn level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// Permits ranks of different instruction-set levels: results are right, but their bits depend on the rank that
    /// computes them.
    #[must_use]
    pub fn allow_mixed_levels(mut self) -> Self {
        self.mixed = true;
        self
    }

    /// At most so many threads of the current rayon pool for each call.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Shares every prefill out in this way, instead of the one that is predicted to be faster.
    #[must_use]
    pub fn method(mut self, method: Method) -> Self {
        self.method = Some(method);
        self
    }

    /// The most bytes of one message of MPI, at most 2³¹ − 1; longer ones are sent in pieces. 2³⁰ unless said. Every
    /// rank passes the same.
    #[must_use]
    pub fn message_bytes(mut self, most: usize) -> Self {
        self.wire.most = most.clamp(1, i32::MAX as usize);
        self
    }

    /// The links as these, instead of as measured: for predictions that do not change from run to run. Every rank
    /// passes the same.
    #[must_use]
    pub fn link(mut self, link: Link) -> Self {
        self.link = link;
        self
    }

    /// The links as measured, or as given.
    pub fn get_link(&self) -> Link {
        self.link
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.wire.rank()
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.wire.ranks()
    }

    /// Answers the ranks that wait for this one and ask whether it is alive, in any cluster of this thread. Programs
    /// call it if they do other work for longer than the [time-out](Self::timeout) between two calls of a cluster.
    pub fn sign_of_life(&self) {
        line::answer();
    }

    /// What all ranks have, in their order; all have as many bytes. With the time-out of the cluster.
    ///
    /// # Errors
    /// On every rank, if one has another number of bytes or makes another call.
    pub fn all_gather(&self, mine: &[u8]) -> Result<Vec<u8>> {
        // Bytes are the same at every level.
        Record::new("a gathering of the program", Level::portable(), true)
            .with("the bytes of a gathering", mine.len() as u64)
            .agree(&self.wire, Ok(()))?;
        Ok(self.wire.all_gather_first("a gathering of the program", 2, mine).0)
    }
}

/// What a call did: its method, bytes sent and seconds waited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// How the call was shared out.
    pub method: Method,
    /// Messages of this rank.
    pub traffic: Traffic,
    /// Seconds of the whole call, on this rank.
    pub seconds: f64,
}
