//! The memory of a cache: keys and values as numbers, or as bytes in a format. [`Place`] gives the slots of new tokens;
//! `pages` assigns the pages.

use attn_core::formats::{Format, StoredCache, StoredRing, StoredRows, StoredRowsMut, StoredView, append_paged_stored};
use attn_core::half::{bf16, f16};
use attn_core::int8::{KeyScales, QuantizedView};
use attn_core::kv_cache::{AppendCache, CacheView, RingCache, append_paged};
use attn_core::{AttnError, Element, Layout, View, ViewMut};
use attn_simd::KernelElement;
use attn_simd::decode::Source;
use bytemuck::Zeroable;
use bytemuck::allocation::try_zeroed_slice_box;
use half::vec::HalfBitsVecExt;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::kind::Kind;
use crate::options::raised;
use crate::pages::Pages;

/// Formats of bytes by their names in Python, which for fp8 are those of torch and ml_dtypes.
const FORMATS: [(&str, Format); 5] = [
    ("int8", Format::Int8),
    ("q8_0", Format::Q8_0),
    ("q4_0", Format::Q4_0),
    ("float8_e4m3fn", Format::E4m3),
    ("float8_e5m2", Format::E5m2),
];

/// Keys and values, in this order.
pub(crate) enum Store {
    F32([Vec<f32>; 2]),
    F16([Vec<f16>; 2]),
    Bf16([Vec<bf16>; 2]),
    Bytes([Bytes; 2]),
}

/// Rows of bytes, with a scale for each token and head if the format has scales beside the bytes.
pub(crate) struct Bytes {
    format: Format,
    /// `[batch or pages, kv_heads, slots, bytes of a row]`.
    sizes: [usize; 4],
    data: Vec<u8>,
    scales: Vec<f32>,
}

/// Where tokens are.
#[derive(Clone)]
pub(crate) enum Place {
    /// In the first slots of each sequence.
    Slots,
    /// The first tokens, which stay, and the last ones in a ring.
    Ring { sinks: usize, window: usize },
    /// In pages that sequences take from a common stock.
    Pages(Pages),
}

/// What a cache is besides its numbers.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    /// Sequences or pages, and the slots of each.
    pub(crate) rows: usize,
    pub(crate) slots: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
}

/// New keys and values of one number type.
pub(crate) type New<'a, T> = [View<'a, T>; 2];

impl Sizes {
    /// The sizes of keys and of values.
    fn both(&self) -> [[usize; 4]; 2] {
        [self.head_dim, self.value_dim].map(|dim| [self.rows, self.kv_heads, self.slots, dim])
    }
}

impl Store {
    /// Zeros of a type, by its name.
    pub(crate) fn new(dtype: &str, sizes: &Sizes) -> PyResult<Self> {
        let [k, v] = sizes.both();
        match dtype {
            "float32" => Ok(Self::F32([zeros(k)?, zeros(v)?])),
            "float16" => Ok(Self::F16([zeros::<u16>(k)?.reinterpret_into(), zeros::<u16>(v)?.reinterpret_into()])),
            "bfloat16" => Ok(Self::Bf16([zeros::<u16>(k)?.reinterpret_into(), zeros::<u16>(v)?.reinterpret_into()])),
            _ => match FORMATS.into_iter().find(|(name, _)| *name == dtype) {
                Some((name, format)) => {
                    for (what, dim) in [("head_dim", k[3]), ("value_dim", v[3])] {
                        let block = format.block();
                        if !dim.is_multiple_of(block) {
                            let text = format!("{what} is {dim}; a multiple of {block} is wanted for {name}");
                            return Err(PyValueError::new_err(text));
                        }
                    }
                    Ok(Self::Bytes([Bytes::new(format, k)?, Bytes::new(format, v)?]))
                }
                None => {
                    let known = FORMATS.map(|(name, _)| format!("\"{name}\"")).join(", ");
                    let text =
                        format!("dtype is {dtype:?}; \"float32\", \"float16\", \"bfloat16\", {known} are supported");
                    Err(PyValueError::new_err(text))
                }
            },
        }
    }

    /// The same in memory of its own.
    pub(crate) fn copied(&self) -> PyResult<Self> {
        Ok(match self {
            Self::F32([k, v]) => Self::F32([copy(k)?, copy(v)?]),
            Self::F16([k, v]) => Self::F16([copy(k)?, copy(v)?]),
            Self::Bf16([k, v]) => Self::Bf16([copy(k)?, copy(v)?]),
            Self::Bytes([k, v]) => Self::Bytes([k.copied()?, v.copied()?]),
        })
    }

