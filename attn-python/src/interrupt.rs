//! Ctrl-C: a long call runs on a thread of its own, while the caller's thread polls for signals and stops it.
//!
//! Python runs handlers of signals on its main thread, between two of its instructions or when an extension polls for
//! them. A thread of the pool cannot poll, and a thread that computes could only do so inside its kernels.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{panic, thread};

use attn_core::Result;
use pyo3::prelude::*;

use crate::options::raised;
use crate::pool::{self, Work};

/// Operations from which on a call gets a thread: about ten milliseconds of a fast machine, beside which the twenty
/// microseconds of a new thread do not show.
const LONG: f64 = 1e9;

/// How often signals are looked for.
const EVERY: Duration = Duration::from_millis(50);

/// Runs a call without the interpreter's lock. A long one gets a flag that it must obey: the
/// handler of a signal has raised an error, which is returned.
pub(crate) fn run(
    py: Python<'_>,
    work: Work,
    call: impl FnOnce(Option<&AtomicBool>) -> Result<()> + Send,
) -> PyResult<()> {
    if work.operations < LONG {
        return py.detach(|| pool::run(work, || call(None))).map_err(raised);
    }
    let (stop, call, (done, mut ended)) = (AtomicBool::new(false), Mutex::new(Some(call)), sync_channel(1));
    let take = || call.lock().unwrap_or_else(PoisonError::into_inner).take();
    thread::scope(|scope| {
        let work = || {
            let result = take().map_or(Ok(()), |call| call(Some(&stop)));
            let _ = done.send(result); // nobody listens after a panic only
        };
        let Ok(worker) = thread::Builder::new().name("attn".into()).spawn_scoped(scope, work) else {
            // No thread is to be had: Ctrl-C waits.
            return py.detach(|| take().map_or(Ok(()), |call| call(None))).map_err(raised);
        };
        let mut interrupted = None;
        loop {
            let found;
            (found, ended) = py.detach(move || (ended.recv_timeout(EVERY), ended));
            match found {
                Ok(result) => return interrupted.map_or(result.map_err(raised), Err),
                Err(RecvTimeoutError::Timeout) if worker.is_finished() => break,
                Err(RecvTimeoutError::Timeout) => {
                    if interrupted.is_none()
                        && let Err(error) = py.check_signals()
                    {
                        stop.store(true, Ordering::Relaxed);
                        interrupted = Some(error);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        worker.join().map_err(|panic| panic::resume_unwind(panic))
    })
}
