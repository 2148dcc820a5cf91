//! The phases of the [kernel](super::kernel), compiled per level: those of a group of tiles or of one tile, and the one
//! that ends a chunk.

use core::ops::Range;

use attn_core::row::Row;

use super::call::{RowAt, Rows};
use super::rows::TileRows;
use super::score;
use super::softmax::State;
use crate::dtype::Input;
use crate::gemv::{self, Group, Places, Stored, TILE, Unchecked, bytes, tiles_of};
use crate::isa::Isa;
use crate::level::{Level, Run};
use crate::pack;
use crate::scoring::{Scoring, TileAt};
use crate::workspace::elements_of;

/// Packs queries. Zeros pad them to whole vectors, and to a number of rows for which the products are compiled.
pub(super) struct Queries<'a> {
    /// The factor of all channels of a query: 1, −1 or 0.
    pub(super) factor: f32,
    pub(super) head_dim: usize,
    pub(super) q: &'a Input<'a>,
    pub(super) rows: &'a [RowAt],
    pub(super) columns: usize,
    pub(super) padded: usize,
    /// A factor for each channel.
    pub(super) channels: Option<Row<'a, f32>>,
    pub(super) dst: &'a mut [f32],
}

impl Run<()> for Queries<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { factor, head_dim, q, rows, columns, padded, channels, dst } = self;
        dst[..padded * columns].fill(0.0);
        for (at, row) in rows.iter().zip(dst.chunks_exact_mut(columns.max(1))) {
            let row = &mut row[..head_dim];
            pack::read_row(isa, q, [at.place[0], at.head, at.place[1]], 0, row);
            if factor != 1.0 {
                row.iter_mut().for_each(|x| *x *= factor);
            }
            if let Some(channels) = channels {
                row.iter_mut().zip(channels.iter()).for_each(|(x, scale)| *x *= scale);
            }
        }
    }
}

/// Writes queries as integers for keys of some kind, at levels that multiply bytes.
pub(super) struct WriteIntegers<'a> {
    pub(super) kind: gemv::Integers,
    /// Whether they have few digits.
    pub(super) fast: bool,
    pub(super) rows: usize,
    pub(super) q: &'a [f32],
    pub(super) columns: usize,
    pub(super) dst: &'a mut [f32],
}

impl Run<()> for WriteIntegers<'_> {
    const OF_BYTES: bool = true;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { kind, fast, rows, q, columns, dst } = self;
        // Constant conditions, so that no code of other levels is compiled.
        if const { I::DIGITS >= bytes::FAST_DIGITS } {
            let (beside, digits) = dst.split_at_mut(rows * bytes::BESIDE);
            let (q, to) = ((q, rows, columns), (beside, elements_of(digits)));
            if fast {
                bytes::write::<I, { bytes::FAST_DIGITS }>(isa, kind, q, to);
            } else if const { I::DIGITS >= bytes::DIGITS } {
                bytes::write::<I, { bytes::DIGITS }>(isa, kind, q, to);
            }
        }
    }
}

impl gemv::QueryRows<'_> {
    /// The rows of one head, of several with `rows` rows each, for keys of a type.
    pub(super) fn of_head<T: Stored>(self, head: usize, rows: usize, columns: usize) -> Self {
        let before = head * rows;
        let words = match T::INTEGERS {
            Some(_) => bytes::floats(before, columns),
            None => before * columns / 2,
        };
        let (floats, words) = (&self.floats[before * columns..], self.words.get(words..).unwrap_or_default());
        Self { floats, words, paired: self.paired >> before & (u32::MAX >> (32 - rows)), ..self }
    }
}

/// Products of all rows with the keys of some tiles.
pub(super) struct Dots<'a, T> {
    /// The rows of each head.
    pub(super) n: usize,
    pub(super) keys: Unchecked<'a, T>,
    /// The tiles that some row sees, as bits.
    pub(super) seen: u32,
    pub(super) q: gemv::QueryRows<'a>,
    pub(super) s: &'a mut [f32],
    /// Floats from the scores of a tile to those of the next.
    pub(super) stride: usize,
}

