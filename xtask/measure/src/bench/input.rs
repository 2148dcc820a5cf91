//! `--input FILE`: all engines on the tensors of a file.

use std::path::Path;

use attn_bench::clock::Repeat;
use attn_bench::engine::{self, Engine};
use attn_bench::format::FORMAT;
use attn_bench::layers::{self, LayerResults};
use attn_bench::machine::Machine;
use attn_bench::report::table;
use attn_bench::tensors::{self, Names};
use serde::Serialize;

use super::args::{Args, Failure};
use super::output::{command_line, write};

/// What `--json` writes.
#[derive(Serialize)]
struct InputReport {
    format: &'static str,
    kind: &'static str,
    machine: Machine,
    layers: Vec<LayerResults>,
}

pub(super) fn run(args: &Args, path: &Path) -> Result<(), Failure> {
    let level = args.level()?;
    let threads = args.one_thread_count(args.threads()?.first().copied().unwrap_or(1))?;
    let pool = engine::pool(threads).map_err(Failure::Other)?;
    let bytes = std::fs::read(path).map_err(|error| Failure::File(path.to_path_buf(), error))?;
    let layers = tensors::layers(&bytes, &names(args)?)
        .map_err(|error| Failure::Other(format!("{}: {error}", path.display())))?;
    let repeat = Repeat { at_least: 3, at_most: 100, seconds: if args.quick { 0.1 } else { 0.5 } };
    let machine = Machine::detect(level, pool.current_num_threads(), command_line());
    println!("{}; level {}, {} threads", machine.cpu, machine.level, machine.threads);

    let mut results = Vec::new();
    for layer in &layers {
        let result = layers::run(layer, args.causal, level, &pool, repeat)
            .map_err(|error| Failure::Other(format!("{}, {}: {error}", path.display(), layer.name)))?;
        results.push(result);
    }
    show(&results);
    if let Some(path) = &args.json {
        let report = InputReport { format: FORMAT, kind: "input", machine, layers: results.clone() };
        let json = serde_json::to_string_pretty(&report)
            .map_err(|error| Failure::Other(format!("cannot write JSON: {error}")))?;
        write(path, &json)?;
    }
    let wrong: Vec<&str> = results.iter().filter(|r| !r.right()).map(|r| r.name.as_str()).collect();
    if !wrong.is_empty() {
        let hint = if args.causal { "" } else { " (a causal model needs --causal)" };
        return Err(Failure::Other(format!("not within what is allowed: {}{hint}", wrong.join(", "))));
    }
    println!("All engines within {:.0e} + {:.0e}·|value| of what was expected.", layers::ABSOLUTE, layers::RELATIVE);
    Ok(())
}

/// The names given by hand: all three or none.
fn names(args: &Args) -> Result<Names, Failure> {
    match (&args.q, &args.k, &args.v) {
        (None, None, None) => Ok(Names::Find),
        (Some(q), Some(k), Some(v)) => Ok(Names::Given { q: q.clone(), k: k.clone(), v: v.clone() }),
        _ => Err(Failure::Argument("--q, --k and --v go together: give all three or none".into())),
    }
}

fn show(results: &[LayerResults]) {
    if let Some(first) = results.first() {
        let expected = if results.iter().all(|r| r.stored) { "what the file holds" } else { "the reference engine" };
        println!("q {:?}, k {:?}, {}; compared with {expected}", first.q, first.k, first.dtype);
        let hidden: usize = results.iter().map(|r| r.hidden_keys).max().unwrap_or(0);
        if hidden > 0 {
            println!("attention_mask hides {hidden} keys");
        }
    }
    let mut header = vec!["layer".to_string()];
    for engine in Engine::ALL {
        header.extend([engine.to_string(), "error".into()]);
    }
    header.extend(["largest error".into(), "of lse".into()]);
    let error = |e: Option<f64>| e.map_or_else(|| "–".into(), |e| format!("{e:.1e}"));
    let rows = results.iter().map(|r| {
        let mut row = vec![r.name.clone()];
        for engine in &r.engines {
            row.extend([attn_bench::curve::seconds(engine.seconds), error(engine.out.map(|d| d.largest))]);
        }
        let (out, lse) = r.largest();
        row.extend([error(out), error(lse)]);
        row
    });
    println!("{}", table::table(&header.iter().map(String::as_str).collect::<Vec<_>>(), 1, rows));
}
