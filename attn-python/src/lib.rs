//! `attn._attn`: the native part of the Python package `attn`, exact attention on arrays in place.
//!
//! `raw` turns DLPack capsules into slices, `tensor` turns objects into tensors and results into objects, `fold` turns
//! tensors into views, `numbers` and `options` turn keywords into [`attn_core::Attention`]. `call` and `backward`
//! compute, on the threads of `pool`; `interrupt` stops them on Ctrl-C; `heatmap` draws. Python shows the docstrings
//! and signatures of this file.

mod append;
mod backward;
mod cache;
mod cache_call;
mod call;
mod fold;
mod heatmap;
mod interrupt;
mod kind;
mod numbers;
mod options;
mod pages;
mod parts;
mod pool;
mod raw;
mod rotary;
mod store;
mod tensor;

/// Attention for Python. Import `attn`, not this.
#[pyo3::pymodule(name = "_attn", gil_used = false)]
mod module {
    use attn_core::half::{bf16, f16};
    use attn_simd::{Level, Plan};
    use pyo3::exceptions::PyTypeError;
    use pyo3::prelude::*;
    use pyo3::types::{PyDict, PyTuple};

    use crate::backward::backward;
    use crate::call::{Inputs, forward, with_kind};
    use crate::heatmap::{self, Texts};
    use crate::kind::Kind;
    use crate::numbers::{flag, own_flag};
    use crate::options::{Masks, Options, raised};
    use crate::parts;
    use crate::raw::Plain;
    use crate::rotary::{self, Places};

