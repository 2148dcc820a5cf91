//! `--ranks`: two ranks of one core each, beside one core, two threads and two copies of one core's work.
//!
//! Builds `attn-mpi`'s example `measure`, which needs MPI and libclang, and starts it under `mpirun`.

use std::path::{Path, PathBuf};
use std::process::Command;

use attn_bench::machine::Machine;
use attn_bench::progress::Progress;
use attn_bench::ranks::{self, Case, RanksReport, Sample, Setup};
use attn_bench::report::ranks::document;
use attn_simd::Level;

use super::args::{Args, Failure};
use super::output::{command_line, show, some_case};
use super::progress::Terminal;

/// What is missing, and how to get it.
const INSTALL: &str = "--ranks starts jobs by mpirun, and builds attn-mpi against an MPI with libclang: on Debian and \
                       Ubuntu `apt-get install openmpi-bin libopenmpi-dev libclang-dev` (or mpich libmpich-dev), on \
                       Fedora `dnf install openmpi-devel clang-devel`";

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let tokens = args.max_n.unwrap_or(if args.quick { 2048 } else { 8192 });
    let (level, filter) = (args.level()?, args.filter()?);
    let all = ranks::cases(tokens);
    let chosen: Vec<Case> = all.iter().filter(|case| filter.accepts(&case.name())).cloned().collect();
    let names = |cases: &[Case]| cases.iter().map(Case::name).collect::<Vec<_>>();
    some_case(args, &names(&chosen), &names(&all))?;
    if args.list {
        names(&chosen).iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let mpi = version()?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cores < 2 {
        return Err(Failure::Other("two ranks of one core each need two cores; this machine has one".into()));
    }
    let program = built()?;
    let machine = Machine::detect(level, 1, command_line());
    println!("{}; level {}; {mpi}", machine.cpu, level.name());
    if let Some(warning) = machine.disturbed() {
        println!("{warning}");
    }
    let (passes, samples) = if args.quick { (2, 2) } else { (3, if args.full { 9 } else { 3 }) };
    let key = format!("ranks {:?} {passes} {samples} {} {mpi}", names(&chosen), level.name());
    let mut journal = args.journal("ranks", &machine, &key)?;
    let mut report = RanksReport::new(machine, mpi.clone(), &chosen);
    let mut progress = Terminal::new();
    progress.begin(&vec![1.0; chosen.len() * passes * Setup::ALL.len()]);
    for pass in 0..passes {
        for row in &mut report.rows {
            for setup in Setup::ALL {
                let step = format!("{}/{}/pass{pass}", row.case.name(), setup.name());
                let found = match journal.get::<Vec<Sample>>(&step) {
                    Some(known) => {
                        progress.known();
                        known
                    }
                    None => {
                        progress.step(&step);
                        let found = job(&program, &mpi, level, setup, &row.case, samples)?;
                        journal.put(&step, &found).map_err(|error| Failure::Other(format!("the journal: {error}")))?;
                        found
                    }
                };
                row.of(setup).extend(found);
            }
        }
    }
    progress.end();
    // All is measured: what follows is computed from it. A file that stays behind does no harm.
    let _ = journal.finish();
    show(args, &format!("ranks, {}", level.name()), &document(&report), &report)
}

/// The first line of what `mpirun` says about itself.
fn version() -> Result<String, Failure> {
    let output = Command::new("mpirun").arg("--version").output();
    let output = output.map_err(|error| Failure::Other(format!("cannot start mpirun: {error}. {INSTALL}")))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let first = text.lines().map(str::trim).find(|line| !line.is_empty());
    // MPICH begins with a heading.
    let named = text.lines().map(str::trim).find_map(|line| line.strip_prefix("Version:"));
    match (named, first) {
        (Some(version), _) => Ok(format!("MPICH {}", version.trim())),
        (None, Some(first)) => Ok(first.replace("mpirun (", "").replace(')', "")),
        (None, None) => Err(Failure::Other(format!("mpirun does not say its version. {INSTALL}"))),
    }
}

/// Builds the program that takes samples.
fn built() -> Result<PathBuf, Failure> {
    let folder = Path::new("target").join("ranks");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--release", "--locked", "--manifest-path", "attn-mpi/Cargo.toml", "--example", "measure"]);
    let status = command.arg("--target-dir").arg(&folder).status();
    match status {
        Ok(status) if status.success() => Ok(folder.join("release/examples/measure")),
        Ok(status) => Err(Failure::Other(format!("attn-mpi does not build ({status}). {INSTALL}"))),
        Err(error) => Err(Failure::Other(format!("cannot start cargo: {error}"))),
    }
}

/// One job.
fn job(
    program: &Path,
    mpi: &str,
    level: Level,
    setup: Setup,
    case: &Case,
    samples: usize,
) -> Result<Vec<Sample>, Failure> {
    let mut command = Command::new("mpirun");
    command.args(["-n", &setup.processes().to_string()]);
    command.args(["--bind-to", if setup == Setup::Threads { "none" } else { "core" }]);
    if mpi.contains("Open MPI") {
        command.arg("--allow-run-as-root");
    }
    let program = std::path::absolute(program).map_err(|error| Failure::File(program.to_path_buf(), error))?;
    command.arg(program).args(case.arguments(setup, samples));
    command.env("RAYON_NUM_THREADS", setup.threads().to_string()).env("ATTN_LEVEL", level.name());
    let output = command.output().map_err(|error| Failure::Other(format!("cannot start mpirun: {error}")))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(Failure::Other(format!("{}, {}: {}\n{said}", case.name(), setup.name(), output.status)));
    }
    ranks::samples(&String::from_utf8_lossy(&output.stdout))
        .map_err(|error| Failure::Other(format!("{}, {}: {error}\n{said}", case.name(), setup.name())))
}