impl<T: Stored> Dots<'_, T> {
    /// Runs it at a level: all rows in the way of most, and then the others one by one.
    pub(super) fn at(self, level: Level) {
        let Self { n, keys, seen, q, s, stride } = self;
        // A constant condition, so that no code for other types is compiled.
        if const { !T::PAIRS } || q.paired == 0 {
            return level.run(Dots { n, keys, seen, q, s, stride });
        }
        let heads = keys.heads;
        if heads.count > 1 {
            if q.paired.count_ones() as usize == n * heads.count {
                return Dots { n, keys, seen, q, s, stride }.one_way(level, true);
            }
            for head in 0..heads.count {
                let (q, s) = (q.of_head::<T>(head, n, keys.columns), &mut s[head * n * TILE..]);
                let keys = Unchecked { heads: heads.one(head), ..keys };
                Dots { n, keys, seen, q, s, stride }.at(level);
            }
            return;
        }
        let most = 2 * q.paired.count_ones() as usize >= n;
        Dots { n, keys, seen, q, s: &mut *s, stride }.one_way(level, most);
        for r in (0..n).filter(|r| (q.paired >> r & 1 == 1) != most) {
            let (floats, words) = (&q.floats[r * keys.columns..], &q.words[r * keys.columns / 2..]);
            let q = gemv::QueryRows { floats, words, ..q };
            Dots { n: 1, keys, seen, q, s: &mut s[r * TILE..], stride }.one_way(level, !most);
        }
    }

    /// Runs it on pairs, which the level has, or on floats.
    fn one_way(self, level: Level, pairs: bool) {
        if pairs {
            let done = level.run_pairs(self);
            debug_assert!(done.is_some(), "some row is pairs, so the level multiplies them");
        } else {
            level.run(self);
        }
    }
}

impl<T: Stored> Run<()> for Dots<'_, T> {
    const OF_BYTES: bool = T::INTEGERS.is_some();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { n, keys, seen, q, s, stride } = self;
        let keys = keys.check();
        // A constant condition, here and below, so that no code of other levels is compiled.
        if const { I::DIGITS > 0 && T::INTEGERS.is_some() }
            && bytes::multiplies::<I>(q.fast)
            && keys.columns() <= bytes::WIDEST
        {
            let heads = keys.heads().count;
            // Several heads take turns of one tile.
            let turns = (0..if heads > 1 { keys.tiles() } else { 1 }).flat_map(|n| (0..heads).map(move |h| (n, h)));
            for (n_tile, head) in turns {
                let (keys, fast) = (keys.head(head), q.fast);
                let seen = if heads > 1 { seen & 1 << n_tile } else { seen };
                let (q, s) = (q.of_head::<T>(head, n, keys.columns()), &mut s[head * n * TILE..]);
                let (q, to) = ((q.floats, q.words), (s, stride));
                if fast {
                    bytes::dots::<I, T, { bytes::FAST_DIGITS }>(isa, n, (&keys, seen), q, to);
                } else if const { I::DIGITS >= bytes::DIGITS } {
                    bytes::dots::<I, T, { bytes::DIGITS }>(isa, n, (&keys, seen), q, to);
                }
            }
            return;
        }
        let (q, floats) =
            if const { I::WORD == 1 } { (q.floats, keys.columns()) } else { (q.words, keys.columns() / 2) };
        // Of each head `n` rows.
        for tiles in together(n, keys.heads().count, seen, keys.tiles(), I::LANES) {
            for (first, count) in gemv::blocks::<T>(n, I::LANES) {
                let s = &mut s[tiles.start * stride + first * TILE..];
                gemv::dots(isa, count, (&keys, tiles.clone()), &q[first * floats..], (s, stride));
            }
        }
    }
}

/// The tiles that the blocks of `rows` rows read in turn: those that follow each other, or one by one if there are
/// several blocks, so that all but the first find them in a near cache, or several heads, so that none is far behind.
#[inline(always)]
fn together(rows: usize, heads: usize, seen: u32, tiles: usize, lanes: usize) -> impl Iterator<Item = Range<usize>> {
    let most = if rows > gemv::most(lanes) || heads > 1 { 1 } else { tiles };
    let mut left = seen & ((1 << tiles) - 1);
    core::iter::from_fn(
        #[inline(always)]
        move || {
            let first = (left != 0).then(|| left.trailing_zeros() as usize)?;
            let count = (!(left >> first)).trailing_zeros() as usize;
            let end = first + count.min(most);
            left &= !((1 << end) - 1);
            Some(first..end)
        },
    )
}

