//! Rows of a tensor of any type that several threads write: each is handed out exactly once.

#![allow(
    unsafe_code,
    reason = "the leaf: rows of one tensor written by several threads, through claims that are apart"
)]

use core::sync::atomic::{AtomicUsize, Ordering};

use attn_core::{Element, ViewMut};

use super::{RawView, Rows};

/// Rows of one claim at most.
const MOST: usize = 64;

/// The rows of a tensor `[batch, head, row, column]`, cut into claims of at most 64 rows of one head.
#[derive(Debug)]
pub(crate) struct RowQueue<'o, T> {
    view: RawView<'o, T>,
    sizes: [usize; 4],
    next: AtomicUsize,
}

impl<'o, T: Element> RowQueue<'o, T> {
    pub(crate) fn new(view: ViewMut<'o, T>) -> Self {
        let sizes = view.sizes();
        Self { view: RawView::new(view), sizes, next: AtomicUsize::new(0) }
    }

    /// Claims in all.
    fn len(&self) -> usize {
        let [batch, heads, rows, columns] = self.sizes;
        // Rows without columns are not written, and no memory bounds their number.
        if columns == 0 { 0 } else { batch * heads * rows.div_ceil(MOST) }
    }

    /// The next rows that nobody has, if any.
    pub(crate) fn claim(&self) -> Option<RowClaim<'_, 'o, T>> {
        // Relaxed is enough: the counter alone hands out rows, and the end of the call joins the threads.
        let index = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < self.len()).then(|| n + 1));
        let (index, [_, heads, all, _]) = (index.ok()?, self.sizes);
        let claims = all.div_ceil(MOST);
        let (head, first) = (index / claims, index % claims * MOST);
        let rows = Rows { batch: head / heads, head: head % heads, first, count: (all - first).min(MOST) };
        // SAFETY: the rows are inside the view, whose sizes these are, and the counter hands them out once.
        Some(unsafe { RowClaim::of(&self.view, rows, self.sizes[3]) })
    }
}

/// The exclusive right to write some rows of one head.
#[derive(Debug)]
pub(crate) struct RowClaim<'q, 'o, T> {
    view: &'q RawView<'o, T>,
    rows: Rows,
    columns: usize,
}

impl<'q, 'o, T: Element> RowClaim<'q, 'o, T> {
    /// A claim to rows of `columns` numbers.
    ///
    /// # Safety
    /// The rows lie inside the view, which has so many columns, and nobody else reads or writes them while the claim
    /// lives.
    pub(super) unsafe fn of(view: &'q RawView<'o, T>, rows: Rows, columns: usize) -> Self {
        Self { view, rows, columns }
    }

    /// Which rows.
    pub(crate) fn rows(&self) -> Rows {
        self.rows
    }

    /// Columns of a row.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// The `n`-th row, if its columns lie side by side.
    #[inline(always)]
    pub(crate) fn row(&mut self, n: usize) -> Option<&mut [T]> {
        let Rows { batch, head, first, count } = self.rows;
        assert!(n < count);
        if self.view.strides[3] != 1 {
            return None;
        }
        // SAFETY: as in `write`; the slice borrows the claim exclusively.
        Some(unsafe { core::slice::from_raw_parts_mut(self.view.at([batch, head, first + n, 0]), self.columns) })
    }

    /// Writes the `n`-th row, one column after the other.
    #[inline(always)]
    pub(crate) fn write(&mut self, n: usize, value: impl Fn(usize) -> T) {
        let (Rows { batch, head, first, count }, columns) = (self.rows, self.columns());
        assert!(n < count);
        let stride = self.view.strides[3];
        // SAFETY: the row lies inside the view: the claim's rows do, and `n` is one of them. This claim alone writes
        // them, as `of` requires, and a `ViewMut` has proved that no two elements share memory.
        unsafe {
            let start = self.view.at([batch, head, first + n, 0]);
            for column in 0..columns {
                start.offset(column as isize * stride).write(value(column));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use attn_core::Layout;

    use super::*;

    #[test]
    fn every_row_is_claimed_exactly_once_and_written_in_its_place() {
        for (layout, sizes) in
            [(Layout::Bhsd, [2, 3, 130, 5]), (Layout::Bshd, [2, 3, 64, 4]), (Layout::Bhsd, [1, 2, 7, 0])]
        {
            let [batch, heads, rows, columns] = sizes;
            let mut data = vec![-1.0f32; sizes.iter().product()];
            let queue = RowQueue::new(ViewMut::new(&mut data, layout, sizes).unwrap());
            let mut count = 0;
            while let Some(mut claim) = queue.claim() {
                let Rows { batch, head, first, count: some } = claim.rows();
                for n in 0..some {
                    let row = ((batch * heads + head) * rows + first + n) as f32;
                    claim.write(n, |column| row + column as f32 / 8.0);
                    count += 1;
                }
            }
            assert_eq!(count, if columns == 0 { 0 } else { batch * heads * rows });
            let view = attn_core::View::new(&data, layout, sizes).unwrap();
            for row in 0..count {
                let [b, h, r] = [row / (heads * rows), row / rows % heads, row % rows];
                for column in 0..columns {
                    assert_eq!(view.row(b, h, r).get(column), row as f32 + column as f32 / 8.0);
                }
            }
        }
    }
}
