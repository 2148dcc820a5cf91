//! candle's tensors as views, on a CPU, of any strides. Nothing is computed here.

use attn_core::{AttnShape, View};
use candle_core::{CpuStorage, Error, Layout, Result, Storage, Tensor, WithDType, bail};

/// Calls a generic function by the dtype of `q`, k and v.
macro_rules! by_dtype {
    ($dtype:expr, |$T:ident| $call:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $call
            }
            candle_core::DType::F16 => {
                type $T = attn_core::half::f16;
                $call
            }
            candle_core::DType::BF16 => {
                type $T = attn_core::half::bf16;
                $call
            }
            other => candle_core::bail!("attn: q, k and v must be f32, f16 or bf16, all of one type; q is {other:?}"),
        }
    };
}
pub(crate) use by_dtype;

/// Four sizes, of a tensor that has to have four axes.
pub(crate) fn sizes(name: &str, layout: &Layout) -> Result<[usize; 4]> {
    match *layout.dims() {
        [batch, heads, seq, dim] => Ok([batch, heads, seq, dim]),
        ref dims => bail!("attn: {name} has {} axes; (batch, heads, seq, dim) are wanted: {dims:?}", dims.len()),
    }
}

/// The sizes of a call of q, k and v.
pub(crate) fn shape([q, k, v]: [&Layout; 3]) -> Result<AttnShape> {
    AttnShape::new(sizes("q", q)?, sizes("k", k)?, sizes("v", v)?).map_err(Error::wrap)
}

/// The four sizes of a tensor of at most four axes; the missing ones stand first.
pub(crate) fn padded(name: &str, layout: &Layout) -> Result<[usize; 4]> {
    let dims = layout.dims();
    let Some(missing) = 4usize.checked_sub(dims.len()) else {
        bail!("attn: {name} has {} axes; at most 4 are wanted", dims.len());
    };
    let mut sizes = [1; 4];
    sizes[missing..].copy_from_slice(dims);
    Ok(sizes)
}

/// A tensor where it lies. One of fewer axes broadcasts over the missing ones, which stand first.
pub(crate) fn view<'a, T: Copy>(name: &str, data: &'a [T], layout: &Layout) -> Result<View<'a, T>> {
    let (sizes, mut steps) = (padded(name, layout)?, [0; 4]);
    for (step, &stride) in steps.iter_mut().rev().zip(layout.stride().iter().rev()) {
        *step = isize::try_from(stride).map_err(Error::wrap)?;
    }
    View::strided(data, sizes, steps, layout.start_offset()).map_err(Error::wrap)
}

/// A view of a storage whose type is known.
pub(crate) fn view_of<'a, T: WithDType>(name: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<View<'a, T>> {
    view(name, T::cpu_storage_as_slice(storage)?, layout)
}

/// Hands over a tensor's storage and layout.
pub(crate) fn reading<R>(
    name: &str,
    tensor: &Tensor,
    read: impl FnOnce(&CpuStorage, &Layout) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("attn: {name} is not on the CPU") };
    read(storage, layout)
}
