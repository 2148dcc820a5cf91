//! The forward pass over storages, and the operation without a backward pass.

use std::sync::{Mutex, PoisonError};

use attn_core::score_mod::Mods;
use attn_core::{Attention, Outputs, ViewMut};
use attn_simd::KernelElement;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Error, Layout, Result, Shape, WithDType};

use crate::tensors::{by_dtype, shape, view_of};

/// The operation without gradients: options beside three tensors, and where the log-sum-exps go. candle knows one
/// result per operation.
pub(crate) struct Op<'p, 'a, M> {
    pub(crate) attn: &'p Attention<'a, M>,
    pub(crate) lse: Option<&'p Mutex<Vec<f32>>>,
}

impl<M: Mods + Sync> CustomOp3 for Op<'_, '_, M> {
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
        let mut lse = self.lse.map(|lse| lse.lock().unwrap_or_else(PoisonError::into_inner));
        forward(self.attn, [q, k, v], [q_layout, k_layout, v_layout], lse.as_deref_mut())
    }
}

/// Computes a contiguous output, and the log-sum-exps if there is room for them.
pub(crate) fn forward<M: Mods + Sync>(
    attn: &Attention<'_, M>,
    qkv: [&CpuStorage; 3],
    layouts: [&Layout; 3],
    lse: Option<&mut Vec<f32>>,
) -> Result<(CpuStorage, Shape)> {
    by_dtype!(qkv[0].dtype(), |T| run::<T, M>(attn, qkv, layouts, lse))
}

fn run<T: KernelElement + WithDType, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    [q, k, v]: [&CpuStorage; 3],
    layouts: [&Layout; 3],
    lse: Option<&mut Vec<f32>>,
) -> Result<(CpuStorage, Shape)> {
    let sizes = shape(layouts)?.output();
    let (q, k, v) = (view_of::<T>("q", q, layouts[0])?, view_of("k", k, layouts[1])?, view_of("v", v, layouts[2])?);
    attn_core::Layout::Bhsd.strides(sizes).map_err(Error::wrap)?; // shows that the product fits
    let mut out = vec![T::default(); sizes.iter().product()];
    let to = ViewMut::new(&mut out, attn_core::Layout::Bhsd, sizes).map_err(Error::wrap)?;
    let mut outputs = Outputs::new(to);
    if let Some(lse) = lse {
        lse.resize(sizes[..3].iter().product(), 0.0);
        outputs = outputs.lse(lse);
    }
    attn_parallel::forward(attn, q, k, v, outputs).map_err(Error::wrap)?;
    Ok((T::to_cpu_storage_owned(out), Shape::from(&sizes[..])))
}
