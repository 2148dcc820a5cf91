//! `--kernels` and `--backward`: single shapes beside the machine's peak and, with `--python`, beside torch and
//! onnxruntime.

use attn_bench::clock::Repeat;
use attn_bench::compare::Run;
use attn_bench::engine;
use attn_bench::filter::Filter;
use attn_bench::journal::Journal;
use attn_bench::kernels::{self, Kernel, KernelReport, KernelResult, SHAPES, Setup, What};
use attn_bench::machine::Machine;
use attn_bench::peer::{Peer, PeerError};
use attn_bench::progress::Progress;
use attn_bench::report::kernels::document;
use attn_simd::Level;

use super::args::{Args, Failure};
use super::compare;
use super::output::{command_line, show, some_case, threads_text};
use super::progress::Terminal;
use crate::peers;

/// A level and the rows to run at it.
type Batch = (Level, Vec<Kernel>);

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let level = args.level()?;
    let threads = args.one_thread_count(1)?;
    let rows = selected(args)?;
    // Without a level of its own, the run ends with the rows that are also of interest one level below the best.
    let mut batches = vec![(level, rows.clone())];
    if let (None, Ok(avx2)) = (&args.level, Level::by_name("avx2"))
        && avx2 != level
    {
        batches.push((avx2, rows.into_iter().filter(|row| row.avx2).collect()));
    }
    for (level, rows) in &mut batches {
        if !level.multiplies_bf16() {
            let filter = args.filter()?;
            let wanted = |row: &Kernel| filter.accepts(&kernels::case_name(row, level.name(), threads));
            without_bf16(*level, rows.iter().filter(|row| row.fast && wanted(row)).count());
            rows.retain(|row| !row.fast);
        }
    }
    let all = names(&batches, threads);
    narrow(&mut batches, threads, &args.filter()?);
    let chosen = names(&batches, threads);
    some_case(args, &chosen, &all)?;
    if args.list {
        chosen.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let old = compare::old(args)?;
    let pool = engine::pool(threads).map_err(Failure::Other)?;
    let effort = if args.quick { (4, 15, 0.4) } else { (6, 60, if args.full { 5.0 } else { 1.5 }) };
    let repeat = Repeat { at_least: effort.0, at_most: effort.1, seconds: effort.2 };
    let passes = if args.quick { 2 } else { 3 };
    let machine = Machine::detect(level, threads, command_line());
    println!("{}; {threads} thread{}", machine.cpu, if threads == 1 { "" } else { "s" });
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }
    let key = format!("kernels {chosen:?} {repeat:?} {passes} {:?}", args.python);
    let mut journal = args.journal("kernels", &machine, &key)?;
    let mut report = KernelReport::new(machine);
    let mut peers: Vec<(Level, Vec<Peer>)> = Vec::new();
    for &(level, _) in &batches {
        peers.push((level, started(args, level, threads, &mut report)?));
    }

    let mut progress = Terminal::new();
    let steps = batches.iter().map(|batch| batch.1.len()).sum::<usize>();
    progress.begin(&vec![1.0; steps * passes]);
    let setup =
        |level| Setup { level, pool: &pool, repeat: repeat.split(passes), sample_seconds: 0.01, probe_seconds: 0.005 };
    for pass in 0..passes {
        one_pass(&batches, setup, pass, &mut peers, &mut report, (&mut journal, &mut progress))?;
    }
    progress.end();
    let comparison = compare::confirmed(args, old.as_ref(), &mut report, Run::of_kernels, |report, filter, n| {
        let mut again = batches.clone();
        narrow(&mut again, threads, filter);
        one_pass(&again, setup, passes + n, &mut peers, report, (&mut journal, &mut progress))
    })?;
    // All is measured: what follows is computed from it. A file that stays behind does no harm.
    let _ = journal.finish();

    let document = document(&report, comparison.as_ref());
    let kind = if args.backward { "gradients" } else { "kernels" };
    let kind = if args.types { format!("{kind} of all types") } else { kind.to_owned() };
    show(args, &format!("{kind}, {}, {}", level.name(), threads_text(threads)), &document, &report)?;
    old.zip(comparison).map_or(Ok(()), |(old, comparison)| compare::conclude(args, &old, &comparison))
}

