//! Exact attention for candle on CPUs: attn's kernels as a custom operation.
//!
//! candle's `candle_nn::ops::sdpa` runs on Metal only; [`sdpa`] here has its arguments and runs on CPUs, without
//! storing scores, on tensors of any strides, f32, f16 and bf16, with grouped heads. [`attention`] takes every option
//! of [`attn_core::Attention`].
//!
//! ```
//! use candle_core::{Device, Tensor};
//! let device = Device::Cpu;
//! let q = Tensor::randn(0f32, 1.0, (2, 10, 8, 64), &device)?.transpose(1, 2)?; // no .contiguous()
//! let k = Tensor::randn(0f32, 1.0, (2, 2, 30, 64), &device)?; // eight query heads over two key heads: no repeat_kv
//! let v = Tensor::randn(0f32, 1.0, (2, 2, 30, 64), &device)?;
//! let y = attn_candle::sdpa(&q, &k, &v, None, true, 0.125, 1.0)?; // causal, the last query at the last key
//! assert_eq!(y.dims(), [2, 8, 10, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! The operation has no backward pass: results are new leaves, as candle's own fused ones are.

use std::sync::{Mutex, PoisonError};

use attn_core::half::{bf16, f16};
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnShape, Bias, Mask, Outputs, View, ViewMut};
use attn_simd::KernelElement;
use candle_core::{CpuStorage, CustomOp3, DType, Error, Layout, Result, Shape, Storage, Tensor, bail};

/// Attention with candle's arguments: `softmax(softcap(scale·q·kᵀ) + mask)·v`.
///
/// | tensor | shape |
/// |---|---|
/// | q | `(batch, q_heads, q_len, head_dim)` |
/// | k, v | `(batch, kv_heads, kv_len, …)`; `kv_heads` divides `q_heads` |
/// | mask | broadcasts to `(batch, q_heads, q_len, kv_len)`; f32, f16 or bf16, added to the scores: −∞ hides |
///
/// `do_causal` lets the last query see the last key, as candle's kernels do. `softcapping` of 1 is none, as there.
///
/// # Errors
/// Shapes that do not fit, naming both sizes; dtypes that differ or are none of f32, f16, bf16; tensors that are not on
/// a CPU.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let mut attn = Attention::new().scale(f64::from(scale));
    if do_causal {
        attn = attn.mask(Mask::causal(Align::BottomRight));
    }
    if softcapping != 1.0 {
        attn = attn.softcap(f64::from(softcapping));
    }
    let Some(mask) = mask else {
        return attention(&attn, q, k, v);
    };
    let (storage, layout) = mask.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("attn: mask is not on the CPU") };
    match storage {
        CpuStorage::F32(data) => with_bias(attn, data, layout, [q, k, v]),
        CpuStorage::F16(data) => with_bias(attn, data, layout, [q, k, v]),
        CpuStorage::BF16(data) => with_bias(attn, data, layout, [q, k, v]),
        _ => bail!("attn: mask is {:?}; it is added to the scores, as f32, f16 or bf16", mask.dtype()),
    }
}

fn with_bias<'a, T: Copy>(
    attn: Attention<'a>,
    data: &'a [T],
    layout: &Layout,
    [q, k, v]: [&Tensor; 3],
) -> Result<Tensor>
where
    Bias<'a>: From<View<'a, T>>,
{
    attention(&attn.bias(view("mask", data, layout)?), q, k, v)
}

/// Attention with any options, on the threads of the current rayon pool. Shapes as for [`sdpa`].
///
/// ```
/// use attn_core::{Align, Attention, Mask};
/// use candle_core::{Device, Tensor};
/// let x = Tensor::randn(0f32, 1.0, (1, 4, 100, 32), &Device::Cpu)?;
/// let attn = Attention::new().mask(Mask::window(16, 0, Align::TopLeft)); // itself and the 16 before
/// let y = attn_candle::attention(&attn, &x, &x, &x)?;
/// assert_eq!(y.dims(), x.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`sdpa`], and options without meaning.
pub fn attention<M: Mods + Sync>(attn: &Attention<'_, M>, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    apply(&Op { attn, lse: None }, q, k, v)
}

