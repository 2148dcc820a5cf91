//! The kernel: a group of rows over some chunks of its keys.
//!
//! ```text
//! for each group of tiles, of 64 keys each
//!     score_tiles: for each tile
//!         dots       s[row][key] = q·k          (int8: times the key's scale)
//!         score      scale, cap, bias           (only where there is more than a scale)
//!         hide       −∞ where a row does not see a key
//!     weigh_tiles: for each tile
//!         softmax    scores become weights; maxima, sums and factors
//!         weighted   o[row] = o[row]·factor + p·v   (int8: p times the value's scale)
//! ```
//! Every element of K and V is read from memory once, whatever the number of rows. If keys have rope or rows are in
//! packed formats, the products read a copy of the tile.

use core::ops::Range;

use attn_core::View;
use attn_core::formats::{Format, StoredView};
use attn_core::int8::QuantizedView;
use attn_core::kv_cache::{CacheRope, CacheView};
use attn_core::position::rope::RopeTables;

use super::call::{CHUNK, Call, MAX_ROWS, RowAt, RowGroup, Rows, Sizes, TILES, tiles_for};
use super::mask::{RowMask, present};
use super::phases::{Close, Dots, FinishScores, Integers, IsFinite, Nonfinite, Queries, Softmax, Weighted};
use super::pieces::Piece;
use super::rows::{Located, TileRows};
use super::scales::{ScaleColumns, Scales, Scaling, keys_with_rope};
use super::score;
use super::softmax::State;
use super::tree::Fold;
use super::widen::Widened;
use crate::dtype::Source;
use crate::gemv::packed::{E4m3, E5m2, Packed, Q4, Q8, packed};
use crate::gemv::{self, Stored, TILE};
use crate::workspace::{Cutter, Line};

/// Scratch of one thread.
pub(super) struct Buffers<'w> {
    q: &'w mut [f32],
    /// Queries as integers, for int8 keys.
    integers: &'w mut [f32],
    s: &'w mut [f32],
    o: &'w mut [f32],
    /// What rounding took from the outputs, and sums of a tile that wait.
    rest: &'w mut [f32],
    waiting: [&'w mut [f32]; 3],
    state: State<'w>,
    k: &'w mut [f32],
    v: &'w mut [f32],
    states: &'w mut [f32],
}