/// Weighted values of some tiles for all rows.
pub(super) struct Weighted<'a, T> {
    /// The rows of each head.
    pub(super) n: usize,
    pub(super) values: Unchecked<'a, T>,
    /// The tiles that some row sees, as bits.
    pub(super) seen: u32,
    /// The weights and the factors of all tiles, and the floats from those of a tile to those of the next.
    pub(super) weights: [(&'a [f32], usize); 2],
    /// Whether weights may be rounded: `Precision::Fast`.
    pub(super) fast: bool,
    pub(super) sums: gemv::Sums<'a>,
}

impl<T: Stored> Run<()> for Weighted<'_, T> {
    const OF_BYTES: bool = T::INTEGERS.is_some();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { n, values, seen, weights: [(p, p_stride), (factor, stride)], fast, mut sums } = self;
        let values = values.check();
        for tiles in together(n, values.heads().count, seen, values.tiles(), I::LANES) {
            // A constant condition, so that no code of other levels is compiled.
            if const { I::DIGITS > 0 && T::INTEGERS.is_some() } && fast && bytes::values::fit::<T>(values.columns()) {
                for head in 0..values.heads().count {
                    let (values, before) = (values.head(head), head * n);
                    let p = &p[tiles.start * p_stride + before * TILE..];
                    let weights = [(p, p_stride), (&factor[tiles.start * stride + before..], stride)];
                    let sums = sums.from(before * values.columns());
                    bytes::values::weighted(isa, n, (&values, tiles.clone()), weights, sums);
                }
                continue;
            }
            for (first, count) in gemv::blocks::<T>(n, I::LANES) {
                let weights = [
                    (&p[tiles.start * p_stride + first * TILE..], p_stride),
                    (&factor[tiles.start * stride + first..], stride),
                ];
                gemv::weighted(isa, count, (&values, tiles.clone()), weights, sums.from(first * values.columns()));
            }
        }
    }
}

/// Adds the values of one tile to the rows that integers hold and that see no value that is not finite. Returns the
/// other rows, as bits.
pub(super) struct WeighSeen<'a, T> {
    pub(super) values: Unchecked<'a, T>,
    pub(super) tile: usize,
    pub(super) p: &'a [f32],
    pub(super) factor: &'a [f32],
    /// Which values each row sees, as bits; of all rows.
    pub(super) words: &'a [u64],
    /// Values that are not finite, as bits.
    pub(super) odd: u64,
    pub(super) sums: gemv::Sums<'a>,
}

impl<T: Stored> Run<u32> for WeighSeen<'_, T> {
    const OF_BYTES: bool = T::INTEGERS.is_some();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> u32 {
        let Self { values, tile, p, factor, words, odd, mut sums } = self;
        let (values, mut left) = (values.check(), u32::MAX >> (32 - words.len()));
        // A constant condition, so that no code of other levels is compiled.
        if const { I::DIGITS > 0 && T::INTEGERS.is_some() } && bytes::values::fit::<T>(values.columns()) {
            for (r, &word) in words.iter().enumerate().filter(|(_, word)| **word & odd == 0) {
                let sums = sums.from(r * values.columns());
                let held = bytes::values::add_seen(isa, (&values, tile, word), (&p[r * TILE..], &factor[r..]), sums);
                left &= !(u32::from(held) << r);
            }
        }
        left
    }
}

/// Whether all elements of one of some tiles are finite.
pub(super) struct IsFinite<'a, T>(pub(super) Unchecked<'a, T>, pub(super) usize);

impl<T: Stored> Run<bool> for IsFinite<'_, T> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> bool {
        self.0.check().tile(self.1, 0).is_finite(isa)
    }
}

/// Turns the scores of some tiles into weights.
pub(super) struct Softmax<'a, 'w> {
    pub(super) state: &'a mut State<'w>,
    pub(super) log2_scale: f32,
    pub(super) rows: usize,
    pub(super) group: &'a Group,
    /// The tiles that some row sees, as bits.
    pub(super) seen: u32,
    /// The factors of what was before each tile, and the floats from those of a tile to those of the next.
    pub(super) factors: (&'a mut [f32], usize),
    pub(super) s: &'a mut [f32],
    /// Floats from the scores of a tile to those of the next.
    pub(super) stride: usize,
}

impl Run<()> for Softmax<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { state, log2_scale, rows, group, seen, factors: (factors, floats), s, stride } = self;
        for n in tiles_of(seen) {
            let keys = group.tile(n).1.next_multiple_of(I::LANES);
            let factor = &mut factors[n * floats..][..floats];
            state.push(isa, log2_scale, (rows, keys), factor, &mut s[n * stride..]);
        }
    }
}

/// Finishes the scores of a tile, and writes −∞ for keys that a row does not see.
pub(super) struct FinishScores<'a> {
    pub(super) scoring: &'a Scoring<'a>,
    pub(super) rows: Rows<'a>,
    /// The first key, and the number of keys.
    pub(super) tile: [usize; 2],
    /// Whether every row sees every key.
    pub(super) all: bool,
    pub(super) words: &'a mut [u64],
    pub(super) s: &'a mut [f32],
}

