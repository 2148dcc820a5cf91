//! A cache whose keys and values are bytes in a format. Any engine reads it, in any layout of its tokens.

use super::format::Format;
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::kv_cache::{CacheRope, CacheView, TokenRun};
use crate::position::rope::RopeTables;
use crate::row::Row;
use crate::shape::AttnShape;
use crate::view::View;

/// How the rows of keys or of values are stored: a format, and the scales of those that [have](Format::is_scaled) some.
#[derive(Clone, Copy, Debug)]
pub struct StoredRows<'c> {
    format: Format,
    scales: Option<View<'c, f32>>,
}

impl<'c> StoredRows<'c> {
    /// A format with its scales. Scales broadcast to `[batch or pages, kv_heads, slots, 1]`, as the rows lie:
    /// `[1, 1, 1, 1]` is one for the tensor, `[1, kv_heads, 1, 1]` one per head.
    ///
    /// ```
    /// use attn_core::formats::{Format, StoredRows};
    /// use attn_core::View;
    /// let per_tensor = View::broadcast(&[0.25f32], &[])?;
    /// assert!(StoredRows::new(Format::E4m3, Some(per_tensor)).is_ok());
    /// assert!(StoredRows::new(Format::E4m3, None).is_err());
    /// assert!(StoredRows::new(Format::Q8_0, Some(per_tensor)).is_err()); // blocks have their own
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// [`AttnError::Size`] for scales that are missing, or that the format does not have.
    #[inline]
    pub const fn new(format: Format, scales: Option<View<'c, f32>>) -> Result<Self> {
        match (format.is_scaled(), scales.is_some()) {
            (true, false) => {
                Err(AttnError::Size { what: "tensors of scales of fp8 or int8 rows", expected: 1, found: 0 })
            }
            (false, true) => {
                Err(AttnError::Size { what: "tensors of scales of rows without scales", expected: 0, found: 1 })
            }
            _ => Ok(Self { format, scales }),
        }
    }

    /// From checked parts.
    #[inline]
    pub(super) const fn of_checked(format: Format, scales: Option<View<'c, f32>>) -> Self {
        Self { format, scales }
    }

    /// The format.
    #[inline]
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The scales; in a [`StoredView`] broadcast to `[batch or pages, kv_heads, slots, 1]`.
    #[inline]
    pub const fn scales(&self) -> Option<View<'c, f32>> {
        self.scales
    }

    /// With scales as large as the rows are many. Checks the bytes.
    #[inline]
    pub(super) fn for_bytes(self, bytes: View<'_, u8>) -> Result<(Self, usize)> {
        let ([rows, heads, slots, row_bytes], [.., unit]) = (bytes.sizes(), bytes.strides());
        let dim = self.format.row_dim(row_bytes)?;
        if unit != 1 && row_bytes > 1 {
            return Err(AttnError::Unsupported { what: "stored rows whose bytes are not contiguous" });
        }
        let scales = match self.scales {
            Some(scales) => Some(broadcast(scales, [rows, heads, slots, 1])?),
            None => None,
        };
        Ok((Self { scales, ..self }, dim))
    }

    /// The scale of a row; 1 if there is none.
    #[inline]
    pub(super) fn scale(&self, row: usize, head: usize, slot: usize) -> f32 {
        self.scales.map_or(1.0, |scales| scales.at(row, head, slot, 0))
    }
}

