//! Caches in packed formats: attention over them, encoding, and Hadamard rotations.
//!
//! Engines that read such caches attend to the bytes in place; a second answer, of all engines, is that of the
//! rows as the library decodes them. Caches in int8 are two kinds of cache of the library, and each gives an answer.

use attn_core::formats::{Format, StoredRows, StoredView};
use attn_core::hadamard::{rotate, rotate_rows};
use attn_core::int8::{KeyScales, QuantizedView};
use attn_core::kv_cache::CacheView;
use attn_core::score::default_scale;
use attn_core::{Align, Attention, Element, Layout, Outputs, View, ViewMut};

use super::attention::{Tables, causal, options};
use crate::conformance::Tensor;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number, StepCall};

/// The format that a parameter names.
fn format(loaded: Loaded<'_>, parameter: &str) -> Result<Format, Stop> {
    let Some(name) = loaded.case.word(parameter)? else {
        return Err(Stop::Fail(format!("parameter {parameter} is missing")));
    };
    let found = Format::ALL.into_iter().find(|format| format.name() == name);
    found.ok_or_else(|| Stop::Skip(format!("caches in {name} are not built")))
}

/// The bytes of a cache's keys or values, and their format.
fn rows<'t>(loaded: Loaded<'t>, which: &str) -> Result<(View<'t, u8>, StoredRows<'t>), Stop> {
    let bytes = loaded.input(&format!("{which}_data"))?.view::<u8>()?;
    let scales = match loaded.optional(&format!("{which}_scale"))? {
        Some(scales) => Some(scales.view::<f32>()?),
        None => None,
    };
    Ok((bytes, StoredRows::new(format(loaded, &format!("{which}_format"))?, scales)?))
}

pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        if causal(loaded.case)? != Some(Align::BottomRight) {
            return Err(Stop::Skip("steps over a cache are causal at the bottom right".to_owned()));
        }
        let ((k_bytes, keys), (v_bytes, values)) = (rows(loaded, "k")?, rows(loaded, "v")?);
        let cache = StoredView::new(CacheView::of_tensors(k_bytes, v_bytes)?, keys, values)?;
        let q = loaded.input("q")?.view::<T>()?;
        let tables = Tables::of(loaded, k_bytes.sizes()[2])?;
        let attn = options(loaded, &tables)?;

        let [k_deq, v_deq] = decoded(&cache);
        let mut answers = Answers { produced: Produced::default(), value_rotation: loaded.case.size("v_hadamard")? };
        match loaded.case.size("k_hadamard")? {
            Some(block) => {
                let mut wide = widened(q);
                rotate_rows(&mut ViewMut::new(&mut wide, Layout::Bhsd, q.sizes())?, block)?;
                let q = View::new(&wide, Layout::Bhsd, q.sizes())?;
                answers.all(engine, &attn, q, cache, (&k_deq, &v_deq))?;
            }
            None => answers.all(engine, &attn, q, cache, (&k_deq, &v_deq))?,
        }
        let mut produced = answers.produced;
        let ([batch, heads, tokens, _], [head_dim, value_dim]) = (k_bytes.sizes(), cache.dims());
        produced.put("k_deq", &[batch, heads, tokens, head_dim], &k_deq);
        produced.put("v_deq", &[batch, heads, tokens, value_dim], &v_deq);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// All keys and all values as the library decodes them.
fn decoded(cache: &StoredView<'_>) -> [Vec<f32>; 2] {
    let ([batch, heads, tokens, _], [head_dim, value_dim]) = (cache.bytes().k().sizes(), cache.dims());
    let mut all = [head_dim, value_dim].map(|dim| vec![-12345.0; batch * heads * tokens * dim]);
    let [k, v] = &mut all;
    let (mut k_rows, mut v_rows) = (k.chunks_mut(head_dim.max(1)), v.chunks_mut(value_dim.max(1)));
    for n in 0..batch * heads * tokens {
        let (b, h, t) = (n / tokens / heads, n / tokens % heads, n % tokens);
        cache.key(b, h, t, k_rows.next().unwrap_or_default());
        cache.value(b, h, t, v_rows.next().unwrap_or_default());
    }
    all
}

/// The elements of a tensor, row by row.
fn widened<T: Number>(x: View<'_, T>) -> Vec<f32> {
    let [batch, heads, len, _] = x.sizes();
    let rows = (0..batch * heads * len).map(|n| x.row(n / len / heads, n / len % heads, n % len));
    rows.flat_map(|row| row.iter().map(|x| x.to_f64() as f32)).collect()
}

/// Outputs, in each way that an engine has.
struct Answers {
    produced: Produced,
    /// Of the values: outputs are rotated back.
    value_rotation: Option<usize>,
}