impl Run<()> for FinishScores<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { scoring, rows, tile: [key, keys], all, words, s } = self;
        if let Some(scale) = scoring.score_scale {
            for (shape, part) in rows.by_sequence() {
                for r in part {
                    let RowAt { sequence, head, query, .. } = rows.at[r];
                    let (tile, row) =
                        (TileAt { batch: sequence, head, query, rows: 1, key, keys }, &mut s[r * TILE..][..TILE]);
                    score::finish(isa, (scoring, &shape), scale, tile, &mut words[r], row);
                }
            }
        }
        // The last tile of a sequence may end inside a vector.
        if !all || scoring.bias.is_some() || !keys.is_multiple_of(I::LANES) {
            let vectors = keys.next_multiple_of(I::LANES);
            for r in 0..rows.at.len() {
                if words[r] != u64::MAX {
                    score::replace_hidden(isa, &mut s[r * TILE..][..vectors], words[r], f32::NEG_INFINITY);
                }
            }
        }
    }
}

/// Writes the state of a chunk: maxima in natural logarithms, sums, outputs.
pub(super) struct Close<'a, 'w> {
    /// The factor from maxima to natural logarithms.
    pub(super) ln_scale: f64,
    pub(super) state: &'a State<'w>,
    pub(super) rows: usize,
    /// The outputs, and what rounding took from them.
    pub(super) o: [&'a [f32]; 2],
    pub(super) wide: usize,
    pub(super) value_dim: usize,
    pub(super) slot: &'a mut [f32],
}

impl Run<()> for Close<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) {
        let Self { ln_scale, state, rows, o: [o, rest], wide, value_dim, slot } = self;
        for (r, row) in slot.chunks_exact_mut(value_dim + 2).enumerate().take(rows) {
            let (max, sum) = state.of_row::<I>(r);
            // A maximum beyond f32 becomes the largest f32. If all scores of a row are beyond it, their order is lost,
            // but no NaN arises.
            let exact = f64::from(max) * ln_scale;
            let finite = exact.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
            let natural = if max.is_finite() { finite } else { max };
            // Rounding moves the maximum by a few millionths. The weights, which are relative to it, are corrected to
            // third order. A row that has seen no key keeps −∞, because −∞ − −∞ would be an invalid operation.
            let moved = exact - f64::from(finite);
            let follow =
                if moved.abs() < 0.5 { (1.0 + moved * (1.0 + moved * (0.5 + moved / 6.0))) as f32 } else { 1.0 };
            row[0] = natural;
            row[1] = sum * follow;
            for (x, (&o, &rest)) in row[2..].iter_mut().zip(o[r * wide..].iter().zip(&rest[r * wide..])) {
                *x = (o + rest) * follow;
            }
        }
    }
}

/// A tile with NaN or infinite values that some rows must not see: 0·NaN is NaN.
pub(super) struct Nonfinite<'p, V> {
    pub(super) rows: &'p V,
    /// Which of the heads.
    pub(super) head: usize,
    /// The first token, and the number of tokens.
    pub(super) token: usize,
    pub(super) tokens: usize,
}

impl<V: TileRows> Nonfinite<'_, V> {
    /// The tokens of the tile with elements that are not finite, as bits.
    pub(super) fn odd_tokens(&self, row: &mut [f32]) -> u64 {
        let mut odd = 0;
        for j in 0..self.tokens {
            row.fill(0.0);
            self.rows.read(self.head, self.token + j, row);
            odd |= u64::from(row.iter().any(|x| !x.is_finite())) << j;
        }
        odd
    }

    /// Does the work of [`Weighted`] in two steps: first with those elements as 0, then each of them by itself, for the
    /// rows that see it. `words` say which keys each row sees.
    pub(super) fn weighted(
        &self,
        level: Level,
        words: &[u64],
        wide: usize,
        (p, factor): (&[f32], &[f32]),
        mut sums: gemv::Sums<'_>,
        copy: &mut [f32],
    ) {
        for (j, row) in copy.chunks_exact_mut(wide).enumerate().take(self.tokens) {
            row.fill(0.0);
            self.rows.read(self.head, self.token + j, row);
            row.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
        }
        let places = Places::copied(self.tokens, wide);
        let values = Unchecked::copy(&*copy, &places, wide);
        let weights = [(p, 0), (factor, 0)];
        level.run(Weighted { n: words.len(), values, seen: 1, weights, fast: false, sums: sums.from(0) });
        let row = &mut copy[..wide];
        for j in 0..self.tokens {
            row.fill(0.0);
            self.rows.read(self.head, self.token + j, row);
            for (c, value) in row.iter().enumerate().filter(|(_, value)| !value.is_finite()) {
                for (r, _) in words.iter().enumerate().filter(|(_, word)| **word >> j & 1 == 1) {
                    sums.o[r * wide + c] += p[r * TILE + j] * value;
                }
            }
        }
    }
}