/// As [`attention`], with the log-sum-exp of each row: f32, `(batch, q_heads, q_len)`; −∞ for a row that sees no key.
/// It gives single weights (`attn_core::weights`) and joins results over parts of the keys.
///
/// # Errors
/// As [`attention`].
pub fn attention_lse<M: Mods + Sync>(
    attn: &Attention<'_, M>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let lse = Mutex::default();
    let out = apply(&Op { attn, lse: Some(&lse) }, q, k, v)?;
    let (batch, heads, rows, _) = out.dims4()?;
    let lse = lse.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((out, Tensor::from_vec(lse, (batch, heads, rows), q.device())?))
}

fn apply<M: Mods + Sync>(op: &Op<'_, '_, M>, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        if tensor.dtype() != q.dtype() {
            bail!("attn: {name} is {:?}, q is {:?}", tensor.dtype(), q.dtype());
        }
    }
    q.apply_op3_no_bwd(k, v, op)
}

/// The operation: options beside three tensors, and where the log-sum-exps go. candle knows one result per operation.
struct Op<'p, 'a, M> {
    attn: &'p Attention<'a, M>,
    lse: Option<&'p Mutex<Vec<f32>>>,
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
        let layouts = [q_layout, k_layout, v_layout];
        match (q, k, v) {
            (CpuStorage::F32(q), CpuStorage::F32(k), CpuStorage::F32(v)) => {
                let (out, shape) = run(self, [q, k, v], layouts)?;
                Ok((CpuStorage::F32(out), shape))
            }
            (CpuStorage::F16(q), CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let (out, shape) = run::<f16, _>(self, [q, k, v], layouts)?;
                Ok((CpuStorage::F16(out), shape))
            }
            (CpuStorage::BF16(q), CpuStorage::BF16(k), CpuStorage::BF16(v)) => {
                let (out, shape) = run::<bf16, _>(self, [q, k, v], layouts)?;
                Ok((CpuStorage::BF16(out), shape))
            }
            _ => bail!("attn: q, k and v must be f32, f16 or bf16, all of one type; q is {:?}", dtype(q)),
        }
    }
}

fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}

/// Computes a contiguous output.
fn run<T: KernelElement, M: Mods + Sync>(
    op: &Op<'_, '_, M>,
    [q, k, v]: [&[T]; 3],
    layouts: [&Layout; 3],
) -> Result<(Vec<T>, Shape)> {
    let [q, k, v] = [view("q", q, layouts[0])?, view("k", k, layouts[1])?, view("v", v, layouts[2])?];
    for (name, view, layout) in [("q", &q, layouts[0]), ("k", &k, layouts[1]), ("v", &v, layouts[2])] {
        if layout.dims().len() != 4 {
            bail!(
                "attn: {name} has {} axes; (batch, heads, seq, dim) are wanted: {:?}",
                layout.dims().len(),
                view.sizes()
            );
        }
    }
    let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes()).map_err(Error::wrap)?;
    let sizes = shape.output();
    attn_core::Layout::Bhsd.strides(sizes).map_err(Error::wrap)?; // shows that the product fits
    let mut out = vec![T::default(); sizes.iter().product()];
    let to = ViewMut::new(&mut out, attn_core::Layout::Bhsd, sizes).map_err(Error::wrap)?;
    let mut outputs = Outputs::new(to);
    let mut lse = op.lse.map(|lse| lse.lock().unwrap_or_else(PoisonError::into_inner));
    if let Some(lse) = &mut lse {
        lse.resize(sizes[..3].iter().product(), 0.0);
        outputs = outputs.lse(lse);
    }
    attn_parallel::forward(op.attn, q, k, v, outputs).map_err(Error::wrap)?;
    Ok((out, Shape::from(&sizes[..])))
}

/// A tensor where it lies. One of fewer axes broadcasts over the missing ones, which stand first.
fn view<'a, T: Copy>(name: &str, data: &'a [T], layout: &Layout) -> Result<View<'a, T>> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let Some(missing) = 4usize.checked_sub(dims.len()) else {
        bail!("attn: {name} has {} axes; at most 4 are wanted", dims.len());
    };
    let (mut sizes, mut steps) = ([1; 4], [0; 4]);
    for (axis, (&size, &stride)) in dims.iter().zip(strides).enumerate() {
        sizes[missing + axis] = size;
        steps[missing + axis] = isize::try_from(stride).map_err(Error::wrap)?;
    }
    View::strided(data, sizes, steps, layout.start_offset()).map_err(Error::wrap)
}
