//! Progress on the terminal: a bar where somebody watches, plain lines where output goes to a file.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use attn_bench::curve::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// Shows how far a measurement is, on standard error.
pub(crate) struct Terminal {
    bar: Option<ProgressBar>,
    steps: usize,
    done: usize,
    last_line: Option<Instant>,
}

/// Plain lines come at most this often.
const BETWEEN_LINES: Duration = Duration::from_secs(2);

impl Terminal {
    /// A bar if standard error is a terminal.
    pub(crate) fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(0));
        Self { bar, steps: 0, done: 0, last_line: None }
    }
}

impl Progress for Terminal {
    fn begin(&mut self, steps: usize) {
        (self.steps, self.done) = (steps, 0);
        if let Some(bar) = &self.bar {
            bar.set_length(steps as u64);
            bar.set_position(0);
            if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} {bar:40} {pos}/{len} {msg}") {
                bar.set_style(style);
            }
        }
    }

    fn step(&mut self, what: &str) {
        match &self.bar {
            Some(bar) => {
                // No redrawing from another thread while something is measured: only here, between measurements.
                bar.set_position(self.done as u64);
                bar.set_message(what.to_string());
            }
            None if self.last_line.is_none_or(|at| at.elapsed() >= BETWEEN_LINES) => {
                eprintln!("[{}/{}] {what}", self.done + 1, self.steps);
                self.last_line = Some(Instant::now());
            }
            None => {}
        }
        self.done += 1;
    }

    fn end(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
