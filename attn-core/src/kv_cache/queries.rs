//! Which rows of q are queries of which sequence.

use core::ops::Range;

use super::checks::check_at_most;
use crate::error::{AttnError, Result};

/// Which rows of q are queries of which sequence. The queries of a sequence are its last tokens; the cache already
/// holds their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries<'q> {
    /// q is `[batch, q_heads, q_len, head_dim]`, all of it queries.
    All,
    /// q is `[batch, q_heads, q_len, head_dim]`; only the first `lens[b]` rows of sequence `b` are queries. The others
    /// are padding: their outputs are 0, their lse −∞.
    First(&'q [usize]),
    /// q is `[1, q_heads, total, head_dim]`: sequences one after the other, sequence `b` at `cu[b]..cu[b + 1]`
    /// (FlashAttention's `cu_seqlens`). Rows behind the last are padding.
    Packed(&'q [usize]),
}

impl Queries<'_> {
    /// Checks the sizes of q, `[rows, q_heads, q_len, head_dim]`, against a number of sequences.
    ///
    /// # Errors
    /// [`AttnError::Size`] if q or the lengths are of another number of sequences, [`AttnError::Order`] if `cu`
    /// decreases, [`AttnError::Index`] if lengths exceed the rows of q.
    pub fn check(&self, [rows, _, q_len, _]: [usize; 4], batch: usize) -> Result<()> {
        match *self {
            Queries::All => AttnError::check_size("q batch against the cache's", batch, rows),
            Queries::First(lens) => {
                AttnError::check_size("q batch against the cache's", batch, rows)?;
                AttnError::check_size("q_lens against batch", batch, lens.len())?;
                lens.iter().enumerate().try_for_each(|(at, &len)| check_at_most("q_lens", at, len, q_len))
            }
            Queries::Packed(cu) => {
                AttnError::check_size("q batch of packed queries", 1, rows)?;
                AttnError::check_size("cu_q (batch + 1)", batch.saturating_add(1), cu.len())?;
                AttnError::check_size("cu_q[0]", 0, cu.first().copied().unwrap_or(0))?;
                let ends = cu.iter().zip(cu.get(1..).unwrap_or_default());
                if let Some(before) = ends.clone().position(|(start, end)| end < start) {
                    return Err(AttnError::Order { what: "cu_q", at: before.saturating_add(1) });
                }
                match cu.last() {
                    Some(&value) if value > q_len || (batch == 0 && q_len > 0) => {
                        Err(AttnError::Index { what: "cu_q", at: batch, value, limit: q_len.saturating_add(1) })
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// Queries of one sequence, of a q of `q_len` rows.
    pub fn len(&self, sequence: usize, q_len: usize) -> usize {
        match *self {
            Queries::All => q_len,
            Queries::First(lens) => lens.get(sequence).copied().unwrap_or(0),
            Queries::Packed(cu) => match (cu.get(sequence), cu.get(sequence.saturating_add(1))) {
                (Some(start), Some(end)) => end.saturating_sub(*start),
                _ => 0,
            },
        }
    }

    /// Where the queries of a sequence start: index on the first axis of q, and on its third.
    pub fn start(&self, sequence: usize) -> [usize; 2] {
        match *self {
            Queries::All | Queries::First(_) => [sequence, 0],
            Queries::Packed(cu) => [0, cu.get(sequence).copied().unwrap_or(0)],
        }
    }

    /// The rows of padding behind a sequence, counted from its [`start`](Self::start), of a q of `q_len` rows. Those
    /// behind all packed sequences follow the last one.
    pub fn padding(&self, sequence: usize, batch: usize, q_len: usize) -> Range<usize> {
        let len = self.len(sequence, q_len);
        match self {
            Queries::All => 0..0,
            Queries::First(_) => len..q_len,
            Queries::Packed(_) if sequence.saturating_add(1) == batch => {
                let [_, start] = self.start(sequence);
                len..q_len.saturating_sub(start)
            }
            Queries::Packed(_) => 0..0,
        }
    }
}