    /// The name of the type in which numbers are kept.
    pub(crate) fn dtype(&self) -> &'static str {
        match self {
            Self::F32(_) => Kind::F32.name(),
            Self::F16(_) => Kind::F16.name(),
            Self::Bf16(_) => Kind::Bf16.name(),
            Self::Bytes([k, _]) => {
                FORMATS.into_iter().find(|(_, format)| *format == k.format).map_or(k.format.name(), |(name, _)| name)
            }
        }
    }

    /// The only type that new tokens may have; `None` where all floats are encoded.
    pub(crate) fn takes(&self) -> Option<Kind> {
        match self {
            Self::F32(_) => Some(Kind::F32),
            Self::F16(_) => Some(Kind::F16),
            Self::Bf16(_) => Some(Kind::Bf16),
            Self::Bytes(_) => None,
        }
    }

    /// Bytes of keys and values, with their scales.
    pub(crate) fn bytes(&self) -> usize {
        let all = |sizes: [usize; 2]| sizes[0] + sizes[1];
        match self {
            Self::F32(both) => all(both.each_ref().map(|x| size_of_val(&x[..]))),
            Self::F16(both) => all(both.each_ref().map(|x| size_of_val(&x[..]))),
            Self::Bf16(both) => all(both.each_ref().map(|x| size_of_val(&x[..]))),
            Self::Bytes(both) => all(both.each_ref().map(|x| x.data.len() + size_of_val(&x.scales[..]))),
        }
    }

    /// The cache with so many tokens, to be read.
    pub(crate) fn source<'c>(
        &'c self,
        sizes: &Sizes,
        place: &'c Place,
        lens: &'c [usize],
    ) -> Result<Source<'c>, AttnError> {
        match self {
            Self::F32(both) => Ok(numbers(both, sizes, place, lens)?.into()),
            Self::F16(both) => Ok(numbers(both, sizes, place, lens)?.into()),
            Self::Bf16(both) => Ok(numbers(both, sizes, place, lens)?.into()),
            // The kernel reads int8 as numbers, which is faster than to widen bytes.
            Self::Bytes([k, v]) if k.format == Format::Int8 => {
                let [k_data, v_data] = [k, v].map(|x| View::new(bytemuck::cast_slice(&x.data), Layout::Bhsd, x.sizes));
                let cache = place.view(k_data?, v_data?, lens)?;
                Ok(QuantizedView::new(cache, KeyScales::PerToken(k.scales()?), v.scales()?)?.into())
            }
            Self::Bytes([k, v]) => {
                let cache = place.view(k.view()?, v.view()?, lens)?;
                Ok(Source::Stored(StoredView::new(cache, k.rows()?, v.rows()?)?))
            }
        }
    }
}

/// A cache of numbers, to be read.
fn numbers<'c, T: Copy>(
    [k, v]: &'c [Vec<T>; 2],
    sizes: &Sizes,
    place: &'c Place,
    lens: &'c [usize],
) -> Result<CacheView<'c, T>, AttnError> {
    let [k_sizes, v_sizes] = sizes.both();
    place.view(View::new(k, Layout::Bhsd, k_sizes)?, View::new(v, Layout::Bhsd, v_sizes)?, lens)
}

impl Place {
    fn view<'c, T: Copy>(
        &'c self,
        k: View<'c, T>,
        v: View<'c, T>,
        lens: &'c [usize],
    ) -> Result<CacheView<'c, T>, AttnError> {
        match self {
            Self::Slots => CacheView::of_slots(k, v, lens),
            &Self::Ring { sinks, window } => CacheView::of_ring(k, v, lens, sinks, window),
            Self::Pages(pages) => CacheView::of_pages(k, v, pages.table(lens)?),
        }
    }

    /// Takes new tokens into numbers. Over pages `lens` counts them already.
    pub(crate) fn append<T: KernelElement>(
        &self,
        both: &mut [Vec<T>; 2],
        sizes: &Sizes,
        lens: &mut [usize],
        new: New<'_, T>,
        counts: Option<&[usize]>,
    ) -> Result<(), AttnError> {
        let ([k, v], [k_sizes, v_sizes]) = (both, sizes.both());
        let (mut k, mut v) = (ViewMut::new(k, Layout::Bhsd, k_sizes)?, ViewMut::new(v, Layout::Bhsd, v_sizes)?);
        match (self, counts) {
            (&Self::Ring { sinks, window }, _) => RingCache::new(k, v, lens, sinks, window)?.insert(new[0], new[1]),
            (Self::Slots, None) => AppendCache::new(k, v, lens)?.append(new[0], new[1]),
            (Self::Slots, Some(counts)) => AppendCache::new(k, v, lens)?.append_ragged(new[0], new[1], counts),
            (Self::Pages(pages), counts) => append_paged(&mut k, &mut v, pages.table(lens)?, new[0], new[1], counts),
        }
    }

    /// Encodes new tokens into bytes. Over pages `lens` counts them already.
    pub(crate) fn encode<T: Element<Compute = f32>>(
        &self,
        both: &mut [Bytes; 2],
        lens: &mut [usize],
        new: New<'_, T>,
        counts: Option<&[usize]>,
    ) -> Result<(), AttnError> {
        let [k, v] = both;
        let (mut k, mut v) = (k.rows_mut()?, v.rows_mut()?);
        match (self, counts) {
            (&Self::Ring { sinks, window }, _) => StoredRing::new(k, v, lens, sinks, window)?.insert(new[0], new[1]),
            (Self::Slots, None) => StoredCache::new(k, v, lens)?.append(new[0], new[1]),
            (Self::Slots, Some(counts)) => StoredCache::new(k, v, lens)?.append_ragged(new[0], new[1], counts),
            (Self::Pages(pages), counts) => {
                append_paged_stored(&mut k, &mut v, pages.table(lens)?, new[0], new[1], counts)
            }
        }
    }
}

