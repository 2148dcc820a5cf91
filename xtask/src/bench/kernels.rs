//! `--kernels`: single shapes beside the machine's peak and, with `--python`, beside torch and onnxruntime.

use attn_bench::clock::Repeat;
use attn_bench::curve::{Progress, seconds};
use attn_bench::engine;
use attn_bench::kernels::{self, Kernel, KernelResult, SHAPES, Setup};
use attn_bench::machine::Machine;
use attn_bench::peer::Peer;
use attn_bench::report::{FORMAT, table};
use attn_simd::Level;
use serde::Serialize;

use super::progress::Terminal;
use super::{Args, Failure, command_line, write};

/// What `--json` writes.
#[derive(Serialize)]
struct KernelReport {
    format: &'static str,
    machine: Machine,
    /// Versions of the peers, by level.
    peers: Vec<String>,
    results: Vec<KernelResult>,
    notes: Vec<String>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let level = args.level()?;
    let threads = args.threads.max(1);
    let pool = engine::pool(threads).map_err(Failure::Other)?;
    let rows = selected(args)?;
    let effort = if args.quick { (3, 15, 0.4) } else { (5, 60, if args.full { 5.0 } else { 1.5 }) };
    let repeat = Repeat { at_least: effort.0, at_most: effort.1, seconds: effort.2 };
    let machine = Machine::look(level, threads, command_line());
    println!("{}; {threads} thread{}", machine.cpu, if threads == 1 { "" } else { "s" });
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }

    // Without a level of its own, the run ends with the rows that are also of interest one level below the best.
    let mut passes = vec![(level, rows.clone())];
    if let (None, Ok(avx2)) = (&args.level, Level::by_name("avx2"))
        && avx2 != level
    {
        passes.push((avx2, rows.into_iter().filter(|row| row.avx2).collect()));
    }
    let mut report =
        KernelReport { format: FORMAT, machine, peers: Vec::new(), results: Vec::new(), notes: Vec::new() };
    for (level, rows) in passes.into_iter().filter(|(_, rows)| !rows.is_empty()) {
        let setup = Setup { level, pool: &pool, repeat, sample_seconds: 0.01, probe_seconds: 0.005 };
        pass(args, &setup, &rows, &mut report)?;
    }
    for note in &report.notes {
        println!("{note}");
    }
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report)
            .map_err(|error| Failure::Other(format!("cannot write JSON: {error}")))?;
        write(path, &json)?;
        println!("Samples: {}", path.display());
    }
    Ok(())
}

/// The rows asked for.
fn selected(args: &Args) -> Result<Vec<Kernel>, Failure> {
    let all = kernels::parse(SHAPES).map_err(|error| Failure::Other(error.to_string()))?;
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

/// One level over its rows.
fn pass(args: &Args, setup: &Setup<'_>, rows: &[Kernel], report: &mut KernelReport) -> Result<(), Failure> {
    let threads = setup.pool.current_num_threads();
    let held = setup.level.name() == "avx2";
    let mut peer = match &args.python {
        Some(python) => Some(Peer::start(python, threads, held).map_err(|error| Failure::Other(error.to_string()))?),
        None => None,
    };
    let mut heading = format!("level {}", setup.level.name());
    if let Some(peer) = &peer {
        let about = peer.about();
        let name = |name: &str, version: &Option<String>| match version {
            Some(version) => format!("{name} {version}"),
            None => format!("no {name}"),
        };
        let versions = [name("torch", &about.torch), name("onnxruntime", &about.onnxruntime)].join(", ");
        heading = format!("{heading}, beside {versions}{}", if held { " held to AVX2" } else { "" });
        report.peers.push(heading.clone());
    }

    let mut progress = Terminal::new();
    progress.begin(rows.len());
    let mut results = Vec::new();
    for row in rows {
        progress.step(&row.name);
        let result = kernels::measure(row, setup, peer.as_mut(), &mut report.notes)
            .map_err(|error| Failure::Other(format!("{}: {error}", row.name)))?;
        results.push(result);
    }
    progress.end();
    println!("\n{heading}\n{}", show(&results));
    report.results.extend(results);
    Ok(())
}

/// A row per shape; a column pair per peer that ran any of them.
fn show(results: &[KernelResult]) -> impl std::fmt::Display + use<> {
    let mut peers: Vec<&str> = Vec::new();
    for peer in results.iter().flat_map(|r| &r.peers) {
        if !peers.contains(&peer.name.as_str()) {
            peers.push(&peer.name);
        }
    }
    let mut header = vec!["shape", "what", "ours", "GFLOP/s", "of peak"];
    for peer in &peers {
        header.extend([peer, "ratio"]);
    }
    if !peers.is_empty() {
        header.extend(["best ratio", "largest difference"]);
    }
    let rows = results.iter().map(|r| {
        let what = match r.kernel.what.parts() {
            (name, 0.0) => name.to_string(),
            (name, value) => format!("{name} {value}"),
        };
        let mut row = vec![
            r.kernel.name.clone(),
            what,
            seconds(r.seconds),
            format!("{:.1}", r.gflops),
            table::percent(r.share_of_peak),
        ];
        for name in &peers {
            let peer = r.peers.iter().find(|p| p.name == *name);
            row.push(peer.map_or_else(|| "–".into(), |p| seconds(p.seconds)));
            row.push(peer.map_or_else(|| "–".into(), |p| format!("{:.2}×", p.ratio)));
        }
        if !peers.is_empty() {
            row.push(r.best_peer().map_or_else(|| "–".into(), |p| format!("{:.2}×", p.ratio)));
            let worst = r.peers.iter().filter_map(|p| p.difference).reduce(f64::max);
            row.push(worst.map_or_else(|| "–".into(), |d| format!("{d:.1e}")));
        }
        row
    });
    table::table(&header, 2, rows)
}
