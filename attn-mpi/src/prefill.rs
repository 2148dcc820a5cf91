//! Prefill: many queries over keys, both sharded along the sequence. Checks, agrees, and runs one of the methods.

use std::time::Instant;

use attn_core::score_mod::Mods;
use attn_core::{Attention, Outputs, View};
use attn_simd::KernelElement;
use bytemuck::Pod;

use crate::agree::text;
use crate::call::{Call, whole};
use crate::cluster::{Cluster, Report};
use crate::cost::Method;
use crate::error::Result;
use crate::sharding::Sharding;
use crate::{heads, ring};

impl Cluster {
    /// Attention over the whole sequence, of which each rank holds a shard. All ranks call it together.
    ///
    /// | tensor | shape on a rank |
    /// |---|---|
    /// | q | `[batch, q_heads, positions of queries, head_dim]` |
    /// | k | `[batch, kv_heads, positions of keys, head_dim]` |
    /// | v | `[batch, kv_heads, positions of keys, value_dim]` |
    /// | out, lse | as q, with `value_dim`; lse `[batch, q_heads, positions of queries]` |
    ///
    /// `queries` and `keys` say which positions each rank holds; for self-attention they are the same. Options mean the
    /// whole call: masks, biases and mods see global positions and heads, and tensors among them are passed whole to
    /// every rank (or broadcast).
    ///
    /// With [`Attention::reproducible`] the result has the bits of one process, for any number of ranks, any sharding
    /// and either method. Without it, results differ from those of one process by rounding.
    ///
    /// ```no_run
    /// use attn_core::{Align, Attention, Layout, Mask, View, ViewMut};
    /// use attn_mpi::{Cluster, Sharding, mpi};
    /// let universe = mpi::initialize().expect("MPI is not initialised yet");
    /// let cluster = Cluster::new(&universe.world());
    /// let sharding = Sharding::zigzag(100_000, cluster.ranks());
    /// let n = sharding.local_len(cluster.rank());
    /// let (q, kv, mut out) = (vec![0.5f32; 8 * n * 64], vec![0.25f32; 2 * n * 64], vec![0.0f32; 8 * n * 64]);
    /// let attn = Attention::new().mask(Mask::causal(Align::BottomRight)).reproducible();
    /// let (q, kv) = (View::new(&q, Layout::Bhsd, [1, 8, n, 64])?, View::new(&kv, Layout::Bhsd, [1, 2, n, 64])?);
    /// let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 8, n, 64])?;
    /// cluster.prefill(&attn, &sharding, &sharding, q, kv, kv, to)?;
    /// # Ok::<(), attn_mpi::Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank if one of them has arguments that do not fit, or if they disagree; see
    /// [`Error`](crate::Error). No output has been written then. Seeded dropout and the weights as an output are
    /// refused.
    #[expect(clippy::too_many_arguments, reason = "the three tensors, two shardings, options and outputs of a call")]
    pub fn prefill<'o, T, O, M>(
        &self,
        attn: &Attention<'_, M>,
        queries: &Sharding,
        keys: &Sharding,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<Report>
    where
        T: KernelElement + Pod,
        O: KernelElement + Pod,
        M: Mods + Sync,
    {
        let (start, outputs) = (Instant::now(), outputs.into());
        let call = Call { cluster: self, attn, shape: whole(queries, keys, q, k, v), queries, keys, q, k, v };
        let local = call.check(&outputs).map_err(Into::into);
        let explain = self.explain(&call.shape, [T::DTYPE.bytes(), O::DTYPE.bytes()]);
        call.record("prefill")
            .with("the element type of the output", text(O::DTYPE.name()))
            .with("whether an lse is wanted", u64::from(outputs.lse.is_some()))
            .with("the method", text(&format!("{:?}", explain.method)))
            .agree(&self.wire, local)?;
        let traffic = match explain.method {
            Method::Ring => ring::run(&call, outputs)?,
            Method::Heads => heads::run(&call, outputs)?,
        };
        Ok(Report { method: explain.method, traffic, seconds: start.elapsed().as_secs_f64() })
    }
}
