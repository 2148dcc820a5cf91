//! Calls about which ranks disagree, and jobs whose ranks compute for long, fall silent or die.

use std::time::Duration;

use attn_core::{Align, Attention, AttnError, Layout, Mask, View, ViewMut};
use attn_mpi::mpi::topology::SimpleCommunicator;
use attn_mpi::{Cluster, Error, Method, ShardedCache, Sharding};
use attn_simd::Level;

use crate::run;

/// A small call of self-attention over 40 positions with this rank's options.
fn call(cluster: &Cluster, attn: &Attention<'_>, len: usize, dim: usize) -> Result<(), Error> {
    let sharding = Sharding::even(len, cluster.ranks());
    let n = sharding.local_len(cluster.rank());
    let (x, mut out) = (vec![0.5f32; 2 * n * dim], vec![7.0f32; 2 * n * dim]);
    let x = View::new(&x, Layout::Bhsd, [1, 2, n, dim])?;
    let result = cluster.prefill(attn, &sharding, &sharding, x, x, x, ViewMut::new(&mut out, Layout::Bhsd, x.sizes())?);
    // An error comes before any write.
    assert!(out.iter().all(|&x| (x == 7.0) == result.is_err() && x != 0.0));
    result.map(|_| ())
}

/// Every disagreement is an error on every rank.
pub(crate) fn disagree(cluster: Cluster) {
    let (me, ranks) = (cluster.rank(), cluster.ranks());
    let odd = me + 1 == ranks && ranks > 1;
    let good = Attention::new().mask(Mask::causal(Align::BottomRight));
    let window = |left| Mask::window(left, 0, Align::BottomRight);
    let check = |what: &str, result: Result<(), Error>| match result {
        Err(Error::Disagree { what: found, rank, first, found: other }) => {
            assert!(ranks > 1 && found == what && rank == ranks - 1 && first != other, "{what}: {found}");
        }
        other => assert!(ranks == 1 && other.is_ok(), "{what}: {other:?}"),
    };
    check("q_len", call(&cluster, &good, 40 + usize::from(odd), 8));
    check("head_dim", call(&cluster, &good, 40, if odd { 16 } else { 8 }));
    check("the scale", call(&cluster, &if odd { good.scale(0.3) } else { good }, 40, 8));
    check("the mask", call(&cluster, &good.mask(window(if odd { 3 } else { 4 })), 40, 8));
    check("the mask", call(&cluster, &if odd { Attention::new() } else { good }, 40, 8));
    check("reproducible", call(&cluster, &if odd { good.reproducible() } else { good }, 40, 8));
    let sinks = [0.5, if odd { 0.25 } else { 0.75 }];
    check("the sinks", call(&cluster, &good.sinks(&sinks), 40, 8));
    let dense: Vec<bool> = (0..1600).map(|n| n % 3 == 0 || (odd && n == 1598)).collect();
    let dense = View::broadcast(&dense, &[40, 40]).expect("made for it");
    check("the mask", call(&cluster, &good.mask(Mask::keep(dense)), 40, 8));

    // Arguments that do not fit on one rank: it gets the reason, the others its number.
    let result = call(&cluster, &if odd { good.scale(f64::NAN) } else { good }, 40, 8);
    match result {
        Err(Error::Attn(AttnError::Option { name: "scale", .. })) => assert!(odd),
        Err(Error::Refused { rank }) => assert!(!odd && rank == ranks - 1),
        other => assert!(ranks == 1 && other.is_ok(), "{other:?}"),
    }
    // And a good call afterwards is a good call.
    call(&cluster, &good, 40, 8).expect("nothing is wrong with it");

    // Gatherings of the program: as many bytes on every rank, and the same call.
    check("the bytes of a gathering", cluster.all_gather(&vec![1; 8 + usize::from(odd)]).map(|_| ()));
    let other = if odd { cluster.all_gather(&[1]).map(|_| ()) } else { call(&cluster, &good, 40, 8) };
    check("the call", other);

    // Pieces of messages: also smaller than the record by which ranks agree.
    let mut cluster = cluster;
    for bytes in [1, 100, 1 << 20] {
        cluster = cluster.message_bytes(bytes + usize::from(odd));
        check("the bytes of a message", call(&cluster, &good, 40, 8));
        let all = cluster.all_gather(&[me as u8; 300]).expect("as many bytes on each");
        assert!(all.chunks(300).enumerate().all(|(rank, one)| one == [rank as u8; 300]));
        let sharding = Sharding::even(40, ranks);
        let n = sharding.local_len(me);
        let x = vec![0.5f32; n * 8];
        let x = View::new(&x, Layout::Bhsd, [1, 1, n, 8]).expect("made for it");
        check("the bytes of a message", ShardedCache::of_shards(&cluster, &sharding, x, x, 512).map(|_| ()));
    }
    cluster = cluster.message_bytes(1 << 30);
    call(&cluster, &good, 40, 8).expect("nothing is wrong with it");

    // Ranks at different levels, unless that is allowed.
    if Level::detect() != Level::portable() {
        let cluster = if odd { cluster.level(Level::portable()) } else { cluster };
        match call(&cluster, &good, 40, 8) {
            Err(Error::MixedLevels { rank, .. }) => assert_eq!(rank, ranks - 1),
            other => assert!(ranks == 1 && other.is_ok(), "{other:?}"),
        }
        call(&cluster.allow_mixed_levels(), &good, 40, 8).expect("mixed levels are allowed");
    }
}

