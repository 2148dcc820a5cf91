//! Gradients of a call whose queries and keys are sharded along the sequence. Checks, agrees, runs the ring.

use std::time::Instant;

use attn_core::backward::Gradients;
use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Element, Layout, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::KernelElement;
use attn_simd::backward::Inputs;
use bytemuck::Pod;

use crate::agree::{all_good, text};
use crate::call::{Call, whole};
use crate::cluster::{Cluster, Report};
use crate::cost::Method;
use crate::error::Result;
use crate::ring;
use crate::sharding::Sharding;
use crate::tensors::{Shard, write_row};

/// Tag of the gradients of the sinks.
const TAG: i32 = 10;

impl Cluster {
    /// The gradients of `Σ out·dy` over the whole sequence, of which each rank holds a shard. All ranks call it
    /// together, with the options and the shardings of the [`prefill`](Self::prefill) that gave `out` and `lse`.
    ///
    /// | tensor | shape on a rank |
    /// |---|---|
    /// | q, dq | `[batch, q_heads, positions of queries, head_dim]` |
    /// | k, dk | `[batch, kv_heads, positions of keys, head_dim]` |
    /// | v, dv | `[batch, kv_heads, positions of keys, value_dim]` |
    /// | out, dy | `[batch, q_heads, positions of queries, value_dim]` |
    /// | lse | `[batch, q_heads, positions of queries]` |
    /// | sinks | `[q_heads]`; every rank gets the gradient of the whole call |
    ///
    /// Always by the ring: keys and values travel as in a prefill, and the sums of `dk` and `dv` travel behind them, in
    /// f32, back to the rank that holds the keys. A rank sends `ranks − 1` shards of keys and values, and `ranks` of
    /// sums. It keeps two shards of keys and values, three of sums, and its `dq` in f32.
    ///
    /// The gradients are those of one process but for rounding. Their bits depend on the shards, not on threads or on
    /// the order of messages.
    ///
    /// ```no_run
    /// use attn_core::backward::Gradients;
    /// use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut};
    /// use attn_mpi::{Cluster, Sharding, mpi};
    /// use attn_simd::backward::Inputs;
    /// let universe = mpi::initialize().expect("MPI is not initialised yet");
    /// let cluster = Cluster::new(&universe.world());
    /// let sharding = Sharding::zigzag(100_000, cluster.ranks());
    /// let n = sharding.local_len(cluster.rank());
    /// let (x, mut out, mut lse) = (vec![0.5f32; 8 * n * 64], vec![0.0f32; 8 * n * 64], vec![0.0f32; 8 * n]);
    /// let (attn, sizes) = (Attention::new().mask(Mask::causal(Align::BottomRight)), [1, 8, n, 64]);
    /// let x = View::new(&x, Layout::Bhsd, sizes)?;
    /// let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, sizes)?).lse(&mut lse);
    /// cluster.prefill(&attn, &sharding, &sharding, x, x, x, to)?;
    ///
    /// let dy = vec![1.0f32; 8 * n * 64]; // of a loss that is the sum of the output
    /// let (out, dy) = (View::new(&out, Layout::Bhsd, sizes)?, View::new(&dy, Layout::Bhsd, sizes)?);
    /// let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0f32; 8 * n * 64]);
    /// let [dq, dk, dv] = [&mut dq, &mut dk, &mut dv].map(|to| ViewMut::new(to, Layout::Bhsd, sizes));
    /// let inputs = Inputs { q: x, k: x, v: x, out, lse: &lse, dy };
    /// cluster.backward(&attn, &sharding, &sharding, inputs, Gradients::new(dq?, dk?, dv?))?;
    /// # Ok::<(), attn_mpi::Error>(())
    /// ```
    ///
    /// # Errors
    /// On every rank if one of them has arguments that do not fit, or if they disagree; see
    /// [`Error`](crate::Error). No gradient has been written then. Refused: `reproducible()`, seeded dropout, the
    /// gradient of a bias, a `score_mod` without a derivative.
    pub fn backward<T, G, O, M>(
        &self,
        attn: &Attention<'_, M>,
        queries: &Sharding,
        keys: &Sharding,
        inputs: Inputs<'_, T, G>,
        gradients: Gradients<'_, O>,
    ) -> Result<Report>
    where
        T: KernelElement + Pod,
        G: KernelElement,
        O: Element,
        M: Mods + Sync,
    {
        let start = Instant::now();
        let Inputs { q, k, v, .. } = inputs;
        let call = Call { cluster: self, attn, shape: whole(queries, keys, q, k, v), queries, keys, q, k, v };
        let local = check(&call, &inputs, &gradients).map_err(Into::into);
        call.record("backward")
            .with("the element type of the output", text(G::DTYPE.name()))
            .with("the element type of the gradients", text(O::DTYPE.name()))
            .with("whether the gradient of the sinks is wanted", u64::from(gradients.sinks.is_some()))
            .agree(&self.wire, local)?;
        let (sums, mut traffic) = ring::gradients::run(&call, &inputs);
        // Messages have come to their end on every rank, whatever the kernels said.
        let sinks = match gradients.sinks {
            Some(_) => sinks(&call, &inputs),
            None => Ok(Vec::new()),
        };
        let local = sums.and_then(|sums| Ok((sums, sinks?)));
        let (ring::gradients::Sums { dq, of_keys }, mine) = all_good(&self.wire, local.map_err(Into::into))?;
        let Gradients { dq: mut to_q, dk: mut to_k, dv: mut to_v, sinks: to_sinks, .. } = gradients;
        let sums = Shard::new(&of_keys, call.kv_sizes(), k.sizes()[2])?;
        write(View::new(&dq, Layout::Bhsd, q.sizes())?, &mut to_q);
        write(sums.k, &mut to_k);
        write(sums.v, &mut to_v);
        if let Some(to) = to_sinks {
            let bytes: Vec<u8> = mine.iter().flat_map(|x| x.to_le_bytes()).collect();
            let (all, more) = self.wire.all_gather("the gradients of the sinks", TAG, &bytes);
            traffic.add(more);
            let all: Vec<f64> = all.as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x)).collect();
            let of = |head: usize| all.iter().skip(head).step_by(mine.len().max(1)).sum();
            to.iter_mut().enumerate().for_each(|(head, to)| *to = of(head));
        }
        Ok(Report { method: Method::Ring, traffic, seconds: start.elapsed().as_secs_f64() })
    }
}

