//! One call on this rank: its arguments, and the checks that a rank can make by itself.

use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Outputs, View, state};
use attn_simd::{KernelElement, Plan};

use crate::agree::{Record, text};
use crate::cluster::Cluster;
use crate::cost::Method;
use crate::part::check_parts;
use crate::sharding::Sharding;
use crate::split::Split;

/// A call whose arguments have been checked on this rank.
pub(crate) struct Call<'c, 'a, T, M> {
    pub(crate) cluster: &'c Cluster,
    pub(crate) attn: &'c Attention<'a, M>,
    /// Of the whole call.
    pub(crate) shape: AttnShape,
    pub(crate) queries: &'c Sharding,
    pub(crate) keys: &'c Sharding,
    pub(crate) q: View<'c, T>,
    pub(crate) k: View<'c, T>,
    pub(crate) v: View<'c, T>,
}

impl<T: KernelElement, M: Mods + Sync> Call<'_, '_, T, M> {
    /// What this rank can see of the arguments of a prefill.
    pub(crate) fn check<O: KernelElement>(&self, outputs: &Outputs<'_, O>) -> attn_core::Result<()> {
        self.check_inputs()?;
        let local = self.local()?;
        outputs.check(&local)?;
        states_len(&local)?;
        if outputs.weights.is_some() {
            return Err(AttnError::Unsupported { what: "weights over ranks (attn_core::weights with the lse)" });
        }
        let AttnShape { q_heads, kv_heads, .. } = self.shape;
        let ranks = self.cluster.ranks();
        if self.cluster.method == Some(Method::Heads) && Split::of(q_heads, kv_heads, ranks).is_none() {
            return Err(AttnError::Beyond { what: "ranks of the method Heads", value: ranks, most: q_heads });
        }
        Ok(())
    }

    /// The sizes of this rank's tensors.
    pub(crate) fn local(&self) -> attn_core::Result<AttnShape> {
        AttnShape::new(self.q.sizes(), self.k.sizes(), self.v.sizes())
    }

    /// What this rank can see of q, k, v, the shardings and the options.
    pub(crate) fn check_inputs(&self) -> attn_core::Result<()> {
        let (me, ranks) = (self.cluster.rank(), self.cluster.ranks());
        AttnError::check_size("ranks of the sharding of the queries", ranks, self.queries.ranks())?;
        AttnError::check_size("ranks of the sharding of the keys", ranks, self.keys.ranks())?;
        AttnError::check_size("q positions against the sharding", self.queries.local_len(me), self.q.sizes()[2])?;
        AttnError::check_size("k positions against the sharding", self.keys.local_len(me), self.k.sizes()[2])?;
        self.local()?;
        let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let (k, v) = ([batch, kv_heads, kv_len, head_dim], [batch, kv_heads, kv_len, value_dim]);
        let shape = AttnShape::new([batch, q_heads, q_len, head_dim], k, v)?;
        Plan::new(self.attn, shape, self.cluster.level)?;
        check_parts(self.attn)?;
        // A shard of another rank may be larger than this one's; some of its buffers are f32.
        let dims = head_dim.checked_add(value_dim).and_then(|dims| dims.checked_mul(T::DTYPE.bytes().max(4)));
        let bytes =
            [batch, kv_heads, self.keys.longest()].into_iter().try_fold(dims.unwrap_or(usize::MAX), usize::checked_mul);
        match bytes {
            Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
            _ => Err(AttnError::Overflow { what: "bytes of a shard" }),
        }
    }

    /// What all ranks have to agree on: sizes, options and shardings.
    pub(crate) fn record(&self, name: &str) -> Record {
        Record::new(name, self.cluster.level, self.cluster.mixed)
            .with("batch", self.shape.batch as u64)
            .with("q_heads", self.shape.q_heads as u64)
            .with("kv_heads", self.shape.kv_heads as u64)
            .with("head_dim", self.shape.head_dim as u64)
            .with("value_dim", self.shape.value_dim as u64)
            .with("q_len", self.shape.q_len as u64)
            .with("kv_len", self.shape.kv_len as u64)
            .with("the element type of the inputs", text(T::DTYPE.name()))
            .with("the bytes of a message", self.cluster.wire.most as u64)
            .with_sharding("the sharding of the queries", self.queries)
            .with_sharding("the sharding of the keys", self.keys)
            .with_options(self.attn)
    }

    /// `[batch, kv_heads, head_dim, value_dim]`.
    pub(crate) fn kv_sizes(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.kv_heads, self.shape.head_dim, self.shape.value_dim]
    }
}

/// The sizes of the whole call; those of k and v are checked later.
pub(crate) fn whole<T: Copy>(
    queries: &Sharding,
    keys: &Sharding,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
) -> AttnShape {
    let ([batch, q_heads, _, head_dim], [_, kv_heads, ..], [.., value_dim]) = (q.sizes(), k.sizes(), v.sizes());
    AttnShape { batch, q_heads, kv_heads, q_len: queries.len(), kv_len: keys.len(), head_dim, value_dim }
}

/// Numbers of the states of a call's rows.
///
/// # Errors
/// [`AttnError::Overflow`] if they are too large for memory.
pub(crate) fn states_len(shape: &AttnShape) -> attn_core::Result<usize> {
    let len = state::len(shape)?;
    match len.checked_mul(size_of::<f64>()).map(isize::try_from) {
        Some(Ok(_)) => Ok(len),
        _ => Err(AttnError::Overflow { what: "bytes of the states of the rows" }),
    }
}
