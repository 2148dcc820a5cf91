//! Which heads each rank computes, if ranks share heads out.

use std::ops::Range;

use crate::sharding::stripe;

/// Which heads a rank computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) heads: Range<usize>,
    pub(crate) kv_heads: Range<usize>,
}

impl Split {
    /// For each rank its heads: whole groups, or, where there are more ranks than key/value heads, a share of one.
    /// `None` where a rank would have no head, or a group cannot be shared evenly.
    pub(crate) fn of(q_heads: usize, kv_heads: usize, ranks: usize) -> Option<Vec<Self>> {
        let group = q_heads.checked_div(kv_heads)?;
        if kv_heads >= ranks {
            let of = |rank| {
                let kv_heads = stripe(kv_heads, ranks, rank);
                Self { heads: kv_heads.start * group..kv_heads.end * group, kv_heads }
            };
            return Some((0..ranks).map(of).collect());
        }
        let sharers = ranks / kv_heads;
        if sharers * kv_heads != ranks || group < sharers {
            return None;
        }
        let of = |rank: usize| {
            let (kv_head, share) = (rank / sharers, stripe(group, sharers, rank % sharers));
            Self { heads: kv_head * group + share.start..kv_head * group + share.end, kv_heads: kv_head..kv_head + 1 }
        };
        Some((0..ranks).map(of).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_is_computed_once() {
        for (q_heads, kv_heads, ranks, fits) in
            [(8, 8, 8, true), (8, 2, 4, true), (6, 2, 4, true), (9, 3, 2, true), (4, 2, 8, false), (8, 2, 3, false)]
        {
            let split = Split::of(q_heads, kv_heads, ranks);
            assert_eq!(split.is_some(), fits, "{q_heads} over {kv_heads}, {ranks} ranks");
            let heads: Vec<usize> = split.iter().flatten().flat_map(|split| split.heads.clone()).collect();
            assert!(heads.is_empty() || heads == (0..q_heads).collect::<Vec<_>>());
        }
    }
}
