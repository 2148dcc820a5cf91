//! The kernel: some query rows that share keys and values, over some chunks of those keys.
//!
//! ```text
//! for each tile of 64 keys
//!     dots       s[row][key] = q·k          (int8: times the key's scale)
//!     score      scale, cap, bias           (only where there is more than a scale)
//!     hide       −∞ where a row does not see a key
//!     softmax    scores become weights; maxima, sums and factors
//!     weighted   o[row] = o[row]·factor + p·v   (int8: p times the value's scale)
//! ```
//! Every element of K and V comes from memory once, whatever the number of rows. Keys that are turned by their place (rotary
//! positions of a cache) are turned in a copy of the tile.

use core::ops::Range;

use attn_core::int8::QuantizedView;
use attn_core::kv_cache::{CacheView, Turn};
use attn_core::{Row, View};

use super::scales::{ScaleColumns, Scaling, turned};
use super::sight::{Jobs, RowAt, Sight, present};
use super::softmax::State;
use super::source::{Located, Source};
use super::split::Calls;
use super::tree::Fold;
use super::{CHUNK, MAX_ROWS, score};
use crate::input::Input;
use crate::isa::Isa;
use crate::isa::rows::{self, Starts, Stored, TILE, Unchecked};
use crate::job::Scoring;
use crate::kernel::pack;
use crate::kernel::visible::Tile;
use crate::level::Run;
use crate::workspace::{Cutter, Line, lines_for};

/// Query rows that read the same keys and values: `rows` of them from `first` on, counted as `query · group + head of the group`.
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
            s: rows * TILE,
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
        [q, s, o, row, row, sums, k, v, states].into_iter().map(lines_for).sum()
    }
}

/// Scratch of one thread.
pub(crate) struct Buffers<'w> {
    q: &'w mut [f32],
    s: &'w mut [f32],
    o: &'w mut [f32],
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
            state: State {
                max: cutter.floats(sizes.row),
                factor: cutter.floats(sizes.row),
                sums: cutter.floats(sizes.sums),
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

    /// The loop over tiles. It is compiled once per type of cache; only the phases that it calls are compiled per level.
    fn over<T: Stored>(self, cache: &CacheView<'_, T>, scales: Option<&QuantizedView<'_>>) {
        let Self { job, calls, q, unit, rows, chunks, state, buffers: b } = self;
        let (shape, level, n) = (&job.shape, job.level, unit.rows);
        let lanes = level.lanes();
        let (columns, wide) = (shape.head_dim.next_multiple_of(lanes), shape.value_dim.next_multiple_of(lanes));
        let padded = rows::padded(n, lanes);
        let jobs = Jobs { first: job, sequence: unit.sequence, calls };
        // Shared keys are one sequence.
        let of = [if unit.shared { 0 } else { unit.sequence }, unit.kv_head];
        let turn = match cache.turn() {
            Some(Turn::Single(tables)) => Some(tables),
            _ => None, // others are refused before
        };
        let scaling = scales.map(|scales| Scaling { cache, scales, of });
        // Scales of channels belong to keys before they are turned, and to queries otherwise.
        let channels = scaling.as_ref().and_then(|scaling| scaling.channels()).filter(|_| turn.is_none());
        level.run(Queries { job, q, rows, columns, padded, channels, dst: b.q });
        if let Some(tables) = &turn {
            jobs.for_each(rows, |job, part| {
                let past = job.shape.kv_len.saturating_sub(job.shape.q_len);
                for r in part {
                    tables.turn_slice(&mut b.q[r * columns..][..shape.head_dim], past + rows[r].query);
                }
            });
        }
        b.s[..padded * TILE].fill(0.0);

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
        let (mut key, mut fresh) = (start, true);
        while key < end {
            if fresh {
                b.state.reset();
                b.o[..padded * wide].fill(0.0);
                fresh = false;
            }
            let keys = tile_at(key);
            // Where the next tile lies, so that it can be asked for.
            let after = tile_at(key + keys);
            keys_at.find_next(level, key + keys, after);
            values_at.find_next(level, key + keys, after);
            let (any, all) = sight.look(&jobs, rows, (key, keys), present(cache, of[0], key, keys));
            if any {
                let vectors = keys.next_multiple_of(lanes);
                if columns == 0 {
                    b.s[..n * TILE].fill(0.0);
                } else if let Some(tables) = &turn {
                    let keys = turned(cache, scales, (tables, of), (key, keys), columns, b.k);
                    level.run(Dots { n, keys: keys.as_unchecked(), q: b.q, s: b.s });
                } else {
                    let tile = keys_at.rows(key, keys, b.k);
                    level.run(Dots { n, keys: tile, q: b.q, s: b.s });
                    if let Some(scales) = scaling.as_ref().and_then(|scaling| scaling.of_keys(key, keys)) {
                        level.run(ScaleColumns { rows: n, vectors, scales: &scales, s: b.s });
                    }
                }
                if job.mod_scale.is_some() || !all || !keys.is_multiple_of(lanes) {
                    let words = &mut sight.words;
                    jobs.for_each(rows, |job, part| {
                        level.run(FinishScores { job, rows, part, tile: [key, keys], all, words, s: b.s });
                    });
                }
                level.run(Softmax { state: &mut b.state, to_log2: job.log2_scale(), rows: n, keys: vectors, s: b.s });
                if !job.dropout.is_none() {
                    for (r, &RowAt { sequence, head, query, .. }) in rows.iter().enumerate() {
                        let kept = job.dropout.row_bits(shape, sequence, head, query, key);
                        level.run(score::Replace { row: &mut b.s[r * TILE..][..vectors], seen: kept, other: 0.0 });
                    }
                }
                if wide > 0 {
                    let values = values_at.rows(key, keys, b.v);
                    let guarded = !all || job.bias.is_some();
                    if let Some(scaling) = &scaling {
                        level.run(ScaleColumns { rows: n, vectors, scales: &scaling.of_values(key, keys), s: b.s });
                        // A hidden value's scale may be anything, and 0·NaN is NaN.
                        for (r, &seen) in sight.words.iter().enumerate().take(if guarded { n } else { 0 }) {
                            level.run(score::Replace { row: &mut b.s[r * TILE..][..vectors], seen, other: 0.0 });
                        }
                    }
                    if guarded && scaling.is_none() && !level.run(IsFinite(values)) {
                        let poison = Poison { cache, view: cache.v(), at: [of[0], of[1], key], keys };
                        poison.weighted(job, &sight.words[..n], wide, (b.s, b.state.factor), b.o, b.v);
                    } else {
                        level.run(Weighted { n, values, p: b.s, factor: b.state.factor, o: b.o });
                    }
                }
            }
            keys_at.advance();
            values_at.advance();
            key += keys;
            if key.is_multiple_of(CHUNK) || key == end {
                level.run(Close { job, state: &b.state, rows: n, o: b.o, wide, slot: fold.slot() });
                fold.push(0, (key - 1) / CHUNK);
                fresh = true;
            }
        }
        match fold.finish() {
            Some(whole) => state.copy_from_slice(whole),
            None => attn_core::partial::clear(state, shape.value_dim),
        }
    }
}