/// How long the ranks of a broken job wait.
const PATIENCE: Duration = Duration::from_secs(2);

/// Rank 1 computes something else for ever.
pub(crate) fn as_silent_rank(cluster: Cluster) {
    let cluster = cluster.timeout(PATIENCE);
    call(&cluster, &Attention::new(), 40, 8).expect("the first call is good");
    if cluster.rank() == 1 {
        std::thread::sleep(Duration::from_secs(600));
    }
    let _ = call(&cluster, &Attention::new(), 40, 8);
}

/// Rank 1 computes for longer than the others wait, in each step of a ring; then it does other work for as long.
pub(crate) fn as_busy_rank(cluster: Cluster) {
    let (me, ranks) = (cluster.rank(), cluster.ranks());
    let cluster = cluster.timeout(PATIENCE).method(Method::Ring);
    // Two ranges on each rank: four calls of the kernels a step, of 16 pairs each.
    let stripe = |n: usize| 4 * n..4 * n + 4;
    let sharding = (0..ranks).map(|rank| vec![stripe(rank), stripe(rank + ranks)]).collect();
    let sharding = Sharding::new(sharding).expect("each position once");
    let slow = Attention::new().score_mod(|score, _| {
        if me == 1 {
            std::thread::sleep(PATIENCE / 50);
        }
        score
    });
    let (x, mut out) = (vec![0.5f32; 8 * 8], vec![0.0f32; 8 * 8]);
    let x = View::new(&x, Layout::Bhsd, [1, 1, 8, 8]).expect("made for it");
    let to = ViewMut::new(&mut out, Layout::Bhsd, x.sizes()).expect("made for it");
    cluster.prefill(&slow, &sharding, &sharding, x, x, x, to).expect("a good call");
    assert!(out.iter().all(|&x| (x - 0.5).abs() < 1e-6));
    call(&cluster, &Attention::new(), 40, 8).expect("the others waited");
    for _ in 0..if me == 1 { 8 } else { 0 } {
        std::thread::sleep(PATIENCE / 4);
        cluster.sign_of_life();
    }
    call(&cluster, &Attention::new(), 40, 8).expect("the others waited");
}

/// Rank 1 calls two clusters of the same ranks in another order than the others, so that all wait.
pub(crate) fn as_crossed_rank(cluster: Cluster) {
    let first = cluster.timeout(PATIENCE);
    let second = Cluster::new(&SimpleCommunicator::world()).timeout(PATIENCE);
    let order = if first.rank() == 1 { [&second, &first] } else { [&first, &second] };
    for cluster in order {
        let _ = call(cluster, &Attention::new(), 40, 8);
    }
}

/// Rank 0 waits for rank 1 in one cluster, while rank 1 computes in another for longer than the time-out.
pub(crate) fn as_rank_of_two_clusters(cluster: Cluster) {
    let all = cluster.timeout(PATIENCE).method(Method::Ring);
    let one = Cluster::new(&SimpleCommunicator::self_comm()).timeout(PATIENCE).method(Method::Ring);
    if all.rank() == 1 {
        // Forty calls of the kernels, of four pairs each.
        let sharding = Sharding::new(vec![(0..40).map(|n| n..n + 1).collect()]).expect("each position once");
        let slow = Attention::new().mask(Mask::window(3, 0, Align::TopLeft)).score_mod(|score, _| {
            std::thread::sleep(PATIENCE / 40);
            score
        });
        let (x, mut out) = (vec![0.5f32; 40 * 8], vec![0.0f32; 40 * 8]);
        let x = View::new(&x, Layout::Bhsd, [1, 1, 40, 8]).expect("made for it");
        let to = ViewMut::new(&mut out, Layout::Bhsd, x.sizes()).expect("made for it");
        one.prefill(&slow, &sharding, &sharding, x, x, x, to).expect("a good call");
    }
    call(&all, &Attention::new(), 40, 8).expect("the others waited");
}

/// Rank 1 dies.
pub(crate) fn as_killed_rank(cluster: Cluster) {
    let cluster = cluster.timeout(PATIENCE);
    call(&cluster, &Attention::new(), 40, 8).expect("the first call is good");
    if cluster.rank() == 1 {
        std::process::abort();
    }
    let _ = call(&cluster, &Attention::new(), 40, 8);
}

