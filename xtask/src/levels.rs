//! `cargo xtask levels`: what this machine can run, and which kernel each number type gets.

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
            println!("{}", table::table(&["level", "floats a vector", "inputs", "kernel"], 4, rows));
            absent().for_each(|line| println!("{line}"));
            println!("{}", default_level());
            println!("Second cache: {} KiB a core, as the blocks are laid out for", Caches::detect().l2 >> 10);
            println!("Prefetch while decoding: {}", Prefetch::detect());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("levels: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A row per level and number type, for one head of 1024 queries and keys; on matrix tiles a half that is asked for as
/// f32 takes more products and has a row of its own.
fn kernels(head_dim: usize) -> attn_core::Result<Vec<Vec<String>>> {
    let sizes = [1, 1, 1024, head_dim];
    let (attn, shape) = (Attention::new(), AttnShape::new(sizes, sizes, sizes)?);
    let mut rows = Vec::new();
    for level in Level::available() {
        let plan = Plan::new(&attn, shape, level)?;
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let mut row = |output: Dtype| {
                let explain = plan.explain_into(dtype, output).to_string();
                let mut name = dtype.name().to_string();
                if dtype != output {
                    name = format!("{name} into {}", output.name());
                }
                rows.push(vec![level.name().into(), level.lanes().to_string(), name, explain]);
            };
            row(dtype);
            if level.has_tiles() && dtype != Dtype::F32 {
                row(Dtype::F32);
            }
        }
    }
    Ok(rows)
}

/// A line per level that does not run here, and why.
fn absent() -> impl Iterator<Item = String> {
    Level::names().filter_map(|name| Level::by_name(name).err().map(|error| format!("Absent: {name}: {error}")))
}

/// What to say where `ATTN_LEVEL` asks for a level that does not run here.
pub(crate) fn ignored() -> Option<String> {
    let name = std::env::var_os("ATTN_LEVEL")?.to_string_lossy().into_owned();
    let error = Level::by_name(&name).err()?;
    Some(format!("ATTN_LEVEL={name} is ignored: {error}"))
}

/// Which level runs unless one is asked for, and why.
fn default_level() -> String {
    let level = Level::detect().name();
    match (ignored(), std::env::var_os("ATTN_LEVEL")) {
        (Some(ignored), _) => format!("Default: {level}; {ignored}"),
        (None, Some(_)) => format!("Default: {level}, by ATTN_LEVEL"),
        (None, None) => format!("Default: {level}, the best of this machine; ATTN_LEVEL=NAME forces another"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_has_a_kernel_for_every_type() {
        let rows = kernels(64).unwrap();
        let wanted: usize = Level::available().map(|level| if level.has_tiles() { 5 } else { 3 }).sum();
        assert_eq!(rows.len(), wanted);
        for row in rows {
            let dtype = row[2].split(' ').next().unwrap();
            assert!(row[3].starts_with(&format!("{}-{dtype}", row[0])), "{row:?}");
            // Whoever looks at a table without tiles reads why.
            assert!(row[3].contains("tiles, ") || row[3].contains("no tiles: this machine"), "{row:?}");
        }
        assert!(kernels(usize::MAX).is_err());
    }

    #[test]
    fn levels_are_present_or_absent() {
        assert_eq!(absent().count() + Level::available().count(), Level::names().count());
        assert!(absent().all(|line| line.contains("this machine")));
    }
}
