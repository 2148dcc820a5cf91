//! Signs of life: a rank that has waited for too long asks all others, and each answers whenever it calls MPI.
//!
//! A rank that computes calls MPI between two calls of the kernels, and answers that it computes: the asking rank waits
//! on. If a rank does not answer within the time-out, or if all ranks only wait for each other, the job is aborted, and
//! the message names the reason.

use std::io::Write;
use std::time::{Duration, Instant};

use mpi::request::multiple_scope;
use mpi::traits::{Communicator, Destination, Source};

use crate::wire::Wire;

/// Tags of questions and of answers.
const TAGS: [i32; 2] = [7, 11];

/// The exit code of a job that was given up.
const GAVE_UP: i32 = 70;

impl Wire {
    /// Answers the ranks that ask for a sign of life: with the number of the question, and whether this rank has only
    /// waited for longer than the time-out.
    pub(crate) fn answer(&self) {
        let [question, answer] = TAGS;
        while let Some(status) = self.comm.any_process().immediate_probe_with_tag(question) {
            let asks = self.comm.process_at_rank(status.source_rank());
            let mut round = [0u64];
            asks.receive_into_with_tag(&mut round[..], question);
            let stuck = self.waits.get().is_some_and(|since| since.elapsed() > self.timeout);
            // A few bytes, which MPI takes over at once.
            asks.send_with_tag(&[round[0], u64::from(stuck)][..], answer);
        }
    }

    /// Asks all ranks for a sign of life. Returns if one of them computes, or has heard from another not long ago, or
    /// if what this rank waits for arrives: `arrives` lets MPI work, and gives the ranks that are waited for, `None` if
    /// something has come from one. Else the job ends. `last`: when something arrived last.
    pub(crate) fn roll_call(&self, what: &str, last: Instant, arrives: &mut dyn FnMut() -> Option<Vec<usize>>) {
        let ([question, answer], me, ranks) = (TAGS, self.rank(), self.ranks());
        let round = [self.round.replace(self.round.get() + 1)];
        // Whether a rank only waits; this one does.
        let mut signs: Vec<Option<bool>> = (0..ranks).map(|rank| (rank == me).then_some(true)).collect();
        multiple_scope(ranks, |scope, questions| {
            for rank in (0..ranks).filter(|&rank| rank != me) {
                let other = self.comm.process_at_rank(rank as i32);
                questions.add(other.immediate_send_with_tag(scope, &round[..], question));
            }
            let (asked, mut sent) = (Instant::now(), Vec::new());
            loop {
                if questions.incomplete() > 0 {
                    questions.test_some(&mut sent);
                }
                self.answer();
                while let Some(status) = self.comm.any_process().immediate_probe_with_tag(answer) {
                    let rank = status.source_rank();
                    let mut sign = [0u64; 2];
                    self.comm.process_at_rank(rank).receive_into_with_tag(&mut sign[..], answer);
                    // An answer to an earlier question says nothing.
                    if let (true, Ok(rank)) = (sign[0] == round[0], usize::try_from(rank)) {
                        signs[rank] = Some(sign[1] != 0);
                    }
                }
                let (waiting, all) = (arrives(), signs.iter().all(Option::is_some));
                let works = signs.contains(&Some(false));
                if questions.incomplete() == 0 && (waiting.is_none() || (all && works)) {
                    return;
                }
                if all && !works || asked.elapsed() > self.timeout {
                    self.give_up(what, last, waiting.unwrap_or_default(), &signs);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }

    /// Says why, and ends the job.
    fn give_up(&self, what: &str, last: Instant, mut waiting: Vec<usize>, signs: &[Option<bool>]) -> ! {
        waiting.sort_unstable();
        waiting.dedup();
        let silent: Vec<usize> = (0..signs.len()).filter(|&rank| signs[rank].is_none()).collect();
        let found = if silent.is_empty() {
            "all ranks wait for each other: they make different calls".to_owned()
        } else {
            format!("no sign of life from ranks {silent:?}")
        };
        let (me, seconds) = (self.rank(), last.elapsed().as_secs_f64());
        // In one piece: other ranks write to the same terminal.
        let text = format!(
            "attn-mpi: rank {me} waited {seconds:.1} s for {what} with ranks {waiting:?}; {found}. The job is aborted.\n"
        );
        let _ = std::io::stderr().write_all(text.as_bytes());
        self.comm.abort(GAVE_UP)
    }
}
