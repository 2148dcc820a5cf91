//! The kernel: some query rows that share keys and values, over some chunks of those keys.
//!
//! ```text
//! for each group of tiles, of 64 keys each
//!     for each tile
//!         dots       s[row][key] = q·k          (int8: times the key's scale)
//!         score      scale, cap, bias           (only where there is more than a scale)
//!         hide       −∞ where a row does not see a key
//!     for each tile
//!         softmax    scores become weights; maxima, sums and factors
//!         weighted   o[row] = o[row]·factor + p·v   (int8: p times the value's scale)
//! ```
//! Every element of K and V comes from memory once, whatever the number of rows. Rope is
//! applied to keys in a copy of the tile.

use core::ops::Range;

use attn_core::int8::QuantizedView;
use attn_core::kv_cache::{CacheRope, CacheView};

use super::phases::{Close, Dots, FinishScores, IsFinite, Nonfinite, Queries, Softmax, Weighted};
use super::scales::{ScaleColumns, Scaling, keys_with_rope};
use super::sight::{Jobs, RowAt, Sight, present};
use super::softmax::State;
use super::source::{Located, Source};
use super::split::Calls;
use super::tree::Fold;
use super::{CHUNK, MAX_ROWS, score};
use crate::input::Input;
use crate::isa::rows::{self, Stored, TILE};
use crate::job::Scoring;
use crate::workspace::{Cutter, Line, lines_for};

/// Query rows that read the same keys and values: `rows` of them from `first` on, counted as
/// `query · group + head of the group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Which sequence, to masks and to the cache; of shared keys, the sequence of the first row.
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) first: usize,
    pub(super) rows: usize,
    /// Whether the keys are those before all sequences: rows may go on into the sequences after the first.
    pub(super) shared: bool,
}

/// Floats of each array of a thread's scratch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    q: usize,
    s: usize,
    o: usize,
    row: usize,
    sums: usize,
    k: usize,
    v: usize,
    states: usize,
}

impl Sizes {
    /// For units of at most `rows` rows, `slots` states in a fold.
    pub(crate) fn new(lanes: usize, rows: usize, [head_dim, value_dim]: [usize; 2], slots: usize) -> Self {
        let rows = rows::padded(rows, lanes);
        let (head_dim, wide) = (head_dim.next_multiple_of(lanes), value_dim.next_multiple_of(lanes));
        Self {
            q: rows * head_dim,
            s: rows * TILE * tiles_for(rows),
            o: rows * wide,
            row: rows.next_multiple_of(lanes),
            sums: rows * lanes,
            k: TILE * head_dim,
            v: TILE * wide,
            states: slots * rows * (value_dim + 2),
        }
    }

    /// Cache lines of all of them.
    pub(crate) fn lines(&self) -> usize {
        let Self { q, s, o, row, sums, k, v, states } = *self;
        [q, s, o, o, o, o, o, row, row, sums, sums, k, v, states].into_iter().map(lines_for).sum()
    }
}

/// Scratch of one thread.
pub(crate) struct Buffers<'w> {
    q: &'w mut [f32],
    s: &'w mut [f32],
    o: &'w mut [f32],
    /// What outputs have lost to rounding, and sums of a tile that wait.
    rest: &'w mut [f32],
    waiting: [&'w mut [f32]; 3],
    state: State<'w>,
    k: &'w mut [f32],
    v: &'w mut [f32],
    states: &'w mut [f32],
}

impl<'w> Buffers<'w> {
    pub(crate) fn new(lines: &'w mut [Line], sizes: &Sizes) -> Self {
        let mut cutter = Cutter::new(lines);
        Self {
            q: cutter.floats(sizes.q),
            s: cutter.floats(sizes.s),
            o: cutter.floats(sizes.o),
            rest: cutter.floats(sizes.o),
            waiting: core::array::from_fn(|_| cutter.floats(sizes.o)),
            state: State {
                max: cutter.floats(sizes.row),
                factor: cutter.floats(sizes.row),
                sums: cutter.floats(sizes.sums),
                rest: cutter.floats(sizes.sums),
            },
            k: cutter.floats(sizes.k),
            v: cutter.floats(sizes.v),
            states: cutter.floats(sizes.states),
        }
    }
}