/// Packs queries, padded with zeros to whole vectors and to a number of rows that is compiled.
struct Queries<'a> {
    job: &'a Scoring<'a>,
    q: &'a Input<'a>,
    rows: &'a [RowAt],
    columns: usize,
    padded: usize,
    /// What each channel is multiplied by.
    channels: Option<Row<'a, f32>>,
    dst: &'a mut [f32],
}

impl Run<()> for Queries<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { job, q, rows, columns, padded, channels, dst } = self;
        dst[..padded * columns].fill(0.0);
        for (at, row) in rows.iter().zip(dst.chunks_exact_mut(columns.max(1))) {
            let row = &mut row[..job.shape.head_dim];
            pack::read_row(isa, q, [at.place[0], at.head, at.place[1]], 0, row);
            if job.q_factor != 1.0 {
                row.iter_mut().for_each(|x| *x *= job.q_factor);
            }
            if let Some(channels) = channels {
                row.iter_mut().zip(channels.iter()).for_each(|(x, scale)| *x *= scale);
            }
        }
    }
}

/// Products of all rows with the keys of a tile.
struct Dots<'a, T> {
    n: usize,
    keys: Unchecked<'a, T>,
    q: &'a [f32],
    s: &'a mut [f32],
}

impl<T: Stored> Run<()> for Dots<'_, T> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { n, keys, q, s } = self;
        for (first, count) in blocks(n, I::LANES) {
            rows::dots(isa, count, keys.check(), &q[first * keys.columns..], &mut s[first * TILE..]);
        }
    }
}

/// Weighted values of a tile for all rows.
struct Weighted<'a, T> {
    n: usize,
    values: Unchecked<'a, T>,
    p: &'a [f32],
    factor: &'a [f32],
    o: &'a mut [f32],
}

impl<T: Stored> Run<()> for Weighted<'_, T> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { n, values, p, factor, o } = self;
        for (first, count) in blocks(n, I::LANES) {
            let (p, factor) = (&p[first * TILE..], &factor[first..]);
            rows::weighted(isa, count, values.check(), (p, factor), &mut o[first * values.columns..]);
        }
    }
}

/// Whether all elements of some rows are finite.
struct IsFinite<'a, T>(Unchecked<'a, T>);

impl<T: Stored> Run<bool> for IsFinite<'_, T> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        self.0.check().is_finite(isa)
    }
}

/// Scores become weights.
struct Softmax<'a, 'w> {
    state: &'a mut State<'w>,
    to_log2: f32,
    rows: usize,
    keys: usize,
    s: &'a mut [f32],
}

impl Run<()> for Softmax<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        self.state.push(isa, self.to_log2, self.rows, self.keys, self.s);
    }
}

