//! The cost curve: which lengths, how long to take, and what is shown.

use attn_bench::case::{Case, Number};
use attn_bench::clock::{Deadline, Repeat};
use attn_bench::compare::Run;
use attn_bench::curve::Who;
use attn_bench::curve::measure::{self, Settings, Tools};
use attn_bench::curve_report::CurveReport;
use attn_bench::engine::{self, Engine};
use attn_bench::filter::Filter;
use attn_bench::machine::Machine;
use attn_bench::report::curve::document;
use attn_bench::report::document::{Part, Picture};
use attn_bench::report::html;
use attn_bench::report::plot::Theme;
use attn_bench::roofline::Roofs;

use super::args::{Args, Failure};
use super::compare;
use super::output::{COUNTED, command_line, show, some_case, write};
use super::progress::Terminal;

/// How long to take.
struct Effort {
    longest: usize,
    repeat: Repeat,
    passes: usize,
    longest_call: f64,
    most_memory: usize,
    seconds: f64,
    probe_seconds: f64,
}

impl Effort {
    fn of(args: &Args) -> Self {
        if args.quick {
            // The whole run must stay below half a minute on two half-busy cores: measured, it is near 15 s when idle.
            let repeat = Repeat { at_least: 4, at_most: 26, seconds: 0.12 };
            Self {
                longest: 4096,
                repeat,
                passes: 2,
                longest_call: 0.35,
                most_memory: 128 << 20,
                seconds: 18.0,
                probe_seconds: 0.003,
            }
        } else if args.full {
            let repeat = Repeat { at_least: 6, at_most: 200, seconds: 2.0 };
            Self {
                longest: 32768,
                repeat,
                passes: 3,
                longest_call: 30.0,
                most_memory: 5 << 30,
                seconds: 1e6,
                probe_seconds: 0.02,
            }
        } else {
            let repeat = Repeat { at_least: 3, at_most: 60, seconds: 0.5 };
            Self {
                longest: 16384,
                repeat,
                passes: 3,
                longest_call: 1.5,
                most_memory: 1280 << 20,
                seconds: 80.0,
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

/// Settings of a command.
fn settings(args: &Args) -> Result<Settings, Failure> {
    let effort = Effort::of(args);
    let dims = match args.head_dim.as_slice() {
        [] if args.full => &[64, 128],
        [] => &[64][..],
        some => some,
    };
    let numbers = match args.dtype.as_slice() {
        [] if args.full => &Number::ALL,
        [] => &[Number::F32][..],
        some => some,
    };
    for (name, value, most) in dims.iter().map(|&d| ("--head-dim", d, 4096)).chain([("--heads", args.heads, 1024)]) {
        if !(1..=most).contains(&value) {
            return Err(Failure::Argument(format!("{name} must be between 1 and {most}, not {value}")));
        }
    }
    let longest = args.max_n.unwrap_or(effort.longest);
    if !(2..=1 << 20).contains(&longest) {
        return Err(Failure::Argument(format!("--max-n must be between 2 and {}, not {longest}", 1 << 20)));
    }
    let case = |d| Case { q_heads: args.heads, kv_heads: args.heads, causal: args.causal, ..Case::square(0, d) };
    let variants = numbers.iter().flat_map(|&number| dims.iter().map(move |&d| (d, number)));
    let mut lines = [Engine::Naive, Engine::Streaming, Engine::Simd].map(Who::alone).to_vec();
    lines.extend(args.threads()?.into_iter().map(|threads| Who { engine: Engine::Parallel, threads }));
    lines.extend(Engine::CHEAPER.map(Who::alone));
    Ok(Settings {
        sizes: sizes(longest),
        variants: variants.map(|(d, number)| (case(d), number)).collect(),
        lines,
        filter: args.filter()?,
        level: args.level()?,
        repeat: effort.repeat,
        passes: effort.passes,
        longest_call: effort.longest_call,
        most_memory: effort.most_memory,
        deadline: Deadline::after(effort.seconds),
        probe_seconds: effort.probe_seconds,
    })
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let settings = settings(args)?;
    let names = settings.names();
    some_case(args, &names, &Settings { filter: Filter::ALL, ..settings.clone() }.names())?;
    if args.list {
        names.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let old = compare::old(args)?;
    let counts = args.threads()?;
    let pools =
        counts.iter().map(|&threads| engine::pool(threads)).collect::<Result<Vec<_>, _>>().map_err(Failure::Other)?;
    let machine = Machine::detect(settings.level, counts.iter().copied().max().unwrap_or(1), command_line());
    println!("{}; level {level_name}, {} threads", machine.cpu, machine.threads, level_name = settings.level.name());
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }
    // The deadline is a moment in time, which no two runs share.
    let key = format!("{:?}", Settings { deadline: Deadline::after(-1.0), ..settings.clone() });
    let mut journal = args.journal("curve", &machine, &key)?;
    let mut progress = Terminal::new();
    let mut tools = Tools { pools: &pools, heap: COUNTED, journal: &mut journal, progress: &mut progress };
    let failed = |error: measure::MeasureError| Failure::Other(error.to_string());
    let mut curves = measure::measure(&settings, &mut tools).map_err(failed)?;
    let comparison = compare::confirmed(
        args,
        old.as_ref(),
        &mut curves,
        |curves| Run::of_curves(&machine, curves),
        |curves, filter, n| measure::again(&settings, &mut tools, curves, filter, settings.passes + n).map_err(failed),
    )?;
    let roofs = Roofs::measure(settings.level, most_threads(&pools)?, 8.0 * settings.probe_seconds);
    // All is measured: what follows is computed from it. A file that stays behind does no harm.
    let _ = journal.finish();

    let report = CurveReport::new(machine, settings.level, curves, roofs);
    let document = document(&report, comparison.as_ref());
    show(args, &format!("curve, {}", settings.level.name()), &document, &report)?;
    for (name, picture) in PICTURES.into_iter().zip(document.parts.iter().filter_map(picture)) {
        for (theme, suffix) in Theme::ALL {
            if let Some(folder) = &args.pictures {
                write(&folder.join(format!("{name}-{suffix}.svg")), &picture.plot.file(theme))?;
            }
        }
    }
    let page = args.report.join("report.html");
    write(&page, &html::page(&document))?;
    println!("Report: {}", super::output::url(&page));
    old.zip(comparison).map_or(Ok(()), |(old, comparison)| compare::conclude(args, &old, &comparison))
}

/// The pictures that `--pictures` writes: the first ones of the page.
const PICTURES: [&str; 3] = ["time", "memory", "share"];

fn picture(part: &Part) -> Option<&Picture> {
    if let Part::Picture(picture) = part { Some(picture) } else { None }
}

/// The largest pool.
fn most_threads(pools: &[rayon::ThreadPool]) -> Result<&rayon::ThreadPool, Failure> {
    let most = pools.iter().max_by_key(|pool| pool.current_num_threads());
    most.ok_or_else(|| Failure::Other("no thread pool".into()))
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

    #[test]
    fn names_depend_on_what_is_asked_for() {
        use crate::bench::args::command;
        let names = |words: &[&str]| settings(&command(words)).unwrap().names();
        assert_eq!(names(&["--quick", "--filter", "simd/t1/n64$"]), ["curve/d64/f32/simd/t1/n64"]);
        let words =
            ["--head-dim", "8,16", "--dtype", "bf16", "--threads", "1,3", "--max-n", "64", "--filter", "parallel"];
        assert_eq!(
            names(&words),
            [
                "curve/d8/bf16/parallel/t1/n64",
                "curve/d8/bf16/parallel/t3/n64",
                "curve/d16/bf16/parallel/t1/n64",
                "curve/d16/bf16/parallel/t3/n64"
            ]
        );
        let full = names(&["--full", "--filter", "simd.*n32768"]);
        assert_eq!(full.len(), 6, "{full:?}");
    }

    #[test]
    fn arguments_without_sense_are_refused() {
        use crate::bench::args::command;
        for (words, why) in [
            (["--head-dim", "64,0"], "--head-dim"),
            (["--heads", "5000"], "--heads"),
            (["--max-n", "1"], "--max-n"),
            (["--threads", "2,0"], "0 threads"),
            (["--filter", "n["], "--filter"),
            (["--level", "sse9"], "sse9"),
        ] {
            let error = settings(&command(&words)).unwrap_err().to_string();
            assert!(error.contains(why), "{words:?}: {error}");
        }
        let error = run(&command(&["--filter", "no such case"])).unwrap_err().to_string();
        assert!(error.contains("no such case") && error.contains("curve/d64/f32/"), "{error}");
        let error = run(&command(&["--quick", "--compare", "no/such.json"])).unwrap_err().to_string();
        assert!(error.contains("no/such.json"), "{error}");
    }
}
