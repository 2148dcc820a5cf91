//! Operations that candle's `backward` goes through: they keep their options, and the log-sum-exps of their forward
//! pass. `forward` and `backward` compute them.

use std::marker::PhantomData;
use std::sync::OnceLock;

use attn_core::score_mod::Mods;
use attn_core::{Attention, Bias, View};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

use crate::backward::{Saved, backward};
use crate::forward::forward;
use crate::tensors::{reading, view};

/// Options that a graph keeps until its gradients are computed.
pub(crate) trait Options {
    type Mods: Mods + Sync;

    /// Calls a function with them.
    fn with<R>(&self, call: impl FnOnce(&Attention<'_, Self::Mods>) -> Result<R>) -> Result<R>;
}

/// Data, and the options that borrow from it.
pub(crate) struct Kept<D, F, M> {
    data: D,
    options: F,
    mods: PhantomData<fn() -> M>,
}

impl<D, M, F: for<'a> Fn(&'a D) -> Attention<'a, M>> Kept<D, F, M> {
    pub(crate) fn new(data: D, options: F) -> Self {
        Self { data, options, mods: PhantomData }
    }

    /// The options, which borrow from the data.
    pub(crate) fn options(&self) -> Attention<'_, M> {
        (self.options)(&self.data)
    }
}

impl<D, M: Mods + Sync, F: for<'a> Fn(&'a D) -> Attention<'a, M>> Options for Kept<D, F, M> {
    type Mods = M;

    fn with<R>(&self, call: impl FnOnce(&Attention<'_, M>) -> Result<R>) -> Result<R> {
        call(&self.options())
    }
}

/// Options, and a tensor that is added to the scores.
pub(crate) struct Masked {
    pub(crate) attn: Attention<'static>,
    pub(crate) mask: Option<Tensor>,
}

impl Options for Masked {
    type Mods = ();

    fn with<R>(&self, call: impl FnOnce(&Attention<'_>) -> Result<R>) -> Result<R> {
        match &self.mask {
            None => call(&self.attn),
            Some(mask) => reading("mask", mask, |storage, layout| with_mask(self.attn, storage, layout, call)),
        }
    }
}

/// Calls a function with the options and a bias.
pub(crate) fn with_mask<R>(
    attn: Attention<'_>,
    storage: &CpuStorage,
    layout: &Layout,
    call: impl FnOnce(&Attention<'_>) -> Result<R>,
) -> Result<R> {
    fn biased<'a, T: Copy>(attn: Attention<'a>, data: &'a [T], layout: &Layout) -> Result<Attention<'a>>
    where
        Bias<'a>: From<View<'a, T>>,
    {
        Ok(attn.bias(view("mask", data, layout)?))
    }
    match storage {
        CpuStorage::F32(data) => call(&biased(attn, data, layout)?),
        CpuStorage::F16(data) => call(&biased(attn, data, layout)?),
        CpuStorage::BF16(data) => call(&biased(attn, data, layout)?),
        other => {
            let dtype = candle_core::backend::BackendStorage::dtype(other);
            bail!("attn: mask is {dtype:?}; it is added to the scores, as f32, f16 or bf16")
        }
    }
}

/// Attention with gradients by q, k and v; [`learned`](crate::learned) has one more.
pub(crate) struct Graph<O> {
    options: O,
    lse: OnceLock<Vec<f32>>,
}

impl<O> Graph<O> {
    pub(crate) fn new(options: O) -> Self {
        Self { options, lse: OnceLock::new() }
    }
}

impl<O: Options> CustomOp3 for Graph<O> {
    fn name(&self) -> &'static str {
        "attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (layouts, mut lse) = ([q_layout, k_layout, v_layout], Vec::new());
        let out = self.options.with(|attn| forward(attn, [q, k, v], layouts, Some(&mut lse)))?;
        self.lse.get_or_init(|| lse);
        Ok(out)
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // No lock: the kernels wait on rayon, which may run another backward pass through this operation meanwhile.
        let lse = self.lse.get().map_or(&[][..], Vec::as_slice);
        let saved = Saved { q, k, v, out, lse, dy };
        let [dq, dk, dv] = self.options.with(|attn| backward(attn, &saved, None))?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