impl<'w> Buffers<'w> {
    pub(super) fn new(lines: &'w mut [Line], sizes: &Sizes) -> Self {
        let mut cutter = Cutter::new(lines);
        Self {
            q: cutter.floats(sizes.q),
            integers: cutter.floats(sizes.integers),
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

/// Computes a piece. Writes one state, `[rows][2 + value_dim]`, which is incomplete if the caller stops the call.
pub(crate) fn compute(call: &Call<'_>, piece: &Piece, state: &mut [f32], buffers: &mut Buffers<'_>) {
    let (group, mut places) = (*piece.group(), [RowAt::default(); MAX_ROWS]);
    let over = Over { call, group, rows: call.rows_of(&group, &mut places), chunks: piece.chunks(), state, buffers };
    match call.prefix.as_ref().filter(|_| group.shared).unwrap_or(&call.source) {
        Source::F32(cache) => over.numbers(cache, None),
        Source::F16(cache) => over.numbers(cache, None),
        Source::Bf16(cache) => over.numbers(cache, None),
        Source::I8(cache) => over.numbers(cache.numbers(), Some(cache)),
        Source::Stored(cache) => over.stored(cache),
    }
}

/// A group of rows over some chunks of a cache of any type.
struct Over<'p, 'w> {
    call: &'p Call<'p>,
    group: RowGroup,
    rows: Rows<'p>,
    chunks: Range<usize>,
    state: &'p mut [f32],
    buffers: &'p mut Buffers<'w>,
}

impl Over<'_, '_> {
    /// Over numbers, read in place.
    fn numbers<T: Stored>(self, cache: &CacheView<'_, T>, scales: Option<&QuantizedView<'_>>) {
        let (level, of) = (self.call.scoring.level, self.of());
        let rope = match cache.rope() {
            Some(CacheRope::Single(tables)) => Some(tables),
            _ => None, // others are refused before
        };
        let key = |token: usize, out: &mut [f32]| match scales {
            Some(scales) => scales.key(of[0], of[1], token, out),
            None => {
                let Some(run) = cache.run(of[0], token) else { return };
                T::read(cache.k().row(run.row, of[1], run.slot), out);
            }
        };
        let rows = |[columns, wide]: [usize; 2], first| {
            let keys = Located::new(level, cache, cache.k(), of, columns, first);
            (keys, Located::new(level, cache, cache.v(), of, wide, first))
        };
        self.run((cache, scales.map_or(Scales::NONE, Scales::quantized), rope), &key, rows);
    }

    /// Over bytes. They are widened in registers if keys and values have one format and whole vectors; otherwise tile
    /// by tile.
    fn stored(self, cache: &StoredView<'_>) {
        let formats = [cache.keys().format(), cache.values().format()];
        let whole = cache.dims().iter().all(|dim| dim.is_multiple_of(self.call.scoring.level.lanes()));
        match formats {
            [Format::Q8_0, Format::Q8_0] if whole => self.packed::<Q8>(cache),
            [Format::Q4_0, Format::Q4_0] if whole => self.packed::<Q4>(cache),
            [Format::E4m3, Format::E4m3] if whole => self.packed::<E4m3>(cache),
            [Format::E5m2, Format::E5m2] if whole => self.packed::<E5m2>(cache),
            [Format::Int8, Format::Int8] if whole => self.packed::<i8>(cache),
            _ => self.widened(cache),
        }
    }

    /// Over bytes that are widened in registers.
    fn packed<T: Packed>(self, cache: &StoredView<'_>) {
        let (level, of) = (self.call.scoring.level, self.of());
        let key = |token: usize, out: &mut [f32]| cache.key(of[0], of[1], token, out);
        let (k, v) = (cache.bytes().k(), cache.bytes().v());
        let [k, v] = [k, v].map(|x| View::strided(packed::<T>(x.data()), x.sizes(), x.strides(), x.offset()));
        let (Ok(k), Ok(v)) = (k, v) else { return self.widened(cache) };
        let rows = |[columns, wide]: [usize; 2], first| {
            let keys = Located::new(level, cache.bytes(), k, of, columns, first);
            (keys, Located::new(level, cache.bytes(), v, of, wide, first))
        };
        self.run((cache.bytes(), Scales::stored(cache), cache.rope()), &key, rows);
    }

    /// Over bytes that are widened tile by tile.
    fn widened(self, cache: &StoredView<'_>) {
        let (level, of) = (self.call.scoring.level, self.of());
        let key = |token: usize, out: &mut [f32]| cache.key(of[0], of[1], token, out);
        let rows = |[columns, wide]: [usize; 2], _| {
            let keys = Widened::new(level, cache.bytes(), (cache.bytes().k(), cache.keys().format()), of, columns);
            (keys, Widened::new(level, cache.bytes(), (cache.bytes().v(), cache.values().format()), of, wide))
        };
        self.run((cache.bytes(), Scales::stored(cache), cache.rope()), &key, rows);
    }

    /// The sequence in the cache, and the key/value head. Shared keys are one sequence.
    fn of(&self) -> [usize; 2] {
        [if self.group.shared { 0 } else { self.group.sequence }, self.group.kv_head]
    }

    /// The loop over groups of tiles. It is compiled once per type of cache; only its phases are compiled per
    /// level. `cache` tells where tokens are, `key` writes one key in real numbers, and `located` makes the rows of
    /// keys and values, from their columns and the first tile.
    fn run<T: Copy, K: TileRows, V: TileRows>(
        self,
        (cache, scales, rope): (&CacheView<'_, T>, Scales<'_>, Option<RopeTables<'_, f32>>),
        key: &dyn Fn(usize, &mut [f32]),
        located: impl FnOnce([usize; 2], (usize, usize)) -> (K, V),
    ) {
        let of = self.of();
        let Self { call, rows, chunks, state, buffers: b, .. } = self;
        let (shape, scoring, n) = (rows.shape(), &call.scoring, rows.at.len());
        let (level, lanes) = (scoring.level, scoring.level.lanes());
        let (columns, wide) = (shape.head_dim.next_multiple_of(lanes), shape.value_dim.next_multiple_of(lanes));
        let padded = gemv::padded(n, lanes);
        let scaling = Scaling { cache, scales, of };
        // Scales of channels belong to keys if rope is applied, and to queries otherwise.
        let channels = scaling.channels().filter(|_| rope.is_none());
        let (factor, head_dim) = (scoring.q_sign, shape.head_dim);
        level.run(Queries { factor, head_dim, q: &call.q, rows: rows.at, columns, padded, channels, dst: b.q });
        if let Some(tables) = &rope {
            for (shape, part) in rows.by_sequence() {
                let past = shape.kv_len.saturating_sub(shape.q_len);
                for r in part {
                    tables.apply_to_slice(&mut b.q[r * columns..][..head_dim], past + rows.at[r].query);
                }
            }
        }
        if const { K::Number::INTEGERS.is_some() } && columns <= gemv::bytes::WIDEST {
            level.run(Integers { rows: n, q: b.q, columns, dst: b.integers });
        }
        b.s.fill(0.0);

        let mask = RowMask::of(scoring, rows);
        // A tile begins at a multiple of its size, whatever the first row sees: so a key keeps its lane.
        let start = (mask.any.start / TILE * TILE).max(cache.first());
        let end = mask.any.end.min(cache.len(of[0]));
        let (start, end) = (start.max(chunks.start.saturating_mul(CHUNK)), end.min(chunks.end.saturating_mul(CHUNK)));
        let first = (start, tile_at(start, end));
        let (keys_at, values_at) = located([columns, wide], first);
        let mut tiles = Tiles {
            call,
            rows,
            cache,
            key,
            scaling,
            rope,
            of,
            columns,
            wide,
            padded,
            end,
            keys_at,
            values_at,
            mask,
            visible: [Visible::NONE; TILES],
        };
        let (value_dim, ln_scale) = (shape.value_dim, scoring.ln_scale);
        let mut fold = Fold::new(b.states, n * (value_dim + 2), value_dim);
        let (mut at, mut fresh) = (start, true);
        while at < end && !scoring.is_stopped() {
            if fresh {
                b.state.reset();
                b.o[..padded * wide].fill(0.0);
                b.rest[..padded * wide].fill(0.0);
                fresh = false;
            }
            // First the scores of several tiles, then their values: each stream of memory is longer before the other
            // one begins.
            let count = tiles.score_tiles(at, (b.q, b.integers, b.k), b.s);
            at = tiles.weigh_tiles(at, count, (&mut b.state, b.o, b.rest, &mut b.waiting), b.v, b.s);
            if at.is_multiple_of(CHUNK) || at == end {
                let o = [&*b.o, &*b.rest];
                level.run(Close { ln_scale, state: &b.state, rows: n, o, wide, value_dim, slot: fold.slot() });
                fold.push(0, (at - 1) / CHUNK);
                fresh = true;
            }
        }
        match fold.finish() {
            Some(whole) => state.copy_from_slice(whole),
            None => attn_core::state::clear(state, value_dim),
        }
    }
}

/// The number of keys of the tile that begins at `key`.
fn tile_at(key: usize, end: usize) -> usize {
    (TILE - key % TILE).min(end.saturating_sub(key))
}

/// The tiles of a piece.
struct Tiles<'p, 'c, T, K, V> {
    call: &'p Call<'p>,
    rows: Rows<'p>,
    cache: &'p CacheView<'c, T>,
    /// Writes one key in real numbers.
    key: &'p dyn Fn(usize, &mut [f32]),
    scaling: Scaling<'p, 'c, T>,
    rope: Option<RopeTables<'c, f32>>,
    /// The sequence in the cache, and the key/value head.
    of: [usize; 2],
    /// Channels of keys and of values, rounded up to whole vectors, and rows, rounded up to a compiled number.
    columns: usize,
    wide: usize,
    padded: usize,
    /// The end of the keys.
    end: usize,
    keys_at: K,
    values_at: V,
    mask: RowMask,
    /// What rows see of the tiles with scores.
    visible: [Visible; TILES],
}

impl<T: Copy, K: TileRows, V: TileRows> Tiles<'_, '_, T, K, V> {
    /// Computes the scores of some tiles from `key` on, within a chunk. Returns how many.
    fn score_tiles(&mut self, key: usize, (q, integers, copy): (&[f32], &[f32], &mut [f32]), s: &mut [f32]) -> usize {
        let Self { call, rows, cache, key: read, of, columns, padded, end, .. } = *self;
        let Self { scaling, rope, keys_at, mask, visible, .. } = self;
        let (scoring, level, n) = (&call.scoring, call.scoring.level, rows.at.len());
        let lanes = level.lanes();
        let (mut count, mut at) = (0, key);
        for (tile, s) in visible.iter_mut().zip(s.chunks_exact_mut(padded * TILE)).take(tiles_for(padded)) {
            let keys = tile_at(at, end);
            // The rows of the next tile, for the prefetch.
            keys_at.find_next(level, at + keys, tile_at(at + keys, end));
            let (any, all) = mask.of_tile(scoring, rows, (at, keys), present(cache, of[0], at, keys));
            if any {
                let vectors = keys.next_multiple_of(lanes);
                if columns == 0 {
                    s[..n * TILE].fill(0.0);
                } else if let Some(tables) = rope {
                    let head_dim = call.sequences.shape.head_dim;
                    let keys = keys_with_rope(read, tables, (at, keys), (head_dim, columns), copy);
                    level.run(Dots { n, keys: keys.as_unchecked(), q, integers, s });
                } else {
                    let rows = keys_at.rows(at, keys, copy);
                    level.run(Dots { n, keys: rows, q, integers, s });
                    if let Some(scales) = scaling.of_keys(at, keys) {
                        level.run(ScaleColumns { rows: n, vectors, scales: &scales, s });
                    }
                }
                if scoring.score_scale.is_some() || !all || !keys.is_multiple_of(lanes) {
                    level.run(FinishScores { scoring, rows, tile: [at, keys], all, words: &mut mask.words, s });
                }
                tile.words[..n].copy_from_slice(&mask.words[..n]);
            }
            (tile.any, tile.all) = (any, all);
            keys_at.advance();
            (count, at) = (count + 1, at + keys);
            if at.is_multiple_of(CHUNK) || at == end {
                break;
            }
        }
        count
    }

    /// Turns the scores of `count` tiles from `key` on into weights, and adds their values to the outputs. Returns the
    /// key after them.
    fn weigh_tiles<'w>(
        &mut self,
        mut key: usize,
        count: usize,
        (state, o, rest, waiting): (&mut State<'w>, &mut [f32], &mut [f32], &mut [&'w mut [f32]; 3]),
        copy: &mut [f32],
        s: &mut [f32],
    ) -> usize {
        let Self { call, rows, wide, padded, end, .. } = *self;
        let Self { scaling, values_at, visible, .. } = self;
        let (scoring, level, n) = (&call.scoring, call.scoring.level, rows.at.len());
        let lanes = level.lanes();
        for (Visible { any, all, words }, s) in visible.iter().zip(s.chunks_exact_mut(padded * TILE)).take(count) {
            let keys = tile_at(key, end);
            values_at.find_next(level, key + keys, tile_at(key + keys, end));
            if *any {
                let vectors = keys.next_multiple_of(lanes);
                level.run(Softmax { state, log2_scale: scoring.log2_scale(), rows: n, keys: vectors, s });
                if !scoring.dropout.is_none() {
                    for (r, &RowAt { sequence, head, query, .. }) in rows.at.iter().enumerate() {
                        let kept = scoring.dropout.row_bits(rows.shape(), sequence, head, query, key);
                        level.run(score::Replace { row: &mut s[r * TILE..][..vectors], visible: kept, other: 0.0 });
                    }
                }
                if wide > 0 {
                    let values = values_at.rows(key, keys, copy);
                    let guarded = !all || scoring.bias.is_some();
                    if let Some(scales) = scaling.of_values(key, keys) {
                        level.run(ScaleColumns { rows: n, vectors, scales: &scales, s });
                        // A hidden value may have any scale, and 0·NaN is NaN.
                        for (r, &visible) in words.iter().enumerate().take(if guarded { n } else { 0 }) {
                            level.run(score::Replace { row: &mut s[r * TILE..][..vectors], visible, other: 0.0 });
                        }
                    }
                    let waiting = waiting.each_mut().map(|array| &mut **array);
                    let sums = gemv::Sums { o: &mut *o, rest: &mut *rest, waiting };
                    if guarded && !V::Number::FINITE && !level.run(IsFinite(values)) {
                        let nonfinite = Nonfinite { rows: values_at, token: key, tokens: keys };
                        nonfinite.weighted(level, &words[..n], wide, (s, state.factor), sums, copy);
                    } else {
                        level.run(Weighted { n, values, p: s, factor: state.factor, sums });
                    }
                }
            }
            values_at.advance();
            key += keys;
        }
        key
    }
}

/// What rows see of a tile.
#[derive(Clone, Copy)]
struct Visible {
    any: bool,
    all: bool,
    words: [u64; MAX_ROWS],
}

impl Visible {
    const NONE: Self = Self { any: false, all: false, words: [0; MAX_ROWS] };
}