impl Bytes {
    /// Zeros for rows of so many numbers.
    fn new(format: Format, [rows, heads, slots, dim]: [usize; 4]) -> PyResult<Self> {
        let sizes = [rows, heads, slots, format.row_bytes(dim).map_err(raised)?];
        let scales = if format.is_scaled() { zeros([rows, heads, slots, 1])? } else { Vec::new() };
        Ok(Self { format, sizes, data: zeros(sizes)?, scales })
    }

    fn copied(&self) -> PyResult<Self> {
        Ok(Self { format: self.format, sizes: self.sizes, data: copy(&self.data)?, scales: copy(&self.scales)? })
    }

    fn of_scales(&self) -> [usize; 4] {
        let [rows, heads, slots, _] = self.sizes;
        [rows, heads, slots, 1]
    }

    fn view(&self) -> Result<View<'_, u8>, AttnError> {
        View::new(&self.data, Layout::Bhsd, self.sizes)
    }

    fn scales(&self) -> Result<View<'_, f32>, AttnError> {
        View::new(&self.scales, Layout::Bhsd, self.of_scales())
    }

    fn rows(&self) -> Result<StoredRows<'_>, AttnError> {
        StoredRows::new(self.format, self.format.is_scaled().then(|| self.scales()).transpose()?)
    }

    fn rows_mut(&mut self) -> Result<StoredRowsMut<'_>, AttnError> {
        let of_scales = self.of_scales();
        let bytes = ViewMut::new(&mut self.data, Layout::Bhsd, self.sizes)?;
        if !self.format.is_scaled() {
            return StoredRowsMut::new(self.format, bytes);
        }
        let scales = ViewMut::new(&mut self.scales, Layout::Bhsd, of_scales)?;
        StoredRowsMut::with_scales_per_token(self.format, bytes, scales)
    }
}

/// The name of a type: a text, or a dtype of NumPy, torch or ml_dtypes.
pub(crate) fn name_of(dtype: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(name) = dtype.extract::<String>() {
        return Ok(name);
    }
    for attribute in ["name", "__name__"] {
        if let Ok(name) = dtype.getattr(attribute).and_then(|name| name.extract::<String>()) {
            return Ok(name);
        }
    }
    let text = dtype.str()?.to_string();
    Ok(text.strip_prefix("torch.").unwrap_or(&text).to_owned())
}

/// A copy, or an error that names its size.
fn copy<T: Copy>(all: &[T]) -> PyResult<Vec<T>> {
    let mut copy = Vec::new();
    if copy.try_reserve_exact(all.len()).is_err() {
        let text = format!("a copy of {} bytes cannot be allocated", size_of_val(all));
        return Err(PyMemoryError::new_err(text));
    }
    copy.extend_from_slice(all);
    Ok(copy)
}

/// Zeros for a tensor, or an error that names their size. The system gives the memory when tokens are written.
fn zeros<T: Zeroable>(sizes: [usize; 4]) -> PyResult<Vec<T>> {
    let count = sizes.into_iter().try_fold(1usize, usize::checked_mul);
    match count.and_then(|count| try_zeroed_slice_box(count).ok()) {
        Some(mut zeros) => {
            attn_simd::advise_huge_pages(&mut zeros);
            Ok(zeros.into_vec())
        }
        None => Err(PyMemoryError::new_err(format!("a cache of the sizes {sizes:?} cannot be allocated"))),
    }
}
