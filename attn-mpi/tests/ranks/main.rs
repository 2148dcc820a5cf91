//! Runs the checks under `mpirun`, with 1 to 8 ranks on this machine, and looks at how jobs with a broken rank end.
//!
//! This program starts itself: with the argument `rank` it is one rank of a job. `cargo test --test ranks` runs
//! everything, `cargo test --test ranks -- prefill 3` one suite with three ranks. The suite `vectors` reads the
//! conformance suite `ring`, from `ATTN_VECTORS` or beside the workspace. Ranks share cores, so each computes
//! on one thread. `MPIRUN` names another launcher than `mpirun`; it must be that of the MPI of the build (`MPICC`).

mod backward;
mod calls;
mod compare;
mod decode;
mod failure;
mod halves;
mod prefill;
#[path = "../../../attn-testing/src/tolerance.rs"]
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "the one table of tolerances; the test crate itself would build a test framework"
)]
mod tolerance;
mod vectors;

use std::io::Read;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use attn_mpi::{Cluster, mpi};

/// How long ranks wait for one that shares its core with seven others.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long a whole job may take: several times what the longest does.
const LIMIT: Duration = Duration::from_secs(240);
/// How often a job is started whose launcher crashes or does not end. Open MPI's mpirun 4.1 crashed in one of some two
/// hundred jobs that were aborted. A job that never ends is a failure still.
const TRIES: usize = 3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["rank", suite] => as_rank(suite),
        [suite, ranks] => ended(run(suite, ranks.parse().expect("a number of ranks"))),
        ["broken"] => broken(),
        [] => {
            let mut all = true;
            vectors::announce();
            for ranks in 1..=8 {
                for suite in ["prefill", "decode", "halves", "backward", "vectors", "disagree"] {
                    all &= ended(run(suite, ranks)) == ExitCode::SUCCESS;
                }
            }
            vectors::announce();
            if all { broken() } else { ExitCode::FAILURE }
        }
        _ => ExitCode::FAILURE,
    }
}

/// Jobs whose ranks compute for long, wait for each other, fall silent or die.
fn broken() -> ExitCode {
    let slow = failure::busy_rank() & failure::two_clusters() & failure::crossed_ranks();
    let slow = slow & failure::stopped_job();
    let dead = failure::silent_rank() & failure::killed_rank() & failure::panicked_rank();
    if slow & dead { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One rank of a job.
fn as_rank(suite: &str) -> ExitCode {
    // Backtraces of all ranks at once are hard to read: the first rank that panics ends the job.
    let say = std::panic::take_hook();
    if suite != "panicked" {
        std::panic::set_hook(Box::new(move |info| {
            say(info);
            std::process::abort();
        }));
    }
    let universe = mpi::initialize().expect("MPI starts");
    let cluster = Cluster::new(&universe.world()).timeout(TIMEOUT).threads(1);
    match suite {
        "prefill" => prefill::run(cluster),
        "decode" => decode::run(cluster),
        "backward" => backward::run(cluster),
        "halves" => halves::run(cluster),
        "vectors" => vectors::run(cluster),
        "disagree" => failure::disagree(cluster),
        "busy" => failure::as_busy_rank(cluster),
        "clusters" => failure::as_rank_of_two_clusters(cluster),
        "crossed" => failure::as_crossed_rank(cluster),
        "silent" => failure::as_silent_rank(cluster),
        "killed" => failure::as_killed_rank(cluster),
        "stopped" => failure::as_stopped_rank(cluster),
        "panicked" => failure::as_panicked_rank(cluster),
        _ => panic!("no suite {suite}"),
    }
    ExitCode::SUCCESS
}

/// Starts this program on so many ranks, and again if the launcher crashes or does not end. Returns what ended, what it
/// printed and how long that took.
fn run(suite: &str, ranks: usize) -> (String, Output, Duration) {
    let mpirun = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned());
    let version = Command::new(&mpirun).arg("--version").output().expect("mpirun is there");
    let mut command = Command::new(&mpirun);
    command.args(["-n", &ranks.to_string()]);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        command.args(["--oversubscribe", "--allow-run-as-root", "--mca", "btl_vader_single_copy_mechanism", "none"]);
        // Ranks that wait let others have their core.
        command.args(["--mca", "mpi_yield_when_idle", "1"]);
    }
    command.arg(std::env::current_exe().expect("this program has a path")).args(["rank", suite]);
    command.env("RAYON_NUM_THREADS", "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tries = 1;
    loop {
        let start = Instant::now();
        let (output, in_time) = output_within(command.spawn().expect("mpirun starts"), LIMIT);
        let took = start.elapsed();
        let what = format!("{suite} on {ranks} ranks: {:.1} s", took.as_secs_f64());
        // A launcher that ends by itself has a code, whatever became of its ranks.
        if in_time && output.status.code().is_some() || tries == TRIES {
            return (what, output, took);
        }
        println!("{what}: the launcher {}, try {tries} of {TRIES}", if in_time { "crashed" } else { "did not end" });
        print!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        tries += 1;
    }
}

/// What a launcher printed, and whether it ended in time. One that does not is told to end its ranks, and then killed.
fn output_within(mut launcher: Child, limit: Duration) -> (Output, bool) {
    fn all_of(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = from.read_to_end(&mut bytes);
            bytes
        })
    }
    let ended_within = |launcher: &mut Child, limit: Duration| {
        let start = Instant::now();
        while launcher.try_wait().expect("mpirun is a child").is_none() {
            if start.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    };
    let stdout = all_of(launcher.stdout.take().expect("piped"));
    let stderr = all_of(launcher.stderr.take().expect("piped"));
    let in_time = ended_within(&mut launcher, limit);
    if !in_time {
        let _ = Command::new("kill").arg(launcher.id().to_string()).status();
        if !ended_within(&mut launcher, Duration::from_secs(10)) {
            let _ = launcher.kill();
        }
    }
    let status = launcher.wait().expect("mpirun is a child");
    let text = |reader: std::thread::JoinHandle<Vec<u8>>| reader.join().expect("a reader does not panic");
    (Output { status, stdout: text(stdout), stderr: text(stderr) }, in_time)
}

/// Shows how a job ended.
fn ended((what, output, _): (String, Output, Duration)) -> ExitCode {
    print!("{}", String::from_utf8_lossy(&output.stdout));
    if output.status.success() {
        println!("{what}, passed");
        return ExitCode::SUCCESS;
    }
    println!("{what}, FAILED\n{}", String::from_utf8_lossy(&output.stderr));
    ExitCode::FAILURE
}
