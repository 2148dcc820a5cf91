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
//! # Training
//!
//! `loss.backward()` goes through attn's kernels too: [`sdpa`] has gradients by q, k, v and the mask,
//! [`differentiable`] those by q, k and v with any options, [`with_sinks`] those by the sinks as well. Nothing of
//! `q_len·kv_len` is kept between the passes.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! let x = Var::randn(0f32, 1.0, (1, 4, 20, 16), &Device::Cpu)?;
//! let y = attn_candle::sdpa(&x, &x, &x, None, true, 0.25, 1.0)?;
//! let gradients = y.sqr()?.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&x).expect("x is a variable").dims(), x.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```

pub use attn_core;

mod backward;
mod forward;
mod graph;
mod learned;
mod tensors;

use std::sync::{Mutex, PoisonError};

use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, Mask};
use candle_core::{Result, Tensor, bail};

use forward::Op;
use graph::{Graph, Kept, Masked, Options};
use learned::{LearnedOp, WithSinks, sinks_of};
use tensors::reading;

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
/// Gradients go to q, k, v, and to the mask if it is a variable or computed from one; [`Tensor::detach`] makes a
/// constant of it.
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
    check_dtypes([q, k, v])?;
    match mask {
        Some(mask) if mask.track_op() => LearnedOp::apply(learned::Mask(attn), [q, k, v], mask),
        mask => apply(Masked { attn, mask: mask.cloned() }, [q, k, v]),
    }
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
/// The result is a new leaf: options that are borrowed cannot wait for gradients. To train, see [`differentiable`].
///
/// # Errors
/// As [`sdpa`], and options without meaning.
pub fn attention<M: Mods + Sync>(attn: &Attention<'_, M>, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    check_dtypes([q, k, v])?;
    q.apply_op3_no_bwd(k, v, &Op { attn, lse: None })
}

/// As [`attention`], with gradients by q, k and v. The graph keeps `data`, and calls `options` for the options that
/// borrow from it: in the forward pass, and in the backward pass.
///
/// Both calls must give the same options; dropout draws the same weights by its seed. Options that own all they need
/// take `()` as data. A `score_mod` needs its derivative ([`Attention::score_mod_with`]).
///
/// ```
/// use attn_core::{Align, Attention, Mask};
/// use candle_core::{Device, Tensor, Var};
/// let x = Var::randn(0f32, 1.0, (2, 4, 50, 16), &Device::Cpu)?;
/// let lens = vec![50, 31]; // how many tokens the sequences have
/// let y = attn_candle::differentiable(
///     lens,
///     |lens| Attention::new().mask(Mask::causal(Align::TopLeft).and(Mask::kv_lens(lens))),
///     &x,
///     &x,
///     &x,
/// )?;
/// assert!(y.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`attention`]; those of the gradients when they are computed.
pub fn differentiable<D, M, F>(data: D, options: F, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>
where
    D: Send + Sync + 'static,
    M: Mods + Sync + 'static,
    F: for<'a> Fn(&'a D) -> Attention<'a, M> + Send + Sync + 'static,
{
    check_dtypes([q, k, v])?;
    apply(Kept::new(data, options), [q, k, v])
}

/// As [`differentiable`], with sinks (`(q_heads)`, f32, f16 or bf16: a logit of each query head that takes part in the
/// denominator only) and the gradient by them.
///
/// ```
/// use attn_core::{Align, Attention, Mask};
/// use candle_core::{DType, Device, Tensor, Var};
/// let x = Tensor::randn(0f32, 1.0, (2, 4, 50, 16), &Device::Cpu)?;
/// let sinks = Var::zeros(4, DType::F32, &Device::Cpu)?;
/// let window = Attention::new().mask(Mask::window(15, 0, Align::TopLeft));
/// let y = attn_candle::with_sinks(&sinks, window, |attn| *attn, &x, &x, &x)?;
/// assert_eq!(y.sqr()?.sum_all()?.backward()?.get(&sinks).expect("sinks are a variable").dims(), [4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As [`differentiable`]; sinks of another size or type, naming both; options that have sinks themselves.
pub fn with_sinks<D, M, F>(sinks: &Tensor, data: D, options: F, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>
where
    D: Send + Sync + 'static,
    M: Mods + Sync + 'static,
    F: for<'a> Fn(&'a D) -> Attention<'a, M> + Send + Sync + 'static,
{
    check_dtypes([q, k, v])?;
    let options = Kept::new(data, options);
    if sinks.track_op() {
        return LearnedOp::apply(learned::Sinks(options), [q, k, v], sinks);
    }
    let sinks = reading("sinks", sinks, sinks_of)?;
    apply(WithSinks { options, sinks }, [q, k, v])
}

/// As [`attention`], with the log-sum-exp of each row: f32, `(batch, q_heads, q_len)`; −∞ for a row that sees no key.
/// It gives single weights (`attn_core::weights`) and joins results over parts of the keys. Both results are leaves.
///
/// # Errors
/// As [`attention`].
pub fn attention_lse<M: Mods + Sync>(
    attn: &Attention<'_, M>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<(Tensor, Tensor)> {
    check_dtypes([q, k, v])?;
    let lse = Mutex::default();
    let out = q.apply_op3_no_bwd(k, v, &Op { attn, lse: Some(&lse) })?;
    let (batch, heads, rows, _) = out.dims4()?;
    let lse = lse.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((out, Tensor::from_vec(lse, (batch, heads, rows), q.device())?))
}

/// As an operation that keeps what gradients need, or as one that keeps nothing if nobody can ask for gradients.
fn apply<O: Options + Send + Sync + 'static>(options: O, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
    if q.track_op() || k.track_op() || v.track_op() {
        return q.apply_op3(k, v, Graph::new(options));
    }
    options.with(|attn| q.apply_op3_no_bwd(k, v, &Op { attn, lse: None }))
}

fn check_dtypes([q, k, v]: [&Tensor; 3]) -> Result<()> {
    for (name, tensor) in [("k", k), ("v", v)] {
        if tensor.dtype() != q.dtype() {
            bail!("attn: {name} is {:?}, q is {:?}", tensor.dtype(), q.dtype());
        }
    }
    Ok(())
}
