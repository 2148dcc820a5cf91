//! Signs of life: a rank that has waited for too long asks all others, and each answers (`line`) whenever it calls MPI.
//!
//! A rank that computes calls MPI between two calls of the kernels, and answers that it computes: the asking rank waits
//! on. If a rank does not answer within the time-out, or if all ranks only wait for each other, the job is aborted, and
//! the message names the reason.

use std::time::Duration;

use mpi::request::multiple_scope;
use mpi::traits::{Communicator, Destination, Source};

use crate::line::{Awake, TAGS, answer};
use crate::wire::Wire;

impl Wire {
    /// Asks all ranks for a sign of life. Returns if one of them computes, or has heard from another not long ago, or
    /// if what this rank waits for arrives: `arrives` lets MPI work, and gives the ranks that are waited for, `None` if
    /// something has come from one. Else the job ends. `quiet`: since something arrived last.
    pub(crate) fn roll_call(&self, what: &str, quiet: &mut Awake, arrives: &mut dyn FnMut() -> Option<Vec<usize>>) {
        let ([question, answered], me, ranks) = (TAGS, self.rank(), self.ranks());
        let round = [self.round.replace(self.round.get() + 1)];
        // Whether a rank only waits; this one does.
        let mut signs: Vec<Option<bool>> = (0..ranks).map(|rank| (rank == me).then_some(true)).collect();
        multiple_scope(ranks, |scope, questions| {
            for rank in (0..ranks).filter(|&rank| rank != me) {
                let other = self.line.comm.process_at_rank(rank as i32);
                questions.add(other.immediate_send_with_tag(scope, &round[..], question));
            }
            let (mut asked, mut sent) = (Awake::new(), Vec::new());
            loop {
                if questions.incomplete() > 0 {
                    questions.test_some(&mut sent);
                }
                quiet.elapsed();
                answer();
                while let Some(status) = self.line.comm.any_process().immediate_probe_with_tag(answered) {
                    let rank = status.source_rank();
                    let mut sign = [0u64; 2];
                    self.line.comm.process_at_rank(rank).receive_into_with_tag(&mut sign[..], answered);
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
                if all && !works || asked.elapsed() > self.line.timeout.get() {
                    self.give_up(what, quiet.elapsed(), waiting.unwrap_or_default(), &signs);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }

    /// Says why, and ends the job.
    fn give_up(&self, what: &str, waited: Duration, mut waiting: Vec<usize>, signs: &[Option<bool>]) -> ! {
        waiting.sort_unstable();
        waiting.dedup();
        let silent: Vec<usize> = (0..signs.len()).filter(|&rank| signs[rank].is_none()).collect();
        let found = if silent.is_empty() {
            "all ranks wait for each other: they make different calls".to_owned()
        } else {
            format!("no sign of life from ranks {silent:?}")
        };
        let seconds = waited.as_secs_f64();
        self.line.give_up(&format!("waited {seconds:.1} s for {what} with ranks {waiting:?}; {found}"))
    }
}
