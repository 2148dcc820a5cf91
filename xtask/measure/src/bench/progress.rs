//! Progress on the terminal: a bar on a terminal, plain lines in a file.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use attn_bench::progress::{Pace, Progress, duration};
use indicatif::{ProgressBar, ProgressStyle};

/// Shows how far a measurement is, on standard error.
pub(crate) struct Terminal {
    bar: Option<ProgressBar>,
    pace: Pace,
    started: Instant,
    last_line: Option<Instant>,
}

/// Plain lines come at most this often.
const BETWEEN_LINES: Duration = Duration::from_secs(2);

impl Terminal {
    /// A bar if standard error is a terminal.
    pub(crate) fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(0));
        Self { bar, pace: Pace::default(), started: Instant::now(), last_line: None }
    }
}

impl Progress for Terminal {
    fn begin(&mut self, expected: &[f64]) {
        self.pace = Pace::new(expected);
        self.started = Instant::now();
        if let Some(bar) = &self.bar {
            bar.set_length(expected.len() as u64);
            bar.set_position(0);
            if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} {bar:40} {pos}/{len} {msg}") {
                bar.set_style(style);
            }
        }
    }

    fn step(&mut self, what: &str) {
        self.pace.step();
        let left = self.pace.left(self.started.elapsed().as_secs_f64());
        let left = left.map_or_else(String::new, |left| format!(", {} left", duration(left)));
        match &self.bar {
            Some(bar) => {
                // No redrawing from another thread while something is measured: only here, between measurements.
                bar.set_position(self.pace.started() as u64 - 1);
                bar.set_message(format!("{what}{left}"));
            }
            None if self.last_line.is_none_or(|at| at.elapsed() >= BETWEEN_LINES) => {
                eprintln!("[{}/{}{left}] {what}", self.pace.started(), self.pace.steps());
                self.last_line = Some(Instant::now());
            }
            None => {}
        }
    }

    fn known(&mut self) {
        self.pace.known();
    }

    fn end(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
