//! `--decode`: one token against caches of keys and values, beside a plain read of as many bytes.

use attn_bench::clock::Repeat;
use attn_bench::compare::Run;
use attn_bench::decode::{self, DecodeReport, Row, Setup, Shape, Stored, case_name};
use attn_bench::engine;
use attn_bench::machine::Machine;
use attn_bench::peer::Peer;
use attn_bench::progress::Progress;
use attn_bench::report::decode::document;

use super::args::{Args, Failure};
use super::compare;
use super::output::{command_line, show, some_case, threads_text};
use super::progress::Terminal;

/// A shape over a type.
type Case = (Shape, Stored);

/// What cold calls find in the processor's caches instead: more than they hold.
const SWEEP: usize = 256 << 20;

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let (level, threads, filter) = (args.level()?, args.one_thread_count(1)?, args.filter()?);
    let cases = || decode::shapes().into_iter().flat_map(|shape| Stored::ALL.map(|stored| (shape.clone(), stored)));
    let name = |(shape, stored): &Case| case_name(shape, *stored, threads);
    let all: Vec<String> = cases().map(|case| name(&case)).collect();
    let chosen: Vec<Case> = cases().filter(|case| filter.accepts(&name(case))).collect();
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
    let machine = Machine::detect(level, threads, command_line());
    println!("{}; level {}; {threads} thread{}", machine.cpu, level.name(), if threads == 1 { "" } else { "s" });
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }
    let key = format!("decode {names:?} {repeat:?} {passes} {} {threads} {:?}", level.name(), args.python);
    let mut journal = args.journal("decode", &machine, &key)?;
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
    let mut one_pass = |pass: usize, chosen: &[&Case], report: &mut DecodeReport| -> Result<(), Failure> {
        for case @ (shape, stored) in chosen {
            let step = format!("{}/pass{pass}", name(case));
            let rows = match journal.get::<Vec<Row>>(&step) {
                Some(rows) => {
                    progress.known();
                    rows
                }
                None => {
                    progress.step(&step);
                    let rows = decode::measure(shape, *stored, &setup(pass), peer.as_mut());
                    let rows = rows.map_err(|error| Failure::Other(error.to_string()))?.to_vec();
                    journal.put(&step, &rows).map_err(|error| Failure::Other(format!("the journal: {error}")))?;
                    rows
                }
            };
            rows.into_iter().for_each(|row| report.take(row));
        }
        Ok(())
    };
    let all: Vec<&Case> = chosen.iter().collect();
    for pass in 0..passes {
        one_pass(pass, &all, &mut report)?;
    }
    let comparison = compare::confirmed(args, old.as_ref(), &mut report, Run::of_decode, |report, filter, n| {
        let slower = |case: &&&Case| ["warm", "cold"].iter().any(|of| filter.accepts(&format!("{}/{of}", name(case))));
        one_pass(passes + n, &all.iter().filter(slower).copied().collect::<Vec<_>>(), report)
    })?;
    progress.end();
    // All is measured: what follows is computed from it. A file that stays behind does no harm.
    let _ = journal.finish();
    show(
        args,
        &format!("decoding, {}, {}", level.name(), threads_text(threads)),
        &document(&report, comparison.as_ref()),
        &report,
    )?;
    old.zip(comparison).map_or(Ok(()), |(old, comparison)| compare::conclude(args, &old, &comparison))
}
