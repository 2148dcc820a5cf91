//! Which positions of a sequence each rank holds.
//!
//! A shard is a list of ranges of global positions, in ascending order. A rank's tensor holds them one after the other:
//! row `n` of the tensor is the `n`-th position of the list.

use std::ops::Range;

use attn_core::{AttnError, Result};

/// The positions of a sequence, shared out among ranks. Every rank holds the same description of all shards.
///
/// ```
/// use attn_mpi::Sharding;
/// let halves = Sharding::even(10, 4); // 3, 3, 2 and 2 positions
/// assert_eq!(halves.of(3), [8..10]);
/// let zigzag = Sharding::zigzag(16, 2); // four stripes: the first and the last, and the two in the middle
/// assert_eq!(zigzag.of(0), [0..4, 12..16]);
/// assert_eq!(zigzag.of(1), [4..8, 8..12]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    shards: Vec<Vec<Range<usize>>>,
    len: usize,
}

impl Sharding {
    /// Consecutive shards of these lengths, one for each rank; 0 is allowed.
    ///
    /// # Errors
    /// [`AttnError::Overflow`] if the lengths do not add up to a `usize`.
    pub fn contiguous(lens: &[usize]) -> Result<Self> {
        let mut end = 0usize;
        let mut shards = Vec::with_capacity(lens.len());
        for &len in lens {
            let start = end;
            end = start.checked_add(len).ok_or(AttnError::Overflow { what: "lengths of the shards" })?;
            shards.push(non_empty(std::iter::once(start..end)));
        }
        Ok(Self { shards, len: end })
    }

    /// Consecutive shards whose lengths differ by at most one.
    pub fn even(len: usize, ranks: usize) -> Self {
        let shards = (0..ranks).map(|rank| non_empty(std::iter::once(stripe(len, ranks, rank)))).collect();
        Self { shards, len }
    }

    /// Twice as many stripes as ranks; rank `r` holds stripe `r` from the front and stripe `r` from the back. Under a
    /// causal mask every rank has the same work, where the last of consecutive shards would have most of it.
    pub fn zigzag(len: usize, ranks: usize) -> Self {
        let of = |n| stripe(len, 2 * ranks, n);
        let shards = (0..ranks).map(|rank| non_empty([of(rank), of(2 * ranks - 1 - rank)])).collect();
        Self { shards, len }
    }

    /// Any shards: for each rank its ranges of positions, ascending. Each position below the largest end belongs to
    /// exactly one rank.
    ///
    /// # Errors
    /// [`AttnError::Order`] if a rank's ranges do not ascend, [`AttnError::Size`] if a position belongs to no rank or
    /// to two.
    pub fn new(shards: Vec<Vec<Range<usize>>>) -> Result<Self> {
        for ranges in &shards {
            let mut last = 0;
            for (at, range) in ranges.iter().enumerate() {
                if range.start < last || range.end < range.start {
                    return Err(AttnError::Order { what: "positions of a shard", at });
                }
                last = range.end;
            }
        }
        let shards: Vec<Vec<Range<usize>>> = shards.into_iter().map(non_empty).collect();
        let mut all: Vec<&Range<usize>> = shards.iter().flatten().collect();
        all.sort_by_key(|range| range.start);
        let mut end = 0;
        for range in all {
            AttnError::check_size("first position of a shard's range", end, range.start)?;
            end = range.end;
        }
        Ok(Self { shards, len: end })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.shards.len()
    }

    /// Positions of the whole sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ranges of a rank; none where there is no such rank.
    pub fn of(&self, rank: usize) -> &[Range<usize>] {
        self.shards.get(rank).map_or(&[], Vec::as_slice)
    }

    /// How many positions a rank holds.
    pub fn local_len(&self, rank: usize) -> usize {
        self.of(rank).iter().map(Range::len).sum()
    }

    /// The most positions that a rank holds.
    pub fn longest(&self) -> usize {
        (0..self.ranks()).map(|rank| self.local_len(rank)).max().unwrap_or(0)
    }

    /// The ranges of a rank, each with the row at which it begins in the rank's tensor.
    pub(crate) fn rows(&self, rank: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.of(rank).iter().scan(0, |row, range| {
            let first = *row;
            *row += range.len();
            Some((first, range.clone()))
        })
    }
}

/// The `n`-th of `parts` stripes whose lengths differ by at most one.
pub(crate) fn stripe(len: usize, parts: usize, n: usize) -> Range<usize> {
    let (each, more) = (len / parts, len % parts);
    let start = n * each + n.min(more);
    start..start + each + usize::from(n < more)
}

/// The ranges that hold a position.
fn non_empty(ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    ranges.into_iter().filter(|range| !range.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_has_one_rank() {
        for ranks in 1..9 {
            for len in [0, 1, 7, 16, 1000, 1001] {
                for sharding in [Sharding::even(len, ranks), Sharding::zigzag(len, ranks)] {
                    let again = Sharding::new(sharding.shards.clone()).unwrap();
                    assert_eq!((again.len(), again.ranks()), (len, ranks));
                    assert!(sharding.longest() * ranks < len + 2 * ranks);
                }
            }
        }
    }

    #[test]
    fn what_overlaps_or_is_missing_is_refused() {
        assert!(Sharding::new(vec![vec![0..4], vec![3..8]]).is_err());
        assert!(Sharding::new(vec![vec![0..4], vec![5..8]]).is_err());
        assert!(Sharding::new(vec![vec![4..8, 0..4]]).is_err());
        assert!(Sharding::contiguous(&[usize::MAX, 1]).is_err());
    }
}
