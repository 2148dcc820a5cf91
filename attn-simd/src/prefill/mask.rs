//! Which queries of a block see which keys of a tile, as bits.
//!
//! A mask is read by row, 64 keys at a time as a word, because its tables are stored by row. The kernels need words by
//! key, one bit per query, because their lanes are queries. So each tile that is partly visible transposes the words of
//! a block. If rows see ranges, the words by key follow from the ends of the ranges alone. Full tiles are found first
//! and cost nothing.

use core::ops::Range;

use attn_core::engine::{lowest_bits, transpose_bits};
use attn_core::mask::DenseMask;
use attn_core::mask::Term;

use super::job::Job;
use super::layout::MAX_Q_TILE;
use crate::gemm::{Reach, adds_pairs};
use crate::isa::{Isa, hint};
use crate::queue::Rows;
use crate::scoring::{KV_TILE, TileAt, pick};

/// How much of a tile the rows of a block see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cover {
    Empty,
    Full,
    Partial,
}

impl Cover {
    fn of(any: bool, all: bool) -> Self {
        match (any, all) {
            (false, _) => Self::Empty,
            (true, true) => Self::Full,
            (true, false) => Self::Partial,
        }
    }
}

/// The ranges of keys that the rows of a block see, at most `ROWS`.
pub(crate) struct Ranges<const ROWS: usize = MAX_Q_TILE> {
    rows: [(usize, usize); ROWS],
    /// Keys that any row sees.
    pub(crate) any: Range<usize>,
    /// Keys that every row sees, as far as ranges tell.
    all: Range<usize>,
}

impl<const ROWS: usize> Ranges<ROWS> {
    /// No row sees a key.
    pub(crate) const NOTHING: Self = Self { rows: [(0, 0); ROWS], any: 0..0, all: 0..0 };

    /// Calls the mask once per row of a block.
    pub(crate) fn of(job: &Job<'_>, rows: Rows) -> Self {
        let nothing = Range { start: usize::MAX, end: 0 };
        let mut this = Self { rows: [(0, 0); ROWS], any: nothing, all: 0..usize::MAX };
        if job.mask.is_none() {
            let all = 0..job.shape.kv_len;
            return Self { rows: [(all.start, all.end); ROWS], any: all.clone(), all };
        }
        for (n, slot) in this.rows.iter_mut().take(rows.count).enumerate() {
            let r = job.mask.row_range(&job.shape, rows.batch, rows.head, rows.first + n);
            *slot = (r.start, r.end);
            if !r.is_empty() {
                this.any = this.any.start.min(r.start)..this.any.end.max(r.end);
            }
            this.all = this.all.start.max(r.start)..this.all.end.min(r.end);
        }
        if this.any.is_empty() {
            this.any = 0..0;
        }
        this
    }

    /// Whether the range of every row holds all keys of a tile.
    #[inline(always)]
    fn holds(&self, tile: TileAt) -> bool {
        self.all.start <= tile.key && tile.key + tile.keys <= self.all.end
    }

    /// Which keys of a tile each vector needs: whole pairs of keys where chains add pairs.
    pub(crate) fn reach<I: Isa, const NQ: usize>(&self, tile: TileAt) -> Reach<NQ> {
        if self.holds(tile) && tile.rows > (NQ - 1) * I::LANES {
            return Reach::all(tile.keys);
        }
        let mut reach = Reach { start: [tile.keys; NQ], end: [0; NQ] };
        let within = |key: usize| key.saturating_sub(tile.key).min(tile.keys);
        let each = if adds_pairs::<I>() { 2 } else { 1 };
        for (lane, &(start, end)) in self.rows.iter().take(tile.rows).enumerate() {
            if start < end {
                let (first, last) = (&mut reach.start[lane / I::LANES], &mut reach.end[lane / I::LANES]);
                *first = within(start - start % each).min(*first);
                *last = within(end.next_multiple_of(each)).max(*last);
            }
        }
        // Neither may decrease: a vector needs at least what later ones need at the left, and earlier ones at the
        // right.
        for n in 1..NQ {
            reach.end[n] = reach.end[n].max(reach.end[n - 1]);
            reach.start[NQ - 1 - n] = reach.start[NQ - 1 - n].min(reach.start[NQ - n]);
        }
        reach
    }

    /// Fills `bits[key]` with one bit per query for each key of the tile, unless the tile is full or empty.
    #[inline(always)]
    pub(crate) fn cover<I: Isa>(&self, isa: I, job: &Job<'_>, tile: TileAt, bits: &mut [u64; KV_TILE]) -> Cover {
        if job.ranges && self.holds(tile) {
            return Cover::Full;
        }
        if job.ranges { self.by_ranges(tile, bits) } else { self.by_rows(isa, job, tile, bits) }
    }

    /// If each row sees a range: a bit turns on where the range starts and off where it ends.
    fn by_ranges(&self, tile: TileAt, bits: &mut [u64; KV_TILE]) -> Cover {
        let mut turns = [0u64; KV_TILE + 1];
        for (lane, &(start, end)) in self.rows.iter().enumerate().take(tile.rows) {
            let within = |key: usize| key.saturating_sub(tile.key).min(tile.keys);
            turns[within(start)] ^= 1 << lane;
            turns[within(end)] ^= 1 << lane;
        }
        // Lanes without a row: nothing that they compute is written.
        let padding = if tile.rows >= 64 { 0 } else { u64::MAX << tile.rows };
        let (mut visible, mut any, mut all) = (0, 0, u64::MAX);
        for (bits, turn) in bits.iter_mut().zip(turns).take(tile.keys) {
            visible ^= turn;
            any |= visible;
            *bits = visible | padding;
            all &= *bits;
        }
        Cover::of(any != 0, all == u64::MAX)
    }

