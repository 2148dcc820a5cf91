//! A call over a cache: query and options read, outputs made, results handed out.

use std::ops::Range;

use attn_core::half::{bf16, f16};
use attn_core::kv_cache::Queries;
use attn_core::{Outputs, View};
use attn_simd::decode::{DecodePlan, Source};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::with_kind;
use crate::fold::{Fold, narrow, narrow_mut};
use crate::interrupt;
use crate::kind::Kind;
use crate::numbers::{flag, lengths, number};
use crate::options::{Masks, Options, raised};
use crate::pool::Work;
use crate::raw::{Out, Plain, Tensor};
use crate::tensor::{Library, count_write, empty, empty_as, handed, library, read, shape};

/// Keywords that have a meaning over a cache, besides those that a call reads itself.
const OPTIONS: [&str; 7] = ["window", "softcap", "temperature", "sinks", "alibi", "threads", "level"];

/// A call over a cache, read and not yet computed.
pub(crate) struct Call<'py> {
    q: Tensor<'py>,
    options: Options,
    q_lens: Option<Vec<usize>>,
    out: Out<'py>,
    lse: Option<Out<'py>>,
    /// The objects of out and lse, and whether the caller gave out.
    objects: (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, bool),
}

impl<'py> Call<'py> {
    /// Reads a query and options, and makes the outputs.
    pub(crate) fn read(
        function: &str,
        query: &Bound<'py, PyAny>,
        keywords: Option<&Bound<'py, PyDict>>,
        ragged: bool,
        value_dim: usize,
    ) -> PyResult<Self> {
        let (mut return_lse, mut out, mut q_lens, mut scale) = (false, None, None, None);
        let mut options = Options::read(function, 0.0, false, None, keywords, |key, value| {
            match key {
                "return_lse" => return_lse = flag(key, value)?,
                "out" => out = (!value.is_none()).then(|| value.clone()),
                "scale" => scale = if value.is_none() { None } else { Some(number(key, value)?) },
                "q_lens" if ragged => q_lens = if value.is_none() { None } else { Some(lengths("q_lens", value)?) },
                key if OPTIONS.contains(&key) => return Ok(false),
                _ => {
                    let text = format!("{function}() got an unexpected keyword argument '{key}'");
                    return Err(PyTypeError::new_err(text));
                }
            }
            Ok(true)
        })?;
        options.set_scale(scale);
        let q = read("query", query)?;
        if !matches!(q.kind, Kind::F32 | Kind::F16 | Kind::Bf16) {
            let text = format!("query is {}; float32, float16 and bfloat16 are supported", q.kind.name());
            return Err(PyTypeError::new_err(text));
        }
        four(&q)?;
        let [_, batch, q_heads, rows, _] = q.sizes;
        options.fit(q_heads, batch)?;
        let sizes = [batch, q_heads, rows, value_dim];
        let given = out.is_some();
        let target = match out {
            Some(out) if library(&out) == Library::Other => {
                return Err(PyTypeError::new_err("out must be an array of NumPy or a tensor of torch"));
            }
            Some(out) => out,
            None => empty_as(query, &q, &sizes)?,
        };
        let written = read("out", &target)?;
        if shape(&written) != sizes {
            let text = format!("out has the shape {:?}, {sizes:?} is wanted", shape(&written));
            return Err(PyValueError::new_err(text));
        }
        if written.kind != q.kind {
            let (found, wanted) = (written.kind.name(), q.kind.name());
            return Err(PyTypeError::new_err(format!("out is {found}, query is {wanted}")));
        }
        let written = Out::new(written, &[&q])?;
        let (lse_object, lse) = if return_lse {
            let object = empty(query, Kind::F32, true, &sizes[..3])?;
            let tensor = Out::new(read("lse", &object)?, &[])?;
            (Some(object), Some(tensor))
        } else {
            (None, None)
        };
        Ok(Self { q, options, q_lens, out: written, lse, objects: (target, lse_object, given) })
    }

    /// Queries of each sequence.
    pub(crate) fn rows(&self) -> usize {
        self.q.sizes[3]
    }

    /// Refuses more queries of a sequence than tokens that the cache holds of it: theirs are the last ones.
    pub(crate) fn check_held(&self, held: &[usize]) -> PyResult<()> {
        let rows = self.rows();
        for (at, &held) in held.iter().enumerate() {
            let count = self.q_lens.as_ref().map_or(rows, |lens| lens.get(at).map_or(0, |&len| len.min(rows)));
            if count > held {
                let text = format!("query has {count} tokens for sequence {at}, of which the cache has {held}");
                return Err(PyValueError::new_err(text + "; their keys are appended before"));
            }
        }
        Ok(())
    }

