//! Two functions beside a call: `merge` joins results over parts of the keys, `rope` applies rotary positions.

use std::sync::atomic::Ordering;

use attn_core::half::{bf16, f16};
use attn_core::position::Positions;
use attn_core::position::rope::{Pairing, Rope};
use attn_core::{AttnError, Element, View, state};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::call::{same_kind, with_kind};
use crate::interrupt;
use crate::options::{listed, raised};
use crate::pool::Work;
use crate::raw::{AXES, Kind, Out, Plain, Tensor};
use crate::tensor::{Fold, Library, empty, handed, library, read, shape};

/// Reads a tensor of 2 to 5 axes in one of the kernels' types.
fn read_numbers<'py>(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Tensor<'py>> {
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

fn same_shape(tensor: &Tensor<'_>, wanted: &[usize]) -> PyResult<()> {
    if shape(tensor) == wanted {
        return Ok(());
    }
    let (name, found) = (tensor.name, shape(tensor));
    Err(PyValueError::new_err(format!("{name} has the shape {found:?}, {wanted:?} is wanted")))
}

/// As `attn.merge`, with the objects of out and lse.
pub(crate) fn merge<'py>(
    parts: Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let Some((first, _)) = parts.first() else {
        return Err(PyValueError::new_err("parts is empty, at least one is wanted"));
    };
    let py = first.py();
    let mut read_parts = Vec::with_capacity(parts.len());
    for (out, lse) in &parts {
        let (out, lse) = (read_numbers("out", out)?, read("lse", lse)?);
        if lse.kind != Kind::F32 {
            return Err(PyTypeError::new_err(format!("lse is {}, float32 is wanted", lse.kind.name())));
        }
        same_shape(&lse, &shape(&out)[..out.axes - 1])?;
        if let Some((known, _)) = read_parts.first() {
            same_shape(&out, shape(known))?;
            same_kind(known, &out)?;
        }
        read_parts.push((out, lse));
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

/// Where tokens stand.
pub(crate) enum Places {
    Offset(isize),
    Shared(Vec<isize>),
    Each(Vec<isize>),
}

impl Places {
    /// An offset, positions along one axis, or along (batch, tokens).
    pub(crate) fn read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyInt>() {
            return Ok(Self::Offset(object.extract()?));
        }
        let list = listed("positions", object)?;
        if let Ok(positions) = list.extract::<Vec<isize>>() {
            return Ok(Self::Shared(positions));
        }
        let rows = list
            .extract::<Vec<Vec<isize>>>()
            .map_err(|_| PyTypeError::new_err("positions must be an integer, or integers along one or two axes"))?;
        if let Some(row) = rows.iter().find(|row| row.len() != rows[0].len()) {
            let text = format!("positions has rows of {} and {} integers", rows[0].len(), row.len());
            return Err(PyValueError::new_err(text));
        }
        Ok(Self::Each(rows.concat()))
    }
}

/// As `attn.rope`.
pub(crate) fn rope<'py>(
    object: &Bound<'py, PyAny>,
    places: &Places,
    (pairing, base, rotary_dim): (&str, f64, Option<usize>),
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let x = read_numbers("x", object)?;
    let mut rope = Rope::new(match pairing {
        "half" => Pairing::Half,
        "interleaved" => Pairing::Interleaved,
        other => {
            let text = format!("pairing is {other:?}; \"half\" and \"interleaved\" are allowed");
            return Err(PyValueError::new_err(text));
        }
    });
    rope = rope.base(base);
    if let Some(dim) = rotary_dim {
        rope = rope.rotary_dim(dim);
    }
    let target = match out {
        Some(out) if library(out) == Library::Other => {
            return Err(PyTypeError::new_err("out must be an array of NumPy or a tensor of torch"));
        }
        Some(out) => out.clone(),
        None => empty(object, x.kind, false, shape(&x))?,
    };
    let written = read("out", &target)?;
    same_shape(&written, shape(&x))?;
    same_kind(&x, &written)?;
    let fold = Fold::of(&[&x, &written], None)?;
    let table = match places {
        Places::Offset(offset) => Positions::Offset(*offset),
        Places::Shared(positions) => Positions::Shared(positions),
        Places::Each(positions) => Positions::Each(positions),
    };
    if fold.calls != 1 && matches!(places, Places::Each(_)) {
        return Err(PyValueError::new_err("x: leading axes that do not fold take positions along one axis"));
    }
    // In place if it is the same array; any other one must be apart.
    let in_place = target.is(object);
    let others = [&x];
    let mut to = Out::new(written, if in_place { &[] } else { &others })?;
    with_kind!(x.kind, |T| {
        for call in 0..fold.calls {
            let mut to = fold.view_mut::<T>(&mut to, call)?;
            if in_place {
                py.detach(|| rope.apply_in_place(&mut to, table)).map_err(raised)?;
            } else {
                let x = fold.view::<T>(&x, call)?;
                py.detach(|| rope.apply(x, &mut to, table)).map_err(raised)?;
            }
        }
        Ok::<(), PyErr>(())
    })?;
    if out.is_some() { Ok(target) } else { handed(object, target) }
}
