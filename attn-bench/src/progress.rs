//! The progress of a measurement, and the time that the rest will take.

/// Told how far a measurement is.
pub trait Progress {
    /// The work begins; each step comes with the seconds it is expected to take, which need only be right in
    /// proportion.
    fn begin(&mut self, expected: &[f64]);
    /// The next step begins.
    fn step(&mut self, what: &str);
    /// The next step need not be taken: an earlier run did it.
    fn known(&mut self);
    /// All is done.
    fn end(&mut self);
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _: &[f64]) {}
    fn step(&mut self, _: &str) {}
    fn known(&mut self) {}
    fn end(&mut self) {}
}

/// Predicts the time that is left from the time that the steps so far took, in proportion to the expected time of each.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    expected: Vec<f64>,
    started: usize,
    done: f64,
    running: f64,
}

impl Pace {
    /// Of the steps that are to come.
    pub fn new(expected: &[f64]) -> Self {
        Self { expected: expected.to_vec(), ..Self::default() }
    }

    /// Steps in all.
    pub fn steps(&self) -> usize {
        self.expected.len()
    }

    /// Steps that have begun or were known.
    pub fn started(&self) -> usize {
        self.started
    }

    /// The next step begins; the one before it is done.
    pub fn step(&mut self) {
        self.done += self.running;
        self.running = self.expected.get(self.started).copied().unwrap_or(0.0);
        self.started += 1;
    }

    /// The next step took no time, and says nothing about the others.
    pub fn known(&mut self) {
        self.done += self.running;
        self.running = 0.0;
        self.started += 1;
    }

    /// Seconds left when a step begins, `elapsed` seconds after the first one; `None` before one is done.
    pub fn left(&self, elapsed: f64) -> Option<f64> {
        let rest = self.running + self.expected.get(self.started..).unwrap_or_default().iter().sum::<f64>();
        (self.done > 0.0).then(|| elapsed * rest / self.done)
    }
}

/// Seconds as people say them: `45 s`, `3 min`, `1 h 20 min`.
pub fn duration(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round() as u64;
    match seconds {
        s if s < 99.5 => format!("{s:.0} s"),
        _ if minutes < 100 => format!("{minutes} min"),
        _ => format!("{} h {} min", minutes / 60, minutes % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_in_proportion_to_what_was_expected() {
        let mut pace = Pace::new(&[1.0, 1.0, 2.0, 4.0]);
        assert_eq!(pace.left(0.0), None);
        pace.step();
        assert_eq!(pace.left(0.0), None, "nothing is known while the first step runs");
        pace.step();
        assert_eq!(pace.left(3.0), Some(3.0 * 7.0), "three times slower than expected, seven to go");
        pace.known();
        assert_eq!(pace.left(6.0), Some(12.0), "a known step is neither work done nor work to do");
        pace.step();
        assert_eq!((pace.left(6.0), pace.started(), pace.steps()), (Some(12.0), 4, 4));
        pace.step();
        assert_eq!(pace.left(20.0), Some(0.0));
    }

    #[test]
    fn durations_read_well() {
        assert_eq!([0.4, 45.2, 180.0, 4800.0, 6600.0].map(duration), ["0 s", "45 s", "3 min", "80 min", "1 h 50 min"]);
    }
}
