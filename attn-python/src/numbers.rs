//! Numbers, flags and tables from objects of Python: errors name the argument, and what it may be.

use attn_core::Align;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyString};

use crate::tensor::{Library, library, refuse_gradient, type_name};

pub(crate) fn bad(text: impl Into<String>) -> PyErr {
    PyValueError::new_err(text.into())
}

/// The slopes of ALiBi.
pub(crate) enum Slopes {
    /// The published ones for that many heads.
    Published,
    Given(Vec<f32>),
}

/// A mask of whole blocks: the array, and the queries and keys of a block.
pub(crate) type Blocks = (Py<PyAny>, usize, usize);

/// An integer of Python, NumPy or any type that has `__index__`, but no bool.
pub(crate) fn integer(name: &str, value: &Bound<'_, PyAny>) -> PyResult<isize> {
    if value.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!("{name} is a bool, an integer is wanted")));
    }
    value.extract::<isize>().map_err(|error| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            return bad(format!("{name} is {value}, at most {} is allowed in size", isize::MAX));
        }
        PyTypeError::new_err(format!("{name} is {}, an integer is wanted", type_name(value)))
    })
}

/// An integer of at least 0.
pub(crate) fn size(name: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let n = integer(name, value)?;
    usize::try_from(n).map_err(|_| bad(format!("{name} is {n}, at least 0 is allowed")))
}

/// An integer of 64 bits without a sign.
pub(crate) fn seed(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract::<u64>().map_err(|error| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            return bad(format!("seed is {value}, 0 to 2^64 - 1 is allowed"));
        }
        PyTypeError::new_err(format!("seed is {}, an integer is wanted", type_name(value)))
    })
}

/// A number. One of torch that records gradients is refused: there are none by it.
pub(crate) fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    if !value.is_instance_of::<PyFloat>() && library(value) == Library::Torch {
        refuse_gradient(name, value)?;
    }
    value.extract().map_err(|_| PyTypeError::new_err(format!("{name} is {}, a number is wanted", type_name(value))))
}

/// A bool.
pub(crate) fn flag(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    value.extract().map_err(|_| PyTypeError::new_err(format!("{name} is {}, a bool is wanted", type_name(value))))
}

/// Takes the bool that only one function has: as [`Options::read`](crate::options::Options::read) wants it.
pub(crate) fn own_flag<'py>(
    own: &'static str,
    to: &mut bool,
) -> impl FnMut(&str, &Bound<'py, PyAny>) -> PyResult<bool> {
    move |name, value| {
        if name == own {
            *to = flag(name, value)?;
        }
        Ok(name == own)
    }
}

/// A text.
pub(crate) fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    value.extract().map_err(|_| PyTypeError::new_err(format!("{name} is {}, a str is wanted", type_name(value))))
}

/// Where query 0 stands among the keys.
pub(crate) fn align(value: &Bound<'_, PyAny>) -> PyResult<Align> {
    let wanted = "\"top_left\", \"bottom_right\" or an offset is wanted";
    if value.is_instance_of::<PyString>() {
        return match &*value.extract::<String>()? {
            "top_left" => Ok(Align::TopLeft),
            "bottom_right" => Ok(Align::BottomRight),
            other => Err(bad(format!("causal is {other:?}; {wanted}"))),
        };
    }
    match integer("causal", value) {
        Err(error) if error.is_instance_of::<PyTypeError>(value.py()) => {
            Err(PyTypeError::new_err(format!("causal is {}; {wanted}", type_name(value))))
        }
        offset => offset.map(Align::Offset),
    }
}

/// A window's two distances; None or −1 is no bound.
pub(crate) fn window(value: &Bound<'_, PyAny>) -> PyResult<(Option<usize>, Option<usize>)> {
    let [left, right] = value
        .extract::<[Option<isize>; 2]>()
        .map_err(|_| PyTypeError::new_err(format!("window is {value}; (left, right) is wanted, integers or None")))?;
    let side = |distance: Option<isize>| match distance {
        None | Some(-1) => Ok(None),
        Some(n) => usize::try_from(n).map(Some).map_err(|_| bad(format!("window is {value}; at least -1 is allowed"))),
    };
    Ok((side(left)?, side(right)?))
}

/// A mask of blocks, and the queries and keys of one.
pub(crate) fn blocks(value: &Bound<'_, PyAny>) -> PyResult<Blocks> {
    let found = value.extract::<(Py<PyAny>, usize, usize)>();
    found.map_err(|_| PyTypeError::new_err("block_mask must be (blocks, queries of a block, keys of a block)"))
}

/// The numbers of a table: a sequence, or an array of one axis.
pub(crate) fn listed<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if library(value) == Library::Torch {
        refuse_gradient(name, value)?;
    }
    if value.hasattr("tolist")? { value.call_method0("tolist") } else { Ok(value.clone()) }
}

/// A table of integers of at least 0.
pub(crate) fn lengths(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let numbers = listed(name, value)?
        .extract::<Vec<isize>>()
        .map_err(|_| PyTypeError::new_err(format!("{name} must be integers along one axis")))?;
    let checked = |(at, n): (usize, isize)| {
        usize::try_from(n).map_err(|_| bad(format!("{name}[{at}] is {n}, at least 0 is allowed")))
    };
    numbers.into_iter().enumerate().map(checked).collect()
}

/// A table of numbers.
pub(crate) fn floats(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
    listed(name, value)?
        .extract::<Vec<f32>>()
        .map_err(|_| PyTypeError::new_err(format!("{name} must be numbers along one axis")))
}

/// The slopes of ALiBi: True, or a table.
pub(crate) fn slopes(value: &Bound<'_, PyAny>) -> PyResult<Option<Slopes>> {
    if value.is_instance_of::<PyBool>() {
        return Ok(value.is_truthy()?.then_some(Slopes::Published));
    }
    Ok(Some(Slopes::Given(floats("alibi", value)?)))
}
