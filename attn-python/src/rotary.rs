//! Rotary positions.

use std::borrow::Cow;
use std::ops::Range;

use attn_core::half::{bf16, f16};
use attn_core::position::Positions;
use attn_core::position::rope::{Pairing, Rope};
use attn_core::{AttnError, Element, View, ViewMut};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::call::{same_kind, with_kind};
use crate::fold::{Fold, narrow, narrow_mut};
use crate::kind::Kind;
use crate::numbers::{integer, listed};
use crate::options::raised;
use crate::parts::{read_numbers, same_shape};
use crate::raw::{Out, Plain};
use crate::tensor::{Library, count_write, empty, handed, library, read, shape};

/// Where tokens stand.
#[derive(Clone)]
pub(crate) enum Places {
    Offset(isize),
    Shared(Vec<isize>),
    Each(Vec<isize>),
}

impl Places {
    /// An offset, positions along one axis, or along (batch, tokens).
    pub(crate) fn read(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let list = listed("positions", object)?;
        if list.is_instance_of::<PyInt>() {
            return integer("positions", &list).map(Self::Offset);
        }
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

    /// Refuses tables of other sizes than the tokens'.
    fn check(&self, batch: usize, tokens: usize) -> Result<(), AttnError> {
        match self {
            Self::Offset(_) => Ok(()),
            Self::Shared(positions) => AttnError::check_size("positions against tokens", tokens, positions.len()),
            Self::Each(positions) => {
                AttnError::check_size("positions (batch · tokens)", batch * tokens, positions.len())
            }
        }
    }

    /// Those of some of the tokens. The table has been checked.
    fn part(&self, rows: &Range<usize>, tokens: usize) -> Cow<'_, Self> {
        match self {
            _ if *rows == (0..tokens) => Cow::Borrowed(self),
            Self::Offset(offset) => Cow::Owned(Self::Offset(offset.saturating_add_unsigned(rows.start))),
            Self::Shared(positions) => Cow::Owned(Self::Shared(positions[rows.clone()].to_vec())),
            Self::Each(positions) => {
                let of_rows = positions.chunks_exact(tokens).flat_map(|all| &all[rows.clone()]);
                Cow::Owned(Self::Each(of_rows.copied().collect()))
            }
        }
    }

    fn positions(&self) -> Positions<'_> {
        match self {
            Self::Offset(offset) => Positions::Offset(*offset),
            Self::Shared(positions) => Positions::Shared(positions),
            Self::Each(positions) => Positions::Each(positions),
        }
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
    if fold.calls != 1 && matches!(places, Places::Each(_)) {
        return Err(PyValueError::new_err("x: leading axes that do not fold take positions along one axis"));
    }
    // In place if it is the same array; any other one must be apart.
    let in_place = target.is(object);
    let others = [&x];
    let mut to = Out::new(written, if in_place { &[] } else { &others })?;
    with_kind!(x.kind, |T| {
        for call in 0..fold.calls {
            let from = if in_place { None } else { Some(fold.view::<T>(&x, call)?) };
            apply(py, &rope, places, from, fold.view_mut::<T>(&mut to, call)?)?;
        }
        Ok::<(), PyErr>(())
    })?;
    if out.is_some() {
        count_write(&target)?;
        return Ok(target);
    }
    handed(object, target)
}

/// Numbers that rope is applied to between two looks for signals: some ten milliseconds.
const NUMBERS: usize = 1 << 21;

/// Applies rope to all tokens, in place if there is nothing to read, in parts between which signals are looked for.
fn apply<T: Element<Compute = f32> + Plain>(
    py: Python<'_>,
    rope: &Rope,
    places: &Places,
    from: Option<View<'_, T>>,
    mut to: ViewMut<'_, T>,
) -> PyResult<()> {
    let [batch, heads, tokens, dim] = to.sizes();
    places.check(batch, tokens).map_err(raised)?;
    let step = (NUMBERS / (batch * heads * dim).max(1)).max(1);
    // Once without tokens, too: that checks the rest.
    for first in (0..tokens.max(1)).step_by(step) {
        if first > 0 {
            py.check_signals()?;
        }
        let rows = first..tokens.min(first + step);
        let part = places.part(&rows, tokens);
        let from = from.map(|from| narrow(from, 2, rows.clone())).transpose().map_err(raised)?;
        let mut to = narrow_mut(to.reborrow(), 2, rows).map_err(raised)?;
        let applied = py.detach(|| match from {
            Some(from) => rope.apply(from, &mut to, part.positions()),
            None => rope.apply_in_place(&mut to, part.positions()),
        });
        applied.map_err(raised)?;
    }
    Ok(())
}
