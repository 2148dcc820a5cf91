//! Gradients from Python, by the kernels.

use std::borrow::Cow;

use attn_core::backward::Gradients;
use attn_core::half::{bf16, f16};
use attn_core::{AttnShape, Bias, Layout, ViewMut};
use attn_simd::KernelElement;
use attn_simd::backward::Inputs as Saved;
use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::call::{Inputs, same_kind, with_kind};
use crate::fold::Fold;
use crate::interrupt;
use crate::kind::Kind;
use crate::options::{Options, raised};
use crate::pool::Work;
use crate::raw::{Out, Plain, Tensor};
use crate::tensor::{empty, handed, read, shape};

/// Computes the gradients, as objects of query's library.
pub(crate) fn backward<'py>(
    [query, grad_out, out, lse]: [&Bound<'py, PyAny>; 4],
    inputs: &Inputs<'py>,
    options: &mut Options,
    return_dmask: bool,
) -> PyResult<Bound<'py, PyTuple>> {
    let py = query.py();
    let mask = match &inputs.mask {
        Some(mask) if return_dmask && mask.kind != Kind::Bool => Some(mask),
        _ if return_dmask => return Err(PyTypeError::new_err("return_dmask: attn_mask must be given, and of numbers")),
        _ => None,
    };
    let whole = inputs.shape()?;
    options.fit(whole.q_heads, whole.batch)?;
    let (dy, out, lse) = (read("grad_out", grad_out)?, read("out", out)?, read("lse", lse)?);
    for tensor in [&dy, &out] {
        same_kind(&inputs.q, tensor)?;
        expect(tensor, &inputs.sizes(&[whole.q_len, whole.value_dim]))?;
    }
    if lse.kind != Kind::F32 {
        return Err(PyTypeError::new_err(format!("lse is {}, float32 is wanted", lse.kind.name())));
    }
    expect(&lse, &inputs.sizes(&[whole.q_len]))?;
    let rows = &*side_by_side(&lse);
    let like = |tensor: &Tensor<'_>| empty(query, tensor.kind, false, shape(tensor));
    let objects = [like(&inputs.q)?, like(&inputs.k)?, like(&inputs.v)?];
    let [dq, dk, dv] = [&objects[0], &objects[1], &objects[2]].map(|object| read("gradient", object));
    let (dq, dk, dv) = (dq?, dk?, dv?);
    let fold = inputs.fold(&[&dy, &out, &dq, &dk, &dv])?;
    options.check_fold(fold)?;
    let mut to = [Out::new(dq, &[])?, Out::new(dk, &[])?, Out::new(dv, &[])?];
    let mut sinks = vec![0.0; if options.has_sinks() { whole.q_heads } else { 0 }];
    let mut bias = mask.map(|mask| zeros(&mask.sizes)).transpose()?;
    let of_options = (&mut sinks[..], bias.as_deref_mut());
    with_kind!(inputs.q.kind, |T| run::<T>(py, inputs, options, fold, (&dy, &out, rows), &mut to, of_options))?;
    let mut found = Vec::new();
    for object in objects {
        found.push(handed(query, object)?);
    }
    let mut push = |shape: &[usize], numbers: Vec<f64>| -> PyResult<()> {
        let object = empty(query, Kind::F32, false, shape)?;
        let mut to = Out::new(read("gradient", &object)?, &[])?;
        let to = to.slice_mut::<f32>().unwrap_or_default();
        to.iter_mut().zip(numbers).for_each(|(to, x)| *to = x as f32);
        found.push(handed(query, object)?);
        Ok(())
    };
    if options.has_sinks() {
        push(&[whole.q_heads], sinks)?;
    }
    if let (Some(mask), Some(bias)) = (mask, bias) {
        push(shape(mask), bias)?;
    }
    PyTuple::new(py, found)
}

