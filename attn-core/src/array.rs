//! Views of `ndarray`'s arrays, without copying; with the feature `ndarray`. Axes are `[batch, heads, seq, dim]`.
//!
//! An array whose elements fill a stretch of memory becomes a view by `try_into`, whatever the order and direction of
//! its axes: `permuted_axes`, `invert_axis` and `t()` cost nothing. A slice of a larger array leaves gaps, and cannot
//! tell who owns the memory in them; [`View::of_part`] makes its view from the larger array.

use ndarray::{ArrayView4, ArrayViewMut4};

use crate::error::{AttnError, Result};
use crate::view::{View, ViewMut};

/// What an array with gaps is told.
const GAPS: AttnError = AttnError::Unsupported { what: "an array that is not contiguous; see View::of_part" };

/// Sizes, strides, and the index of the first element in the stretch of memory that the elements fill.
fn axes(shape: &[usize], strides: &[isize]) -> ([usize; 4], [isize; 4], usize) {
    let (mut sizes, mut steps, mut offset) = ([0; 4], [0; 4], 0usize);
    let pairs = shape.iter().zip(strides);
    for ((&size, &stride), (to_size, to_step)) in pairs.zip(sizes.iter_mut().zip(&mut steps)) {
        (*to_size, *to_step) = (size, stride);
        if stride < 0 {
            // An array's reach is in memory, so that neither product nor sum overflows.
            offset = offset.wrapping_add(size.saturating_sub(1).wrapping_mul(stride.unsigned_abs()));
        }
    }
    (sizes, steps, offset)
}

impl<'a, T: Copy> TryFrom<ArrayView4<'a, T>> for View<'a, T> {
    type Error = AttnError;

    /// # Errors
    /// [`AttnError::Unsupported`] if the elements leave gaps.
    ///
    /// ```
    /// use attn_core::View;
    /// use ndarray::Array4;
    /// // [batch, seq, heads, dim]
    /// let x = Array4::from_shape_fn((1, 3, 2, 4), |(_, s, h, d)| (100 * s + 10 * h + d) as f32);
    /// let x = View::try_from(x.view().permuted_axes([0, 2, 1, 3]))?;
    /// assert_eq!((x.sizes(), x.at(0, 1, 2, 3)), ([1, 2, 3, 4], 213.0));
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    fn try_from(array: ArrayView4<'a, T>) -> Result<Self> {
        let (sizes, strides, offset) = axes(array.shape(), array.strides());
        Self::strided(array.to_slice_memory_order().ok_or(GAPS)?, sizes, strides, offset)
    }
}

impl<'a, T: Copy> TryFrom<ArrayViewMut4<'a, T>> for ViewMut<'a, T> {
    type Error = AttnError;

    /// # Errors
    /// [`AttnError::Unsupported`] if the elements leave gaps.
    fn try_from(array: ArrayViewMut4<'a, T>) -> Result<Self> {
        let (sizes, strides, offset) = axes(array.shape(), array.strides());
        Self::strided(array.into_slice_memory_order().ok_or(GAPS)?, sizes, strides, offset)
    }
}

impl<'a, T: Copy> View<'a, T> {
    /// A slice of a larger array, or one that broadcasts: `owner` is all memory of the array that `part` was cut from.
    ///
    /// # Errors
    /// As [`View::strided`], if `part` is not inside the array.
    ///
    /// ```
    /// use attn_core::View;
    /// use ndarray::{Array4, s};
    /// let cache = Array4::<f32>::ones((1, 2, 100, 64));
    /// let part = cache.slice(s![.., .., ..10, ..;2]); // ten positions, every second channel
    /// let k = View::of_part(cache.as_slice_memory_order().unwrap(), part)?;
    /// assert_eq!(k.sizes(), [1, 2, 10, 32]);
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn of_part(owner: &'a [T], part: ArrayView4<'_, T>) -> Result<Self> {
        let (sizes, strides, _) = axes(part.shape(), part.strides());
        // `as_ptr` is the element [0, 0, 0, 0]. A part that begins before its owner or between elements is not the
        // owner's.
        let distance = part.as_ptr().addr().checked_sub(owner.as_ptr().addr());
        let offset = distance.and_then(|bytes| bytes.checked_div(size_of::<T>()));
        let offset = offset.filter(|_| !part.is_empty()).or(part.is_empty().then_some(0));
        Self::strided(owner, sizes, strides, offset.ok_or(AttnError::Underflow { what: "part of an array" })?)
    }
}
