//! The positions of the tokens of a call.

use crate::error::{AttnError, Result};
use crate::shape::product;

/// The positions of the tokens of a call, `[batch, seq]`. They may be negative: a rotation back.
///
/// ```
/// use attn_core::position::Positions;
/// let packed = Positions::Shared(&[0, 1, 2, 0, 1]); // two documents in one sequence
/// assert_eq!(packed.of(7, 3, 5), 0);
/// let decode = Positions::Offsets(&[17, 4]); // two sequences whose caches hold 17 and 4 tokens
/// assert_eq!(decode.of(1, 0, 1), 4);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Positions<'a> {
    /// Token `s` has position `offset + s`, in every sequence.
    Offset(isize),
    /// Token `s` of sequence `b` has position `offsets[b] + s`. `[batch]`.
    Offsets(&'a [isize]),
    /// One position per token, the same in every sequence. `[seq]`.
    Shared(&'a [isize]),
    /// One position per token. `[batch, seq]`, row-major.
    Each(&'a [isize]),
}

impl Positions<'_> {
    /// The position of one token, where each sequence has `seq_len`; 0 if a table is too short (which
    /// [`check`](Self::check) refuses).
    #[inline]
    pub fn of(&self, batch: usize, seq: usize, seq_len: usize) -> isize {
        let of = |table: &[isize], i: usize| table.get(i).copied().unwrap_or(0);
        match self {
            Self::Offset(offset) => offset.saturating_add_unsigned(seq),
            Self::Offsets(offsets) => of(offsets, batch).saturating_add_unsigned(seq),
            Self::Shared(positions) => of(positions, seq),
            Self::Each(positions) => of(positions, batch.wrapping_mul(seq_len).wrapping_add(seq)),
        }
    }

    /// Checks that the table has one entry per sequence or token.
    ///
    /// # Errors
    /// [`AttnError::Size`], [`AttnError::Overflow`].
    pub fn check(&self, batch: usize, seq: usize) -> Result<()> {
        match self {
            Self::Offset(_) => Ok(()),
            Self::Offsets(offsets) => AttnError::check_size("position offsets against batch", batch, offsets.len()),
            Self::Shared(positions) => AttnError::check_size("positions against seq", seq, positions.len()),
            Self::Each(positions) => {
                let all = product(&[batch, seq]).ok_or(AttnError::Overflow { what: "batch · seq" })?;
                AttnError::check_size("positions (batch · seq)", all, positions.len())
            }
        }
    }

    /// Checks that every position is a row of a table of `rows` rows.
    #[doc(hidden)]
    pub fn check_rows(&self, what: &'static str, batch: usize, seq: usize, rows: usize) -> Result<()> {
        self.check(batch, seq)?;
        for b in 0..batch {
            for s in 0..seq {
                let row = self.of(b, s, seq);
                let inside = usize::try_from(row).is_ok_and(|row| row < rows);
                if !inside {
                    // A negative index is reported as the largest number: there is no smaller one to name.
                    let value = usize::try_from(row).unwrap_or(usize::MAX);
                    return Err(AttnError::Index {
                        what,
                        at: b.saturating_mul(seq).saturating_add(s),
                        value,
                        limit: rows,
                    });
                }
            }
        }
        Ok(())
    }

    /// The largest position, and at least 0.
    pub(crate) fn largest(&self, batch: usize, seq: usize) -> isize {
        (0..batch).flat_map(|b| (0..seq).map(move |s| (b, s))).map(|(b, s)| self.of(b, s, seq)).fold(0, isize::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_row_by_row() {
        let each = Positions::Each(&[5, 6, 7, 1, 2, 3]);
        assert_eq!((each.of(0, 2, 3), each.of(1, 0, 3)), (7, 1));
        assert_eq!(Positions::Offset(-2).of(3, 1, 2), -1);
        assert_eq!(each.largest(2, 3), 7);
    }

    #[test]
    fn tables_of_the_wrong_size_are_refused() {
        assert!(Positions::Offsets(&[0]).check(2, 3).is_err());
        assert!(Positions::Shared(&[0, 1]).check(2, 3).is_err());
        assert!(Positions::Each(&[0; 5]).check(2, 3).is_err());
        assert!(Positions::Each(&[0; 6]).check(2, 3).is_ok());
        let err = Positions::Shared(&[0, -1]).check_rows("table", 1, 2, 4).unwrap_err();
        assert_eq!(err, AttnError::Index { what: "table", at: 1, value: usize::MAX, limit: 4 });
    }
}