/// Says of a level without products of bf16 how many rows that need them are not measured: there `Precision::Fast` is
/// the same kernel.
fn without_bf16(level: Level, rows: usize) {
    if rows > 0 {
        let why = Level::by_name("amx").err().map_or_else(String::new, |error| format!(": {error} (amx)"));
        eprintln!(
            "NOT MEASURED: level {} has no products of bf16{why}. Rows of Precision::Fast left out: {rows}; f32 and halves \
             run on vectors.",
            level.name()
        );
    }
}

/// The names of all rows.
fn names(batches: &[Batch], threads: usize) -> Vec<String> {
    let all = batches.iter().flat_map(|(level, rows)| rows.iter().map(|row| (level.name(), row)));
    all.map(|(level, row)| kernels::case_name(row, level, threads)).collect()
}

/// Leaves the rows that a filter accepts.
fn narrow(batches: &mut Vec<Batch>, threads: usize, filter: &Filter) {
    for (level, rows) in batches.iter_mut() {
        rows.retain(|row| filter.accepts(&kernels::case_name(row, level.name(), threads)));
    }
    batches.retain(|(_, rows)| !rows.is_empty());
}

/// The rows of the arguments.
fn selected(args: &Args) -> Result<Vec<Kernel>, Failure> {
    let mut all = kernels::parse(SHAPES).map_err(|error| Failure::Other(error.to_string()))?;
    all.retain(|row| (row.what == What::Backward) == args.backward);
    let all = if args.types { kernels::types(&all) } else { all.into_iter().filter(|row| !row.types_only).collect() };
    if args.shapes.is_empty() {
        return Ok(all.into_iter().filter(|row| row.quick || !args.quick).collect());
    }
    let find = |name: &String| {
        let names = || all.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(", ");
        let row = all.iter().find(|row| row.name == *name).cloned();
        row.ok_or_else(|| Failure::Argument(format!("no shape `{name}`; there are: {}", names())))
    };
    args.shapes.iter().map(find).collect()
}

/// The other libraries for a level, if the arguments name them.
fn started(args: &Args, level: Level, threads: usize, report: &mut KernelReport) -> Result<Vec<Peer>, Failure> {
    let held = level.name() == "avx2";
    let failed = |error: PeerError| Failure::Other(error.to_string());
    let mut processes = Vec::new();
    if let Some(python) = &args.python {
        processes.push(Peer::start(python, threads, held).map_err(failed)?);
    }
    // The Rust peers cannot be held to a level: they run beside the best one only.
    if args.peers && !held {
        for build in peers::BUILDS.iter().filter(|build| build.program().exists()) {
            let suffix = format!(" ({})", build.name);
            processes.push(Peer::program(build.program().as_os_str(), threads, &suffix).map_err(failed)?);
        }
    }
    for process in &processes {
        let version = |(name, version): (&String, &Option<String>)| match version {
            Some(version) => format!("{} {version}", process.full_name(name)),
            None => format!("no {name}"),
        };
        let versions: Vec<String> = process.about().iter().map(version).collect();
        let held = if held { " held to AVX2" } else { "" };
        report.peers.push(format!("level {} beside {}{held}", level.name(), versions.join(", ")));
    }
    Ok(processes)
}

/// All rows of all levels once.
fn one_pass<'s>(
    batches: &[Batch],
    setup: impl Fn(Level) -> Setup<'s>,
    pass: usize,
    peers: &mut [(Level, Vec<Peer>)],
    report: &mut KernelReport,
    (journal, progress): (&mut Journal, &mut Terminal),
) -> Result<(), Failure> {
    for (level, rows) in batches {
        let setup = setup(*level);
        for row in rows {
            let step =
                format!("{}/pass{pass}", kernels::case_name(row, level.name(), setup.pool.current_num_threads()));
            let result = match journal.get::<KernelResult>(&step) {
                Some(result) => {
                    progress.known();
                    result
                }
                None => {
                    progress.step(&step);
                    let peers = peers.iter_mut().find(|(of, _)| of == level).map(|(_, peers)| peers);
                    let peers = peers.map_or(&mut [][..], Vec::as_mut_slice);
                    let result = kernels::measure(row, &setup, pass, peers, &mut report.notes)
                        .map_err(|error| Failure::Other(format!("{}: {error}", row.name)))?;
                    journal.put(&step, &result).map_err(|error| Failure::Other(format!("the journal: {error}")))?;
                    result
                }
            };
            report.take(result);
        }
    }
    Ok(())
}
