//! `attn.Cache`: keys and values that stay between calls, in memory of our own, which `store` has.

use std::ops::Range;

use attn_core::half::{bf16, f16};
use attn_core::kv_cache::Queries;
use attn_core::{Attention, AttnError, Outputs, View};
use attn_simd::Level;
use attn_simd::decode::{DecodePlan, Source};
use pyo3::exceptions::{PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call::with_kind;
use crate::options::{Masks, Options, lengths, raised};
use crate::raw::{Kind, Out, Plain, Tensor};
use crate::store::{Sizes, Store, stored};
use crate::tensor::{Fold, Library, empty, handed, library, narrow, narrow_mut, read, shape};

/// A call over the cache, read and not yet computed.
struct Call<'py> {
    q: Tensor<'py>,
    options: Options,
    q_lens: Option<Vec<usize>>,
    out: Out<'py>,
    lse: Option<Out<'py>>,
    /// The objects of out and lse, and whether the caller gave out.
    objects: (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, bool),
}

/// Keys and values that stay between calls, for generating text token by token.
///
/// Cache(batch, kv_heads, head_dim, value_dim=head_dim, *, capacity) keeps all tokens, up to capacity per sequence.
/// Cache(..., window=w, sink_tokens=s) keeps the first s tokens and the last w: for endless streams (StreamingLLM).
/// dtype is "float32", "float16" or "bfloat16"; queries may be of another type. With "int8" tokens are float32, and are
/// kept with a scale for each token and head, in about a quarter of the memory; it needs capacity. The memory is
/// allocated here, once.
///
/// >>> import attn, numpy as np
/// >>> cache = attn.Cache(1, 2, 64, capacity=100)
/// >>> k = v = np.ones((1, 2, 5, 64), np.float32)
/// >>> cache.append(k, v)
/// >>> cache.decode(np.ones((1, 8, 1, 64), np.float32)).shape
/// (1, 8, 1, 64)
/// >>> cache.lens
/// [5]
#[pyclass(module = "attn")]
pub(crate) struct Cache {
    sizes: Sizes,
    lens: Vec<usize>,
    store: Store,
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(
        signature = (batch, kv_heads, head_dim, value_dim=None, *, capacity=None, window=None, sink_tokens=None,
            dtype="float32")
    )]
    fn new(
        batch: usize,
        kv_heads: usize,
        head_dim: usize,
        value_dim: Option<usize>,
        capacity: Option<usize>,
        window: Option<usize>,
        sink_tokens: Option<usize>,
        dtype: &str,
    ) -> PyResult<Self> {
        let value_dim = value_dim.unwrap_or(head_dim);
        let (slots, ring) = match (capacity, window, sink_tokens) {
            (Some(capacity), None, None) => (capacity, None),
            (None, Some(window), sinks) => {
                let sinks = sinks.unwrap_or(0);
                let slots = sinks.checked_add(window).ok_or_else(|| PyValueError::new_err("window is too large"))?;
                (slots, Some((sinks, window)))
            }
            (None, None, _) => return Err(PyValueError::new_err("capacity or window must be given")),
            _ => {
                return Err(PyValueError::new_err(
                    "capacity is given with window or sink_tokens; one of them is wanted",
                ));
            }
        };
        let sizes = Sizes { batch, kv_heads, slots, head_dim, value_dim, ring };
        let store = Store::new(dtype, &sizes)?;
        let lens = vec![0; batch];
        store.source(&sizes, &lens).map(|_| ()).map_err(raised)?;
        Ok(Self { sizes, lens, store })
    }

    /// Tokens that came so far, of each sequence.
    #[getter]
    fn lens(&self) -> Vec<usize> {
        self.lens.clone()
    }

    /// Tokens that a sequence can hold.
    #[getter]
    fn capacity(&self) -> usize {
        self.sizes.slots
    }

    /// Bytes of keys and values.
    #[getter]
    fn nbytes(&self) -> usize {
        self.store.bytes()
    }

    /// The number type of keys and values.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.store.kinds().1
    }

    /// Takes the keys (batch, kv_heads, n, head_dim) and values (batch, kv_heads, n, value_dim) of new tokens, of the
    /// cache's type. counts: (batch,), how many of the n are tokens of each sequence; the others are padding.
    #[pyo3(signature = (key, value, counts=None))]
    fn append(
        &mut self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        counts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (k, v) = (self.tokens("key", key)?, self.tokens("value", value)?);
        let counts = counts.map(|counts| lengths("counts", counts)).transpose()?;
        if counts.is_some() && self.sizes.ring.is_some() {
            return Err(PyNotImplementedError::new_err("not supported: counts for a cache with a window"));
        }
        self.take(py, &k, &v, None, counts.as_deref())
    }

    /// Attends with the last n tokens of each sequence, whose keys were appended before: query is
    /// (batch, q_heads, n, head_dim), and the result (batch, q_heads, n, value_dim). Causal: the last query sees all
    /// keys that are held. Options are those of attn.sdpa that have a meaning here.
    ///
    /// q_lens: (batch,), how many of the n are queries of each sequence; the other rows give 0.
    #[pyo3(
        signature = (query, **options),
        text_signature = "(self, query, *, q_lens=None, scale=None, window=None, softcap=None, temperature=None, \
            sinks=None, alibi=None, return_lse=False, out=None, threads=None, level=None)"
    )]
    fn decode<'py>(
        &self,
        query: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut call = self.call("decode", query, options, true)?;
        let rows = call.q.sizes[3];
        self.compute(query.py(), &mut call, 0..rows)?;
        results(query, call.objects)
    }

    /// Appends n tokens and attends with each of them: a prompt, or its next chunk. Any n over a window too, whose
    /// tokens come one by one. Arguments as for append and decode; if they are refused, nothing is appended.
    #[pyo3(
        signature = (query, key, value, **options),
        text_signature = "(self, query, key, value, *, scale=None, window=None, softcap=None, temperature=None, \
            sinks=None, alibi=None, return_lse=False, out=None, threads=None, level=None)"
    )]
    fn prefill<'py>(
        &mut self,
        query: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = query.py();
        let mut call = self.call("prefill", query, options, false)?;
        let (k, v) = (self.tokens("key", key)?, self.tokens("value", value)?);
        let n = call.q.sizes[3];
        for tensor in [&k, &v] {
            if tensor.sizes[3] != n {
                let text = format!("{} has {} tokens, query has {n}", tensor.name, tensor.sizes[3]);
                return Err(PyValueError::new_err(text));
            }
            Self::apart(&call, tensor)?;
        }
        let step = if self.sizes.ring.is_some() { 1.min(n) } else { n };
        self.check(&call, step, &k, &v)?;
        if step == n {
            self.take(py, &k, &v, None, None)?;
            self.compute(py, &mut call, 0..n)?;
        } else {
            for token in 0..n {
                self.take(py, &k, &v, Some(token), None)?;
                self.compute(py, &mut call, token..token + 1)?;
            }
        }
        results(query, call.objects)
    }

    /// Forgets the tokens of one sequence from length on: the rejected end of a speculation, or all with 0.
    fn truncate(&mut self, sequence: usize, length: usize) -> PyResult<()> {
        let Some(&held) = self.lens.get(sequence) else {
            let text = format!("sequence is {sequence}, the cache has {}", self.lens.len());
            return Err(PyValueError::new_err(text));
        };
        if length > held {
            return Err(PyValueError::new_err(format!("length is {length}, at most {held} is allowed")));
        }
        if self.sizes.ring.is_some() && length != 0 && length != held {
            return Err(PyNotImplementedError::new_err("not supported: to shorten a cache with a window, but to 0"));
        }
        self.lens[sequence] = length;
        Ok(())
    }

    fn __repr__(&self) -> String {
        let Sizes { batch, kv_heads, slots, head_dim, value_dim, .. } = self.sizes;
        let ring = match self.sizes.ring {
            None => format!("capacity={slots}"),
            Some((sinks, window)) => format!("window={window}, sink_tokens={sinks}"),
        };
        let dtype = self.dtype();
        format!(
            "attn.Cache({batch}, {kv_heads}, {head_dim}, {value_dim}, {ring}, dtype=\"{dtype}\") with {:?}",
            self.lens
        )
    }
}