/// The same numbers for more rows: strides of 0.
#[inline]
fn broadcast(scales: View<'_, f32>, to: [usize; 4]) -> Result<View<'_, f32>> {
    scales.check_broadcast("scales of stored rows", to)?;
    let mut strides = scales.strides();
    for (stride, size) in strides.iter_mut().zip(scales.sizes()) {
        if size == 1 {
            *stride = 0;
        }
    }
    View::strided(scales.data(), to, strides, scales.offset())
}

/// Keys and values in bytes, each in a [`Format`] of its own, in any layout.
///
/// The bytes are those of a [`CacheView`]: plain tensors, rows of slots, rings, pages. Its k is
/// `[batch or pages, kv_heads, slots, bytes of a key]`, its v `[…, bytes of a value]`; a row's bytes are contiguous.
/// A scale multiplies a key's score or a value's weight; of the bytes, a tile at a time is widened at most.
///
/// # How exact
///
/// Engines compute what they would on the decoded numbers in `f32`, to the same accuracy; with int8 and q8_0, to that
/// of a [`QuantizedView`](crate::int8::QuantizedView). They sum products with the codes before they multiply by a scale
/// beside the bytes: `|q|·largest code·head_dim` must be within `f32`.
///
/// ```
/// use attn_core::formats::{Format, StoredRows, StoredView};
/// use attn_core::kv_cache::{CacheView, Queries};
/// use attn_core::{Attention, Layout, View, ViewMut, streaming};
/// // Two tokens of dim 32 as ggml stores them in q8_0: 34 bytes each.
/// let (x, mut bytes) = ([[0.5f32; 32], [1.0; 32]], [[0u8; 34]; 2]);
/// for (x, bytes) in x.iter().zip(&mut bytes) {
///     Format::Q8_0.encode(x, bytes)?;
/// }
/// let bytes = View::new(bytes.as_flattened(), Layout::Bhsd, [1, 1, 2, 34])?;
/// let rows = StoredRows::new(Format::Q8_0, None)?;
/// let cache = StoredView::new(CacheView::of_tensors(bytes, bytes)?, rows, rows)?;
/// assert_eq!(cache.dims(), [32, 32]);
/// let (q, mut out) = ([0.0f32; 32], [0.0f32; 32]); // every score 0: the output is the mean
/// let (q, to) = (View::matrix(&q, 1, 32)?, ViewMut::matrix(&mut out, 1, 32)?);
/// streaming::forward_stored(&Attention::new(), q, Queries::All, cache, to, &mut [0.0; 32])?;
/// assert!(out.iter().all(|x| (x - 0.75).abs() < 1e-3));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct StoredView<'c> {
    bytes: CacheView<'c, u8>,
    keys: StoredRows<'c>,
    values: StoredRows<'c>,
    dims: [usize; 2],
    rope: Option<RopeTables<'c, f32>>,
}

impl<'c> StoredView<'c> {
    /// Pairs bytes with their formats.
    ///
    /// # Errors
    /// [`AttnError::Size`] if rows are no whole number of blocks, [`AttnError::Broadcast`] if scales do not
    /// broadcast to the rows, [`AttnError::Unsupported`] if the bytes of a row are not contiguous or the bytes
    /// have rope tables, which are those of [`cache_relative`](Self::cache_relative) here.
    #[inline]
    pub fn new(bytes: CacheView<'c, u8>, keys: StoredRows<'c>, values: StoredRows<'c>) -> Result<Self> {
        if bytes.rope().is_some() {
            return Err(AttnError::Unsupported { what: "rope tables of a cache's bytes" });
        }
        let ((keys, head_dim), (values, value_dim)) = (keys.for_bytes(bytes.k())?, values.for_bytes(bytes.v())?);
        Ok(Self { bytes: bytes.with_contiguous_rows(), keys, values, dims: [head_dim, value_dim], rope: None })
    }

    /// The bytes, and where tokens are in them.
    #[inline]
    pub const fn bytes(&self) -> &CacheView<'c, u8> {
        &self.bytes
    }

    /// How keys are stored.
    #[inline]
    pub const fn keys(&self) -> StoredRows<'c> {
        self.keys
    }

    /// How values are stored.
    #[inline]
    pub const fn values(&self) -> StoredRows<'c> {
        self.values
    }

    /// Numbers of a key and of a value.
    #[inline]
    pub const fn dims(&self) -> [usize; 2] {
        self.dims
    }

    /// RoPE tables that are applied to keys as they are read.
    #[inline]
    pub const fn rope(&self) -> Option<RopeTables<'c, f32>> {
        self.rope
    }

    /// [`CacheView::after`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn after(self, before: usize) -> Result<Self> {
        let this = Self { bytes: self.bytes.after(before)?, ..self };
        match this.rope {
            Some(tables) => this.cache_relative(tables),
            None => Ok(this),
        }
    }

    /// [`CacheView::cache_relative`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn cache_relative(self, tables: RopeTables<'c, f32>) -> Result<Self> {
        self.bytes.check_rope_of(&CacheRope::Single(tables), self.dims[0])?;
        Ok(Self { rope: Some(tables), ..self })
    }

    /// [`CacheView::shape`], of numbers.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn shape(&self, q: [usize; 4]) -> Result<AttnShape> {
        let ([_, heads, ..], [head_dim, value_dim], batch) = (self.bytes.k().sizes(), self.dims, self.bytes.batch());
        let kv_len = (0..batch).map(|b| self.bytes.len(b)).max().unwrap_or(0);
        AttnShape::new(q, [batch, heads, kv_len, head_dim], [batch, heads, kv_len, value_dim])
    }

    /// Writes the key of a token in real numbers. Nothing if there is no such token.
    #[inline]
    pub fn key(&self, sequence: usize, kv_head: usize, token: usize, out: &mut [f32]) {
        let Some(TokenRun { row, slot, .. }) = self.bytes.run(sequence, token) else { return };
        self.key_row(kv_head).read((row, slot), out);
    }

    /// Writes the value of a token in real numbers. Nothing if there is no such token.
    #[inline]
    pub fn value(&self, sequence: usize, kv_head: usize, token: usize, out: &mut [f32]) {
        let Some(TokenRun { row, slot, .. }) = self.bytes.run(sequence, token) else { return };
        self.value_row(kv_head).read((row, slot), out);
    }

    /// The keys of a head.
    #[inline]
    pub(crate) const fn key_row(&self, head: usize) -> HeadRows<'c> {
        HeadRows { bytes: self.bytes.k(), rows: self.keys, head }
    }

    /// The values of a head.
    #[inline]
    pub(crate) const fn value_row(&self, head: usize) -> HeadRows<'c> {
        HeadRows { bytes: self.bytes.v(), rows: self.values, head }
    }
}

