//! The memory of a cache: its numbers of one type, and its sizes.

use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{AppendCache, CacheView, RingCache};
use attn_core::{AttnError, Layout, View, ViewMut};
use attn_simd::KernelElement;
use attn_simd::decode::Source;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Keys and values of one number type.
pub(crate) enum Store {
    F32(Vec<f32>, Vec<f32>),
    F16(Vec<f16>, Vec<f16>),
    Bf16(Vec<bf16>, Vec<bf16>),
}

/// Evaluates an expression with the two vectors of a store.
macro_rules! stored {
    ($store:expr, |$k:ident, $v:ident| $body:expr) => {
        match $store {
            Store::F32($k, $v) => $body,
            Store::F16($k, $v) => $body,
            Store::Bf16($k, $v) => $body,
        }
    };
}
pub(crate) use stored;

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
    pub(crate) fn keys(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.slots, self.head_dim]
    }

    pub(crate) fn values(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.slots, self.value_dim]
    }

    /// The cache with so many tokens, to be read.
    pub(crate) fn view<'c, T: KernelElement>(
        &self,
        k: &'c [T],
        v: &'c [T],
        lens: &'c [usize],
    ) -> Result<Source<'c>, AttnError> {
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
pub(crate) fn zeros<T: Copy + Default>(sizes: [usize; 4]) -> PyResult<Vec<T>> {
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
