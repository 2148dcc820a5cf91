//! Operations with a fourth gradient, by an additive mask or by the sinks. candle has operations of three tensors at
//! most: the second is k and v side by side, the third is learned.

use std::sync::OnceLock;

use attn_core::Attention;
use attn_core::score_mod::Mods;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};

use crate::backward::{Learned, Saved, backward};
use crate::forward::forward;
use crate::graph::{Kept, Options, with_mask};
use crate::tensors::{padded, reading, shape};

/// Options that take a tensor into them, which is learned.
pub(crate) trait Taking {
    /// What the operation is called.
    const NAME: &'static str;
    type Mods: Mods + Sync;

    /// Calls a function with the options and the tensor.
    fn with<R>(
        &self,
        tensor: &CpuStorage,
        layout: &Layout,
        call: impl FnOnce(&Attention<'_, Self::Mods>) -> Result<R>,
    ) -> Result<R>;

    /// Where the gradient by the tensor goes.
    fn gradient<'g>(layout: &Layout, to: &'g mut [f64]) -> Result<Learned<'g>>;
}

/// Options without a mask, which take one.
pub(crate) struct Mask(pub(crate) Attention<'static>);

impl Taking for Mask {
    const NAME: &'static str = "attn with a learned mask";
    type Mods = ();

    fn with<R>(&self, mask: &CpuStorage, layout: &Layout, call: impl FnOnce(&Attention<'_>) -> Result<R>) -> Result<R> {
        with_mask(self.0, mask, layout, call)
    }

    fn gradient<'g>(layout: &Layout, to: &'g mut [f64]) -> Result<Learned<'g>> {
        Ok(Learned::Mask { sizes: padded("mask", layout)?, to })
    }
}

/// Options that take sinks.
pub(crate) struct Sinks<D, F, M>(pub(crate) Kept<D, F, M>);

impl<D, M: Mods + Sync, F: for<'a> Fn(&'a D) -> Attention<'a, M>> Taking for Sinks<D, F, M> {
    const NAME: &'static str = "attn with learned sinks";
    type Mods = M;

    fn with<R>(
        &self,
        sinks: &CpuStorage,
        layout: &Layout,
        call: impl FnOnce(&Attention<'_, M>) -> Result<R>,
    ) -> Result<R> {
        let sinks = sinks_of(sinks, layout)?;
        call(&with_sinks(&self.0, &sinks)?)
    }

    fn gradient<'g>(_: &Layout, to: &'g mut [f64]) -> Result<Learned<'g>> {
        Ok(Learned::Sinks(to))
    }
}

/// Options, and sinks that are not learned.
pub(crate) struct WithSinks<D, F, M> {
    pub(crate) options: Kept<D, F, M>,
    pub(crate) sinks: Vec<f32>,
}

impl<D, M: Mods + Sync, F: for<'a> Fn(&'a D) -> Attention<'a, M>> Options for WithSinks<D, F, M> {
    type Mods = M;

    fn with<R>(&self, call: impl FnOnce(&Attention<'_, M>) -> Result<R>) -> Result<R> {
        call(&with_sinks(&self.options, &self.sinks)?)
    }
}

/// The options, which have no sinks, with these.
fn with_sinks<'a, D, M: Mods, F: for<'d> Fn(&'d D) -> Attention<'d, M>>(
    options: &'a Kept<D, F, M>,
    sinks: &'a [f32],
) -> Result<Attention<'a, M>> {
    let attn = options.options();
    if attn.get_sinks().is_some() {
        bail!("attn: the options have sinks, too; with_sinks takes them as a tensor");
    }
    Ok(attn.sinks(sinks))
}

/// The logits of sinks, one for each query head.
pub(crate) fn sinks_of(storage: &CpuStorage, layout: &Layout) -> Result<Vec<f32>> {
    let (&[count], &[stride]) = (layout.dims(), layout.stride()) else {
        bail!("attn: sinks have {} axes; (q_heads) are wanted: {:?}", layout.dims().len(), layout.dims());
    };
    let at = (0..count).map(|head| layout.start_offset() + head * stride);
    Ok(match storage {
        CpuStorage::F32(data) => at.map(|n| data[n]).collect(),
        CpuStorage::F16(data) => at.map(|n| data[n].to_f32()).collect(),
        CpuStorage::BF16(data) => at.map(|n| data[n].to_f32()).collect(),
        other => {
            let dtype = candle_core::backend::BackendStorage::dtype(other);
            bail!("attn: sinks are {dtype:?}; f32, f16 or bf16 are wanted")
        }
    })
}

/// Attention with gradients by q, k, v and the tensor that its options take.
pub(crate) struct LearnedOp<O> {
    options: O,
    lse: OnceLock<Vec<f32>>,
    head_dim: usize,
}

impl<O: Taking + Send + Sync + 'static> LearnedOp<O> {
    /// Applies the operation.
    pub(crate) fn apply(options: O, [q, k, v]: [&Tensor; 3], learned: &Tensor) -> Result<Tensor> {
        let head_dim = shape([q.layout(), k.layout(), v.layout()])?.head_dim;
        let kv = Tensor::cat(&[k, v], 3)?;
        q.apply_op3(&kv, learned, Self { options, lse: OnceLock::new(), head_dim })
    }
}

impl<O> LearnedOp<O> {
    /// Where k and v are in the second tensor: start and length along the last axis.
    fn parts(&self, both: usize) -> [(usize, usize); 2] {
        [(0, self.head_dim), (self.head_dim, both - self.head_dim)]
    }
}

impl<O: Taking + Send + Sync> CustomOp3 for LearnedOp<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        kv: &CpuStorage,
        kv_layout: &Layout,
        learned: &CpuStorage,
        learned_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let [k, v] = self.parts(kv_layout.dims()[3]).map(|(start, len)| kv_layout.narrow(3, start, len));
        let (k, v) = (k?, v?);
        let (layouts, mut lse) = ([q_layout, &k, &v], Vec::new());
        let out =
            self.options.with(learned, learned_layout, |attn| forward(attn, [q, kv, kv], layouts, Some(&mut lse)))?;
        self.lse.get_or_init(|| lse);
        Ok(out)
    }

    fn bwd(
        &self,
        q: &Tensor,
        kv: &Tensor,
        learned: &Tensor,
        out: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [k, v] = self.parts(kv.dim(3)?).map(|(start, len)| kv.narrow(3, start, len));
        let (k, v) = (k?, v?);
        let lse = self.lse.get().map_or(&[][..], Vec::as_slice);
        let saved = Saved { q, k: &k, v: &v, out, lse, dy };
        let mut gradient = vec![0.0; learned.elem_count()];
        let [dq, dk, dv] = reading("what is learned", learned, |storage, layout| {
            let to = O::gradient(layout, &mut gradient)?;
            self.options.with(storage, layout, |attn| backward(attn, &saved, Some(to)))
        })?;
        let gradient = Tensor::from_vec(gradient, learned.shape(), learned.device())?;
        // Through f32: candle's halves are converted from there.
        let gradient = gradient.to_dtype(DType::F32)?.to_dtype(learned.dtype())?;
        Ok((Some(dq), Some(Tensor::cat(&[dk, dv], 3)?), Some(gradient)))
    }
}
