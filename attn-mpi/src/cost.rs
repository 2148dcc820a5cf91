//! The cost of a call: bytes, and seconds by the α–β model (a message of `n` bytes takes `α + n·β`; Hockney 1994).
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

/// What one way to share a call out costs the rank that has the most to do.
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

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, compute, seconds) = (self.bytes * 1e-6, self.compute * 1e3, self.seconds * 1e3);
        let memory = self.memory * 1e-6;
        writeln!(f, "{bytes:.3} MB sent, {compute:.3} ms computing, {seconds:.3} ms in all, {memory:.3} MB held")
    }
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
        writeln!(f, "{:?} over {} ranks", self.method, self.ranks)?;
        write!(f, "{}ring: {}", self.link, self.ring)?;
        match &self.heads {
            Some(cost) => write!(f, "heads: {cost}"),
            None => writeln!(f, "heads: fewer heads than ranks, or groups that do not divide"),
        }
    }
}

/// What the gradients of a call cost by the ring, which is the one way that they have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExplainBackward {
    /// The ring of keys, values and their sums.
    pub ring: Cost,
    /// Ranks.
    pub ranks: usize,
    /// What the times are made of.
    pub link: Link,
}

impl fmt::Display for ExplainBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Gradients by the ring over {} ranks", self.ranks)?;
        write!(f, "{}ring: {}", self.link, self.ring)
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
    let states = rows * (real(shape.value_dim) + 2.0);
    let piece = rows * longest_piece(real(shape.q_len) / n);
    let (queries, outputs) = (rows * real(shape.head_dim) * input, rows * (real(shape.value_dim) * output + 4.0));
    let tensors = queries + shard + outputs;
    let steps = n - 1.0;
    let step = compute / n;
    let ring = Cost {
        bytes: steps * shard,
        compute,
        // The last step transfers nothing.
        seconds: step + steps * step.max(link.message(shard)),
        // Two shards, the states of its rows in f64, and the outputs of a piece of them.
        memory: tensors + 2.0 * shard + states * 8.0 + piece * (real(shape.value_dim) + 1.0) * 4.0,
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

/// The share of a rank's rows, of so many queries, that one call of the kernels computes at most.
fn longest_piece(queries: f64) -> f64 {
    ((queries / 4.0).clamp(1024.0, 4096.0) / queries.max(1.0)).min(1.0)
}

/// What the gradients of a call cost for so many ranks. `bytes` are those of an element of q, k and v, of the output
/// and its gradient, and of the gradients that are computed.
///
/// ```
/// use attn_core::AttnShape;
/// use attn_mpi::{Link, predict_backward};
/// let sizes = |heads| [1, heads, 1 << 20, 128];
/// let shape = AttnShape::new(sizes(32), sizes(8), sizes(8))?;
/// let cost = predict_backward(&shape, 8, [2, 2, 2], Link::gigabits(100.0, 2.0).flops(1e12)).ring;
/// // Seven shards of keys and values in bf16, eight of sums in f32.
/// let shard = 8.0 * 128.0 * 2.0 * (1 << 17) as f64;
/// assert_eq!(cost.bytes, 7.0 * shard * 2.0 + 8.0 * shard * 4.0);
/// assert!(cost.seconds < 1.01 * cost.compute); // hidden, but for the last transfer
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn predict_backward(shape: &AttnShape, ranks: usize, bytes: [usize; 3], link: Link) -> ExplainBackward {
    let (n, real) = (ranks.max(1) as f64, |x: usize| x as f64);
    let [input, output, gradient] = bytes.map(real);
    let (head_dim, value_dim) = (real(shape.head_dim), real(shape.value_dim));
    let pairs = real(shape.batch) * real(shape.q_heads) * real(shape.q_len) * real(shape.kv_len);
    // Scores again, and dq and dk; products of dy and v, and dv.
    let compute = 2.0 * pairs * (3.0 * head_dim + 2.0 * value_dim) / n / link.flops;
    let keys = real(shape.batch) * real(shape.kv_heads) * (real(shape.kv_len) / n) * (head_dim + value_dim);
    let rows = real(shape.batch) * real(shape.q_heads) * real(shape.q_len) / n;
    let (shard, sums, step) = (keys * input, keys * 4.0, compute / n);
    let (bytes, seconds, copies) = if ranks > 1 {
        let (of_keys, of_sums) = (link.message(shard), link.message(sums));
        // The first step sends keys and values, the last one sums, those between both; the end sums only.
        let between = (n - 2.0) * step.max(of_keys + of_sums);
        let seconds = step.max(of_keys) + between + step.max(of_sums) + of_sums;
        ((n - 1.0) * shard + n * sums, seconds, 3.0)
    } else {
        (0.0, compute, 1.0)
    };
    let given = rows * (head_dim * input + 2.0 * value_dim * output + 4.0) + shard;
    let wanted = rows * head_dim * gradient + keys * gradient;
    // Two shards and the sums that travel; dq in f32, and that of a piece with the sums that it gives.
    let piece = rows * longest_piece(real(shape.q_len) / n);
    let memory = given + wanted + 2.0 * shard + copies * sums + 4.0 * (rows + piece) * head_dim + sums;
    ExplainBackward { ring: Cost { bytes, compute, seconds, memory }, ranks, link }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(tokens: usize) -> AttnShape {
        let kv = [1, 2, tokens, 64];
        AttnShape::new([1, 8, tokens, 64], kv, kv).unwrap()
    }

    #[test]
    fn one_rank_sends_nothing() {
        let link = Link::gigabits(1.0, 5.0);
        let (prefill, backward) =
            (predict(&shape(1000), 1, [4, 4], link).ring, predict_backward(&shape(1000), 1, [4, 4, 4], link).ring);
        assert_eq!((prefill.bytes, backward.bytes), (0.0, 0.0));
        assert_eq!((prefill.seconds, backward.seconds), (prefill.compute, backward.compute));
        assert!((backward.compute / prefill.compute - 2.5).abs() < 1e-12);
    }

    #[test]
    fn gradients_wait_for_what_computation_does_not_hide() {
        // Links so slow that only messages count: six steps and the end, 3 · (keys and values) and 4 · sums.
        let slow = Link { alpha: 1.0, beta: 1e-3, flops: 1e30 };
        let cost = predict_backward(&shape(1000), 4, [2, 2, 4], slow).ring;
        let keys = 2.0 * 250.0 * 128.0;
        let want = 3.0 * (1.0 + keys * 2e-3) + 4.0 * (1.0 + keys * 4e-3);
        assert!((cost.seconds - want).abs() < 1e-9 * want, "{} for {want}", cost.seconds);
        // And so fast that only the end is seen.
        let fast = Link { alpha: 1e-6, beta: 1e-12, flops: 1e9 };
        let cost = predict_backward(&shape(1000), 4, [2, 2, 4], fast).ring;
        assert!((cost.seconds - cost.compute - fast.message(keys * 4.0)).abs() < 1e-12);
    }

    #[test]
    fn costs_are_written_out() {
        let link = Link::gigabits(100.0, 2.0);
        let text = predict_backward(&shape(4096), 2, [4, 4, 4], link).to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "Gradients by the ring over 2 ranks");
        assert!(lines[1].starts_with("links: 2.0 µs") && lines[3].starts_with("ring: 6.291 MB sent"), "{text}");
        let text = predict(&shape(4096), 2, [4, 4], link).to_string();
        assert!(text.lines().count() == 5 && text.contains("\nheads: "), "{text}");
    }
}
