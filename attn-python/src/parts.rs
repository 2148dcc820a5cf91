//! `merge`: joins results over parts of the keys.

use std::sync::atomic::Ordering;

use attn_core::half::{bf16, f16};
use attn_core::{AttnError, Element, View, state};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::call::with_kind;
use crate::fold::Fold;
use crate::interrupt;
use crate::kind::Kind;
use crate::options::raised;
use crate::pool::Work;
use crate::raw::{AXES, Out, Plain, Tensor};
use crate::tensor::{empty, handed, read, shape, type_name};

/// Reads a tensor of 2 to 5 axes in one of the kernels' types.
pub(crate) fn read_numbers<'py>(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Tensor<'py>> {
    let tensor = read(name, object)?;
    if !matches!(tensor.kind, Kind::F32 | Kind::F16 | Kind::Bf16) {
        let text = format!("{name} is {}; float32, float16 and bfloat16 are supported", tensor.kind.name());
        return Err(PyTypeError::new_err(text));
    }
    if tensor.axes < 2 {
        return Err(PyValueError::new_err(format!("{name} has {} axes, 2 to {AXES} are allowed", tensor.axes)));
    }
    Ok(tensor)
}

pub(crate) fn same_shape(tensor: &Tensor<'_>, wanted: &[usize]) -> PyResult<()> {
    if shape(tensor) == wanted {
        return Ok(());
    }
    let (name, found) = (tensor.name, shape(tensor));
    Err(PyValueError::new_err(format!("{name} has the shape {found:?}, {wanted:?} is wanted")))
}

/// The objects of out and lse, of each part.
fn pairs<'py>(parts: &Bound<'py, PyAny>) -> PyResult<Vec<[Bound<'py, PyAny>; 2]>> {
    let iterator = parts
        .try_iter()
        .map_err(|_| PyTypeError::new_err(format!("parts is {}, a list of (out, lse) is wanted", type_name(parts))))?;
    let mut pairs = Vec::new();
    for (n, part) in iterator.enumerate() {
        let part = part?;
        let is_pair = part.is_instance_of::<PyTuple>() || part.is_instance_of::<PyList>();
        match if is_pair { part.extract() } else { Err(PyTypeError::new_err("")) } {
            Ok(pair) => pairs.push(pair),
            Err(_) => {
                let text = format!("parts[{n}] is {}, (out, lse) is wanted", type_name(&part));
                return Err(PyTypeError::new_err(text));
            }
        }
    }
    Ok(pairs)
}

/// Out and lse of a part, which must fit a first one's.
fn read_part<'py>(
    [out, lse]: &[Bound<'py, PyAny>; 2],
    first: Option<&(Tensor<'py>, Tensor<'py>)>,
) -> PyResult<(Tensor<'py>, Tensor<'py>)> {
    let (out, lse) = (read_numbers("out", out)?, read("lse", lse)?);
    if lse.kind != Kind::F32 {
        return Err(PyTypeError::new_err(format!("lse is {}, float32 is wanted", lse.kind.name())));
    }
    same_shape(&lse, &shape(&out)[..out.axes - 1])?;
    if let Some((known, _)) = first {
        same_shape(&out, shape(known))?;
        if known.kind != out.kind {
            let (found, wanted) = (out.kind.name(), known.kind.name());
            return Err(PyTypeError::new_err(format!("out is {found}, that of parts[0] is {wanted}")));
        }
    }
    Ok((out, lse))
}

/// As `attn.merge`, with the objects of out and lse.
pub(crate) fn merge<'py>(parts: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let (py, parts) = (parts.py(), pairs(parts)?);
    let Some([first, _]) = parts.first() else {
        return Err(PyValueError::new_err("parts is empty, at least one is wanted"));
    };
    let mut read_parts = Vec::with_capacity(parts.len());
    for (n, part) in parts.iter().enumerate() {
        let part = read_part(part, read_parts.first());
        read_parts.push(
            part.map_err(|error| PyErr::from_type(error.get_type(py), format!("parts[{n}]: {}", error.value(py))))?,
        );
    }
    let (known, known_lse) = &read_parts[0];
    let objects = (empty(first, known.kind, false, shape(known))?, empty(first, Kind::F32, true, shape(known_lse))?);
    let mut to = Out::new(read("out", &objects.0)?, &[])?;
    let mut to_lse = Out::new(read("lse", &objects.1)?, &[])?;
    with_kind!(known.kind, |T| join::<T>(py, &read_parts, &mut to, &mut to_lse))?;
    Ok((handed(first, objects.0)?, handed(first, objects.1)?))
}

/// How many operations of a kernel take the time of one number merged.
const SLOW: f64 = 64.0;

/// Merges row by row, in f64.
fn join<T: Element + Plain>(
    py: Python<'_>,
    parts: &[(Tensor<'_>, Tensor<'_>)],
    out: &mut Out<'_>,
    lse: &mut Out<'_>,
) -> PyResult<()> {
    let sizes = out.tensor().sizes;
    for outer in 0..sizes[0] {
        let fold = Fold::each(sizes[0]);
        let mut views = Vec::with_capacity(parts.len());
        for (out, lse) in parts {
            views.push((fold.view::<T>(out, outer)?, lse_rows(lse, outer)?));
        }
        let mut to = fold.view_mut::<T>(out, outer)?;
        let [batch, heads, rows, dim] = to.sizes();
        let at = outer * batch * heads * rows;
        let to_lse = lse.slice_mut::<f32>().and_then(|all| all.get_mut(at..at + batch * heads * rows));
        let to_lse = to_lse.ok_or_else(|| PyValueError::new_err("lse is not contiguous"))?;
        let work = Work { operations: SLOW * (to_lse.len() * dim * parts.len()) as f64, bytes: 0.0 };
        interrupt::run(py, work, |stop| {
            let (mut row, mut other) = (vec![0.0f64; dim + 2], vec![0.0f64; dim + 2]);
            let (mut wide, mut done) = (vec![0.0f64; dim], vec![0.0f64; dim]);
            for (n, to_lse) in to_lse.iter_mut().enumerate() {
                if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                    return Err(AttnError::Stopped);
                }
                let (b, h, i) = (n / (heads * rows), n / rows % heads, n % rows);
                state::clear(&mut row, dim);
                for (view, lse) in &views {
                    wide.iter_mut().zip(view.row(b, h, i).iter()).for_each(|(to, x)| *to = x.to_f64());
                    state::from_output(&wide, f64::from(lse.at(b, h, i, 0)), &mut other);
                    state::merge_states(&mut row, &other, dim)?;
                }
                *to_lse = state::finish(&row, None, &mut done) as f32;
                done.iter().enumerate().for_each(|(d, &x)| to.set(b, h, i, d, T::from_f64(x)));
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The lse of one call, `[batch, heads, rows, 1]`: its axes are one place further to the right than those of its out.
fn lse_rows<'a>(lse: &'a Tensor<'_>, outer: usize) -> PyResult<View<'a, f32>> {
    let ([_, a, b, h, s], [_, sa, sb, sh, ss]) = (lse.sizes, lse.strides);
    let data = lse.slice::<f32>().ok_or_else(|| PyTypeError::new_err("lse is not float32"))?;
    let offset = lse.offset.wrapping_add_signed(if a > 1 { sa * outer as isize } else { 0 });
    View::strided(data, [b, h, s, 1], [sb, sh, ss, 0], offset).map_err(raised)
}
