//! `attn.Cache`: keys and values that stay between calls. `store` holds their memory, and `append` adds tokens.

use std::ops::Range;

use attn_core::AttnError;
use pyo3::exceptions::{PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cache_call::{Call, four};
use crate::kind::Kind;
use crate::numbers::{lengths, size};
use crate::options::raised;
use crate::pages::Pages;
use crate::raw::Tensor;
use crate::store::{Place, Sizes, Store, name_of};
use crate::tensor::{read, shape};

/// Sequences at most: their lengths are allocated, whatever the other sizes are.
const BATCH: usize = 1 << 24;

/// Keys and values that stay between calls, for generating text token by token.
///
/// Cache(batch, kv_heads, head_dim, value_dim=head_dim, *, capacity) keeps all tokens, up to capacity per sequence.
/// Cache(..., window=w, sink_tokens=s) keeps the first s tokens and the last w: for endless streams (StreamingLLM).
/// Cache(..., pages=n, page_size=16) keeps all tokens in n pages of page_size tokens, which sequences take as they
/// grow and give back in truncate (PagedAttention): keys and values take the memory of all tokens. The table of pages
/// has an entry of 4 bytes for each sequence and page of the longest one, which nbytes leaves out.
///
/// dtype: "float32", "float16" or "bfloat16", the type of tokens too; queries may be of another one. "int8",
/// "float8_e4m3fn" and "float8_e5m2" keep a byte for each number, with a scale for each token and head; "q8_0" and
/// "q4_0" are ggml's blocks of 32 numbers with a scale each, in 34 and 18 bytes, for head_dim and value_dim that are
/// multiples of 32. Tokens of these may be of any of the three types, and are encoded once. A dtype of NumPy or torch
/// is taken by its name. The memory is allocated here, once. copy.copy and copy.deepcopy make a second cache with the
/// same tokens. A cache is used by one thread at a time.
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
    pub(crate) sizes: Sizes,
    pub(crate) lens: Vec<usize>,
    pub(crate) place: Place,
    pub(crate) store: Store,
}

