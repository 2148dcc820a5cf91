//! Attention that stops after some keys and resumes later, for schedulers that share one processor.
//!
//! A [`Cursor`] holds the progress of a call: its row, its key, and the row's softmax state. It borrows nothing, so
//! that a `static` or a task's state can hold it. The caller's scratch keeps the accumulated output row. Each call of
//! [`streaming::resume`](crate::streaming::resume) or [`int8::resume`](crate::int8::resume) checks its arguments again,
//! reads at most as many keys as its [`Budget`] allows, and returns. The result has the same bits for every cut.
//!
//! ```
//! use attn_core::resume::{Cursor, Progress};
//! use attn_core::{Attention, View, ViewMut, streaming};
//! let x = [1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0]; // three tokens of dim 2: q = k = v
//! let x = View::matrix(&x, 3, 2)?;
//! let (mut out, mut scratch, mut cursor) = ([0.0f32; 6], [0.0; 2], Cursor::new());
//! let mut calls = 0;
//! loop {
//!     let to = ViewMut::matrix(&mut out, 3, 2)?;
//!     calls += 1;
//!     if streaming::resume(&Attention::new(), x, x, x, to, &mut scratch, cursor.budget(5))? == Progress::Done {
//!         break; // other work goes here
//!     }
//! }
//! assert_eq!(calls, 3); // three rows of three keys and one ending: 12, in fives
//!
//! let mut whole = [0.0f32; 6];
//! streaming::forward(&Attention::new(), x, x, x, ViewMut::matrix(&mut whole, 3, 2)?, &mut scratch)?;
//! assert_eq!(out, whole);
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use core::ops::Range;

use crate::error::{AttnError, Result};
use crate::shape::AttnShape;

/// Whether a call has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[must_use]
pub enum Progress {
    /// Call again.
    Pending,
    /// Every row is written.
    Done,
}

/// How far a call has come; `S` is the softmax state of a row, [`RowState`](crate::softmax::RowState) or
/// [`IntState`](crate::int8::IntState).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cursor<S> {
    batch: usize,
    head: usize,
    query: usize,
    /// The next key; `None` before the row has begun.
    key: Option<usize>,
    state: S,
}

/// How many keys a call may read, from a cursor on; made by [`Cursor::budget`].
#[derive(Debug)]
pub struct Budget<'c, S> {
    cursor: &'c mut Cursor<S>,
    keys: usize,
}

impl<S: Default + Copy> Cursor<S> {
    /// Before the first row.
    pub fn new() -> Self {
        Self::default()
    }

    /// At most `keys` keys more. The end of a row counts as one key, so that the budget bounds the work of a call under
    /// every mask. A hidden key counts, unless it is outside of the mask's range.
    pub fn budget(&mut self, keys: usize) -> Budget<'_, S> {
        Budget { cursor: self, keys }
    }

    /// The current row: batch, query head, query. After the last row, the first of these is the batch size.
    pub fn row(&self) -> [usize; 3] {
        [self.batch, self.head, self.query]
    }

    /// The softmax of the row so far.
    pub fn state(&self) -> S {
        self.state
    }

    /// Checks that the cursor belongs to a call of this shape.
    fn check(&self, shape: &AttnShape) -> Result<()> {
        let inside = self.batch < shape.batch && self.head < shape.q_heads && self.query < shape.q_len;
        // Past the last row, or before the first of a call without rows.
        let between = self.head == 0 && self.query == 0 && (self.batch == shape.batch || self.batch == 0);
        if inside || between {
            return Ok(());
        }
        Err(AttnError::Index { what: "cursor row", at: self.head, value: self.query, limit: shape.q_len })
    }

    fn next_row(&mut self, shape: &AttnShape) {
        self.key = None;
        self.state = S::default();
        self.query += 1;
        if self.query >= shape.q_len {
            self.query = 0;
            self.head += 1;
        }
        if self.head >= shape.q_heads {
            self.head = 0;
            self.batch += 1;
        }
    }
}

/// What an engine does with one row.
pub(crate) trait Rows {
    /// The softmax state.
    type State: Default + Copy;
    /// The keys outside of which a row sees nothing.
    fn range(&self, row: [usize; 3]) -> Range<usize>;
    /// Makes ready for a row: clears the accumulators.
    fn begin(&mut self);
    /// Takes the visible keys of a range.
    fn take(&mut self, row: [usize; 3], keys: Range<usize>, state: &mut Self::State);
    /// Writes the row.
    fn finish(&mut self, row: [usize; 3], state: &Self::State);
}

/// Goes on at the cursor's position.
#[inline]
pub(crate) fn run<R: Rows>(shape: &AttnShape, rows: &mut R, budget: Budget<'_, R::State>) -> Result<Progress> {
    let Budget { cursor, keys: mut left } = budget;
    cursor.check(shape)?;
    if shape.rows() == 0 {
        return Ok(Progress::Done);
    }
    while cursor.batch < shape.batch {
        let row = cursor.row();
        let range = rows.range(row);
        let start = match cursor.key {
            Some(key) => key.clamp(range.start, range.end.max(range.start)),
            None => {
                rows.begin();
                range.start
            }
        };
        let end = range.end.min(start.saturating_add(left));
        rows.take(row, start..end, &mut cursor.state);
        left -= end.saturating_sub(start);
        cursor.key = Some(end);
        if end < range.end || left == 0 {
            return Ok(Progress::Pending);
        }
        left -= 1;
        rows.finish(row, &cursor.state);
        cursor.next_row(shape);
    }
    Ok(Progress::Done)
}

/// Goes from the first row to the last.
#[inline]
pub(crate) fn run_all<R: Rows>(shape: &AttnShape, rows: &mut R) -> Result<()> {
    let mut cursor = Cursor::new();
    // One round, unless `usize` runs out before the keys of all rows do.
    while run(shape, rows, cursor.budget(usize::MAX))? == Progress::Pending {}
    Ok(())
}