/// One unit over some chunks of keys; what comes out is one state, `[rows][2 + value_dim]`.
pub(crate) struct Piece<'p, 'w> {
    /// What happens to the scores of the unit's first sequence; all sequences have its group, dims and factors.
    pub(super) job: &'p Scoring<'p>,
    pub(super) calls: &'p Calls<'p>,
    pub(super) q: &'p Input<'p>,
    pub(super) unit: Unit,
    pub(super) rows: &'p [RowAt],
    pub(super) chunks: Range<usize>,
    pub(super) state: &'p mut [f32],
    pub(super) buffers: &'p mut Buffers<'w>,
}

impl Piece<'_, '_> {
    /// Runs it on a cache of any type.
    pub(super) fn run(self, source: &Source<'_>) {
        match source {
            Source::F32(cache) => self.over(cache, None),
            Source::F16(cache) => self.over(cache, None),
            Source::Bf16(cache) => self.over(cache, None),
            Source::I8(cache) => self.over(cache.numbers(), Some(cache)),
        }
    }

    /// The loop over tiles. It is compiled once per type of cache; only the phases that it calls are compiled per
    /// level.
    fn over<T: Stored>(self, cache: &CacheView<'_, T>, scales: Option<&QuantizedView<'_>>) {
        let Self { job, calls, q, unit, rows, chunks, state, buffers: b } = self;
        let (shape, level, n) = (&job.shape, job.level, unit.rows);
        let lanes = level.lanes();
        let (columns, wide) = (shape.head_dim.next_multiple_of(lanes), shape.value_dim.next_multiple_of(lanes));
        let padded = rows::padded(n, lanes);
        let jobs = Jobs { first: job, sequence: unit.sequence, calls };
        // Shared keys are one sequence.
        let of = [if unit.shared { 0 } else { unit.sequence }, unit.kv_head];
        let rope = match cache.rope() {
            Some(CacheRope::Single(tables)) => Some(tables),
            _ => None, // others are refused before
        };
        let scaling = scales.map(|scales| Scaling { cache, scales, of });
        // Scales of channels belong to keys if rope is applied to them, and to queries otherwise.
        let channels = scaling.as_ref().and_then(|scaling| scaling.channels()).filter(|_| rope.is_none());
        level.run(Queries { job, q, rows, columns, padded, channels, dst: b.q });
        if let Some(tables) = &rope {
            jobs.for_each(rows, |job, part| {
                let past = job.shape.kv_len.saturating_sub(job.shape.q_len);
                for r in part {
                    tables.apply_to_slice(&mut b.q[r * columns..][..shape.head_dim], past + rows[r].query);
                }
            });
        }
        b.s.fill(0.0);

        let mut sight = Sight::of(&jobs, rows);
        // Tiles begin at multiples of their size, whatever the first row sees: a key keeps its lane.
        let start = (sight.any.start / TILE * TILE).max(cache.first());
        let end = sight.any.end.min(cache.len(of[0]));
        let (start, end) = (start.max(chunks.start.saturating_mul(CHUNK)), end.min(chunks.end.saturating_mul(CHUNK)));
        let tile_at = |key: usize| (TILE - key % TILE).min(end.saturating_sub(key));
        let first = (start, tile_at(start));
        let mut keys_at = Located::new(level, cache, cache.k(), of, columns, first);
        let mut values_at = Located::new(level, cache, cache.v(), of, wide, first);

        let mut fold = Fold::new(b.states, n * (shape.value_dim + 2), shape.value_dim);
        let slots = tiles_for(padded);
        let (mut seen, mut key, mut fresh) = ([Seen::NONE; TILES], start, true);
        while key < end {
            if fresh {
                b.state.reset();
                b.o[..padded * wide].fill(0.0);
                b.rest[..padded * wide].fill(0.0);
                fresh = false;
            }
            // The scores of several tiles, then their values: each stream of memory goes on for longer before the other
            // one comes.
            let (mut taken, mut at) = (0, key);
            for (tile, s) in seen.iter_mut().zip(b.s.chunks_exact_mut(padded * TILE)).take(slots) {
                let keys = tile_at(at);
                // Where the next tile lies, so that it can be asked for.
                keys_at.find_next(level, at + keys, tile_at(at + keys));
                let (any, all) = sight.look(&jobs, rows, (at, keys), present(cache, of[0], at, keys));
                if any {
                    let vectors = keys.next_multiple_of(lanes);
                    if columns == 0 {
                        s[..n * TILE].fill(0.0);
                    } else if let Some(tables) = &rope {
                        let keys = keys_with_rope(cache, scales, (tables, of), (at, keys), columns, b.k);
                        level.run(Dots { n, keys: keys.as_unchecked(), q: b.q, s });
                    } else {
                        let rows = keys_at.rows(at, keys, b.k);
                        level.run(Dots { n, keys: rows, q: b.q, s });
                        if let Some(scales) = scaling.as_ref().and_then(|scaling| scaling.of_keys(at, keys)) {
                            level.run(ScaleColumns { rows: n, vectors, scales: &scales, s });
                        }
                    }
                    if job.mod_scale.is_some() || !all || !keys.is_multiple_of(lanes) {
                        let words = &mut sight.words;
                        jobs.for_each(rows, |job, part| {
                            level.run(FinishScores { job, rows, part, tile: [at, keys], all, words, s });
                        });
                    }
                    tile.words[..n].copy_from_slice(&sight.words[..n]);
                }
                (tile.any, tile.all) = (any, all);
                keys_at.advance();
                (taken, at) = (taken + 1, at + keys);
                if at.is_multiple_of(CHUNK) || at == end {
                    break;
                }
            }
            for (Seen { any, all, words }, s) in seen.iter().zip(b.s.chunks_exact_mut(padded * TILE)).take(taken) {
                let keys = tile_at(key);
                values_at.find_next(level, key + keys, tile_at(key + keys));
                if *any {
                    let vectors = keys.next_multiple_of(lanes);
                    level.run(Softmax { state: &mut b.state, to_log2: job.log2_scale(), rows: n, keys: vectors, s });
                    if !job.dropout.is_none() {
                        for (r, &RowAt { sequence, head, query, .. }) in rows.iter().enumerate() {
                            let kept = job.dropout.row_bits(shape, sequence, head, query, key);
                            level.run(score::Replace { row: &mut s[r * TILE..][..vectors], seen: kept, other: 0.0 });
                        }
                    }
                    if wide > 0 {
                        let values = values_at.rows(key, keys, b.v);
                        let guarded = !all || job.bias.is_some();
                        if let Some(scaling) = &scaling {
                            level.run(ScaleColumns { rows: n, vectors, scales: &scaling.of_values(key, keys), s });
                            // A hidden value's scale may be anything, and 0·NaN is NaN.
                            for (r, &seen) in words.iter().enumerate().take(if guarded { n } else { 0 }) {
                                level.run(score::Replace { row: &mut s[r * TILE..][..vectors], seen, other: 0.0 });
                            }
                        }
                        let waiting = b.waiting.each_mut().map(|array| &mut **array);
                        let sums = rows::Sums { o: b.o, rest: b.rest, waiting };
                        if guarded && scaling.is_none() && !level.run(IsFinite(values)) {
                            let nonfinite = Nonfinite { cache, view: cache.v(), at: [of[0], of[1], key], keys };
                            nonfinite.weighted(job, &words[..n], wide, (s, b.state.factor), sums, b.v);
                        } else {
                            level.run(Weighted { n, values, p: s, factor: b.state.factor, sums });
                        }
                    }
                }
                values_at.advance();
                key += keys;
            }
            if key.is_multiple_of(CHUNK) || key == end {
                level.run(Close { job, state: &b.state, rows: n, o: [&*b.o, &*b.rest], wide, slot: fold.slot() });
                fold.push(0, (key - 1) / CHUNK);
                fresh = true;
            }
        }
        match fold.finish() {
            Some(whole) => state.copy_from_slice(whole),
            None => attn_core::state::clear(state, shape.value_dim),
        }
    }
}

/// Most tiles of a group.
const TILES: usize = CHUNK / TILE;

/// Rows times tiles of a group: 8 KiB of scores, which stay in the first cache.
const GROUPED: usize = 32;

/// Tiles of a group of so many rows. Keys and values are two streams from memory, and each goes on for longer where
/// scores of several tiles come before their values. Measured on Zen 5 over cold caches, against one tile: 1.02 to 1.07
/// times as fast for four rows, 1.06 to 1.2 for one. No bit depends on it.
fn tiles_for(rows: usize) -> usize {
    (GROUPED / rows.max(1)).clamp(1, TILES)
}

/// What rows see of a tile.
#[derive(Clone, Copy)]
struct Seen {
    any: bool,
    all: bool,
    words: [u64; MAX_ROWS],
}

impl Seen {
    const NONE: Self = Self { any: false, all: false, words: [0; MAX_ROWS] };
}
