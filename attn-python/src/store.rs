//! The memory of a cache: its numbers of one type, and its sizes.

use attn_core::half::{bf16, f16};
use attn_core::int8::{KeyScales, QuantizedView, quantize};
use attn_core::kv_cache::{AppendCache, CacheView, RingCache};
use attn_core::{AttnError, Layout, View, ViewMut};
use attn_simd::KernelElement;
use attn_simd::decode::Source;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyValueError};
use pyo3::prelude::*;

use crate::raw::Kind;

/// Keys and values of one number type.
pub(crate) enum Store {
    F32(Vec<f32>, Vec<f32>),
    F16(Vec<f16>, Vec<f16>),
    Bf16(Vec<bf16>, Vec<bf16>),
    I8(Int8),
}

/// Keys and values in int8, with a scale for each token and head.
pub(crate) struct Int8 {
    k: Vec<i8>,
    v: Vec<i8>,
    k_scales: Vec<f32>,
    v_scales: Vec<f32>,
}

/// Evaluates an expression with the two vectors of a store, or another one with its int8.
macro_rules! stored {
    ($store:expr, |$k:ident, $v:ident| $body:expr, |$int8:ident| $other:expr) => {
        match $store {
            Store::I8($int8) => $other,
            Store::F32($k, $v) => $body,
            Store::F16($k, $v) => $body,
            Store::Bf16($k, $v) => $body,
        }
    };
}
pub(crate) use stored;

impl Store {
    /// Zeros of a type, by its name.
    pub(crate) fn new(dtype: &str, sizes: &Sizes) -> PyResult<Self> {
        let (k, v) = (sizes.keys(), sizes.values());
        let scales = [sizes.batch, sizes.kv_heads, sizes.slots, 1];
        match dtype {
            "float32" => Ok(Self::F32(zeros(k)?, zeros(v)?)),
            "float16" => Ok(Self::F16(zeros(k)?, zeros(v)?)),
            "bfloat16" => Ok(Self::Bf16(zeros(k)?, zeros(v)?)),
            "int8" if sizes.ring.is_some() => {
                Err(PyNotImplementedError::new_err("not supported: int8 in a cache with a window"))
            }
            "int8" => {
                Ok(Self::I8(Int8 { k: zeros(k)?, v: zeros(v)?, k_scales: zeros(scales)?, v_scales: zeros(scales)? }))
            }
            other => {
                let known = "\"float32\", \"float16\", \"bfloat16\" and \"int8\" are supported";
                Err(PyValueError::new_err(format!("dtype is {other:?}; {known}")))
            }
        }
    }

    /// The type of tokens, and the name of that in which they are kept.
    pub(crate) fn kinds(&self) -> (Kind, &'static str) {
        match self {
            Self::F32(..) => (Kind::F32, "float32"),
            Self::F16(..) => (Kind::F16, "float16"),
            Self::Bf16(..) => (Kind::Bf16, "bfloat16"),
            Self::I8(_) => (Kind::F32, "int8"),
        }
    }

    /// Bytes of keys and values, with their scales.
    pub(crate) fn bytes(&self) -> usize {
        stored!(self, |k, v| size_of_val(&k[..]) + size_of_val(&v[..]), |int8| {
            let scales = size_of_val(&int8.k_scales[..]) + size_of_val(&int8.v_scales[..]);
            int8.k.len() + int8.v.len() + scales
        })
    }

    /// The cache with so many tokens, to be read.
    pub(crate) fn source<'c>(&'c self, sizes: &Sizes, lens: &'c [usize]) -> Result<Source<'c>, AttnError> {
        stored!(self, |k, v| sizes.view(k, v, lens), |int8| int8.view(sizes, lens))
    }
}

impl Int8 {
    fn view<'c>(&'c self, sizes: &Sizes, lens: &'c [usize]) -> Result<Source<'c>, AttnError> {
        let (k, v) =
            (View::new(&self.k, Layout::Bhsd, sizes.keys())?, View::new(&self.v, Layout::Bhsd, sizes.values())?);
        let scales = [sizes.batch, sizes.kv_heads, sizes.slots, 1];
        let k_scales = KeyScales::PerToken(View::new(&self.k_scales, Layout::Bhsd, scales)?);
        let v_scales = View::new(&self.v_scales, Layout::Bhsd, scales)?;
        Ok(QuantizedView::new(CacheView::of_slots(k, v, lens)?, k_scales, v_scales)?.into())
    }