impl Answers {
    fn all<E: Engine, T: Number>(
        &mut self,
        engine: &E,
        attn: &Attention<'_>,
        q: View<'_, T>,
        cache: StoredView<'_>,
        (k, v): (&[f32], &[f32]),
    ) -> Result<(), Stop> {
        let ([_, _, q_len, _], [batch, kv_heads, kv_len, _]) = (q.sizes(), cache.bytes().k().sizes());
        let [head_dim, value_dim] = cache.dims();
        let wide = widened(q);
        let wide = View::new(&wide, Layout::Bhsd, q.sizes())?;
        let k = View::new(k, Layout::Bhsd, [batch, kv_heads, kv_len, head_dim])?;
        let v = View::new(v, Layout::Bhsd, [batch, kv_heads, kv_len, value_dim])?;
        let (y, lse) = super::attention::attend(engine, attn, wide, k, v, Layout::Bhsd)?;
        self.put(q.sizes(), value_dim, &y, &lse)?;
        // A step has no more queries than its cache has tokens.
        if engine.reads_stored() && q_len <= kv_len {
            self.step(q, value_dim, |outputs| T::call_stored(engine, StepCall { attn, q, cache, outputs }))?;
        }
        let int8 = [cache.keys(), cache.values()].iter().all(|rows| rows.format() == Format::Int8);
        if engine.reads_int8() && int8 && q_len <= kv_len {
            let [k, v] = [cache.bytes().k(), cache.bytes().v()]
                .map(|bytes| bytes.data().iter().map(|byte| byte.cast_signed()).collect::<Vec<i8>>());
            let numbers = |x, sizes| View::new(x, Layout::Bhsd, sizes);
            let (k, v) = (numbers(&k, cache.bytes().k().sizes())?, numbers(&v, cache.bytes().v().sizes())?);
            let (Some(k_scales), Some(v_scales)) = (cache.keys().scales(), cache.values().scales()) else {
                return Err(Stop::Fail("int8 without scales".to_owned()));
            };
            let cache = QuantizedView::new(CacheView::of_tensors(k, v)?, KeyScales::PerToken(k_scales), v_scales)?;
            self.step(q, value_dim, |outputs| T::call_int8(engine, StepCall { attn, q, cache, outputs }))?;
        }
        Ok(())
    }

    /// A step, whose outputs `run` writes.
    fn step<T: Number>(
        &mut self,
        q: View<'_, T>,
        value_dim: usize,
        run: impl FnOnce(Outputs<'_, T>) -> attn_core::Result<()>,
    ) -> Result<(), Stop> {
        let [batch, heads, q_len, _] = q.sizes();
        let mut y = vec![T::from_f64(-12345.0); batch * heads * q_len * value_dim];
        let mut lse = vec![T::Compute::from_f64(-12345.0); batch * heads * q_len];
        run(Outputs::new(ViewMut::new(&mut y, Layout::Bhsd, [batch, heads, q_len, value_dim])?).lse(&mut lse))?;
        self.put(q.sizes(), value_dim, &y, &lse)
    }

    /// Adds an answer.
    fn put<T: Element, L: Element>(
        &mut self,
        [batch, heads, q_len, _]: [usize; 4],
        value_dim: usize,
        y: &[T],
        lse: &[L],
    ) -> Result<(), Stop> {
        let sizes = [batch, heads, q_len, value_dim];
        match self.value_rotation {
            Some(block) => {
                let mut wide: Vec<f32> = y.iter().map(|x| x.to_f64() as f32).collect();
                rotate_rows(&mut ViewMut::new(&mut wide, Layout::Bhsd, sizes)?, block)?;
                self.produced.put("y", &sizes, &wide);
            }
            None => self.produced.put("y", &sizes, y),
        }
        self.produced.put("lse", &[batch, heads, q_len], lse);
        Ok(())
    }
}

/// Rows encoded in a format, without a scale beside them.
pub(super) fn quantize(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    let (format, x) = (format(loaded, "format")?, loaded.input("x")?);
    let [rows, dim] = x.sizes()?;
    let row_bytes = format.row_bytes(dim)?;
    let mut bytes = vec![0xa5; rows * row_bytes];
    for (x, bytes) in x.values::<f32>()?.chunks(dim.max(1)).zip(bytes.chunks_mut(row_bytes.max(1))) {
        format.encode(x, bytes)?;
    }
    let data: Vec<f32> = bytes.into_iter().map(f32::from).collect();
    let mut produced = Produced::default();
    produced.put("data", &[rows, row_bytes], &data);
    Ok(produced)
}

/// Rotated rows, and their products.
pub(super) fn hadamard(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T: Number + Stored>(loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let Some(block) = loaded.case.size("block")? else {
            return Err(Stop::Fail("parameter block is missing".to_owned()));
        };
        let rotated = |tensor: &Tensor| -> Result<([usize; 4], Vec<f32>), Stop> {
            let x = tensor.view::<T>()?;
            let (sizes, mut x) = (x.sizes(), widened(x));
            for row in x.chunks_mut(sizes[3].max(1)) {
                rotate(row, block)?;
            }
            Ok((sizes, x))
        };
        let ((q_sizes, q), (k_sizes, k)) = (rotated(loaded.input("q")?)?, rotated(loaded.input("k")?)?);
        let (q_view, k_view) = (View::new(&q, Layout::Bhsd, q_sizes)?, View::new(&k, Layout::Bhsd, k_sizes)?);
        let ([batch, heads, q_len, dim], [_, kv_heads, kv_len, _]) = (q_sizes, k_sizes);
        let scale = loaded.case.number("scale")?.unwrap_or_else(|| default_scale(dim));
        let mut scores = Vec::with_capacity(batch * heads * q_len * kv_len);
        for n in 0..batch * heads * q_len {
            let (b, h, i) = (n / q_len / heads, n / q_len % heads, n % q_len);
            for j in 0..kv_len {
                let key = k_view.row(b, h / (heads / kv_heads.max(1)).max(1), j);
                let dot: f64 =
                    q_view.row(b, h, i).iter().zip(key.iter()).map(|(q, k)| f64::from(q) * f64::from(k)).sum();
                scores.push(scale * dot);
            }
        }
        let mut produced = Produced::default();
        produced.put("q_rot", &q_sizes, &q);
        produced.put("k_rot", &k_sizes, &k);
        produced.put("scores", &[batch, heads, q_len, kv_len], &scores);
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}
