//! The cost curve: which lengths, how long to take, and what is shown.

use attn_bench::case::Case;
use attn_bench::clock::{Deadline, Repeat};
use attn_bench::curve::{self, Settings};
use attn_bench::engine::{self, Engine};
use attn_bench::machine::Machine;
use attn_bench::report::{Report, html, table};

use super::progress::Terminal;
use super::{Args, COUNTED, Failure, command_line, write};

/// How long to take.
struct Effort {
    longest: usize,
    repeat: Repeat,
    longest_call: f64,
    most_memory: usize,
    seconds: f64,
    probe_seconds: f64,
}

impl Effort {
    fn of(args: &Args) -> Self {
        if args.quick {
            // The whole run must stay below half a minute on two half-busy cores: measured, it is near 15 s when idle.
            let repeat = Repeat { at_least: 3, at_most: 25, seconds: 0.12 };
            Self {
                longest: 4096,
                repeat,
                longest_call: 0.35,
                most_memory: 128 << 20,
                seconds: 18.0,
                probe_seconds: 0.003,
            }
        } else if args.full {
            let repeat = Repeat { at_least: 5, at_most: 200, seconds: 2.0 };
            Self { longest: 32768, repeat, longest_call: 30.0, most_memory: 5 << 30, seconds: 1e6, probe_seconds: 0.02 }
        } else {
            let repeat = Repeat { at_least: 3, at_most: 60, seconds: 0.5 };
            Self {
                longest: 16384,
                repeat,
                longest_call: 1.5,
                most_memory: 1280 << 20,
                seconds: 90.0,
                probe_seconds: 0.005,
            }
        }
    }
}

/// Powers of two from 64, and from 1024 on the length halfway between as well: the fit is over the larger ones.
fn sizes(longest: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (6..usize::BITS - 1)
        .flat_map(|e| [Some(1usize << e), (e >= 10).then(|| 3usize << (e - 1))])
        .flatten()
        .take_while(|&n| n <= longest)
        .collect();
    if sizes.last() != Some(&longest) {
        sizes.push(longest);
    }
    sizes
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let effort = Effort::of(args);
    for (name, value, most) in [("--head-dim", args.head_dim, 4096), ("--heads", args.heads, 1024)] {
        if !(1..=most).contains(&value) {
            return Err(Failure::Argument(format!("{name} must be between 1 and {most}, not {value}")));
        }
    }
    let longest = args.max_n.unwrap_or(effort.longest);
    if !(2..=1 << 20).contains(&longest) {
        return Err(Failure::Argument(format!("--max-n must be between 2 and {}, not {longest}", 1 << 20)));
    }
    let level = args.level()?;
    let pool = engine::pool(args.threads()).map_err(Failure::Other)?;
    let case =
        Case { q_heads: args.heads, kv_heads: args.heads, causal: args.causal, ..Case::square(0, args.head_dim) };
    let settings = Settings {
        sizes: sizes(longest),
        case,
        engines: Engine::ALL.to_vec(),
        level,
        repeat: effort.repeat,
        longest_call: effort.longest_call,
        most_memory: effort.most_memory,
        deadline: Deadline::after(effort.seconds),
        probe_seconds: effort.probe_seconds,
    };
    let machine = Machine::look(level, pool.current_num_threads(), command_line());
    println!("{}; level {level_name}, {} threads", machine.cpu, machine.threads, level_name = level.name());
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }
    let curve = curve::measure(&settings, &pool, COUNTED, &mut Terminal::new())
        .map_err(|error| Failure::Other(format!("an engine refused the case: {error}")))?;

    let report = Report::new(machine, curve);
    show(&report);
    let page = args.report.join("report.html");
    write(&page, &html::page(&report))?;
    println!("\nReport: {}", page.display());
    if let Some(path) = &args.json {
        let json = report.to_json().map_err(|error| Failure::Other(format!("cannot write JSON: {error}")))?;
        write(path, &json)?;
        println!("Samples: {}", path.display());
    }
    Ok(())
}

fn show(report: &Report) {
    println!("\nTime per call (median)\n{}", table::times(report));
    println!("\nExtra memory at the worst moment of a call\n{}", table::memory(report));
    println!("\nGrowth over the larger n\n{}", table::growth(report));
    println!(
        "\nAttention overtakes the linear parts of a layer from this n on (their FLOPs at the SIMD engine's rate)\n{}",
        table::crossovers(report)
    );
    for line in table::skipped(report) {
        println!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_powers_of_two_with_halves_above_a_thousand() {
        assert_eq!(sizes(4096), [64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096]);
        assert_eq!(sizes(100), [64, 100]);
        assert_eq!(sizes(2), [2]);
    }
}
