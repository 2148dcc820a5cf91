//! The communicator of a cluster, and answers to ranks that ask for a sign of life.
//!
//! A rank answers for all clusters of its thread at once: one of them may wait for a rank that computes in another. Who
//! asks, and when a job is given up, says `roll_call`.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};

/// The exit code of a job that was given up.
const GAVE_UP: i32 = 70;

/// Tags of questions and of answers.
pub(crate) const TAGS: [i32; 2] = [7, 11];

thread_local! {
    /// Those of all clusters of this thread.
    static LINES: RefCell<Vec<Weak<Line>>> = const { RefCell::new(Vec::new()) };
    /// For how long nothing has arrived, if this thread only waits, in whichever cluster.
    static WAITS: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// The most that counts between two looks at a clock. More is time in which the process was stopped: whoever suspends a
/// whole job stops all its ranks, and none of them is silent.
const STEP: Duration = Duration::from_millis(100);

/// How long this process has been awake.
#[derive(Debug)]
pub(crate) struct Awake {
    last: Instant,
    total: Duration,
}

impl Awake {
    pub(crate) fn new() -> Self {
        Self { last: Instant::now(), total: Duration::ZERO }
    }

    /// The time since the beginning, by clocks that are looked at often.
    pub(crate) fn elapsed(&mut self) -> Duration {
        let now = Instant::now();
        self.total += (now - self.last).min(STEP);
        self.last = now;
        self.total
    }
}

/// A communicator of our own, so that no message meets one of the caller's, and how long nothing may arrive.
pub(crate) struct Line {
    pub(crate) comm: SimpleCommunicator,
    pub(crate) timeout: Cell<Duration>,
}

impl Line {
    pub(crate) fn new(comm: &impl Communicator) -> Rc<Self> {
        let line = Rc::new(Self { comm: comm.duplicate(), timeout: Cell::new(Duration::from_secs(60)) });
        LINES.with_borrow_mut(|lines| {
            lines.retain(|line| line.strong_count() > 0);
            lines.push(Rc::downgrade(&line));
        });
        line
    }

    /// Writes why, and ends the job.
    pub(crate) fn give_up(&self, why: &str) -> ! {
        // In one piece: other ranks write to the same terminal.
        let text = format!("attn-mpi: rank {} {why}. The job is aborted.\n", self.comm.rank());
        let _ = std::io::stderr().write_all(text.as_bytes());
        self.comm.abort(GAVE_UP)
    }

    fn answer(&self) {
        let [question, answer] = TAGS;
        while let Some(status) = self.comm.any_process().immediate_probe_with_tag(question) {
            let asks = self.comm.process_at_rank(status.source_rank());
            let mut round = [0u64];
            asks.receive_into_with_tag(&mut round[..], question);
            let stuck = WAITS.get().is_some_and(|waited| waited > self.timeout.get());
            // A few bytes, which MPI takes over at once.
            asks.send_with_tag(&[round[0], u64::from(stuck)][..], answer);
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        drop(EndsPanicked(self));
    }
}

/// Ends the job if its rank unwinds: the others would wait for its messages, and it for them in `MPI_Finalize`.
pub(crate) struct EndsPanicked<'l>(pub(crate) &'l Line);

impl Drop for EndsPanicked<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && self.0.comm.size() > 1 {
            self.0.give_up("panicked");
        }
    }
}

/// Answers the ranks that ask for a sign of life, in any cluster of this thread: with the number of the question, and
/// whether this rank has only waited for longer than the time-out.
pub(crate) fn answer() {
    LINES.with_borrow(|lines| lines.iter().filter_map(Weak::upgrade).for_each(|line| line.answer()));
}

/// Notes for how long nothing has arrived; `None` if this thread does not wait.
pub(crate) fn waits_for(waited: Option<Duration>) {
    WAITS.set(waited);
}
