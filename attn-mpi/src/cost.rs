//! What a call costs: bytes, and seconds by the α–β model (a message of `n` bytes takes `α + n·β`; Hockney 1994).
//!
//! The ring overlaps: a step takes as long as its computation or its transfer, whichever is longer. The two all-to-alls
//! of the heads overlap with nothing.

use std::fmt;
use std::time::Instant;

use attn_core::AttnShape;

use crate::cluster::{Cluster, Method};
use crate::heads::Split;
use crate::sharding::Sharding;
use crate::wire::Wire;

/// A link between two ranks, and the speed of a rank: the same on every rank, the worst of all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds of an empty message.
    pub alpha: f64,
    /// Seconds of a byte.
    pub beta: f64,
    /// Operations in a second of one rank: a guess of 5·10¹⁰ unless given, which [`Explain`] names beside its times.
    pub flops: f64,
}

/// Bytes of the long message of the ping.
const LONG: usize = 1 << 20;

impl Link {
    /// A link of so many gigabits a second, with a latency in microseconds.
    pub fn gigabits(gigabits: f64, micros: f64) -> Self {
        Self { alpha: micros * 1e-6, beta: 8e-9 / gigabits, flops: 5e10 }
    }

    /// With the speed of a rank, in operations a second.
    #[must_use]
    pub fn flops(mut self, flops: f64) -> Self {
        self.flops = flops;
        self
    }

    /// Sends some messages to the right neighbour while the left one's arrive, and takes the worst of all ranks.
    pub(crate) fn measure(wire: &mut Wire) -> Self {
        let (me, ranks) = (wire.rank(), wire.ranks());
        let fallback = Self { alpha: 1e-6, beta: 1e-10, flops: 5e10 };
        if ranks == 1 {
            return fallback;
        }
        let (to, from) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let time = |len: usize| {
            let (mine, mut theirs) = (vec![0u8; len], vec![0u8; len]);
            let times = (0..4).map(|_| {
                let start = Instant::now();
                wire.exchange("the ping", 3, &[(to, &mine)], vec![(from, &mut theirs)], |_| ());
                start.elapsed().as_secs_f64()
            });
            times.fold(f64::INFINITY, f64::min)
        };
        let (short, long) = (time(1), time(LONG));
        let mine = [short, ((long - short) / LONG as f64).max(1e-12)];
        let bytes: Vec<u8> = mine.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = wire.all_gather("the ping", 3, &bytes).0;
        let all: Vec<f64> = all.as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x)).collect();
        let worst = |first: usize| all.iter().skip(first).step_by(2).copied().fold(0.0, f64::max);
        Self { alpha: worst(0), beta: worst(1), ..fallback }
    }

    fn message(&self, bytes: f64) -> f64 {
        self.alpha + bytes * self.beta
    }
}

/// What one way to share a prefill out costs the rank that has the most to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Bytes that a rank sends at most.
    pub bytes: f64,
    /// Seconds of computation of a rank, without masks.
    pub compute: f64,
    /// Seconds of the whole call.
    pub seconds: f64,
}

/// How a prefill will be shared out, and what each way would cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Explain {
    /// The way that is taken.
    pub method: Method,
    /// The ring.
    pub ring: Cost,
    /// The heads, where there are enough.
    pub heads: Option<Cost>,
    /// Ranks.
    pub ranks: usize,
    /// What the times are made of.
    pub link: Link,
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Link { alpha, beta, flops } = self.link;
        writeln!(f, "{:?} over {} ranks", self.method, self.ranks)?;
        writeln!(f, "links: {:.1} µs a message, {:.2} GB/s", alpha * 1e6, 1e-9 / beta)?;
        writeln!(f, "ranks: {:.0} GFLOP/s assumed, masks not counted", flops * 1e-9)?;
        let mut line = |name: &str, cost: &Cost| {
            let (bytes, compute, seconds) = (cost.bytes * 1e-6, cost.compute * 1e3, cost.seconds * 1e3);
            writeln!(f, "{name}: {bytes:.3} MB sent, {compute:.3} ms computing, {seconds:.3} ms in all")
        };
        line("ring", &self.ring)?;
        match &self.heads {
            Some(cost) => line("heads", cost),
            None => writeln!(f, "heads: fewer heads than ranks, or groups that do not divide"),
        }
    }
}

/// Costs of both ways for so many ranks. `bytes` are those of an element of q, k and v, and of the output.
///
/// ```
/// use attn_core::AttnShape;
/// use attn_mpi::{Link, Method, predict};
/// let sizes = |heads| [1, heads, 1 << 20, 128];
/// let shape = AttnShape::new(sizes(32), sizes(8), sizes(8))?;
/// let fast = predict(&shape, 8, [2, 2], Link::gigabits(100.0, 2.0).flops(1e12));
/// assert!(fast.heads.is_some() && fast.ring.seconds < 1.01 * fast.ring.compute); // hidden behind computation
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn predict(shape: &AttnShape, ranks: usize, bytes: [usize; 2], link: Link) -> Explain {
    let n = ranks.max(1) as f64;
    let real = |x: usize| x as f64;
    let dims = real(shape.head_dim) + real(shape.value_dim);
    let (input, output) = (real(bytes[0]), real(bytes[1]));
    let pairs = real(shape.batch) * real(shape.q_heads) * real(shape.q_len) * real(shape.kv_len);
    let compute = 2.0 * pairs * dims / n / link.flops;
    let shard = real(shape.batch) * real(shape.kv_heads) * (real(shape.kv_len) / n) * dims * input;
    let steps = n - 1.0;
    let step = compute / n;
    let ring = Cost {
        bytes: steps * shard,
        compute,
        // The last step transfers nothing.
        seconds: step + steps * step.max(link.message(shard)),
    };
    let heads = Split::of(shape.q_heads, shape.kv_heads, ranks).map(|_| {
        let rows = real(shape.batch) * real(shape.q_heads) * real(shape.q_len) / n;
        // A key/value head that several ranks share is sent to each.
        let copies = (n / real(shape.kv_heads)).max(1.0);
        let there = rows * real(shape.head_dim) * input + shard * copies;
        let back = rows * (real(shape.value_dim) * output + 4.0);
        let bytes = (there + back) * steps / n;
        Cost { bytes, compute, seconds: compute + 2.0 * steps * link.alpha + bytes * link.beta }
    });
    let method = match &heads {
        Some(heads) if heads.seconds < ring.seconds => Method::Heads,
        _ => Method::Ring,
    };
    Explain { method, ring, heads, ranks, link }
}

impl Cluster {
    /// How [`prefill`](Self::prefill) will share out a call of these global sizes, and what each way would cost by the
    /// [links](Link) as measured. Every rank gives the same answer. `bytes` are those of an element of the inputs and
    /// of the output.
    pub fn explain(&self, shape: &AttnShape, bytes: [usize; 2]) -> Explain {
        let mut explain = predict(shape, self.ranks(), bytes, self.link);
        if let Some(method) = self.method {
            explain.method = method;
        }
        explain
    }

    /// Bytes that a rank needs for a prefill by the ring besides its tensors: two shards of keys and values, its rows
    /// of the output as states, and one output of a block: `O(n / ranks)`.
    pub fn ring_memory(&self, shape: &AttnShape, queries: &Sharding, keys: &Sharding, element: usize) -> usize {
        let shard = shape.batch * shape.kv_heads * keys.longest() * (shape.head_dim + shape.value_dim) * element;
        let rows = shape.batch * shape.q_heads * queries.longest();
        2 * shard + 2 * rows * (shape.value_dim + 2) * size_of::<f32>()
    }
}
