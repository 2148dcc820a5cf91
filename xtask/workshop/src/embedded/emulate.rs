//! Runs a program on the host or in QEMU and reads what it prints.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::boards::{Board, folder};
use crate::process;

/// How long a program may run: seconds, unless it hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// What one measured call cost.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cost {
    /// The case, `streaming/causal`.
    pub(super) case: String,
    /// The entry point, `streaming`.
    pub(super) entry: String,
    /// Emulated instructions per token.
    pub(super) instructions: f64,
    /// Bytes of stack.
    pub(super) stack: u64,
}

/// What a program printed.
#[derive(Debug, Default)]
pub(super) struct Output {
    /// Results, as bits: the same on every machine.
    pub(super) cases: Vec<String>,
    /// What they cost.
    pub(super) costs: Vec<Cost>,
    /// Lines for people.
    pub(super) words: Vec<String>,
}

impl Output {
    /// Reads the lines.
    fn parse(text: &str) -> Result<Self, String> {
        let mut output = Self::default();
        let mut per_tick = 0.0;
        for line in text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let number = |n: usize| -> Result<f64, String> {
                words.get(n).and_then(|word| word.parse().ok()).ok_or_else(|| format!("not understood: {line}"))
            };
            match words.as_slice() {
                ["case", ..] => output.cases.push(line.to_owned()),
                ["clock", ..] => per_tick = number(1)? / number(2)?.max(1.0),
                ["cost", case, entry, ..] => output.costs.push(Cost {
                    case: (*case).to_owned(),
                    entry: (*entry).to_owned(),
                    instructions: number(5)? * per_tick / number(3)?.max(1.0),
                    stack: number(4)? as u64,
                }),
                _ => output.words.push(line.to_owned()),
            }
        }
        if output.cases.is_empty() { Err(format!("no result in what it printed:\n{text}")) } else { Ok(output) }
    }

    /// Says where another machine's results differ.
    pub(super) fn same_cases(&self, other: &Self) -> Result<(), String> {
        if let Some((host, board)) = self.cases.iter().zip(&other.cases).find(|(a, b)| a != b) {
            return Err(format!("results differ:\n    host:  {host}\n    board: {board}"));
        }
        if self.cases.len() != other.cases.len() {
            return Err(format!("{} lines of results, the host has {}", other.cases.len(), self.cases.len()));
        }
        Ok(())
    }

    /// The deepest stack of an entry point.
    pub(super) fn stack(&self, entry: &str) -> Option<u64> {
        self.costs.iter().filter(|cost| cost.entry == entry).map(|cost| cost.stack).max()
    }

    /// Instructions per token of a case.
    pub(super) fn instructions(&self, case: &str) -> Option<f64> {
        self.costs.iter().find(|cost| cost.case == case).map(|cost| cost.instructions)
    }
}

/// On the host.
pub(super) fn on_host(program: &Path) -> Result<Output, String> {
    output(Command::new(program), program)
}

/// On a board. An instruction takes 16 ns of the emulated clock, so that every board's ticks are a few instructions.
pub(super) fn run(board: &Board, program: &Path) -> Result<Output, String> {
    let [emulator, args @ ..] = board.qemu else { return Err("a board without an emulator".to_owned()) };
    let mut command = Command::new(emulator);
    command.args(args).args(["-nographic", "-icount", "shift=4,align=off,sleep=off"]);
    command.args(["-semihosting-config", "enable=on,target=native", "-kernel"]).arg(program);
    output(command, program).map_err(|message| format!("{}: {message}", board.name))
}

fn output(command: Command, program: &Path) -> Result<Output, String> {
    let path = folder().join("run.log");
    let log = File::create(&path).map_err(|error| error.to_string())?;
    let end = process::run(command, &log, LIMIT);
    let text = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
    if end.is_success() {
        return Output::parse(&text);
    }
    let last: Vec<_> = text.lines().rev().take(5).collect();
    let last: Vec<_> = last.into_iter().rev().collect();
    Err(format!("{}: {end:?}; the last lines:\n{}", program.display(), last.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_results_and_costs() {
        let text = "clock 400000 160000\ncase a.0 3f800000\ncost a streaming 4 512 80\nhello there\ncost b streaming 1 700 8\n";
        let output = Output::parse(text).expect("it is well formed");
        assert_eq!((output.cases.len(), output.words.as_slice()), (1, &["hello there".to_owned()][..]));
        assert_eq!((output.stack("streaming"), output.stack("ring")), (Some(700), None));
        assert_eq!(output.instructions("a"), Some(50.0)); // 80 ticks of 2.5 over 4 tokens
        assert!(Output::parse("hello").is_err() && Output::parse("cost a b").is_err());
    }

    #[test]
    fn a_bit_that_differs_is_found() {
        let one = Output::parse("case a.0 3f800000\ncase b.0 1").expect("well formed");
        for (other, says) in [("case a.0 3f800001\ncase b.0 1", "3f800001"), ("case a.0 3f800000", "1 lines")] {
            let message = one.same_cases(&Output::parse(other).expect("well formed")).expect_err("they differ");
            assert!(message.contains(says), "{message}");
        }
        assert!(one.same_cases(&one).is_ok());
    }
}
