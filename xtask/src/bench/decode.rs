//! `--decode`: one token against caches of keys and values, beside a plain read of as many bytes.

use attn_bench::clock::Repeat;
use attn_bench::curve::seconds;
use attn_bench::decode::{self, Row, Setup, Stored};
use attn_bench::engine;
use attn_bench::machine::Machine;
use attn_bench::memory::human;
use attn_bench::peer::Peer;
use attn_bench::report::table::table;

use super::{Args, Failure, command_line, some_case, write};

/// What cold calls find in the processor's caches instead: more than they hold.
const SWEEP: usize = 256 << 20;

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let (level, threads, filter) = (args.level()?, args.one_thread_count(1)?, args.filter()?);
    let cases = || decode::shapes().into_iter().flat_map(|shape| Stored::ALL.map(|stored| (shape.clone(), stored)));
    let name = |name: &str, stored: Stored| format!("decode/{name}/{}/t{threads}", stored.name());
    let all: Vec<String> = cases().map(|(shape, stored)| name(&shape.name, stored)).collect();
    let chosen: Vec<String> = all.iter().filter(|name| filter.accepts(name)).cloned().collect();
    some_case(args, &chosen, &all)?;
    if args.list {
        chosen.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let pool = engine::pool(threads).map_err(Failure::Other)?;
    let effort = if args.quick { (5, 15, 0.2) } else { (9, 60, if args.full { 5.0 } else { 1.0 }) };
    let repeat = Repeat { at_least: effort.0, at_most: effort.1, seconds: effort.2 };
    let machine = Machine::look(level, threads, command_line());
    println!("{}; level {}; {threads} thread{}", machine.cpu, level.name(), if threads == 1 { "" } else { "s" });
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }
    let mut peer = match &args.python {
        Some(python) => Some(Peer::start(python, threads, false).map_err(|error| Failure::Other(error.to_string()))?),
        None => None,
    };
    if let Some(peer) = &peer {
        let version = |name: &str| peer.about().get(name).cloned().flatten().unwrap_or("none".into());
        println!("beside torch {}, onnxruntime {}", version("torch"), version("onnxruntime"));
    }
    let setup = Setup { level, pool: &pool, repeat, sweep: SWEEP };
    let mut rows: Vec<Row> = Vec::new();
    for (shape, stored) in cases().filter(|(shape, stored)| filter.accepts(&name(&shape.name, *stored))) {
        eprintln!("{}", name(&shape.name, stored));
        let measured = decode::measure(&shape, stored, &setup, peer.as_mut());
        rows.extend(measured.map_err(|error| Failure::Other(error.to_string()))?);
    }
    println!("{}", show(&rows));
    if let Some(path) = &args.json {
        let report = serde_json::json!({ "kind": "decode", "machine": machine, "rows": rows });
        let json = serde_json::to_string_pretty(&report)
            .map_err(|error| Failure::Other(format!("cannot write JSON: {error}")))?;
        write(path, &json)?;
        println!("Samples: {}", path.display());
    }
    Ok(())
}

/// One line per row; a column per peer, its time divided by ours, where there are any.
fn show(rows: &[Row]) -> String {
    let mut peers: Vec<&str> = rows.iter().flat_map(|row| &row.peers).map(|peer| peer.name.as_str()).collect();
    peers.sort_unstable();
    peers.dedup();
    let beside: Vec<String> = peers.iter().map(|name| format!("{name} / ours")).collect();
    let mut heads = vec!["shape", "cache", "", "bytes", "step", "GB/s", "of a plain read", "beyond it"];
    heads.extend(beside.iter().map(String::as_str));
    let lines = rows.iter().map(|row| {
        let mut line = vec![
            row.shape.name.clone(),
            row.stored.name().into(),
            if row.cold { "cold" } else { "warm" }.into(),
            human(row.bytes),
            seconds(row.seconds),
            format!("{:.1}", row.bytes as f64 / row.seconds / 1e9),
            format!("{:.2}", row.share_of_read),
            if row.beyond > 0.0 { seconds(row.beyond) } else { "-".into() },
        ];
        line.extend(peers.iter().map(|name| {
            let found = row.peers.iter().find(|peer| peer.name == *name);
            found.map_or("-".into(), |peer| format!("{:.2}", peer.ratio))
        }));
        line
    });
    let mut text = table(&heads, 3, lines).to_string();
    for name in peers {
        for stored in Stored::ALL {
            let of = rows.iter().filter(|row| row.stored == stored).flat_map(|row| &row.peers);
            let worst = of.filter(|peer| peer.name == name).map(|peer| peer.difference).max_by(f64::total_cmp);
            if let Some(worst) = worst {
                text += &format!("\nLargest difference of {name} from ours, {}: {worst:.1e}", stored.name());
            }
        }
    }
    text
}