    /// Any mask: 64 keys of each row as a word, transposed. A function of its own, so that it is compiled once per
    /// instruction set.
    #[inline(never)]
    fn by_rows<I: Isa>(&self, isa: I, job: &Job<'_>, tile: TileAt, bits: &mut [u64; KV_TILE]) -> Cover {
        isa.vectorize(
            #[inline(always)]
            || self.by_rows_inlined(isa, job, tile, bits),
        )
    }

    #[inline(always)]
    fn by_rows_inlined<I: Isa>(&self, isa: I, job: &Job<'_>, tile: TileAt, bits: &mut [u64; KV_TILE]) -> Cover {
        let wanted = lowest_bits(tile.keys);
        bits.fill(u64::MAX); // lanes without a row, as above
        let rows = &mut bits[..tile.rows];
        for (row, &(start, end)) in rows.iter_mut().zip(&self.rows) {
            *row = range_bits(start.saturating_sub(tile.key), end.saturating_sub(tile.key)) & wanted;
        }
        for term in job.mask.terms().filter(|term| !term.is_range()) {
            for (lane, row) in rows.iter_mut().enumerate() {
                let (batch, head, query) = (tile.batch, tile.head, tile.query + lane);
                *row &= match term {
                    Term::Dense(dense) => match whole_word(dense, [batch, head, query, tile.key]) {
                        Some(word) => {
                            // The line of the row's next tile: a tile reads about one line of each row.
                            isa.prefetch::<{ hint::SECOND }>(
                                word.as_ptr().cast::<u8>().wrapping_add(2 * word.len() - 1),
                            );
                            let word = isa.pack_bools(word);
                            if dense.keep { word } else { !word }
                        }
                        None => term.row_bits(&job.shape, batch, head, query, tile.key),
                    },
                    _ => term.row_bits(&job.shape, batch, head, query, tile.key),
                };
            }
        }
        if job.mods.has_mask_mod() {
            job.mods.mask_mod(job.level, tile, rows);
        }
        let any = rows.iter().fold(0, |any, row| any | row);
        let all = rows.iter().fold(wanted, |all, row| all & row);
        let cover = Cover::of(any != 0, all == wanted);
        if cover == Cover::Partial {
            transpose_bits(bits);
        }
        cover
    }
}

/// Bits `start..end`, clipped to a word.
#[inline(always)]
fn range_bits(start: usize, end: usize) -> u64 {
    lowest_bits(end) & !lowest_bits(start)
}

/// 64 entries of a row of a dense mask, if they lie side by side.
#[inline(always)]
fn whole_word<'a>(dense: &DenseMask<'a>, [batch, head, query, key]: [usize; 4]) -> Option<&'a [bool; 64]> {
    let [nb, nh, nq, _] = dense.mask.sizes();
    dense.mask.row(pick(batch, nb), pick(head, nh), pick(query, nq)).as_slice()?.get(key..)?.first_chunk()
}

/// Clears the bits of positions whose bias, `bias[key][query]` in rows of `width`, is −∞. The bits of a full tile are
/// set first.
#[inline(always)]
pub(crate) fn hide_by_bias(tile: TileAt, cover: Cover, width: usize, bias: &[f32], bits: &mut [u64; KV_TILE]) {
    if cover == Cover::Full {
        bits.fill(u64::MAX);
    }
    for (bits, row) in bits.iter_mut().zip(bias.chunks_exact(width)).take(tile.keys) {
        for (lane, &b) in row[..tile.rows].iter().enumerate() {
            *bits &= !(u64::from(b == f32::NEG_INFINITY) << lane);
        }
    }
}

/// Fills `bits[key]` with one bit per query whose weight dropout keeps. A function of its own, because draws become
/// lanes only in a small one.
#[inline(never)]
pub(crate) fn kept<I: Isa>(isa: I, job: &Job<'_>, tile: TileAt, bits: &mut [u64; KV_TILE]) {
    isa.vectorize(
        #[inline(always)]
        || {
            bits.fill(u64::MAX);
            for (lane, row) in bits.iter_mut().enumerate().take(tile.rows) {
                let at = [tile.batch, tile.head, tile.query + lane, tile.key];
                *row = job.dropout.row_bits_by(
                    &job.shape,
                    at,
                    #[inline(always)]
                    |keep| isa.pack_bools(keep),
                );
            }
            transpose_bits(bits);
        },
    );
}

/// Puts `other` where the bits of a row are clear: `rows[key][query]`.
#[inline(always)]
pub(crate) fn replace_hidden<I: Isa, const NQ: usize>(isa: I, rows: &mut [f32], bits: &[u64], other: f32) {
    let other = isa.splat(other);
    for (row, &bits) in rows.chunks_exact_mut(NQ * I::LANES).zip(bits) {
        if bits != u64::MAX {
            for (n, x) in row.chunks_exact_mut(I::LANES).enumerate() {
                let mask = isa.mask_from_bits(bits >> (n * I::LANES));
                isa.replace(mask, x, other);
            }
        }
    }
}
