//! The explanation of a call before it runs: the method, the cost of each method, and memory.

use attn_core::AttnShape;

use crate::cluster::Cluster;
use crate::cost::{Explain, ExplainBackward, predict, predict_backward};
use crate::ring::pieces::longest_piece;
use crate::sharding::Sharding;

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

    /// What [`backward`](Self::backward) of a call of these global sizes sends, and how long it should take by the
    /// [links](Link) as measured. Every rank gives the same answer. `bytes` are those of an element of q, k and v, of
    /// the output and its gradient, and of the gradients that are computed.
    ///
    /// ```no_run
    /// use attn_core::AttnShape;
    /// use attn_mpi::{Cluster, mpi};
    /// let universe = mpi::initialize().expect("MPI is not initialised yet");
    /// let cluster = Cluster::new(&universe.world());
    /// let sizes = |heads| [1, heads, 100_000, 64];
    /// let shape = AttnShape::new(sizes(8), sizes(2), sizes(2))?;
    /// print!("{}", cluster.explain_backward(&shape, [4, 4, 4]));
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn explain_backward(&self, shape: &AttnShape, bytes: [usize; 3]) -> ExplainBackward {
        predict_backward(shape, self.ranks(), bytes, self.link)
    }

    /// Bytes that a rank needs for a prefill by the ring besides its tensors: two shards of keys and values, its rows
    /// of the output as states in f64, and the output of a piece: `O(n / ranks)`. The cluster keeps them for the next
    /// call.
    pub fn ring_memory(&self, shape: &AttnShape, queries: &Sharding, keys: &Sharding, element: usize) -> usize {
        let product = |factors: &[usize]| factors.iter().copied().fold(1, usize::saturating_mul);
        let (AttnShape { batch, q_heads, kv_heads, head_dim, value_dim, .. }, rows) = (*shape, queries.longest());
        let dims = head_dim.saturating_add(value_dim);
        let shards = product(&[2, batch, kv_heads, keys.longest(), dims, element]);
        let states = product(&[batch, q_heads, rows, value_dim.saturating_add(2), size_of::<f64>()]);
        let piece = rows.min(longest_piece(rows));
        let outputs = product(&[batch, q_heads, piece, value_dim.saturating_add(1), size_of::<f32>()]);
        shards.saturating_add(states).saturating_add(outputs)
    }
}
