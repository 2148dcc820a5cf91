//! `--decode`: one token against caches of keys and values, beside a plain read of as many bytes.

use attn_bench::clock::Repeat;
use attn_bench::compare::{Comparison, Run};
use attn_bench::decode::{self, DecodeReport, Setup, Shape, Stored, case_name};
use attn_bench::engine;
use attn_bench::machine::Machine;
use attn_bench::peer::Peer;
use attn_bench::progress::Progress;
use attn_bench::report::decode::document;

use super::args::{Args, Failure};
use super::compare;
use super::output::{command_line, show, some_case, threads_text};
use super::progress::Terminal;

/// What cold calls find in the processor's caches instead: more than they hold.
const SWEEP: usize = 256 << 20;

/// How often the slower cases of a comparison are measured again.
const AGAIN: usize = 2;

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let (level, threads, filter) = (args.level()?, args.one_thread_count(1)?, args.filter()?);
    let cases = || decode::shapes().into_iter().flat_map(|shape| Stored::ALL.map(|stored| (shape.clone(), stored)));
    let name = |(shape, stored): &(Shape, Stored)| case_name(shape, *stored, threads);
    let all: Vec<String> = cases().map(|case| name(&case)).collect();
    let chosen: Vec<(Shape, Stored)> = cases().filter(|case| filter.accepts(&name(case))).collect();
    let names: Vec<String> = chosen.iter().map(name).collect();
    some_case(args, &names, &all)?;
    if args.list {
        names.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let old = compare::old(args)?;
    let pool = engine::pool(threads).map_err(Failure::Other)?;
    let effort = if args.quick { (6, 16, 0.2) } else { (10, 60, if args.full { 5.0 } else { 1.0 }) };
    let repeat = Repeat { at_least: effort.0, at_most: effort.1, seconds: effort.2 };
    let passes = 2;
    let machine = Machine::look(level, threads, command_line());
    println!("{}; level {}; {threads} thread{}", machine.cpu, level.name(), if threads == 1 { "" } else { "s" });
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }
    let mut report = DecodeReport::new(machine);
    let mut peer = match &args.python {
        Some(python) => Some(Peer::start(python, threads, false).map_err(|error| Failure::Other(error.to_string()))?),
        None => None,
    };
    if let Some(peer) = &peer {
        let versions = ["torch", "onnxruntime"].map(|name| {
            format!("{name} {}", peer.about().get(name).cloned().flatten().unwrap_or("not installed".into()))
        });
        report.peers = versions.into();
    }
    let setup = |pass| Setup { level, pool: &pool, repeat: repeat.split(passes), sweep: SWEEP, pass };
    let mut progress = Terminal::new();
    progress.begin(&vec![1.0; chosen.len() * passes]);
    let mut one_pass = |pass: usize, chosen: &[(Shape, Stored)], report: &mut DecodeReport| -> Result<(), Failure> {
        for case @ (shape, stored) in chosen {
            progress.step(&format!("{}/pass{pass}", name(case)));
            let measured = decode::measure(shape, *stored, &setup(pass), peer.as_mut());
            measured.map_err(|error| Failure::Other(error.to_string()))?.into_iter().for_each(|row| report.take(row));
        }
        Ok(())
    };
    for pass in 0..passes {
        one_pass(pass, &chosen, &mut report)?;
    }
    let look = |report: &DecodeReport| {
        old.as_ref().map(|old| Comparison::new(old, &Run::of_decode(report), compare::threshold(args)))
    };
    let mut comparison = look(&report);
    for round in 0..AGAIN {
        let slower: Vec<&str> = comparison.iter().flat_map(Comparison::slower).collect();
        if slower.is_empty() {
            break;
        }
        println!("{} cases seem slower: measuring them again", slower.len());
        let again: Vec<(Shape, Stored)> =
            chosen.iter().filter(|case| slower.iter().any(|slow| slow.starts_with(&name(case)))).cloned().collect();
        one_pass(passes + round, &again, &mut report)?;
        comparison = look(&report);
    }
    progress.end();
    show(
        args,
        &format!("decoding, {}, {}", level.name(), threads_text(threads)),
        &document(&report, comparison.as_ref()),
        &report,
    )?;
    old.zip(comparison).map_or(Ok(()), |(old, comparison)| compare::conclude(args, &old, &comparison))
}