    /// Refuses new tokens that share memory with the output.
    pub(crate) fn apart(&self, tokens: &Tensor<'_>) -> PyResult<()> {
        if self.out.tensor().meets(tokens) {
            return Err(PyValueError::new_err(format!("out shares memory with {}", tokens.name)));
        }
        Ok(())
    }

    /// Checks the call over a cache as it will be, with `step` queries of each sequence.
    pub(crate) fn check(&self, step: usize, batch: usize, source: Source<'_>) -> PyResult<()> {
        let (attn, level) = (self.options.attention(0, batch, Masks::default()), self.options.level());
        with_kind!(self.q.kind, |T| {
            let [batch, heads, _, dim] = Fold::ONE.view::<T>(&self.q, 0)?.sizes();
            let q = [batch, heads, step, dim];
            DecodePlan::new(&attn, q, Queries::All, source, level).map(|_| ()).map_err(raised)
        })
    }

    /// Attends with some rows of the query, over sequences of at most so many keys, which are so many bytes in all.
    pub(crate) fn compute(
        &mut self,
        py: Python<'_>,
        part: Range<usize>,
        (batch, keys, bytes): (usize, usize, f64),
        source: Source<'_>,
    ) -> PyResult<()> {
        let attn = self.options.attention(0, batch, Masks::default());
        let queries = self.q_lens.as_deref().map_or(Queries::All, Queries::First);
        let (options, level) = (&self.options, self.options.level());
        with_kind!(self.q.kind, |T| {
            let q = Fold::ONE.view::<T>(&self.q, 0)?;
            let whole = part == (0..q.sizes()[2]);
            let heads = q.sizes()[0] * q.sizes()[1];
            let q = narrow(q, 2, part.clone()).map_err(raised)?;
            let plan = DecodePlan::new(&attn, q.sizes(), queries, source, level).map_err(raised)?;
            let out = narrow_mut(Fold::ONE.view_mut::<T>(&mut self.out, 0)?, 2, part.clone()).map_err(raised)?;
            let lse = self.lse.as_mut().and_then(Out::slice_mut::<f32>);
            let mut one = vec![0.0; if whole { 0 } else { heads }];
            let mut outputs = Outputs::new(out);
            let dims = (self.q.sizes[4] + outputs.out.sizes()[3]) as f64;
            let operations = 2.0 * (heads * part.len()) as f64 * keys as f64 * dims;
            let work = Work { operations, bytes };
            let attend = |outputs| {
                interrupt::run(py, work, |stop| options.runner(work, stop).attend_cache_planned(&plan, q, outputs))
            };
            match lse {
                None => {}
                Some(lse) if whole => outputs.lse = Some(lse),
                Some(lse) => {
                    outputs.lse = Some(&mut one);
                    attend(outputs)?;
                    let every = lse.len() / heads.max(1);
                    let to = lse.iter_mut().skip(part.start).step_by(every.max(1));
                    to.zip(&one).for_each(|(to, &from)| *to = from);
                    return Ok(());
                }
            }
            attend(outputs)
        })
    }

    /// The results, of query's library; one that the caller gave is of NumPy or torch.
    pub(crate) fn results(self, query: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (out, lse, given) = self.objects;
        let out = if given {
            count_write(&out)?;
            out
        } else {
            handed(query, out)?
        };
        match lse {
            None => Ok(out),
            Some(lse) => Ok((out, handed(query, lse)?).into_pyobject(query.py())?.into_any()),
        }
    }
}

/// Some of the new tokens.
pub(crate) fn part<'a, T: Plain>(new: &'a Tensor<'_>, rows: &Range<usize>) -> PyResult<View<'a, T>> {
    narrow(Fold::ONE.view(new, 0)?, 2, rows.clone()).map_err(raised)
}

/// Refuses a tensor that has not four axes.
pub(crate) fn four(tensor: &Tensor<'_>) -> PyResult<()> {
    if tensor.axes == 4 {
        return Ok(());
    }
    let (name, axes) = (tensor.name, tensor.axes);
    Err(PyValueError::new_err(format!("{name} has {axes} axes, (batch, heads, tokens, dim) are wanted")))
}
