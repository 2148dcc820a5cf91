//! What a call costs: bytes, and seconds by the α–β model (a message of `n` bytes takes `α + n·β`; Hockney 1994).
//!
//! The ring overlaps: a step takes as long as its computation or its transfer, whichever is longer. The two all-to-alls
//! of the heads overlap with nothing. No message is sent here.

use std::fmt;

use attn_core::AttnShape;

use crate::link::Link;
use crate::split::Split;

/// How a prefill is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Method {
    /// Queries stay; keys and values travel from rank to rank. Any number of ranks.
    Ring,
    /// Every rank computes some heads over the whole sequence: two all-to-alls (Jacobs et al. 2023, DeepSpeed Ulysses,
    /// arXiv 2309.14509). At most as many ranks as heads.
    Heads,
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
    /// Bytes that a rank holds at most, its tensors included.
    pub memory: f64,
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
            let memory = cost.memory * 1e-6;
            writeln!(
                f,
                "{name}: {bytes:.3} MB sent, {compute:.3} ms computing, {seconds:.3} ms in all, {memory:.3} MB held"
            )
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
    let rows = real(shape.batch) * real(shape.q_heads) * real(shape.q_len) / n;
    let (queries, outputs) = (rows * real(shape.head_dim) * input, rows * (real(shape.value_dim) * output + 4.0));
    let tensors = queries + shard + outputs;
    let steps = n - 1.0;
    let step = compute / n;
    let ring = Cost {
        bytes: steps * shard,
        compute,
        // The last step transfers nothing.
        seconds: step + steps * step.max(link.message(shard)),
        // Two shards, and the states of its rows twice: as blocks have them, and as they are finished.
        memory: tensors + 2.0 * shard + 2.0 * rows * (real(shape.value_dim) + 2.0) * 4.0,
    };
    let heads = Split::of(shape.q_heads, shape.kv_heads, ranks).map(|_| {
        // A key/value head that several ranks share is sent to each.
        let copies = (n / real(shape.kv_heads)).max(1.0);
        let there = queries + shard * copies;
        let bytes = (there + outputs) * steps / n;
        // Inputs before and after they were exchanged; then the heads' inputs, and the output three times.
        let memory = tensors + there + there.max(3.0 * outputs);
        Cost { bytes, compute, seconds: compute + 2.0 * steps * link.alpha + bytes * link.beta, memory }
    });
    let method = match &heads {
        Some(heads) if heads.seconds < ring.seconds => Method::Heads,
        _ => Method::Ring,
    };
    Explain { method, ring, heads, ranks, link }
}
