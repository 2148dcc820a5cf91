//! Tensors of up to five axes as views of four: how leading axes fold into the batch, and parts of a view.

use std::ops::Range;

use attn_core::{AttnError, View, ViewMut};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::raw::{Out, Plain, Tensor};

/// How the two leading axes become the batch of a call: as one axis, or one call for each index of the first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold {
    /// Calls.
    pub(crate) calls: usize,
    whole: bool,
}

impl Fold {
    /// All leading axes are one batch.
    pub(crate) const ONE: Self = Self { calls: 1, whole: true };

    /// One call for each index of the first axis.
    pub(crate) fn each(calls: usize) -> Self {
        Self { calls, whole: false }
    }

    /// For tensors with the same two leading axes, and masks that may broadcast over them.
    pub(crate) fn of<'t>(tensors: &[&Tensor<'_>], masks: impl IntoIterator<Item = &'t Tensor<'t>>) -> PyResult<Self> {
        let (a, b) = tensors.first().map_or((1, 1), |tensor| (tensor.sizes[0], tensor.sizes[1]));
        let folds = |tensor: &&Tensor<'_>| {
            let [outer, inner, ..] = tensor.strides;
            let empty = tensor.sizes.contains(&0);
            empty || a <= 1 || b <= 1 || inner.checked_mul(b as isize) == Some(outer)
        };
        let mut whole = tensors.iter().all(folds);
        for mask in masks {
            let [outer, inner, ..] = mask.sizes;
            if outer != 1 && outer != a {
                let text = format!("{}: axis 0 has size {outer}, which does not broadcast to {a}", mask.name);
                return Err(PyValueError::new_err(text));
            }
            whole &= a <= 1 || (outer == 1 && inner == 1) || (outer == a && inner == b && folds(&mask));
        }
        Ok(Self { calls: if whole { 1 } else { a }, whole })
    }

    /// Sizes, strides and first element of one call.
    fn part(self, tensor: &Tensor<'_>, call: usize) -> ([usize; 4], [isize; 4], usize) {
        let ([a, b, h, s, d], [outer, inner, sh, ss, sd]) = (tensor.sizes, tensor.strides);
        if self.whole {
            let stride = if b == 1 { outer } else { inner };
            return ([a.saturating_mul(b), h, s, d], [stride, sh, ss, sd], tensor.offset);
        }
        let index = if a == 1 { 0 } else { call };
        ([b, h, s, d], [inner, sh, ss, sd], tensor.offset.wrapping_add_signed(index as isize * outer))
    }

    /// The tensor of one call.
    pub(crate) fn view<'a, T: Plain>(self, tensor: &'a Tensor<'_>, call: usize) -> PyResult<View<'a, T>> {
        let data = tensor.slice::<T>().ok_or_else(|| wrong_kind(tensor))?;
        let (sizes, strides, offset) = self.part(tensor, call);
        View::strided(data, sizes, strides, offset).map_err(|error| named(tensor.name, error))
    }

    /// As [`view`](Self::view) of booleans, whose bytes [`Tensor::bools`] checked.
    pub(crate) fn bools<'a>(self, tensor: &Tensor<'_>, data: &'a [bool], call: usize) -> PyResult<View<'a, bool>> {
        let (sizes, strides, offset) = self.part(tensor, call);
        View::strided(data, sizes, strides, offset).map_err(|error| named(tensor.name, error))
    }

    /// The output of one call.
    pub(crate) fn view_mut<'a, T: Plain>(self, out: &'a mut Out<'_>, call: usize) -> PyResult<ViewMut<'a, T>> {
        let name = out.tensor().name;
        let (sizes, strides, offset) = self.part(out.tensor(), call);
        let wrong = wrong_kind(out.tensor());
        let data = out.slice_mut::<T>().ok_or(wrong)?;
        ViewMut::strided(data, sizes, strides, offset).map_err(|error| named(name, error))
    }
}

/// Some places along one axis of a view.
pub(crate) fn narrow<T: Copy>(view: View<'_, T>, axis: usize, range: Range<usize>) -> Result<View<'_, T>, AttnError> {
    let (mut sizes, strides) = (view.sizes(), view.strides());
    if range == (0..sizes[axis]) || view.is_empty() {
        return Ok(view);
    }
    sizes[axis] = range.len();
    View::strided(view.data(), sizes, strides, view.offset().wrapping_add_signed(strides[axis] * range.start as isize))
}

/// Some places along one axis of an output.
pub(crate) fn narrow_mut<T: Copy>(
    view: ViewMut<'_, T>,
    axis: usize,
    range: Range<usize>,
) -> Result<ViewMut<'_, T>, AttnError> {
    let (mut sizes, strides) = (view.sizes(), view.strides());
    if range == (0..sizes[axis]) || view.is_empty() {
        return Ok(view);
    }
    sizes[axis] = range.len();
    let offset = view.offset().wrapping_add_signed(strides[axis] * range.start as isize);
    ViewMut::strided(view.into_data(), sizes, strides, offset)
}

fn wrong_kind(tensor: &Tensor<'_>) -> PyErr {
    PyTypeError::new_err(format!("{} is {}; this type is not supported here", tensor.name, tensor.kind.name()))
}

fn named(name: &str, error: AttnError) -> PyErr {
    PyValueError::new_err(format!("{name}: {error}"))
}
