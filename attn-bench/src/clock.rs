//! Times of repeated calls: how often to repeat, and which samples to keep.
//!
//! A sample is the mean over enough back-to-back calls that the clock's own cost and grain do not show ([`calls_for`]).
//! A report has the median of several samples, which one interrupted sample does not move. All samples are kept.
//!
//! Work on one thread is timed twice ([`both`]): by the wall clock, and by the thread's own clock, which stops while
//! another program has the core. On an idle machine they agree. On a busy one only the second gives the cost of the
//! work.

use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use serde::{Deserialize, Serialize};

/// Shortest sample worth taking: the clock costs tens of nanoseconds, and a call may take less than a microsecond.
const SHORTEST_SAMPLE: f64 = 500e-6;

/// Longer than the thread pools of other libraries spin after a call (OpenMP's 200 ms is the longest).
pub(crate) const SPIN: Duration = Duration::from_millis(300);

/// Seconds of each sample, in the order they were taken.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Samples(pub Vec<f64>);

impl Samples {
    /// The median; NaN without samples.
    pub fn median(&self) -> f64 {
        median(&self.0)
    }

    /// The shortest; +∞ without samples.
    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Distance between the quartiles relative to the median: how far the samples scatter.
    pub fn spread(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| sorted.get((share * (sorted.len().max(1) - 1) as f64).round() as usize).copied();
        match (at(0.25), at(0.75)) {
            (Some(low), Some(high)) => (high - low) / self.median(),
            _ => f64::NAN,
        }
    }
}

/// The median of some numbers; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => f64::NAN,
        _ if n % 2 == 1 => sorted[n / 2],
        _ => 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]),
    }
}

/// Calls per sample for a call of about `seconds`.
pub fn calls_for(seconds: f64) -> u32 {
    if seconds >= SHORTEST_SAMPLE { 1 } else { (SHORTEST_SAMPLE / seconds.max(1e-9)).ceil().min(100_000.0) as u32 }
}

/// Seconds per call of `calls` back-to-back calls.
///
/// # Errors
/// The first error of a call.
pub fn time<E>(calls: u32, mut call: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let calls = calls.max(1);
    let start = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(calls))
}

/// Seconds per call of `calls` back-to-back calls on this thread: by the wall's clock, and the time that the thread
/// really ran.
///
/// # Errors
/// The first error of a call.
pub fn both<E>(calls: u32, call: impl FnMut() -> Result<(), E>) -> Result<(f64, f64), E> {
    let thread = ThreadTime::now();
    let wall = time(calls, call)?;
    Ok((wall, thread.elapsed().as_secs_f64() / f64::from(calls.max(1))))
}

/// When to stop repeating.
#[derive(Clone, Copy, Debug)]
pub struct Repeat {
    /// Never fewer samples than this (unless the deadline has passed: then one).
    pub at_least: usize,
    /// Never more samples than this.
    pub at_most: usize,
    /// Between the two, stop when this much time has been spent.
    pub seconds: f64,
}

impl Repeat {
    /// The share of one of several passes.
    pub fn split(&self, passes: usize) -> Self {
        let passes = passes.max(1);
        Self {
            at_least: self.at_least.div_ceil(passes),
            at_most: self.at_most.div_ceil(passes),
            seconds: self.seconds / passes as f64,
        }
    }

    /// Whether to take another sample after `taken`, which took `spent` seconds.
    pub fn goes_on(&self, taken: usize, spent: f64, late: bool) -> bool {
        let at_least = if late { 1 } else { self.at_least };
        taken < at_least || (!late && taken < self.at_most && spent < self.seconds)
    }
}

/// A point in time after which measurements are cut short.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// `seconds` from now.
    pub fn after(seconds: f64) -> Self {
        Self(Duration::try_from_secs_f64(seconds).ok().and_then(|d| Instant::now().checked_add(d)))
    }

    /// Whether it has passed.
    pub fn passed(&self) -> bool {
        self.0.is_some_and(|at| Instant::now() >= at)
    }

    /// Seconds that remain; 0 when it has passed.
    pub fn remains(&self) -> f64 {
        self.0.map_or(f64::INFINITY, |at| at.saturating_duration_since(Instant::now()).as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
        let samples = Samples(vec![5.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!((samples.median(), samples.min(), samples.spread()), (3.0, 1.0, 2.0 / 3.0));
        assert!(Samples::default().spread().is_nan());
    }

    #[test]
    fn short_calls_are_taken_together() {
        assert_eq!(calls_for(1.0), 1);
        assert_eq!(calls_for(SHORTEST_SAMPLE / 10.0), 10);
        assert!(calls_for(0.0) > 1000);
        let mut count = 0;
        time(7, || {
            count += 1;
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(count, 7);
        assert_eq!(time(2, || Err(3)), Err(3));
    }

    #[test]
    fn the_clock_of_the_thread_stands_still_while_it_sleeps() {
        let (wall, thread) = both(1, || {
            std::thread::sleep(Duration::from_millis(20));
            Ok::<(), ()>(())
        })
        .unwrap();
        assert!(wall >= 0.02 && thread < wall / 2.0, "{wall} {thread}");
    }

    #[test]
    fn passes_share_the_samples() {
        let third = Repeat { at_least: 3, at_most: 60, seconds: 0.6 }.split(3);
        assert_eq!((third.at_least, third.at_most), (1, 20));
        assert!((third.seconds - 0.2).abs() < 1e-12);
    }

    #[test]
    fn repeats_until_enough_or_late() {
        let repeat = Repeat { at_least: 3, at_most: 10, seconds: 1.0 };
        assert!(repeat.goes_on(2, 5.0, false) && !repeat.goes_on(3, 5.0, false));
        assert!(repeat.goes_on(9, 0.1, false) && !repeat.goes_on(10, 0.1, false));
        assert!(repeat.goes_on(0, 0.0, true) && !repeat.goes_on(1, 0.0, true));
        assert!(Deadline::after(-1.0).remains().is_infinite() && !Deadline::after(1e9).passed());
        assert!(Deadline::after(0.0).passed());
    }
}
