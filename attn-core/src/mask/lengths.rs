//! A length for all sequences, or one for each.

use crate::error::{AttnError, Result};

/// A length that holds for every sequence of the batch, or one per sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lengths<'a> {
    /// The same for all.
    All(usize),
    /// One per sequence, `[batch]`.
    PerBatch(&'a [usize]),
}

impl Lengths<'_> {
    /// The length of one sequence; 0 if the table is too short (which [`Mask::check`](crate::Mask::check) refuses).
    #[inline]
    pub fn of(&self, batch: usize) -> usize {
        match self {
            Self::All(n) => *n,
            Self::PerBatch(lens) => lens.get(batch).copied().unwrap_or(0),
        }
    }

    /// Checks that there is one entry per sequence and none above `limit`.
    pub(crate) fn check(&self, what: &'static str, batch: usize, limit: usize) -> Result<()> {
        let lens = match self {
            Self::All(n) => core::slice::from_ref(n),
            Self::PerBatch(lens) => {
                AttnError::check_size(what, batch, lens.len())?;
                lens
            }
        };
        match lens.iter().position(|&n| n > limit) {
            Some(at) => {
                let value = lens.get(at).copied().unwrap_or(0);
                Err(AttnError::Index { what, at, value, limit: limit.saturating_add(1) })
            }
            None => Ok(()),
        }
    }
}