    /// Quantises new tokens, `counts` of them of each sequence.
    pub(crate) fn append(
        &mut self,
        sizes: &Sizes,
        lens: &mut [usize],
        [k, v]: [View<'_, f32>; 2],
        counts: Option<&[usize]>,
    ) -> Result<(), AttnError> {
        let [.., n, _] = k.sizes();
        let wanted = |dim| [sizes.batch, sizes.kv_heads, n, dim];
        for (what, found, wanted) in [
            ("new keys against the cache", k.sizes(), wanted(sizes.head_dim)),
            ("new values against the cache and new keys", v.sizes(), wanted(sizes.value_dim)),
        ] {
            found.into_iter().zip(wanted).try_for_each(|(found, wanted)| AttnError::check_size(what, wanted, found))?;
        }
        if let Some(counts) = counts {
            AttnError::check_size("counts against batch", sizes.batch, counts.len())?;
        }
        let count = |b: usize| counts.map_or(n, |counts| counts[b]);
        for (at, &len) in lens.iter().enumerate() {
            for (what, value, most) in
                [("counts", count(at), n), ("cached tokens", len.saturating_add(count(at)), sizes.slots)]
            {
                if value > most {
                    return Err(AttnError::Index { what, at, value, limit: most.saturating_add(1) });
                }
            }
        }
        let mut row = vec![0.0; sizes.head_dim.max(sizes.value_dim)];
        for (b, len) in lens.iter_mut().enumerate() {
            for h in 0..sizes.kv_heads {
                for token in 0..count(b) {
                    let slot = (b * sizes.kv_heads + h) * sizes.slots + *len + token;
                    for (from, dim, numbers, scales) in [
                        (k, sizes.head_dim, &mut self.k, &mut self.k_scales),
                        (v, sizes.value_dim, &mut self.v, &mut self.v_scales),
                    ] {
                        let row = &mut row[..dim];
                        row.iter_mut().zip(from.row(b, h, token).iter()).for_each(|(to, x)| *to = x);
                        scales[slot] = quantize(row, &mut numbers[slot * dim..][..dim]);
                    }
                }
            }
            *len += count(b);
        }
        Ok(())
    }
}

/// What a cache is besides its numbers.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    pub(crate) slots: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// Tokens that are kept for ever, and the last ones that are.
    pub(crate) ring: Option<(usize, usize)>,
}

impl Sizes {
    fn keys(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.slots, self.head_dim]
    }

    fn values(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.slots, self.value_dim]
    }

    /// The cache with so many tokens, to be read.
    fn view<'c, T: KernelElement>(&self, k: &'c [T], v: &'c [T], lens: &'c [usize]) -> Result<Source<'c>, AttnError> {
        let (k, v) = (View::new(k, Layout::Bhsd, self.keys())?, View::new(v, Layout::Bhsd, self.values())?);
        Ok(match self.ring {
            None => CacheView::of_slots(k, v, lens)?.into(),
            Some((sinks, window)) => CacheView::of_ring(k, v, lens, sinks, window)?.into(),
        })
    }

    /// Takes new tokens.
    pub(crate) fn append<T: KernelElement>(
        &self,
        (k, v, lens): (&mut [T], &mut [T], &mut [usize]),
        new: [View<'_, T>; 2],
        counts: Option<&[usize]>,
    ) -> Result<(), AttnError> {
        let (k, v) = (ViewMut::new(k, Layout::Bhsd, self.keys())?, ViewMut::new(v, Layout::Bhsd, self.values())?);
        match (self.ring, counts) {
            (Some((sinks, window)), _) => RingCache::new(k, v, lens, sinks, window)?.insert(new[0], new[1]),
            (None, None) => AppendCache::new(k, v, lens)?.append(new[0], new[1]),
            (None, Some(counts)) => AppendCache::new(k, v, lens)?.append_ragged(new[0], new[1], counts),
        }
    }
}

/// Zeros for a tensor, or an error that names their size.
fn zeros<T: Copy + Default>(sizes: [usize; 4]) -> PyResult<Vec<T>> {
    let count = sizes.into_iter().try_fold(1usize, usize::checked_mul);
    let mut data = Vec::new();
    match count.filter(|&count| data.try_reserve_exact(count).is_ok()) {
        Some(count) => {
            data.resize(count, T::default());
            Ok(data)
        }
        None => Err(PyMemoryError::new_err(format!("a cache of the sizes {sizes:?} cannot be allocated"))),
    }
}
