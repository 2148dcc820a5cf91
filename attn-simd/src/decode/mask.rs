//! Which keys the rows of a group see: ranges of keys for the whole group, words of bits tile by tile.
//!
//! Rows that share the keys of several sequences belong to different sequences. Each has the lengths and the mask of
//! its own sequence.

use core::ops::Range;

use attn_core::engine::lowest_bits;
use attn_core::kv_cache::CacheView;

use super::call::{CHUNK, Call, MAX_ROWS, RowAt, RowGroup, Rows};
use crate::scoring::{Scoring, TileAt};

/// The range of keys that any of some rows may see. Masks that are no ranges may hide keys inside it.
fn visible_keys(scoring: &Scoring<'_>, rows: Rows<'_>) -> Range<usize> {
    if scoring.mask.is_none() && rows.at.iter().all(|row| row.sequence == rows.at[0].sequence) {
        return 0..rows.shape().kv_len;
    }
    RowMask::of(scoring, rows).any
}

/// The chunks of keys that any row of a group sees.
pub(super) fn chunks_of(call: &Call<'_>, group: &RowGroup) -> Range<usize> {
    let mut places = [RowAt::default(); MAX_ROWS];
    let visible = visible_keys(&call.scoring, call.rows_of(group, &mut places));
    let visible = match &call.prefix {
        Some(prefix) if group.shared => visible.start..visible.end.min(prefix.len(0)),
        Some(_) => visible.start.max(call.source.first())..visible.end,
        None => visible,
    };
    if visible.is_empty() { 0..0 } else { visible.start / CHUNK..visible.end.div_ceil(CHUNK) }
}

/// Which keys the rows of a group see.
pub(super) struct RowMask {
    ranges: [(usize, usize); MAX_ROWS],
    /// The range from the first to the last key that any row may see.
    pub(super) any: Range<usize>,
    /// The range of keys that every row sees, unless a mask that is no range hides some.
    all: Range<usize>,
    /// Which keys of the present tile each row sees.
    pub(super) words: [u64; MAX_ROWS],
}

impl RowMask {
    #[inline(always)]
    pub(super) fn of(scoring: &Scoring<'_>, rows: Rows<'_>) -> Self {
        let mut this = Self { ranges: [(0, 0); MAX_ROWS], any: 0..0, all: 0..usize::MAX, words: [0; MAX_ROWS] };
        for (shape, part) in rows.by_sequence() {
            for r in part {
                let RowAt { sequence, head, query, .. } = rows.at[r];
                let range = scoring.mask.row_range(&shape, sequence, head, query);
                this.ranges[r] = (range.start, range.end);
                if !range.is_empty() {
                    this.any = if this.any.is_empty() {
                        range.clone()
                    } else {
                        this.any.start.min(range.start)..this.any.end.max(range.end)
                    };
                }
                this.all = this.all.start.max(range.start)..this.all.end.min(range.end);
            }
        }
        this
    }

    /// Computes the words of one tile. Only the keys in `there` can be visible. Returns whether any row sees any key,
    /// and whether every row sees every key.
    #[inline(always)]
    pub(super) fn of_tile(
        &mut self,
        scoring: &Scoring<'_>,
        rows: Rows<'_>,
        (key, keys): (usize, usize),
        there: u64,
    ) -> (bool, bool) {
        let wanted = lowest_bits(keys);
        if scoring.ranges && self.all.start <= key && key + keys <= self.all.end && there == u64::MAX {
            self.words[..rows.at.len()].fill(wanted);
            return (true, true);
        }
        let (mut any, mut all) = (0, wanted);
        for (shape, part) in rows.by_sequence() {
            for r in part {
                let (start, end) = self.ranges[r];
                let mut word =
                    lowest_bits(end.saturating_sub(key)) & !lowest_bits(start.saturating_sub(key)) & wanted & there;
                if !scoring.ranges && word != 0 {
                    let RowAt { sequence, head, query, .. } = rows.at[r];
                    word &= scoring.mask.row_bits_within(&shape, [sequence, head, query], key, start..end);
                    if scoring.mods.has_mask_mod() && word != 0 {
                        let tile = TileAt { batch: sequence, head, query, rows: 1, key, keys };
                        scoring.mods.mask_mod(scoring.level, tile, core::slice::from_mut(&mut word));
                    }
                }
                self.words[r] = word;
                any |= word;
                all &= word;
            }
        }
        (any != 0, all == wanted)
    }
}

/// The keys of a tile that are in the cache, as bits: all but those of evicted pages.
#[inline(always)]
pub(super) fn present<T: Copy>(cache: &CacheView<'_, T>, sequence: usize, key: usize, keys: usize) -> u64 {
    if !cache.has_evicted() {
        return u64::MAX;
    }
    let (mut there, mut n) = (u64::MAX, 0);
    while n < keys {
        let gone = cache.evicted(sequence, key + n);
        there &= !(lowest_bits(n + gone) & !lowest_bits(n));
        n += gone.max(cache.run(sequence, key + n).map_or(1, |run| run.len));
    }
    there
}