impl Cache {
    /// Reads new keys or values.
    fn tokens<'py>(&self, name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Tensor<'py>> {
        let tensor = read(name, object)?;
        let (wanted, kept) = self.store.kinds();
        if tensor.kind != wanted {
            let (found, wanted) = (tensor.kind.name(), wanted.name());
            let text = format!("{name} is {found}, the cache is {kept} and takes {wanted}");
            return Err(PyTypeError::new_err(text));
        }
        four(&tensor)?;
        Ok(tensor)
    }

    /// Reads a query and options, and makes the outputs.
    fn call<'py>(
        &self,
        function: &str,
        query: &Bound<'py, PyAny>,
        keywords: Option<&Bound<'py, PyDict>>,
        ragged: bool,
    ) -> PyResult<Call<'py>> {
        let (mut return_lse, mut out, mut q_lens, mut scale) = (false, None, None, None);
        let mut options = Options::read(function, 0.0, false, None, keywords, |key, value| {
            match key {
                "return_lse" => return_lse = value.extract()?,
                "out" => out = (!value.is_none()).then(|| value.clone()),
                "scale" => scale = value.extract::<Option<f64>>()?,
                "q_lens" if ragged => q_lens = if value.is_none() { None } else { Some(lengths("q_lens", value)?) },
                "window" | "softcap" | "temperature" | "sinks" | "alibi" | "threads" | "level" => return Ok(false),
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
        let sizes = [batch, q_heads, rows, self.sizes.value_dim];
        let given = out.is_some();
        let target = match out {
            Some(out) if library(&out) == Library::Other => {
                return Err(PyTypeError::new_err("out must be an array of NumPy or a tensor of torch"));
            }
            Some(out) => out,
            None => empty(query, q.kind, false, &sizes)?,
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
        Ok(Call { q, options, q_lens, out: written, lse, objects: (target, lse_object, given) })
    }

    /// Refuses an output that shares memory with new tokens.
    fn apart(call: &Call<'_>, tokens: &Tensor<'_>) -> PyResult<()> {
        if call.out.tensor().meets(tokens) {
            return Err(PyValueError::new_err(format!("out shares memory with {}", tokens.name)));
        }
        Ok(())
    }

    /// Checks a call that appends `step` tokens first, before it does.
    fn check(&self, call: &Call<'_>, step: usize, k: &Tensor<'_>, v: &Tensor<'_>) -> PyResult<()> {
        let fold = Fold::of(&[], None)?;
        let Sizes { batch, kv_heads, head_dim, value_dim, .. } = self.sizes;
        for (tensor, wanted) in [(k, head_dim), (v, value_dim)] {
            let n = tensor.sizes[3];
            if tensor.sizes != [1, batch, kv_heads, n, wanted] {
                let (name, found) = (tensor.name, shape(tensor));
                let wanted = [batch, kv_heads, n, wanted];
                return Err(PyValueError::new_err(format!("{name} has the shape {found:?}, {wanted:?} is wanted")));
            }
        }
        let lens: Vec<_> = self.lens.iter().map(|len| len.saturating_add(step)).collect();
        if let Some((at, &len)) = lens.iter().enumerate().find(|(_, len)| **len > self.sizes.slots)
            && self.sizes.ring.is_none()
        {
            let slots = self.sizes.slots;
            let text = format!("sequence {at} would have {len} tokens, the capacity is {slots}");
            return Err(PyValueError::new_err(text));
        }
        let attn = call.options.attention(0, self.sizes.batch, None, Masks::default());
        with_kind!(call.q.kind, |T| {
            let [batch, heads, _, dim] = fold.view::<T>(&call.q, 0)?.sizes();
            let sizes = [batch, heads, step, dim];
            plan_only(&attn, sizes, self.store.source(&self.sizes, &lens), call.options.level())
        })
        .map_err(raised)
    }

    /// Appends all tokens of two tensors, or one.
    fn take(
        &mut self,
        py: Python<'_>,
        k_new: &Tensor<'_>,
        v_new: &Tensor<'_>,
        token: Option<usize>,
        counts: Option<&[usize]>,
    ) -> PyResult<()> {
        let fold = Fold::of(&[], None)?;
        let (sizes, lens) = (self.sizes, &mut self.lens);
        let rows = token.map(|token| token..token + 1);
        stored!(
            &mut self.store,
            |k, v| {
                let new = [part(fold, k_new, &rows)?, part(fold, v_new, &rows)?];
                py.detach(|| sizes.append((k, v, lens), new, counts)).map_err(raised)
            },
            |int8| {
                let new = [part(fold, k_new, &rows)?, part(fold, v_new, &rows)?];
                py.detach(|| int8.append(&sizes, lens, new, counts)).map_err(raised)
            }
        )
    }

    /// Attends with some rows of the query.
    fn compute(&self, py: Python<'_>, call: &mut Call<'_>, part: Range<usize>) -> PyResult<()> {
        let fold = Fold::of(&[], None)?;
        let attn = call.options.attention(0, self.sizes.batch, None, Masks::default());
        let queries = call.q_lens.as_deref().map_or(Queries::All, Queries::First);
        let (mut runner, level) = (call.options.runner(), call.options.level());
        with_kind!(call.q.kind, |T| {
            let q = fold.view::<T>(&call.q, 0)?;
            let whole = part == (0..q.sizes()[2]);
            let heads = q.sizes()[0] * q.sizes()[1];
            let q = narrow(q, 2, part.clone()).map_err(raised)?;
            let out = narrow_mut(fold.view_mut::<T>(&mut call.out, 0)?, 2, part.clone()).map_err(raised)?;
            let lse = call.lse.as_mut().and_then(Out::slice_mut::<f32>);
            let mut one = vec![0.0; if whole { 0 } else { heads }];
            let source = self.store.source(&self.sizes, &self.lens).map_err(raised)?;
            let plan = DecodePlan::new(&attn, q.sizes(), queries, source, level).map_err(raised)?;
            let mut outputs = Outputs::new(out);
            match lse {
                None => {}
                Some(lse) if whole => outputs.lse = Some(lse),
                Some(lse) => {
                    outputs.lse = Some(&mut one);
                    py.detach(|| runner.attend_cache_planned(&plan, q, outputs)).map_err(raised)?;
                    let every = lse.len() / heads.max(1);
                    let to = lse.iter_mut().skip(part.start).step_by(every.max(1));
                    to.zip(&one).for_each(|(to, &from)| *to = from);
                    return Ok(());
                }
            }
            py.detach(|| runner.attend_cache_planned(&plan, q, outputs)).map_err(raised)
        })
    }
}

/// New tokens, or some of them.
fn part<'a, T: Plain>(fold: Fold, new: &'a Tensor<'_>, rows: &Option<Range<usize>>) -> PyResult<View<'a, T>> {
    let view = fold.view(new, 0)?;
    rows.clone().map_or(Ok(view), |rows| narrow(view, 2, rows)).map_err(raised)
}

fn plan_only(
    attn: &Attention<'_>,
    q: [usize; 4],
    source: Result<Source<'_>, AttnError>,
    level: Level,
) -> Result<(), AttnError> {
    DecodePlan::new(attn, q, Queries::All, source?, level).map(|_| ())
}

fn four(tensor: &Tensor<'_>) -> PyResult<()> {
    if tensor.axes == 4 {
        return Ok(());
    }
    let (name, axes) = (tensor.name, tensor.axes);
    Err(PyValueError::new_err(format!("{name} has {axes} axes, (batch, heads, tokens, dim) are wanted")))
}

/// The results, of query's library; one that the caller gave is of NumPy or torch.
fn results<'py>(
    query: &Bound<'py, PyAny>,
    (out, lse, given): (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, bool),
) -> PyResult<Bound<'py, PyAny>> {
    let out = if given { out } else { handed(query, out)? };
    match lse {
        None => Ok(out),
        Some(lse) => Ok((out, handed(query, lse)?).into_pyobject(query.py())?.into_any()),
    }
}
