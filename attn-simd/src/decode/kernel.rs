//! The kernel: a group of rows over some chunks of its keys.
//!
//! ```text
//! for each group of tiles, of 64 keys each
//!     score: for all tiles
//!         dots       s[row][key] = q·k          (int8: times the key's scale)
//!         score      scale, cap, bias           (only where there is more than a scale)
//!         hide       −∞ where a row does not see a key
//!     weigh: for all tiles
//!         softmax    scores become weights; maxima, sums and factors
//!         weighted   o[row] = o[row]·factor + p·v   (int8: p times the value's scale)
//! ```
//! Every element of K and V is read from memory once, whatever the number of rows. If keys have rope or rows are in
//! packed formats, the products read a copy of the tile.

use core::ops::Range;

use attn_core::View;
use attn_core::engine::lowest_bits;
use attn_core::formats::{Format, StoredView};
use attn_core::int8::QuantizedView;
use attn_core::kv_cache::{CacheRope, CacheView};
use attn_core::position::rope::RopeTables;

use super::call::{CHUNK, Call, MAX_ROWS, RowAt, RowGroup, Rows, Sizes, tiles_for};
use super::mask::{RowMask, present};
use super::phases::{
    Close, Dots, FinishScores, IsFinite, Nonfinite, Queries, Softmax, WeighSeen, Weighted, WriteIntegers,
};
use super::pieces::Piece;
use super::rows::{Located, Of, TileOf, TileRows};
use super::scales::{ScaleColumns, Scales, Scaling, keys_with_rope};
use super::score;
use super::softmax::State;
use super::tree::Fold;
use super::widen::Widened;
use crate::dtype::Source;
use crate::gemv::packed::{E4m3, E5m2, Packed, Q4, Q8, packed};
use crate::gemv::{self, Group, Stored, TILE, TILES, tiles_of};
use crate::workspace::{Cutter, Line};

/// Scratch of one thread.
pub(super) struct Buffers<'w> {
    q: &'w mut [f32],
    /// Queries as words: of digits for keys of int8 or q8_0, of pairs for bf16 keys.
    words: &'w mut [f32],
    s: &'w mut [f32],
    o: &'w mut [f32],
    /// What rounding took from the outputs, and sums of a tile that wait.
    rest: &'w mut [f32],
    waiting: [&'w mut [f32]; 3],
    state: State<'w>,
    /// The factors of what was before each tile of a group: `[tiles][rows]`, rounded up to whole vectors.
    factors: &'w mut [f32],
    k: &'w mut [f32],
    v: &'w mut [f32],
    states: &'w mut [f32],
}