/// What this rank can see of its own arguments.
fn check<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
    call: &Call<'_, '_, T, M>,
    inputs: &Inputs<'_, T, G>,
    gradients: &Gradients<'_, O>,
) -> attn_core::Result<()> {
    call.check_inputs()?;
    let local = call.local()?;
    let (output, rows) = (local.output(), local.rows());
    for (what, sizes) in [("out against the output", inputs.out.sizes()), ("dy against the output", inputs.dy.sizes())]
    {
        for (expected, found) in output.into_iter().zip(sizes) {
            AttnError::check_size(what, expected, found)?;
        }
    }
    AttnError::check_size("lse against the rows", rows, inputs.lse.len())?;
    gradients.check(&local)?;
    let bytes = rows.checked_mul(local.head_dim).and_then(|floats| floats.checked_mul(size_of::<f32>()));
    if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(AttnError::Overflow { what: "bytes of dq in f32" });
    }
    attn_simd::backward::Plan::new(call.attn, call.shape, call.cluster.level)?;
    if gradients.bias.is_some() {
        return Err(AttnError::Unsupported { what: "the gradient of a bias over ranks" });
    }
    if call.attn.is_reproducible() {
        return Err(AttnError::Unsupported { what: "reproducible gradients over ranks" });
    }
    let (mods, first) = (call.attn.get_mods(), At { batch: 0, head: 0, query: 0, key: 0 });
    let pairs = ![local.batch, local.q_heads, call.shape.q_len, call.shape.kv_len].contains(&0);
    if pairs && mods.has_score_mod() && mods.derivative(0.0, first).is_none() {
        return Err(AttnError::Unsupported { what: "the gradient of a score function without a derivative" });
    }
    Ok(())
}

/// The gradient of the sinks from this rank's rows: by the kernels, over no keys.
fn sinks<T: KernelElement, G: KernelElement, M: Mods + Sync>(
    call: &Call<'_, '_, T, M>,
    inputs: &Inputs<'_, T, G>,
) -> attn_core::Result<Vec<f64>> {
    let mut sums = vec![0.0; call.shape.q_heads];
    let Some(sinks) = call.attn.get_sinks() else { return Ok(sums) };
    // Queries and keys of no channel: only rows, `out` and `dy` matter.
    let AttnShape { batch, q_heads, kv_heads, value_dim, .. } = call.shape;
    let (n, none) = (call.q.sizes()[2], View::new(&[], Layout::Bhsd, [batch, kv_heads, 0, 0])?);
    let q = View::new(&[], Layout::Bhsd, [batch, q_heads, n, 0])?;
    let v = View::new(&[], Layout::Bhsd, [batch, kv_heads, 0, value_dim])?;
    let to: [&mut [f32]; 3] = [&mut [], &mut [], &mut []];
    let [dq, dk, dv] = to;
    let gradients = Gradients::new(
        ViewMut::new(dq, Layout::Bhsd, q.sizes())?,
        ViewMut::new(dk, Layout::Bhsd, none.sizes())?,
        ViewMut::new(dv, Layout::Bhsd, v.sizes())?,
    );
    let inputs = Inputs::<T, G> { q, k: none, v, out: inputs.out, lse: inputs.lse, dy: inputs.dy };
    let mut runner = Runner::new().level(call.cluster.level).threads(call.cluster.threads);
    runner.backward(&Attention::new().sinks(sinks), inputs, gradients.sinks(&mut sums))?;
    Ok(sums)
}

/// Rounds sums to the type of a gradient.
fn write<O: Element>(from: View<'_, f32>, to: &mut ViewMut<'_, O>) {
    let [batch, heads, seq, _] = from.sizes();
    let mut row = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..seq {
                row.clear();
                row.extend(from.row(b, h, s).iter().map(|x| O::from_f64(f64::from(x))));
                write_row(to, [b, h, s], &row);
            }
        }
    }
}