    #[pymodule_export]
    use crate::cache::Cache;
    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::pool::imported();
        Ok(())
    }

    /// Exact attention: softmax(scale·q·kᵀ + mask)·v, with the arguments of torch and more.
    ///
    /// query: (..., q_heads, q_len, head_dim), 2 to 5 axes; key: (..., kv_heads, kv_len, head_dim);
    /// value: (..., kv_heads, kv_len, value_dim). All float32, float16 or bfloat16, on the CPU, in any strides: NumPy,
    /// torch, whatever has DLPack, and buffers. Nothing is copied. The result has the shape
    /// (..., q_heads, q_len, value_dim) and is of query's library; NumPy for buffers.
    ///
    /// attn_mask broadcasts to (..., q_heads, q_len, kv_len): bool, where True attends; or floats, which are added.
    /// dropout_p: the probability that a weight is dropped, below 1; it needs seed.
    /// is_causal: query i sees keys up to i (the same as causal="top_left").
    /// scale: the factor of q·k; 1/√head_dim by default.
    /// enable_gqa: kv_heads may be a divisor of q_heads.
    /// causal: "top_left", "bottom_right" (the last query sees the last key), or the key position of query 0.
    /// window: (left, right), inclusive distances; None or -1 is no bound. Aligned as causal, else at the bottom right.
    /// softcap: c·tanh(s/c) on the scaled products. temperature divides the scores, with what masks and alibi added.
    /// sinks: (q_heads,), a logit that takes part in the denominator only.
    /// alibi: True for the published slopes, or (q_heads,) slopes. Aligned as causal, else at the bottom right.
    /// kv_lens, q_lens: (batch,), where padding begins. Padded queries give rows of 0. kv_starts: where keys begin.
    /// block_mask: (blocks, n, m), a bool array (batch or 1, q_heads or 1, ⌈q_len/n⌉, ⌈kv_len/m⌉): True attends.
    /// cu_seqlens_q, cu_seqlens_k: bounds of packed sequences, with causal and window inside each.
    /// seed: that of the dropout; the same seed drops the same weights, so each layer and step takes another one.
    /// precision: "exact", or "fast" where the processor multiplies bfloat16.
    /// reproducible: one order of sums for any number of queries.
    /// return_lse: also the log-sum-exp of each row, float32 (..., q_heads, q_len).
    /// out: the array to write, of any of the three types.
    /// threads: at most so many. level: an instruction set of attn.levels().
    ///
    /// Raises ValueError and TypeError before anything is written. The interpreter's lock is released.
    ///
    /// >>> import attn, numpy as np
    /// >>> q = np.ones((1, 8, 5, 64), np.float32)
    /// >>> k = v = np.ones((1, 2, 9, 64), np.float32)
    /// >>> out, lse = attn.sdpa(q, k, v, enable_gqa=True, causal="bottom_right", return_lse=True)
    /// >>> out.shape, lse.shape
    /// ((1, 8, 5, 64), (1, 8, 5))
    #[pyfunction]
    #[pyo3(
        signature = (query, key, value, attn_mask=None, dropout_p=0.0, is_causal=false,
            scale=None, enable_gqa=false, **options),
        text_signature = "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, \
            scale=None, enable_gqa=False, *, \
            causal=None, window=None, softcap=None, temperature=None, sinks=None, alibi=None, \
            kv_lens=None, kv_starts=None, q_lens=None, cu_seqlens_q=None, cu_seqlens_k=None, block_mask=None, \
            seed=None, precision=\"exact\", reproducible=False, return_lse=False, out=None, threads=None, level=None)"
    )]
    fn sdpa<'py>(
        query: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        attn_mask: Option<&Bound<'py, PyAny>>,
        dropout_p: f64,
        is_causal: bool,
        scale: Option<&Bound<'py, PyAny>>,
        enable_gqa: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (mut return_lse, mut out) = (false, None);
        let mut options = Options::read("sdpa", dropout_p, is_causal, scale, options, |key, value| {
            match key {
                "return_lse" => return_lse = flag(key, value)?,
                "out" => out = (!value.is_none()).then(|| value.clone()),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        let inputs = Inputs::read(query, key, value, attn_mask, enable_gqa, options.block_mask())?;
        let [out, lse, _] = forward(query, &inputs, &mut options, out.as_ref(), [return_lse, false])?;
        pair(query.py(), out, lse)
    }

    /// The weights of attention, float32 (..., q_heads, q_len, kv_len), for pictures and tests: they take the memory
    /// that `sdpa` avoids. Arguments as for `sdpa`. Rows sum to 1, or to 0 where a query sees nothing.
    ///
    /// >>> import attn, numpy as np
    /// >>> x = np.ones((2, 3, 8), np.float32)
    /// >>> attn.weights(x, x, x, is_causal=True)[0, 1].tolist()
    /// [0.5, 0.5, 0.0]
    #[pyfunction]
    #[pyo3(
        signature = (query, key, value, attn_mask=None, dropout_p=0.0, is_causal=false,
            scale=None, enable_gqa=false, **options),
        text_signature = "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, \
            scale=None, enable_gqa=False, *, \
            causal=None, window=None, softcap=None, temperature=None, sinks=None, alibi=None, \
            kv_lens=None, kv_starts=None, q_lens=None, cu_seqlens_q=None, cu_seqlens_k=None, block_mask=None, \
            seed=None, precision=\"exact\", reproducible=False, threads=None, level=None)"
    )]
    fn weights<'py>(
        query: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        attn_mask: Option<&Bound<'py, PyAny>>,
        dropout_p: f64,
        is_causal: bool,
        scale: Option<&Bound<'py, PyAny>>,
        enable_gqa: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut options = Options::read("weights", dropout_p, is_causal, scale, options, |_, _| Ok(false))?;
        let inputs = Inputs::read(query, key, value, attn_mask, enable_gqa, options.block_mask())?;
        let [_, _, weights] = forward(query, &inputs, &mut options, None, [false, true])?;
        pair(query.py(), weights, None)
    }

    /// The gradients of Σ out·grad_out by query, key and value, and by the sinks if there are any.
    ///
    /// out and lse are those of `sdpa(..., return_lse=True)` with the same arguments; grad_out has the shape and type
    /// of out. Returns (grad_query, grad_key, grad_value), of query's type. With sinks a fourth one follows, float32 of
    /// (q_heads,). With return_dmask the gradient of attn_mask comes last: float32, of its shape, summed over the axes
    /// along which it is broadcast.
    ///
    /// >>> import attn, numpy as np
    /// >>> x = np.ones((2, 3, 8), np.float32)
    /// >>> out, lse = attn.sdpa(x, x, x, return_lse=True)
    /// >>> dq, dk, dv = attn.sdpa_backward(np.ones_like(out), x, x, x, out, lse)
    /// >>> float(dv.sum().round())
    /// 48.0
    #[pyfunction]
    #[pyo3(
        signature = (grad_out, query, key, value, out, lse, attn_mask=None, dropout_p=0.0, is_causal=false,
            scale=None, enable_gqa=false, **options),
        text_signature = "(grad_out, query, key, value, out, lse, attn_mask=None, dropout_p=0.0, is_causal=False, \
            scale=None, enable_gqa=False, *, \
            causal=None, window=None, softcap=None, temperature=None, sinks=None, alibi=None, \
            kv_lens=None, kv_starts=None, q_lens=None, cu_seqlens_q=None, cu_seqlens_k=None, block_mask=None, \
            seed=None, precision=\"exact\", reproducible=False, return_dmask=False, threads=None, level=None)"
    )]
    fn sdpa_backward<'py>(
        grad_out: &Bound<'py, PyAny>,
        query: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        out: &Bound<'py, PyAny>,
        lse: &Bound<'py, PyAny>,
        attn_mask: Option<&Bound<'py, PyAny>>,
        dropout_p: f64,
        is_causal: bool,
        scale: Option<&Bound<'py, PyAny>>,
        enable_gqa: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let mut return_dmask = false;
        let own = own_flag("return_dmask", &mut return_dmask);
        let mut options = Options::read("sdpa_backward", dropout_p, is_causal, scale, options, own)?;
        let inputs = Inputs::read(query, key, value, attn_mask, enable_gqa, options.block_mask())?;
        backward([query, grad_out, out, lse], &inputs, &mut options, return_dmask)
    }

    /// What would run for a call: level, kernel, tiles and memory, as text. Arguments as for `sdpa`.
    ///
    /// gradients: True for `sdpa_backward`.
    ///
    /// >>> import attn, numpy as np
    /// >>> x = np.ones((1, 2, 3, 8), np.float32)
    /// >>> "f32" in attn.explain(x, x, x)
    /// True
    #[pyfunction]
    #[pyo3(
        signature = (query, key, value, attn_mask=None, dropout_p=0.0, is_causal=false,
            scale=None, enable_gqa=false, **options),
        text_signature = "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, \
            scale=None, enable_gqa=False, *, \
            causal=None, window=None, softcap=None, temperature=None, sinks=None, alibi=None, \
            kv_lens=None, kv_starts=None, q_lens=None, cu_seqlens_q=None, cu_seqlens_k=None, block_mask=None, \
            seed=None, precision=\"exact\", reproducible=False, gradients=False, threads=None, level=None)"
    )]
    fn explain<'py>(
        query: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        attn_mask: Option<&Bound<'py, PyAny>>,
        dropout_p: f64,
        is_causal: bool,
        scale: Option<&Bound<'py, PyAny>>,
        enable_gqa: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<String> {
        let mut gradients = false;
        let own = own_flag("gradients", &mut gradients);
        let mut options = Options::read("explain", dropout_p, is_causal, scale, options, own)?;
        let inputs = Inputs::read(query, key, value, attn_mask, enable_gqa, options.block_mask())?;
        let whole = inputs.shape()?;
        options.fit(whole.q_heads, whole.batch)?;
        let (fold, bools) = (inputs.fold(&[])?, inputs.bools());
        let mut shape = whole;
        shape.batch /= fold.calls.max(1);
        options.check_fold(fold)?;
        let masks = if fold.calls == 0 { Masks::default() } else { inputs.masks(fold, &bools, 0)? };
        let attn = options.attention(0, shape.batch, masks);
        if gradients {
            let plan = attn_simd::backward::Plan::new(&attn, shape, options.level()).map_err(raised)?;
            return Ok(with_kind!(inputs.q.kind, |T| plan.explain(dtype::<T>(), dtype::<T>()).to_string()));
        }
        let plan = Plan::new(&attn, shape, options.level()).map_err(raised)?;
        Ok(with_kind!(inputs.q.kind, |T| plan.explain(dtype::<T>()).to_string()))
    }

    /// The page of `attn.heatmap`, whose docstring says what the arguments are. layers: [(query, key, value), ...].
    #[pyfunction]
    #[pyo3(
        signature = (layers, texts, attn_mask=None, dropout_p=0.0, is_causal=false,
            scale=None, enable_gqa=false, **options)
    )]
    fn heatmap_page<'py>(
        py: Python<'py>,
        layers: Vec<[Bound<'py, PyAny>; 3]>,
        texts: [Option<Bound<'py, PyAny>>; 4],
        attn_mask: Option<&Bound<'py, PyAny>>,
        dropout_p: f64,
        is_causal: bool,
        scale: Option<&Bound<'py, PyAny>>,
        enable_gqa: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<String> {
        let mut options = Options::read("heatmap", dropout_p, is_causal, scale, options, |key, _| match key {
            "precision" | "reproducible" | "threads" | "level" => {
                let text = format!("heatmap() got an unexpected keyword argument '{key}'");
                Err(PyTypeError::new_err(text))
            }
            _ => Ok(false),
        })?;
        let read = |[query, key, value]: &[Bound<'py, PyAny>; 3]| {
            Inputs::read(query, key, value, attn_mask, enable_gqa, options.block_mask())
        };
        let inputs = layers.iter().map(read).collect::<PyResult<Vec<_>>>()?;
        let [title, note, tokens, keys] = texts;
        let text = |text: Option<Bound<'py, PyAny>>| text.map(|text| text.extract::<String>()).transpose();
        let list = |list: Option<Bound<'py, PyAny>>| list.map(|list| list.extract::<Vec<String>>()).transpose();
        let texts = Texts { title: text(title)?, note: text(note)?, tokens: list(tokens)?, keys: list(keys)? };
        heatmap::page(py, &inputs, &mut options, texts)
    }

    /// The instruction sets of this machine that have kernels, the best one last.
    ///
    /// >>> import attn
    /// >>> "portable" in attn.levels()
    /// True
    #[pyfunction]
    fn levels() -> Vec<&'static str> {
        Level::available().map(Level::name).collect()
    }

    /// Joins the results of one query over disjoint parts of the keys: exact, whatever the parts.
    ///
    /// parts: [(out, lse), ...], out (..., q_len, value_dim) and lse (..., q_len) float32, as `sdpa` gives them with
    /// return_lse=True; without sinks, or with sinks in one part only. Returns (out, lse) over all keys.
    ///
    /// >>> import attn, numpy as np
    /// >>> q, k = np.ones((2, 3, 8), np.float32), np.ones((2, 9, 8), np.float32)
    /// >>> parts = [attn.sdpa(q, k[:, part], k[:, part], return_lse=True) for part in (slice(0, 4), slice(4, 9))]
    /// >>> out, lse = attn.merge(parts)
    /// >>> bool(np.allclose(out, attn.sdpa(q, k, k)))
    /// True
    #[pyfunction]
    fn merge<'py>(parts: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        parts::merge(parts)
    }

    /// Rotary positions applied to queries or keys, x: (..., tokens, head_dim), 2 to 5 axes.
    ///
    /// positions: that of the first token, or (tokens,), or (batch, tokens) integers.
    /// pairing: "half" pairs dim i with i + d/2 (Llama in Hugging Face form), "interleaved" 2i with 2i + 1.
    /// rotary_dim: only the first dims turn. out: the array to write, which may be x itself.
    ///
    /// >>> import attn, numpy as np
    /// >>> attn.rope(np.array([[1, 0], [1, 0]], np.float32), pairing="interleaved").round(4).tolist()
    /// [[1.0, 0.0], [0.5403000116348267, 0.8414999842643738]]
    #[pyfunction]
    #[pyo3(signature = (x, positions=None, *, base=10000.0, pairing="half", rotary_dim=None, out=None),
        text_signature = "(x, positions=0, *, base=10000.0, pairing=\"half\", rotary_dim=None, out=None)")]
    fn rope<'py>(
        x: &Bound<'py, PyAny>,
        positions: Option<&Bound<'py, PyAny>>,
        base: f64,
        pairing: &str,
        rotary_dim: Option<usize>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let places = positions.map_or(Ok(Places::Offset(0)), Places::read)?;
        rotary::rope(x, &places, (pairing, base, rotary_dim), out)
    }

    fn dtype<T: attn_core::Element + Plain>() -> attn_core::Dtype {
        T::DTYPE
    }

    /// One result, or two as a tuple.
    fn pair<'py>(
        py: Python<'py>,
        first: Option<Bound<'py, PyAny>>,
        second: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match (first, second) {
            (Some(first), None) => Ok(first),
            (first, second) => Ok((first, second).into_pyobject(py)?.into_any()),
        }
    }
}
