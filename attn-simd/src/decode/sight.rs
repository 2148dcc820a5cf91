//! What the rows of a unit see: ranges of keys for the whole unit, words of bits tile by tile.
//!
//! Rows over keys that several sequences share are rows of different calls, each with lengths and a mask of its own.

use core::ops::Range;

use attn_core::engine::lowest_bits;
use attn_core::kv_cache::CacheView;

use super::MAX_ROWS;
use super::split::Calls;
use crate::job::Scoring;
use crate::kernel::visible::Tile;

/// One query row of a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RowAt {
    /// To masks.
    pub(super) sequence: usize,
    pub(super) head: usize,
    pub(super) query: usize,
    /// Where q and the output have it: index on their first and on their third axis.
    pub(super) place: [usize; 2],
}

/// Places of all rows of a unit.
pub(super) type RowPlaces = [RowAt; MAX_ROWS];

/// What happens to the scores of some rows: the sequence of the first is at hand, others are looked up.
pub(super) struct Jobs<'p> {
    pub(super) first: &'p Scoring<'p>,
    /// Which sequence that is.
    pub(super) sequence: usize,
    pub(super) calls: &'p Calls<'p>,
}

impl Jobs<'_> {
    /// Calls `f` for the rows of each sequence in turn, with what happens to the scores of that one.
    #[inline(always)]
    pub(super) fn for_each(&self, rows: &[RowAt], mut f: impl FnMut(&Scoring<'_>, Range<usize>)) {
        let mut done = 0;
        for part in rows.chunk_by(|a, b| a.sequence == b.sequence) {
            let range = done..done + part.len();
            done = range.end;
            if part[0].sequence == self.sequence {
                f(self.first, range);
            } else {
                self.calls.with(part[0].sequence, &mut |job| f(job, range.clone()));
            }
        }
    }
}

/// The keys that any of some rows sees, as far as ranges tell.
pub(super) fn keys_seen(jobs: &Jobs<'_>, rows: &[RowAt]) -> Range<usize> {
    if jobs.first.mask.is_none() && rows.iter().all(|row| row.sequence == jobs.sequence) {
        return 0..jobs.first.shape.kv_len;
    }
    Sight::of(jobs, rows).any
}

/// What the rows of a unit see.
pub(super) struct Sight {
    ranges: [(usize, usize); MAX_ROWS],
    /// Keys that any row sees.
    pub(super) any: Range<usize>,
    /// Keys that every row sees, as far as ranges tell.
    all: Range<usize>,
    /// Which keys of the present tile each row sees.
    pub(super) words: [u64; MAX_ROWS],
}

impl Sight {
    #[inline(always)]
    pub(super) fn of(jobs: &Jobs<'_>, rows: &[RowAt]) -> Self {
        let mut this = Self { ranges: [(0, 0); MAX_ROWS], any: 0..0, all: 0..usize::MAX, words: [0; MAX_ROWS] };
        jobs.for_each(rows, |job, part| {
            for r in part {
                let RowAt { sequence, head, query, .. } = rows[r];
                let range = job.mask.row_range(&job.shape, sequence, head, query);
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
        });
        this
    }

    /// Fills the words of a tile, of whose keys those in `there` can be seen. Says whether any row sees any key, and
    /// whether all see all.
    #[inline(always)]
    pub(super) fn look(
        &mut self,
        jobs: &Jobs<'_>,
        rows: &[RowAt],
        (key, keys): (usize, usize),
        there: u64,
    ) -> (bool, bool) {
        let wanted = lowest_bits(keys);
        if jobs.first.ranges && self.all.start <= key && key + keys <= self.all.end && there == u64::MAX {
            self.words[..rows.len()].fill(wanted);
            return (true, true);
        }
        let (mut any, mut all) = (0, wanted);
        jobs.for_each(rows, |job, part| {
            for r in part {
                let (start, end) = self.ranges[r];
                let mut word =
                    lowest_bits(end.saturating_sub(key)) & !lowest_bits(start.saturating_sub(key)) & wanted & there;
                if !job.ranges && word != 0 {
                    let RowAt { sequence, head, query, .. } = rows[r];
                    word &= job.mask.row_bits_within(&job.shape, [sequence, head, query], key, start..end);
                    if job.mods.has_mask_mod() && word != 0 {
                        let tile = Tile { batch: sequence, head, query, rows: 1, key, keys };
                        job.mods.mask_mod(job.level, tile, core::slice::from_mut(&mut word));
                    }
                }
                self.words[r] = word;
                any |= word;
                all &= word;
            }
        });
        (any != 0, all == wanted)
    }
}

/// Which keys of a tile are there: all, but of pages that were given back.
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