/// Zeros for the gradient of a mask, or an error: as large as the mask says it is, which may be a view of one number.
fn zeros(sizes: &[usize]) -> PyResult<Vec<f64>> {
    let (len, mut data) = (sizes.iter().try_fold(1usize, |len, &size| len.checked_mul(size)), Vec::new());
    match len.filter(|&len| data.try_reserve_exact(len).is_ok()) {
        Some(len) => {
            data.resize(len, 0.0);
            Ok(data)
        }
        None => {
            Err(PyMemoryError::new_err(format!("the gradient of a mask of the shape {sizes:?} cannot be allocated")))
        }
    }
}

fn expect(tensor: &Tensor<'_>, wanted: &[usize]) -> PyResult<()> {
    if shape(tensor) == wanted {
        return Ok(());
    }
    let (name, found) = (tensor.name, shape(tensor));
    Err(PyValueError::new_err(format!("{name} has the shape {found:?}, {wanted:?} is wanted")))
}

/// The numbers of an lse, in order: in a copy if they lie otherwise.
fn side_by_side<'a>(lse: &'a Tensor<'_>) -> Cow<'a, [f32]> {
    let all = lse.slice::<f32>().unwrap_or_default();
    if lse.is_contiguous() {
        return Cow::Borrowed(all);
    }
    let mut places = vec![lse.offset];
    for (&size, &stride) in lse.sizes.iter().zip(&lse.strides) {
        let along = |&place: &usize| (0..size as isize).map(move |n| place.wrapping_add_signed(n * stride));
        places = places.iter().flat_map(along).collect();
    }
    Cow::Owned(places.iter().filter_map(|&place| all.get(place)).copied().collect())
}

/// Computes all calls, without the interpreter's lock.
fn run<T: KernelElement + Plain>(
    py: Python<'_>,
    inputs: &Inputs<'_>,
    options: &Options,
    fold: Fold,
    (dy, out, lse): (&Tensor<'_>, &Tensor<'_>, &[f32]),
    [dq, dk, dv]: &mut [Out<'_>; 3],
    (sinks, mut dmask): (&mut [f64], Option<&mut [f64]>),
) -> PyResult<()> {
    let bools = inputs.bools();
    for call in 0..fold.calls {
        if call > 0 {
            py.check_signals()?;
        }
        let (q, k, v) =
            (fold.view::<T>(&inputs.q, call)?, fold.view::<T>(&inputs.k, call)?, fold.view::<T>(&inputs.v, call)?);
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes()).map_err(raised)?;
        let masks = inputs.masks(fold, &bools, call)?;
        let of_bias = masks.bias.as_ref().map_or([0; 4], Bias::sizes);
        let of_call: usize = of_bias.into_iter().product();
        // One mask for several calls: their gradients are added up. Else each call has a place of its own.
        let shared = fold.calls > 1 && dmask.as_ref().is_some_and(|all| all.len() == of_call);
        let mut by_bias = if shared { zeros(&of_bias)? } else { Vec::new() };
        let attn = options.attention(call * shape.batch, shape.batch, masks);
        let lse = lse.get(call * shape.rows()..(call + 1) * shape.rows()).unwrap_or_default();
        let saved = Saved { q, k, v, out: fold.view::<T>(out, call)?, lse, dy: fold.view::<T>(dy, call)? };
        let mut gradients =
            Gradients::new(fold.view_mut::<T>(dq, call)?, fold.view_mut::<T>(dk, call)?, fold.view_mut::<T>(dv, call)?);
        let mut part = vec![0.0; sinks.len()];
        if !part.is_empty() {
            gradients = gradients.sinks(&mut part);
        }
        if let Some(all) = dmask.as_deref_mut() {
            let to = if shared { &mut by_bias } else { &mut all[call * of_call..][..of_call] };
            gradients = gradients.bias(ViewMut::new(to, Layout::Bhsd, of_bias).map_err(raised)?);
        }
        // Five products of the same size, where a forward call has two.
        let work = Work::of(&shape, size_of::<T>()).times(2.5);
        interrupt::run(py, work, |stop| options.runner(work, stop).backward(&attn, saved, gradients))?;
        sinks.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        if let Some(all) = dmask.as_deref_mut() {
            all.iter_mut().zip(by_bias).for_each(|(sum, x)| *sum += x);
        }
    }
    Ok(())
}
