//! How much of a tile of the score matrix a mask lets through.

use core::ops::Range;

use super::{Mask, bits};
use crate::shape::AttnShape;

/// How much of a tile is visible: an engine skips an empty tile and masks only a partial one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum TileCover {
    /// No query of the tile sees any of its keys.
    Empty,
    /// Every query sees every key.
    Full,
    /// Anything else.
    Partial,
}

/// Exact: looks at every row, and 64 keys at a time where a row may have holes.
pub(super) fn of_tile(
    mask: &Mask<'_>,
    shape: &AttnShape,
    batch: usize,
    head: usize,
    queries: Range<usize>,
    keys: Range<usize>,
) -> TileCover {
    let ranges = mask.is_ranges();
    let (mut any, mut all) = (false, true);
    for query in queries {
        if ranges {
            let row = mask.row_range(shape, batch, head, query);
            let (start, end) = (row.start.max(keys.start), row.end.min(keys.end));
            any |= start < end;
            all &= start == keys.start && end == keys.end;
        } else {
            for start in keys.clone().step_by(64) {
                let wanted = bits::below(keys.end - start);
                let seen = mask.row_bits(shape, batch, head, query, start) & wanted;
                any |= seen != 0;
                all &= seen == wanted;
            }
        }
        if any && !all {
            return TileCover::Partial;
        }
    }
    match (any, all) {
        (false, _) => TileCover::Empty,
        (true, true) => TileCover::Full,
        (true, false) => TileCover::Partial,
    }
}
