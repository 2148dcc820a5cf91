//! Rows of bytes that tokens are written to.

use super::format::Format;
use super::stored::StoredRows;
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::kv_cache::memory::Memory;
use crate::row::Row;
use crate::shape::check_same;
use crate::view::{View, ViewMut};

/// The keys, or the values, of a cache in bytes: `[batch or pages, kv_heads, slots, bytes of a row]`, the bytes of a
/// row side by side, and scales if the [`Format`] has some.
#[derive(Debug)]
pub struct StoredRowsMut<'c> {
    bytes: ViewMut<'c, u8>,
    format: Format,
    scales: Scales<'c>,
    dim: usize,
}

/// What numbers are divided by before they are encoded.
#[derive(Debug)]
enum Scales<'c> {
    None,
    /// Broadcast to the rows, and read only.
    Fixed(View<'c, f32>),
    /// One for each row, chosen and written when the row is.
    PerToken(ViewMut<'c, f32>),
}

impl<'c> StoredRowsMut<'c> {
    /// Rows of a format without scales beside the bytes.
    ///
    /// # Errors
    /// [`AttnError::Size`] if rows are no whole number of blocks, or the format has scales;
    /// [`AttnError::Unsupported`] if the bytes of a row are not contiguous.
    #[inline]
    pub fn new(format: Format, bytes: ViewMut<'c, u8>) -> Result<Self> {
        let (_, dim) = StoredRows::new(format, None)?.for_bytes(bytes.as_view())?;
        Ok(Self { bytes, format, scales: Scales::None, dim })
    }

    /// Rows whose scales are known before, as `[1, 1, 1, 1]`, `[1, kv_heads, 1, 1]` or anything that broadcasts to
    /// `[batch or pages, kv_heads, slots, 1]`. What is beyond a scale saturates; by a scale of 0 everything is 0.
    ///
    /// # Errors
    /// As [`new`](Self::new), for a format that has no scales; [`AttnError::Broadcast`].
    #[inline]
    pub fn with_scales(format: Format, bytes: ViewMut<'c, u8>, scales: View<'c, f32>) -> Result<Self> {
        let (rows, dim) = StoredRows::new(format, Some(scales))?.for_bytes(bytes.as_view())?;
        let scales = rows.scales().map_or(Scales::None, Scales::Fixed);
        Ok(Self { bytes, format, scales, dim })
    }

    /// Rows each of which gets a scale of its own when it is written, its largest magnitude divided by
    /// [`Format::largest`]; `scales` is `[batch or pages, kv_heads, slots, 1]`. A row with a NaN or ±∞ gets the scale
    /// NaN: the whole row becomes NaN.
    ///
    /// # Errors
    /// As [`with_scales`](Self::with_scales); [`AttnError::Size`] if there is not one scale for each row.
    #[inline]
    pub fn with_scales_per_token(format: Format, bytes: ViewMut<'c, u8>, scales: ViewMut<'c, f32>) -> Result<Self> {
        let (_, dim) = StoredRows::new(format, Some(scales.as_view()))?.for_bytes(bytes.as_view())?;
        let [batch, heads, slots, _] = bytes.sizes();
        for (expected, found) in [batch, heads, slots, 1].into_iter().zip(scales.sizes()) {
            AttnError::check_size("scales [batch, kv_heads, slots, 1] of stored rows", expected, found)?;
        }
        Ok(Self { bytes, format, scales: Scales::PerToken(scales), dim })
    }

    /// The same rows, to be read.
    #[inline]
    pub fn rows(&self) -> StoredRows<'_> {
        let scales = match &self.scales {
            Scales::None => None,
            Scales::Fixed(scales) => Some(*scales),
            Scales::PerToken(scales) => Some(scales.as_view()),
        };
        StoredRows::of_checked(self.format, scales)
    }

    /// Their bytes.
    #[inline]
    pub fn bytes(&self) -> View<'_, u8> {
        self.bytes.as_view()
    }

    /// Writes all rows: `x` is `[batch or pages, kv_heads, slots, dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`], before anything is written.
    #[inline]
    pub fn encode<T: Element<Compute = f32>>(&mut self, x: View<'_, T>) -> Result<()> {
        check_same("rows to be encoded", Memory::<T>::of_numbers(self), x.sizes())?;
        let [rows, heads, slots, _] = x.sizes();
        for row in 0..rows {
            for head in 0..heads {
                for slot in 0..slots {
                    self.write([row, head, slot], x.row(row, head, slot));
                }
            }
        }
        Ok(())
    }

    /// Writes one row.
    #[inline]
    fn write<T: Element<Compute = f32>>(&mut self, [row, head, slot]: [usize; 3], x: Row<'_, T>) {
        let x = || x.iter().map(|x| x.widen());
        let scale = match &mut self.scales {
            Scales::None => None,
            Scales::Fixed(scales) => Some(scales.at(row, head, slot, 0)),
            Scales::PerToken(scales) => {
                let scale = chosen(x(), self.format.largest().unwrap_or(1.0));
                scales.set(row, head, slot, 0, scale);
                Some(scale)
            }
        };
        let Some(bytes) = self.bytes.row_mut(row, head, slot) else { return };
        match scale {
            None => self.format.narrow(x(), bytes),
            Some(scale) => self.format.narrow(x().map(|x| if scale == 0.0 { 0.0 } else { x / scale }), bytes),
        }
    }
}

/// The scale of a row: its largest magnitude divided by the format's; NaN if a number is not finite.
#[inline]
fn chosen(mut x: impl Iterator<Item = f32>, largest: f32) -> f32 {
    let of_row = x.try_fold(0.0f32, |most, x| x.is_finite().then(|| most.max(x.abs())));
    of_row.map_or(f32::NAN, |most| most / largest)
}

impl<T: Element<Compute = f32>> Memory<T> for StoredRowsMut<'_> {
    #[inline]
    fn of_numbers(&self) -> [usize; 4] {
        let [rows, heads, slots, _] = self.bytes.sizes();
        [rows, heads, slots, self.dim]
    }

    #[inline]
    fn store(&mut self, x: View<'_, T>, (sequence, token): (usize, usize), (row, slot): (usize, usize)) {
        let [_, heads, ..] = x.sizes();
        for head in 0..heads {
            self.write([row, head, slot], x.row(sequence, head, token));
        }
    }
}
