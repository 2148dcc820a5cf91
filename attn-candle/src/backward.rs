//! The backward pass over tensors, on the kernels.

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{Attention, Element, View, ViewMut};
use attn_simd::KernelElement;
use attn_simd::backward::Inputs;
use candle_core::{Error, Result, Tensor, WithDType, bail};

use crate::tensors::{by_dtype, reading, shape, view_of};

/// The tensors of a backward call: what the forward call read and wrote, and the gradient by its output.
pub(crate) struct Saved<'t> {
    pub(crate) q: &'t Tensor,
    pub(crate) k: &'t Tensor,
    pub(crate) v: &'t Tensor,
    pub(crate) out: &'t Tensor,
    pub(crate) lse: &'t [f32],
    pub(crate) dy: &'t Tensor,
}

/// Where a fourth gradient goes.
pub(crate) enum Learned<'g> {
    /// That by an additive mask, of four sizes.
    Mask { sizes: [usize; 4], to: &'g mut [f64] },
    /// That by the sinks, one for each query head.
    Sinks(&'g mut [f64]),
}

/// The gradients by q, k and v, in their dtype, contiguous; a fourth too, if it is wanted.
pub(crate) fn backward<M: Mods + Sync>(
    attn: &Attention<'_, M>,
    saved: &Saved<'_>,
    learned: Option<Learned<'_>>,
) -> Result<[Tensor; 3]> {
    for (name, tensor) in [("the output", saved.out), ("its gradient", saved.dy)] {
        if tensor.dtype() != saved.q.dtype() {
            bail!("attn: {name} is {:?}, q is {:?}", tensor.dtype(), saved.q.dtype());
        }
    }
    by_dtype!(saved.q.dtype(), |T| run::<T, M>(attn, saved, learned))
}

fn run<T: KernelElement + WithDType, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    Saved { q, k, v, out, lse, dy }: &Saved<'_>,
    learned: Option<Learned<'_>>,
) -> Result<[Tensor; 3]> {
    shape([q.layout(), k.layout(), v.layout()])?; // four axes each, that fit
    let [dq, dk, dv] = reading("q", q, |q, q_at| {
        reading("k", k, |k, k_at| {
            reading("v", v, |v, v_at| {
                reading("the output", out, |out, out_at| {
                    reading("its gradient", dy, |dy, dy_at| {
                        let inputs = Inputs {
                            q: view_of::<T>("q", q, q_at)?,
                            k: view_of("k", k, k_at)?,
                            v: view_of("v", v, v_at)?,
                            out: view_of("the output", out, out_at)?,
                            lse,
                            dy: view_of("its gradient", dy, dy_at)?,
                        };
                        compute(attn, inputs, learned).map_err(Error::wrap)
                    })
                })
            })
        })
    })?;
    let tensor = |data, like: &Tensor| Tensor::from_vec(data, like.shape(), like.device());
    Ok([tensor(dq, q)?, tensor(dk, k)?, tensor(dv, v)?])
}

/// On the threads of the current rayon pool.
fn compute<T: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    inputs: Inputs<'_, T, T>,
    learned: Option<Learned<'_>>,
) -> attn_core::Result<[Vec<T>; 3]> {
    let sizes = [inputs.q, inputs.k, inputs.v].map(|x: View<'_, T>| x.sizes());
    let mut all = sizes.map(|sizes| vec![T::default(); sizes.iter().product()]);
    attn_parallel::backward(attn, inputs, places(&mut all, sizes, learned)?)?;
    Ok(all)
}

/// Where gradients go.
fn places<'o, T: Element>(
    [dq, dk, dv]: &'o mut [Vec<T>; 3],
    [q, k, v]: [[usize; 4]; 3],
    learned: Option<Learned<'o>>,
) -> attn_core::Result<Gradients<'o, T>> {
    use attn_core::Layout::Bhsd;
    let gradients = Gradients::new(ViewMut::new(dq, Bhsd, q)?, ViewMut::new(dk, Bhsd, k)?, ViewMut::new(dv, Bhsd, v)?);
    Ok(match learned {
        Some(Learned::Mask { sizes, to }) => gradients.bias(ViewMut::new(to, Bhsd, sizes)?),
        Some(Learned::Sinks(to)) => gradients.sinks(to),
        None => gradients,
    })
}
