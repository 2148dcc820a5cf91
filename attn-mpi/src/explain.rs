//! What a cluster says about a call before it runs: the method, what each would cost, and memory.

use attn_core::AttnShape;

use crate::cluster::Cluster;
use crate::cost::{Explain, predict};
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

    /// Bytes that a rank needs for a prefill by the ring besides its tensors: two shards of keys and values, its rows
    /// of the output as states, and one output of a block: `O(n / ranks)`.
    pub fn ring_memory(&self, shape: &AttnShape, queries: &Sharding, keys: &Sharding, element: usize) -> usize {
        let shard = shape.batch * shape.kv_heads * keys.longest() * (shape.head_dim + shape.value_dim) * element;
        let rows = shape.batch * shape.q_heads * queries.longest();
        2 * shard + 2 * rows * (shape.value_dim + 2) * size_of::<f32>()
    }
}