/// All ranks are stopped for longer than the time-out, again and again, while large messages are on their way.
pub(crate) fn as_stopped_rank(cluster: Cluster) {
    let cluster = cluster.timeout(PATIENCE / 2);
    let stop = format!("for n in 1 2 3; do sleep 1; kill -STOP {0}; sleep 3; kill -CONT {0}; done", std::process::id());
    let mut stopper = std::process::Command::new("sh").args(["-c", &stop]).spawn().expect("a shell");
    let mine = vec![1u8; 1 << 22];
    // Until the last stop is over on every rank.
    let mut running = true;
    while running {
        let over = stopper.try_wait().expect("a child").is_some();
        cluster.all_gather(&mine).expect("the others were stopped, too");
        running = cluster.all_gather(&[u8::from(over)]).expect("one byte on each").contains(&0);
    }
    stopper.wait().expect("it has ended");
}

/// Rank 1 panics in a function that the kernels call, and unwinds.
pub(crate) fn as_panicked_rank(cluster: Cluster) {
    let me = cluster.rank();
    let cluster = cluster.timeout(Duration::from_secs(100)).method(Method::Ring);
    let attn = Attention::new().score_mod(|score, _| if me == 1 { panic!("of the caller's") } else { score });
    let sharding = Sharding::even(8, cluster.ranks());
    let n = sharding.local_len(me);
    let (x, mut out) = (vec![0.5f32; n * 8], vec![0.0f32; n * 8]);
    let x = View::new(&x, Layout::Bhsd, [1, 1, n, 8]).expect("made for it");
    let to = ViewMut::new(&mut out, Layout::Bhsd, x.sizes()).expect("made for it");
    let _ = cluster.prefill(&attn, &sharding, &sharding, x, x, x, to);
}

/// A rank that falls silent is named, and the job ends.
pub(crate) fn silent_rank() -> bool {
    let (what, output, took) = run("silent", 4);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let good = !output.status.success()
        && said.contains("no sign of life from ranks [1]")
        && took < 2 * PATIENCE + Duration::from_secs(20);
    println!("{what}, a silent rank is {}", if good { "named" } else { "NOT NAMED" });
    said.lines().filter(|line| line.starts_with("attn-mpi")).for_each(|line| println!("    {line}"));
    good
}

/// A rank that computes for longer than the time-out is not taken for dead.
pub(crate) fn busy_rank() -> bool {
    succeeds("busy", "a rank that computes is", ["waited for", "NOT WAITED FOR"])
}

/// A rank that computes in another cluster is not taken for dead.
pub(crate) fn two_clusters() -> bool {
    succeeds("clusters", "a rank that computes in another cluster is", ["waited for", "NOT WAITED FOR"])
}

/// A job that somebody suspends as a whole goes on afterwards.
pub(crate) fn stopped_job() -> bool {
    succeeds("stopped", "a job that was suspended", ["goes on", "DOES NOT GO ON"])
}

/// Whether a job of three ranks ends well, said in one of two ways.
fn succeeds(job: &str, who: &str, [yes, no]: [&str; 2]) -> bool {
    let (what, output, _) = run(job, 3);
    let good = output.status.success();
    println!("{what}, {who} {}", if good { yes } else { no });
    String::from_utf8_lossy(&output.stderr).lines().for_each(|line| println!("    {line}"));
    good
}

/// Ranks that wait for each other are told so, and the job ends.
pub(crate) fn crossed_ranks() -> bool {
    let (what, output, took) = run("crossed", 3);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let good = !output.status.success()
        && said.contains("all ranks wait for each other")
        && took < 2 * PATIENCE + Duration::from_secs(20);
    println!("{what}, ranks that make different calls are {}", if good { "told so" } else { "NOT TOLD" });
    said.lines().filter(|line| line.starts_with("attn-mpi")).for_each(|line| println!("    {line}"));
    good
}

/// A rank that dies is named, by MPI or by us, and the job ends.
pub(crate) fn killed_rank() -> bool {
    let (what, output, took) = run("killed", 4);
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    // MPICH's launcher knows the process and its host.
    let by_launcher = said.contains("process rank 1") || said.contains("RANK 1") || said.contains("=   PID ");
    let named = by_launcher || said.contains("from ranks [1]");
    let good = !output.status.success() && named && took < 2 * PATIENCE + Duration::from_secs(20);
    println!("{what}, a dead rank is {}", if good { "named" } else { "NOT NAMED" });
    let lines = said.lines().filter(|line| line.contains("rank 1") || line.contains("=   PID "));
    lines.for_each(|line| println!("    {line}"));
    good
}

/// A rank that panics ends the job at once, long before the time-out.
pub(crate) fn panicked_rank() -> bool {
    let (what, output, took) = run("panicked", 4);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let good = !output.status.success() && said.contains("attn-mpi: rank 1 panicked") && took < Duration::from_secs(50);
    println!("{what}, a rank that panics is {}", if good { "named" } else { "NOT NAMED" });
    said.lines().filter(|line| line.starts_with("attn-mpi")).for_each(|line| println!("    {line}"));
    good
}