/// Row blocks of a unit: first row, and how many as they are compiled.
#[inline(always)]
fn blocks(rows: usize, lanes: usize) -> impl Iterator<Item = (usize, usize)> {
    let most = rows::most(lanes);
    (0..rows).step_by(most).map(move |first| (first, rows::rows_for((rows - first).min(most), lanes)))
}

/// Finished scores of some rows of a tile, −∞ where a row does not see a key.
struct FinishScores<'a> {
    job: &'a Scoring<'a>,
    rows: &'a [RowAt],
    /// Which of them.
    part: Range<usize>,
    /// First key, and keys.
    tile: [usize; 2],
    /// Whether every row sees every key.
    all: bool,
    words: &'a mut [u64; MAX_ROWS],
    s: &'a mut [f32],
}

impl Run<()> for FinishScores<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { job, rows, part, tile: [key, keys], all, words, s } = self;
        if let Some(scale) = job.mod_scale {
            for r in part.clone() {
                let RowAt { sequence, head, query, .. } = rows[r];
                let tile = Tile { batch: sequence, head, query, rows: 1, key, keys };
                score::finish(isa, job, scale, tile, &mut words[r], &mut s[r * TILE..][..TILE]);
            }
        }
        // The last tile of a sequence may end inside a vector.
        if !all || job.bias.is_some() || !keys.is_multiple_of(I::LANES) {
            let vectors = keys.next_multiple_of(I::LANES);
            for r in part {
                if words[r] != u64::MAX {
                    score::replace_hidden(isa, &mut s[r * TILE..][..vectors], words[r], f32::NEG_INFINITY);
                }
            }
        }
    }
}

/// Writes the state of a chunk: maxima in natural logarithms, sums, outputs.
struct Close<'a, 'w> {
    job: &'a Scoring<'a>,
    state: &'a State<'w>,
    rows: usize,
    o: &'a [f32],
    wide: usize,
    slot: &'a mut [f32],
}

impl Run<()> for Close<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) {
        let Self { job, state, rows, o, wide, slot } = self;
        for (r, row) in slot.chunks_exact_mut(job.shape.value_dim + 2).enumerate().take(rows) {
            let (max, sum) = state.of_row::<I>(r);
            // Scores beyond f32 count as its largest number: where all of them are, their order is lost, but no NaN is made.
            let exact = f64::from(max) * job.to_ln;
            let natural = match max.is_finite() {
                true => exact.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32,
                false => max,
            };
            // Rounding the maximum moves it by a few millionths; weights that are relative to it follow, to third order.
            let moved = exact - f64::from(natural);
            let follow =
                if moved.abs() < 0.5 { (1.0 + moved * (1.0 + moved * (0.5 + moved / 6.0))) as f32 } else { 1.0 };
            row[0] = natural;
            row[1] = sum * follow;
            for (x, &o) in row[2..].iter_mut().zip(&o[r * wide..]) {
                *x = o * follow;
            }
        }
    }
}

/// A tile with values that are NaN or infinite, some of which some rows must not see: 0·NaN is NaN.
struct Poison<'p, 'c, T> {
    cache: &'p CacheView<'c, T>,
    view: View<'c, T>,
    at: [usize; 3],
    keys: usize,
}

impl<T: Stored> Poison<'_, '_, T> {
    /// As [`Weighted`]: with those elements as 0 first, then each of them by itself, for the rows that see it. `words` say which keys
    /// each row sees.
    fn weighted(
        &self,
        job: &Scoring<'_>,
        words: &[u64],
        wide: usize,
        (p, factor): (&[f32], &[f32]),
        o: &mut [f32],
        copy: &mut [f32],
    ) {
        let mut starts: Starts = [0; 2 * TILE];
        let [sequence, head, token] = self.at;
        for (j, (row, start)) in copy.chunks_exact_mut(wide).zip(starts.iter_mut()).enumerate().take(self.keys) {
            *start = j * wide;
            row.fill(0.0);
            let Some(run) = self.cache.run(sequence, token + j) else { continue };
            for (x, value) in row.iter_mut().zip(self.view.row(run.row, head, run.slot).iter()) {
                let value = value.widen();
                *x = if value.is_finite() { value } else { 0.0 };
            }
        }
        let values = Unchecked { data: &*copy, starts: &starts, base: 0, len: self.keys, columns: wide };
        job.level.run(Weighted { n: words.len(), values, p, factor, o: &mut *o });
        for j in 0..self.keys {
            let Some(run) = self.cache.run(sequence, token + j) else { continue };
            for (c, value) in self.view.row(run.row, head, run.slot).iter().enumerate() {
                let value = value.widen();
                if !value.is_finite() {
                    for (r, _) in words.iter().enumerate().filter(|(_, word)| **word >> j & 1 == 1) {
                        o[r * wide + c] += p[r * TILE + j] * value;
                    }
                }
            }
        }
    }
}
