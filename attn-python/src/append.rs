//! New tokens of a cache, written in parts: between parts signals are handled, and a call that ends early leaves no
//! token.

use std::ops::Range;

use attn_core::half::{bf16, f16};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cache::Cache;
use crate::cache_call::part;
use crate::call::with_kind;
use crate::kind::Kind;
use crate::options::raised;
use crate::raw::Tensor;
use crate::store::{Place, Sizes, Store};

/// Numbers that are appended between two looks for signals: some ten milliseconds.
const NUMBERS: usize = 1 << 24;

impl Cache {
    /// Lengths after new tokens, which must have room.
    pub(crate) fn lens_after(&self, count: impl Fn(usize) -> usize) -> PyResult<Vec<usize>> {
        let after = |(b, len): (usize, &usize)| len.saturating_add(count(b));
        let lens: Vec<_> = self.lens.iter().enumerate().map(after).collect();
        let slots = self.sizes.slots;
        match lens.iter().enumerate().find(|(_, len)| **len > slots) {
            Some((at, len)) if matches!(self.place, Place::Slots) => {
                let text = format!("sequence {at} would have {len} tokens, the capacity is {slots}");
                Err(PyValueError::new_err(text))
            }
            _ => Ok(lens),
        }
    }

    /// Appends the tokens of two tensors, and calls `then`. If that fails, or a signal's handler raises an error, the
    /// tokens are forgotten again; those that have displaced others in a window stay.
    pub(crate) fn take(
        &mut self,
        py: Python<'_>,
        both: [&Tensor<'_>; 2],
        counts: Option<&[usize]>,
        then: impl FnOnce(&Self, Python<'_>) -> PyResult<()>,
    ) -> PyResult<()> {
        let given = both[0].sizes[3];
        let after = self.lens_after(|b| counts.map_or(given, |counts| counts[b]))?;
        let before = self.lens.clone();
        if let Place::Pages(pages) = &mut self.place {
            pages.take(&after)?;
        }
        let Sizes { batch, kv_heads, head_dim, value_dim, .. } = self.sizes;
        let of_token = batch.saturating_mul(kv_heads).saturating_mul(head_dim.saturating_add(value_dim));
        let step = (NUMBERS / of_token.max(1)).max(1);
        let mut done = Ok(());
        // Once without tokens, too: that checks the rest.
        for from in (0..given.max(1)).step_by(step) {
            let rows = from..given.min(from.saturating_add(step));
            done = if from > 0 { py.check_signals() } else { Ok(()) };
            done = done.and_then(|()| self.write(py, both, rows, counts));
            if done.is_err() {
                break;
            }
        }
        let done = done.and_then(|()| then(self, py));
        if done.is_err() && !matches!(self.place, Place::Ring { .. }) {
            self.lens = before;
            if let Place::Pages(pages) = &mut self.place {
                pages.give_back(&self.lens);
            }
        }
        done
    }

    /// Writes some of the new tokens, without the interpreter's lock. `counts` are those of all new tokens.
    pub(crate) fn write(
        &mut self,
        py: Python<'_>,
        [k, v]: [&Tensor<'_>; 2],
        rows: Range<usize>,
        counts: Option<&[usize]>,
    ) -> PyResult<()> {
        let part_of = |count: &usize| (*count).min(rows.end).saturating_sub(rows.start);
        let counts = counts.map(|counts| counts.iter().map(part_of).collect::<Vec<_>>());
        let mut lens = self.lens.clone();
        if let Place::Pages(_) = self.place {
            // A table of pages counts the new tokens already.
            lens = self.lens_after(|b| counts.as_ref().map_or(rows.len(), |counts| counts[b]))?;
        }
        let (sizes, place, lens_now, counts) = (self.sizes, &self.place, &mut lens[..], counts.as_deref());
        match &mut self.store {
            Store::F32(both) => {
                let new = [part::<f32>(k, &rows)?, part(v, &rows)?];
                py.detach(|| place.append(both, &sizes, lens_now, new, counts)).map_err(raised)
            }
            Store::F16(both) => {
                let new = [part::<f16>(k, &rows)?, part(v, &rows)?];
                py.detach(|| place.append(both, &sizes, lens_now, new, counts)).map_err(raised)
            }
            Store::Bf16(both) => {
                let new = [part::<bf16>(k, &rows)?, part(v, &rows)?];
                py.detach(|| place.append(both, &sizes, lens_now, new, counts)).map_err(raised)
            }
            Store::Bytes(both) => with_kind!(k.kind, |T| {
                let new = [part::<T>(k, &rows)?, part(v, &rows)?];
                py.detach(|| place.encode(both, lens_now, new, counts)).map_err(raised)
            }),
        }?;
        self.lens = lens;
        Ok(())
    }
}
