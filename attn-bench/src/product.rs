//! Where a matrix lies in a slice.

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