#[pymethods]
impl Cache {
    #[new]
    #[pyo3(
        signature = (batch, kv_heads, head_dim, value_dim=None, *, capacity=None, window=None, sink_tokens=None,
            pages=None, page_size=None, dtype=None),
        text_signature = "(batch, kv_heads, head_dim, value_dim=None, *, capacity=None, window=None, \
            sink_tokens=None, pages=None, page_size=None, dtype=\"float32\")"
    )]
    fn new(
        batch: &Bound<'_, PyAny>,
        kv_heads: &Bound<'_, PyAny>,
        head_dim: &Bound<'_, PyAny>,
        value_dim: Option<&Bound<'_, PyAny>>,
        capacity: Option<&Bound<'_, PyAny>>,
        window: Option<&Bound<'_, PyAny>>,
        sink_tokens: Option<&Bound<'_, PyAny>>,
        pages: Option<&Bound<'_, PyAny>>,
        page_size: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (batch, kv_heads) = (size("batch", batch)?, size("kv_heads", kv_heads)?);
        let head_dim = size("head_dim", head_dim)?;
        let given = |name, value: Option<&Bound<'_, PyAny>>| value.map(|value| size(name, value)).transpose();
        let value_dim = given("value_dim", value_dim)?.unwrap_or(head_dim);
        let (capacity, window) = (given("capacity", capacity)?, given("window", window)?);
        let (sink_tokens, pages) = (given("sink_tokens", sink_tokens)?, given("pages", pages)?);
        let page_size = given("page_size", page_size)?;
        if batch > BATCH {
            return Err(PyValueError::new_err(format!("batch is {batch}, at most {BATCH} is allowed")));
        }
        let (rows, slots, place) = match (capacity, window, pages) {
            (Some(capacity), None, None) => (batch, capacity, Place::Slots),
            (None, Some(window), None) => {
                let sinks = sink_tokens.unwrap_or(0);
                let slots = sinks.checked_add(window).ok_or_else(|| PyValueError::new_err("window is too large"))?;
                (batch, slots, Place::Ring { sinks, window })
            }
            (None, None, Some(pages)) => {
                let page_size = page_size.unwrap_or(16);
                (pages, page_size, Place::Pages(Pages::new(batch, pages, page_size)?))
            }
            (None, None, None) => return Err(PyValueError::new_err("capacity, window or pages must be given")),
            _ => return Err(PyValueError::new_err("one of capacity, window and pages is wanted, several are given")),
        };
        for (name, is_given, needs, has) in [
            ("sink_tokens", sink_tokens.is_some(), "window", window.is_some()),
            ("page_size", page_size.is_some(), "pages", pages.is_some()),
        ] {
            if is_given && !has {
                return Err(PyValueError::new_err(format!("{name} is given without {needs}")));
            }
        }
        let sizes = Sizes { batch, kv_heads, rows, slots, head_dim, value_dim };
        let dtype = dtype.map_or(Ok("float32".into()), name_of)?;
        let (store, lens) = (Store::new(&dtype, &sizes)?, vec![0; batch]);
        store.source(&sizes, &place, &lens).map(|_| ()).map_err(raised)?;
        Ok(Self { sizes, lens, place, store })
    }

    /// Tokens that came so far, of each sequence.
    #[getter]
    fn lens(&self) -> Vec<usize> {
        self.lens.clone()
    }

    /// Tokens that a sequence can hold; over pages, if it takes all of them.
    #[getter]
    fn capacity(&self) -> usize {
        match &self.place {
            Place::Pages(pages) => self.sizes.rows.saturating_mul(pages.page_size()),
            _ => self.sizes.slots,
        }
    }

    /// The pages of each sequence, in the order of its tokens; None without pages.
    #[getter]
    fn block_table(&self) -> Option<Vec<Vec<i32>>> {
        match &self.place {
            Place::Pages(pages) => Some(pages.rows()),
            _ => None,
        }
    }

    /// Pages that no sequence holds; None without pages.
    #[getter]
    fn free_pages(&self) -> Option<usize> {
        match &self.place {
            Place::Pages(pages) => Some(pages.free()),
            _ => None,
        }
    }

    /// Bytes of keys and values.
    #[getter]
    fn nbytes(&self) -> usize {
        self.store.bytes()
    }

    /// The number type of keys and values.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.store.dtype()
    }

    /// Takes the keys (batch, kv_heads, n, head_dim) and values (batch, kv_heads, n, value_dim) of new tokens, of the
    /// cache's type. counts: (batch,), how many of the n are tokens of each sequence; the others are padding. Ctrl-C
    /// ends a long call, and no token is appended then; over a window, some are, which lens counts.
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
        if let Some(counts) = &counts {
            if matches!(self.place, Place::Ring { .. }) {
                return Err(PyNotImplementedError::new_err("not supported: counts for a cache with a window"));
            }
            AttnError::check_size("counts", self.sizes.batch, counts.len()).map_err(raised)?;
            let given = k.sizes[3];
            if let Some((at, count)) = counts.iter().enumerate().find(|(_, count)| **count > given) {
                return Err(PyValueError::new_err(format!("counts[{at}] is {count}, at most {given} is allowed")));
            }
        }
        self.check_tokens(&k, &v)?;
        self.take(py, [&k, &v], counts.as_deref(), |_, _| Ok(()))
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
        let mut call = Call::read("decode", query, options, true, self.sizes.value_dim)?;
        let rows = call.rows();
        call.check_held(&self.lens)?;
        self.compute(query.py(), &mut call, 0..rows)?;
        call.results(query)
    }

    /// Appends n tokens and attends with each of them: a prompt, or its next chunk. Any n over a window too, whose
    /// tokens come one by one. Arguments as for append and decode; if they are refused, nothing is appended. Nor is it
    /// if Ctrl-C ends the call; over a window, some tokens are, which lens counts.
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
        let mut call = Call::read("prefill", query, options, false, self.sizes.value_dim)?;
        let (k, v) = (self.tokens("key", key)?, self.tokens("value", value)?);
        let n = call.rows();
        for tensor in [&k, &v] {
            if tensor.sizes[3] != n {
                let text = format!("{} has {} tokens, query has {n}", tensor.name, tensor.sizes[3]);
                return Err(PyValueError::new_err(text));
            }
            call.apart(tensor)?;
        }
        self.check_tokens(&k, &v)?;
        let one_by_one = matches!(self.place, Place::Ring { .. });
        self.check(&call, if one_by_one { 1.min(n) } else { n })?;
        if one_by_one {
            for token in 0..n {
                py.check_signals()?;
                self.write(py, [&k, &v], token..token + 1, None)?;
                self.compute(py, &mut call, token..token + 1)?;
            }
        } else {
            self.take(py, [&k, &v], None, |cache, py| cache.compute(py, &mut call, 0..n))?;
        }
        call.results(query)
    }

    /// Forgets the tokens of one sequence from length on: the rejected end of a speculation, or all with 0. Pages that
    /// it does not need are free then.
    fn truncate(&mut self, sequence: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<()> {
        let (sequence, length) = (size("sequence", sequence)?, size("length", length)?);
        let Some(&held) = self.lens.get(sequence) else {
            let text = format!("sequence is {sequence}, below {} is allowed", self.lens.len());
            return Err(PyValueError::new_err(text));
        };
        if length > held {
            return Err(PyValueError::new_err(format!("length is {length}, at most {held} is allowed")));
        }
        if matches!(self.place, Place::Ring { .. }) && length != 0 && length != held {
            return Err(PyNotImplementedError::new_err("not supported: to shorten a cache with a window, but to 0"));
        }
        self.lens[sequence] = length;
        if let Place::Pages(pages) = &mut self.place {
            pages.give_back(&self.lens);
        }
        Ok(())
    }

    fn __copy__(&self, py: Python<'_>) -> PyResult<Self> {
        let store = py.detach(|| self.store.copied())?;
        Ok(Self { sizes: self.sizes, lens: self.lens.clone(), place: self.place.clone(), store })
    }

    fn __deepcopy__(&self, py: Python<'_>, _memo: &Bound<'_, PyAny>) -> PyResult<Self> {
        self.__copy__(py)
    }

    fn __repr__(&self) -> String {
        let Sizes { batch, kv_heads, rows, slots, head_dim, value_dim } = self.sizes;
        let place = match &self.place {
            Place::Slots => format!("capacity={slots}"),
            Place::Ring { sinks, window } => format!("window={window}, sink_tokens={sinks}"),
            Place::Pages(pages) => format!("pages={rows}, page_size={}", pages.page_size()),
        };
        let dtype = self.dtype();
        format!(
            "attn.Cache({batch}, {kv_heads}, {head_dim}, {value_dim}, {place}, dtype=\"{dtype}\") with {:?}",
            self.lens
        )
    }
}

