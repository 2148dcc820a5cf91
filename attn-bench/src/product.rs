//! Products of matrices as [`parts`](crate::parts) needs them: where a matrix lies, and who multiplies.
//!
//! The product is the caller's, because fast ones need what this crate forbids: a pointer. [`by_ndarray`] is the one
//! without.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, ShapeBuilder};

/// Where a matrix lies in a slice: element `(r, c)` at `offset + r·strides[0] + c·strides[1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Of the first element.
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// From a row to the next, and from a column to the next.
    pub strides: [usize; 2],
}

impl Place {
    /// A matrix row by row, alone in its slice.
    pub const fn whole(rows: usize, cols: usize) -> Self {
        Self { offset: 0, rows, cols, strides: [cols, 1] }
    }

    /// Some of its columns.
    #[must_use]
    pub const fn columns(self, first: usize, cols: usize) -> Self {
        Self { offset: self.offset + first * self.strides[1], cols, ..self }
    }

    /// Rows as columns.
    #[must_use]
    pub const fn transposed(self) -> Self {
        let [r, c] = self.strides;
        Self { rows: self.cols, cols: self.rows, strides: [c, r], ..self }
    }
}

/// `y = x·w` on this thread, whatever was in `y`.
pub type Product = fn((&mut [f32], Place), (&[f32], Place), (&[f32], Place));

/// Who multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Multiply {
    /// What the report calls it.
    pub name: &'static str,
    /// The product.
    pub product: Product,
}

/// By the `ndarray` crate (`matrixmultiply`, which goes up to AVX2).
pub const NDARRAY: Multiply = Multiply { name: "ndarray (matrixmultiply, up to AVX2)", product: by_ndarray };

/// `y = x·w` by `ndarray`.
///
/// # Panics
/// Where sizes disagree, a matrix does not lie in its slice, or elements of `y` share memory.
pub fn by_ndarray((y, to): (&mut [f32], Place), (x, left): (&[f32], Place), (w, right): (&[f32], Place)) {
    let shape = |place: Place| (place.rows, place.cols).strides(place.strides.into());
    let mut y = ArrayViewMut2::from_shape(shape(to), &mut y[to.offset..]).expect("the result lies in its slice");
    let x = ArrayView2::from_shape(shape(left), &x[left.offset..]).expect("the left matrix lies in its slice");
    let w = ArrayView2::from_shape(shape(right), &w[right.offset..]).expect("the right matrix lies in its slice");
    general_mat_mul(1.0, &x, &w, 0.0, &mut y);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_and_transposes_are_found() {
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; // 2 × 3
        let last = Place::whole(2, 3).columns(1, 2); // [2 3] [5 6]
        let mut y = [f32::NAN; 4];
        by_ndarray((&mut y, Place::whole(2, 2)), (&x, last), (&x, last.transposed()));
        assert_eq!(y, [13.0, 28.0, 28.0, 61.0]);
    }
}