/// The rows of one head, by row and slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadRows<'c> {
    bytes: View<'c, u8>,
    rows: StoredRows<'c>,
    head: usize,
}

impl HeadRows<'_> {
    /// Bytes of a row, and its scale.
    #[inline]
    fn row(&self, (row, slot): (usize, usize)) -> (&[u8], f32) {
        let bytes = self.bytes.row(row, self.head, slot).as_slice().unwrap_or_default();
        (bytes, self.rows.scale(row, self.head, slot))
    }

    /// Writes a row in real numbers.
    #[inline]
    pub(crate) fn read(&self, at: (usize, usize), out: &mut [f32]) {
        let (bytes, scale) = self.row(at);
        self.rows.format.widen(bytes, out);
        if self.rows.scales.is_some() {
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// `q·row`, in four interleaved chains, times the scale.
    #[inline]
    pub(crate) fn dot<T: Element<Compute = f32>>(&self, q: Row<'_, T>, at: (usize, usize)) -> f32 {
        let ((bytes, scale), mut sums, mut q) = (self.row(at), [0.0f32; 4], q.iter());
        self.rows.format.for_each_piece(bytes, |piece| {
            for four in piece.chunks(4) {
                for ((sum, &x), q) in sums.iter_mut().zip(four).zip(&mut q) {
                    *sum += q.widen() * x;
                }
            }
        });
        let [a, b, c, d] = sums;
        ((a + b) + (c + d)) * scale
    }

    /// `q·row` in double precision.
    #[inline]
    pub(crate) fn dot_f64<T: Element>(&self, q: Row<'_, T>, at: (usize, usize)) -> f64 {
        let ((bytes, scale), mut sum, mut q) = (self.row(at), 0.0, q.iter());
        self.rows.format.for_each_piece(bytes, |piece| {
            for (&x, q) in piece.iter().zip(&mut q) {
                sum += q.to_f64() * f64::from(x);
            }
        });
        sum * f64::from(scale)
    }

    /// `acc += weight · row`.
    #[inline]
    pub(crate) fn add_scaled(&self, acc: &mut [f32], weight: f32, at: (usize, usize)) {
        let ((bytes, scale), mut acc) = (self.row(at), acc.iter_mut());
        let weight = weight * scale;
        self.rows.format.for_each_piece(bytes, |piece| {
            for (&x, acc) in piece.iter().zip(&mut acc) {
                *acc += weight * x;
            }
        });
    }

    /// As [`add_scaled`](Self::add_scaled), in double precision.
    #[inline]
    pub(crate) fn add_f64(&self, acc: &mut [f64], weight: f64, at: (usize, usize)) {
        let ((bytes, scale), mut acc) = (self.row(at), acc.iter_mut());
        let weight = weight * f64::from(scale);
        self.rows.format.for_each_piece(bytes, |piece| {
            for (&x, acc) in piece.iter().zip(&mut acc) {
                *acc += weight * f64::from(x);
            }
        });
    }
}