impl Cache {
    /// Reads new keys or values.
    fn tokens<'py>(&self, name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Tensor<'py>> {
        let tensor = read(name, object)?;
        let (found, kept) = (tensor.kind.name(), self.store.dtype());
        match self.store.takes() {
            Some(wanted) if tensor.kind != wanted => {
                let text = format!("{name} is {found}, the cache is {kept} and takes {}", wanted.name());
                return Err(PyTypeError::new_err(text));
            }
            None if !matches!(tensor.kind, Kind::F32 | Kind::F16 | Kind::Bf16) => {
                let text = format!("{name} is {found}, the cache is {kept} and takes float32, float16 and bfloat16");
                return Err(PyTypeError::new_err(text));
            }
            _ => {}
        }
        four(&tensor)?;
        Ok(tensor)
    }

    /// Refuses new tokens of other sizes than the cache's.
    fn check_tokens(&self, k: &Tensor<'_>, v: &Tensor<'_>) -> PyResult<()> {
        let Sizes { batch, kv_heads, head_dim, value_dim, .. } = self.sizes;
        for (tensor, wanted) in [(k, head_dim), (v, value_dim)] {
            let wanted = [batch, kv_heads, k.sizes[3], wanted];
            if tensor.sizes[1..] != wanted {
                let (name, found) = (tensor.name, shape(tensor));
                return Err(PyValueError::new_err(format!("{name} has the shape {found:?}, {wanted:?} is wanted")));
            }
        }
        if k.kind != v.kind {
            return Err(PyTypeError::new_err(format!("value is {}, key is {}", v.kind.name(), k.kind.name())));
        }
        Ok(())
    }

    /// Checks a call that appends `step` tokens first, before it does. Pages that it needs are taken, unless it fails.
    fn check(&mut self, call: &Call<'_>, step: usize) -> PyResult<()> {
        let lens = self.lens_after(|_| step)?;
        if let Place::Pages(pages) = &mut self.place {
            pages.take(&lens)?;
        }
        let source = self.store.source(&self.sizes, &self.place, &lens).map_err(raised);
        let checked = source.and_then(|source| call.check(step, self.sizes.batch, source));
        if let (Err(_), Place::Pages(pages)) = (&checked, &mut self.place) {
            pages.give_back(&self.lens);
        }
        checked
    }

    /// Attends with some rows of the query.
    fn compute(&self, py: Python<'_>, call: &mut Call<'_>, part: Range<usize>) -> PyResult<()> {
        let source = self.store.source(&self.sizes, &self.place, &self.lens).map_err(raised)?;
        let keys = self.lens.iter().copied().max().unwrap_or(0);
        let keys = if matches!(self.place, Place::Ring { .. }) { keys.min(self.sizes.slots) } else { keys };
        let slots = self.sizes.rows as f64 * self.sizes.slots as f64;
        let held = self.lens.iter().map(|&len| len as f64).sum::<f64>() / slots.max(1.0);
        let bytes = self.store.bytes() as f64 * held.min(1.0);
        call.compute(py, part, (self.sizes.batch, keys, bytes), source)
    }
}
