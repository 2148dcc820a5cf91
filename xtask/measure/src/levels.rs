//! `cargo xtask levels`: the levels of this machine, and the kernel of each number type.

use std::process::ExitCode;

use attn_bench::report::table;
use attn_core::{Attention, AttnShape, Dtype};
use attn_simd::{Caches, Level, Plan, Prefetch};

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The head dimension of the kernels.
    #[arg(long, value_name = "D", default_value_t = 64)]
    head_dim: usize,
    /// Print only the names of the levels, weakest first, for scripts.
    #[arg(long)]
    names: bool,
}

pub(crate) fn run(args: Args) -> ExitCode {
    if args.names {
        Level::available().for_each(|level| println!("{}", level.name()));
        return ExitCode::SUCCESS;
    }
    match kernels(args.head_dim) {
        Ok(rows) => {
            println!("{}", table::table(&["", "f32", "f16", "bf16", "KiB"], 4, rows));
            println!("A kernel's name is level-type-q(queries of a block)k(keys of a tile). KiB: scratch");
            println!("of one thread, at head_dim {}. Halves are computed in f32, but", args.head_dim);
            println!("avx512bf16 multiplies bf16 as it is, and amx everything in parts of bf16.\n");
            absent().for_each(|line| println!("{line}"));
            println!("{}", default_level());
            println!("Second cache: {} KiB a core", Caches::detect().l2 >> 10);
            println!("Prefetch while decoding: {}", Prefetch::detect());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("levels: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A row per level: whether it is the default, the kernel of each number type for one head of 1024 queries and keys,
/// and the scratch of the first.
fn kernels(head_dim: usize) -> attn_core::Result<Vec<Vec<String>>> {
    let sizes = [1, 1, 1024, head_dim];
    let (attn, shape) = (Attention::new(), AttnShape::new(sizes, sizes, sizes)?);
    let mut rows = Vec::new();
    for level in Level::available() {
        let plan = Plan::new(&attn, shape, level)?;
        let mut row = vec![if level == Level::detect() { "→".to_string() } else { String::new() }];
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let explain = plan.explain_into(dtype, dtype).to_string();
            row.push(explain.split(':').next().unwrap_or_default().to_string());
        }
        let scratch = plan.workspace_lines() * size_of::<attn_simd::Line>();
        row.push(scratch.div_ceil(1024).to_string());
        rows.push(row);
    }
    Ok(rows)
}

/// A line per level that does not run here, and why.
fn absent() -> impl Iterator<Item = String> {
    Level::names().filter_map(|name| Level::by_name(name).err().map(|error| format!("{name}: {error}")))
}

/// A message if `ATTN_LEVEL` names a level that does not run here.
pub(crate) fn ignored() -> Option<String> {
    let name = std::env::var_os("ATTN_LEVEL")?.to_string_lossy().into_owned();
    let error = Level::by_name(&name).err()?;
    Some(format!("ATTN_LEVEL={name} is ignored: {error}"))
}

/// Which level runs by default, and why.
fn default_level() -> String {
    let level = Level::detect().name();
    match (ignored(), std::env::var_os("ATTN_LEVEL")) {
        (Some(ignored), _) => format!("Default: {level}; {ignored}"),
        (None, Some(_)) => format!("Default: {level}, by ATTN_LEVEL"),
        (None, None) => format!("Default: {level}, the best of this machine; ATTN_LEVEL forces another"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_has_a_kernel_for_every_type() {
        let rows = kernels(64).unwrap();
        assert_eq!(rows.len(), Level::available().count());
        for (row, level) in rows.iter().zip(Level::available()) {
            for (name, dtype) in row[1..4].iter().zip(["f32", "f16", "bf16"]) {
                // What a level does not make faster runs on its vectors.
                let own = [level, level.vectors()].map(|level| format!("{}-{dtype}-q", level.name()));
                assert!(own.iter().any(|own| name.starts_with(own)), "{row:?}");
            }
        }
        assert_eq!(rows.iter().filter(|row| row[0] == "→").count(), 1);
        let wide = table::table(&["", "f32", "f16", "bf16", "KiB"], 4, rows).to_string();
        assert!(wide.lines().all(|line| line.chars().count() <= 80), "{wide}");
        assert!(kernels(usize::MAX).is_err());
    }

    #[test]
    fn levels_are_present_or_absent() {
        assert_eq!(absent().count() + Level::available().count(), Level::names().count());
        assert!(absent().all(|line| line.contains("this machine")));
    }
}