impl<'w> Buffers<'w> {
    pub(super) fn new(lines: &'w mut [Line], sizes: &Sizes) -> Self {
        let mut cutter = Cutter::new(lines);
        Self {
            q: cutter.floats(sizes.q),
            words: cutter.floats(sizes.words),
            s: cutter.floats(sizes.s),
            o: cutter.floats(sizes.o),
            rest: cutter.floats(sizes.o),
            waiting: core::array::from_fn(|_| cutter.floats(sizes.o)),
            state: State {
                max: cutter.floats(sizes.row),
                sums: cutter.floats(sizes.sums),
                rest: cutter.floats(sizes.sums),
            },
            factors: cutter.floats(sizes.factors),
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
            Some(scales) => scales.key(of.sequence, of.head, token, out),
            None => {
                let Some(run) = cache.run(of.sequence, token) else { return };
                T::read(cache.k().row(run.row, of.head, run.slot), out);
            }
        };
        let rows = |[columns, wide]: [usize; 2]| {
            (Located::new(level, cache, cache.k(), of, columns), Located::new(level, cache, cache.v(), of, wide))
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
        let key = |token: usize, out: &mut [f32]| cache.key(of.sequence, of.head, token, out);
        let (k, v) = (cache.bytes().k(), cache.bytes().v());
        let [k, v] = [k, v].map(|x| View::strided(packed::<T>(x.data()), x.sizes(), x.strides(), x.offset()));
        let (Ok(k), Ok(v)) = (k, v) else { return self.widened(cache) };
        let rows = |[columns, wide]: [usize; 2]| {
            (Located::new(level, cache.bytes(), k, of, columns), Located::new(level, cache.bytes(), v, of, wide))
        };
        self.run((cache.bytes(), Scales::stored(cache), cache.rope()), &key, rows);
    }

    /// Over bytes that are widened tile by tile.
    fn widened(self, cache: &StoredView<'_>) {
        let (level, of) = (self.call.scoring.level, self.of());
        let key = |token: usize, out: &mut [f32]| cache.key(of.sequence, of.head, token, out);
        let rows = |[columns, wide]: [usize; 2]| {
            let keys = Widened::new(level, cache.bytes(), (cache.bytes().k(), cache.keys().format()), of, columns);
            (keys, Widened::new(level, cache.bytes(), (cache.bytes().v(), cache.values().format()), of, wide))
        };
        self.run((cache.bytes(), Scales::stored(cache), cache.rope()), &key, rows);
    }

    /// The sequence in the cache, and the key/value heads. Shared keys are one sequence.
    fn of(&self) -> Of {
        let RowGroup { sequence, kv_head: head, heads, rows, shared, .. } = self.group;
        Of { sequence: if shared { 0 } else { sequence }, head, heads, rows: rows / heads }
    }

    /// The loop over groups of tiles. It is compiled once per type of cache; only its phases are compiled per
    /// level. `cache` tells where tokens are, `key` writes one key in real numbers, and `located` makes the rows of
    /// keys and values, from their columns.
    fn run<T: Copy, K: TileRows, V: TileRows>(
        self,
        (cache, scales, rope): (&CacheView<'_, T>, Scales<'_>, Option<RopeTables<'_, f32>>),
        key: &dyn Fn(usize, &mut [f32]),
        located: impl FnOnce([usize; 2]) -> (K, V),
    ) {
        let of = self.of();
        let Self { call, rows, chunks, state, buffers: b, .. } = self;
        let (shape, scoring, n) = (rows.shape(), &call.scoring, rows.at.len());
        let (level, lanes) = (scoring.level, scoring.level.lanes());
        let (columns, wide) = (shape.head_dim.next_multiple_of(lanes), shape.value_dim.next_multiple_of(lanes));
        // Rows of several heads are as many as the products take.
        let padded = if of.heads > 1 { n } else { gemv::padded(n, lanes) };
        let scaling = Scaling { cache, scales, sequence: of.sequence };
        let (factor, head_dim) = (scoring.q_sign, shape.head_dim);
        for (head, rows) in rows.at.chunks(of.rows).enumerate() {
            // Scales of channels belong to keys if rope is applied, and to queries otherwise.
            let channels = scaling.channels(of.head + head).filter(|_| rope.is_none());
            let (padded, dst) = (padded / of.heads, &mut b.q[head * of.rows * columns..]);
            level.run(Queries { factor, head_dim, q: &call.q, rows, columns, padded, channels, dst });
        }
        if let Some(tables) = &rope {
            for (shape, part) in rows.by_sequence() {
                let past = shape.kv_len.saturating_sub(shape.q_len);
                for r in part {
                    tables.apply_to_slice(&mut b.q[r * columns..][..head_dim], past + rows.at[r].query);
                }
            }
        }
        let fast = call.rounds_integers();
        if let Some(kind) = K::Number::INTEGERS
            && columns <= gemv::bytes::WIDEST
        {
            for head in 0..of.heads {
                let q = gemv::QueryRows { floats: b.q, words: &[], paired: 0, fast };
                let (rows, q) = (of.rows, q.of_head::<K::Number>(head, of.rows, columns).floats);
                let dst = gemv::bytes::words_of_head(b.words, level.digits(), (head, of.rows), columns);
                level.run(WriteIntegers { kind, fast, rows, q, columns, dst });
            }
        }
        let mut paired = 0;
        if const { K::Number::PAIRS } && rope.is_none() && call.multiplies_pairs(head_dim) {
            paired = gemv::pairs::write(&b.q[..padded * columns], columns, n, b.words);
        }
        b.s.fill(0.0);

        let mask = RowMask::of(scoring, rows);
        // A tile begins at a multiple of its size, whatever the first row sees: so a key keeps its lane.
        let start = (mask.any.start / TILE * TILE).max(cache.first());
        let end = mask.any.end.min(cache.len(of.sequence));
        let (start, end) = (start.max(chunks.start.saturating_mul(CHUNK)), end.min(chunks.end.saturating_mul(CHUNK)));
        let (keys_at, values_at) = located([columns, wide]);
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
            keys_at,
            values_at,
            mask,
            seen: 0,
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
            // The scratch is for the largest group of rows of the call, and others may have longer groups of tiles.
            let most = tiles_for(padded).min(b.s.len() / (padded * TILE));
            let group = Group::new(at, end.min((at / CHUNK + 1).saturating_mul(CHUNK)), most);
            tiles.score(&group, gemv::QueryRows { floats: b.q, words: b.words, paired, fast }, b.k, b.s);
            tiles.weigh(&group, (&mut b.state, b.factors, b.o, b.rest, &mut b.waiting), b.v, b.s);
            at = group.end();
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

/// The tiles of a piece.
struct Tiles<'p, 'c, T, K, V> {
    call: &'p Call<'p>,
    rows: Rows<'p>,
    cache: &'p CacheView<'c, T>,
    /// Writes one key in real numbers.
    key: &'p dyn Fn(usize, &mut [f32]),
    scaling: Scaling<'p, 'c, T>,
    rope: Option<RopeTables<'c, f32>>,
    of: Of,
    /// Channels of keys and of values, rounded up to whole vectors, and rows, rounded up to a compiled number.
    columns: usize,
    wide: usize,
    padded: usize,
    keys_at: K,
    values_at: V,
    mask: RowMask,
    /// The tiles with scores that some row sees, as bits.
    seen: u32,
    /// What rows see of them.
    visible: [Visible; TILES],
}

impl<T: Copy, K: TileRows, V: TileRows> Tiles<'_, '_, T, K, V> {
    /// Computes the scores of a group of tiles.
    fn score(&mut self, group: &Group, q: gemv::QueryRows<'_>, copy: &mut [f32], s: &mut [f32]) {
        let Self { call, rows, cache, key: read, of, columns, padded, .. } = *self;
        let Self { scaling, rope, keys_at, mask, visible, .. } = self;
        let (scoring, level, n, stride) = (&call.scoring, call.scoring.level, rows.at.len(), padded * TILE);
        let mut seen = 0;
        for (t, tile) in visible.iter_mut().enumerate().take(group.count()) {
            let (at, keys) = group.tile(t);
            let (any, all) = mask.of_tile(scoring, rows, (at, keys), present(cache, of.sequence, at, keys));
            tile.all = all;
            tile.words[..n].copy_from_slice(&mask.words[..n]);
            seen |= u32::from(any) << t;
        }
        self.seen = seen;
        if columns == 0 {
            tiles_of(seen).for_each(|t| s[t * stride..][..n * TILE].fill(0.0));
        } else if let Some(tables) = rope {
            let head_dim = call.sequences.shape.head_dim;
            for t in tiles_of(seen) {
                let keys = keys_with_rope(read, tables, group.tile(t), (head_dim, columns), copy);
                Dots { n, keys: keys.as_unchecked(), seen: 1, q, s: &mut s[t * stride..], stride }.at(level);
            }
        } else {
            keys_at.find(group);
            if let Some(keys) = keys_at.in_place() {
                Dots { n: of.rows, keys, seen, q, s: &mut *s, stride }.at(level);
            } else {
                for (t, head) in tiles_of(seen).flat_map(|t| (0..of.heads).map(move |head| (t, head))) {
                    let (keys, tile) = keys_at.tile(group, TileOf { tile: t, head }, copy);
                    let s = &mut s[(t - tile) * stride + head * of.rows * TILE..];
                    let q = if of.heads > 1 { q.of_head::<K::Number>(head, of.rows, columns) } else { q };
                    Dots { n: of.rows, keys, seen: 1 << tile, q, s, stride }.at(level);
                }
            }
            for (t, head) in tiles_of(seen).flat_map(|t| (0..of.heads).map(move |head| (t, head))) {
                let (at, keys) = group.tile(t);
                let Some(scales) = scaling.of_keys(of.head + head, at, keys) else { break };
                let (vectors, s) = (keys.next_multiple_of(level.lanes()), &mut s[t * stride + head * of.rows * TILE..]);
                level.run(ScaleColumns { rows: of.rows, vectors, scales: &scales, s });
            }
        }
        for t in tiles_of(seen) {
            let ((at, keys), Visible { all, words, .. }) = (group.tile(t), &mut visible[t]);
            if scoring.score_scale.is_some() || !*all || !keys.is_multiple_of(level.lanes()) {
                let (all, words, s) = (*all, &mut words[..n], &mut s[t * stride..]);
                level.run(FinishScores { scoring, rows, tile: [at, keys], all, words, s });
            }
            if scoring.bias.is_some() {
                *all &= words[..n].iter().fold(u64::MAX, |all, word| all & word) | !lowest_bits(keys) == u64::MAX;
            }
        }
    }

    /// Turns the scores of a group of tiles into weights, and adds their values to the outputs.
    fn weigh<'w>(
        &mut self,
        group: &Group,
        (state, factors, o, rest, waiting): Outputs<'_, 'w>,
        copy: &mut [f32],
        s: &mut [f32],
    ) {
        let Self { call, rows, of, wide, padded, seen, .. } = *self;
        let Self { scaling, values_at, visible, .. } = self;
        let (scoring, level, n, stride) = (&call.scoring, call.scoring.level, rows.at.len(), padded * TILE);
        let (log2_scale, floats) = (scoring.log2_scale(), padded.next_multiple_of(level.lanes()));
        let factors_of = (&mut *factors, floats);
        level.run(Softmax { state, log2_scale, rows: n, group, seen, factors: factors_of, s: &mut *s, stride });
        let fast = call.rounds_integers();
        for t in tiles_of(seen) {
            let ((key, keys), tile, s) = (group.tile(t), &visible[t], &mut s[t * stride..]);
            let vectors = keys.next_multiple_of(level.lanes());
            if !scoring.dropout.is_none() {
                for (r, &RowAt { sequence, head, query, .. }) in rows.at.iter().enumerate() {
                    let kept = scoring.dropout.row_bits(rows.shape(), sequence, head, query, key);
                    level.run(score::Replace { row: &mut s[r * TILE..][..vectors], visible: kept, other: 0.0 });
                }
            }
            for (head, s) in s.chunks_mut(of.rows * TILE).enumerate().take(of.heads) {
                let Some(scales) = scaling.of_values(of.head + head, key, keys) else { break };
                level.run(ScaleColumns { rows: of.rows, vectors, scales: &scales, s });
                // A hidden value may have any scale, and 0·NaN is NaN.
                let words = &tile.words[head * of.rows..];
                for (r, &visible) in words.iter().enumerate().take(if tile.all { 0 } else { of.rows }) {
                    level.run(score::Replace { row: &mut s[r * TILE..][..vectors], visible, other: 0.0 });
                }
            }
        }
        if wide == 0 {
            return;
        }
        let mut sums = gemv::Sums { o, rest, waiting: waiting.each_mut().map(|array| &mut **array) };
        let checked = !V::Number::FINITE && tiles_of(seen).any(|t| !visible[t].all);
        values_at.find(group);
        if let Some(values) = values_at.in_place().filter(|_| !checked) {
            let weights = [(&*s, stride), (&*factors, floats)];
            level.run(Weighted { n: of.rows, values, seen, weights, fast, sums });
            return;
        }
        let n = of.rows;
        for (t, head) in tiles_of(seen).flat_map(|t| (0..of.heads).map(move |head| (t, head))) {
            let ((key, keys), before) = (group.tile(t), head * n);
            let (p, factor) = (&s[t * stride + before * TILE..], &factors[t * floats + before..]);
            let mut sums = sums.from(before * wide);
            let at = TileOf { tile: t, head };
            let (values, tile) = values_at.tile(group, at, copy);
            if checked && !visible[t].all && !level.run(IsFinite(values, tile)) {
                let words = &visible[t].words[before..][..n];
                let mut left = u32::MAX >> (32 - n);
                if const { V::Number::INTEGERS.is_some() } && fast {
                    // Rows that see only finite values have the bits that they have beside any others.
                    let nonfinite = Nonfinite { rows: values_at, head, token: key, tokens: keys };
                    let odd = nonfinite.odd_tokens(&mut copy[..wide]);
                    let (values, tile) = values_at.tile(group, at, copy);
                    left = level.run(WeighSeen { values, tile, p, factor, words, odd, sums: sums.from(0) });
                }
                let nonfinite = Nonfinite { rows: values_at, head, token: key, tokens: keys };
                if left.count_ones() as usize == n {
                    nonfinite.weighted(level, words, wide, (p, factor), sums.from(0), copy);
                    continue;
                }
                for r in (0..n).filter(|r| left >> r & 1 == 1) {
                    let of = (&p[r * TILE..], &factor[r..]);
                    nonfinite.weighted(level, &words[r..=r], wide, of, sums.from(r * wide), copy);
                }
            } else {
                let from = (t - tile) * stride + before * TILE;
                let weights = [(&s[from..], stride), (&factors[(t - tile) * floats + before..], floats)];
                level.run(Weighted { n, values, seen: 1 << tile, weights, fast, sums: sums.from(0) });
            }
        }
    }
}

/// Maxima and sums, factors, outputs, what rounding took from them, and sums that wait.
type Outputs<'b, 'w> = (&'b mut State<'w>, &'b mut [f32], &'b mut [f32], &'b mut [f32], &'b mut [&'w mut [f32]; 3]);

/// What rows see of a tile.
#[derive(Clone, Copy)]
struct Visible {
    /// Whether every row sees every key. The mask says so first, and then the bias.
    all: bool,
    /// Which keys each row sees, as bits.
    words: [u64; MAX_ROWS],
}

impl Visible {
    const NONE: Self = Self { all: false, words: [0; MAX_ROWS] };
}
