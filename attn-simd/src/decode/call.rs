//! What all pieces of a decode call read: sequences, row groups, places of rows, sizes of scratch.

use core::ops::Range;

use attn_core::AttnShape;
use attn_core::kv_cache::Queries;

use crate::dtype::{Input, Source};
use crate::gemv::{self, TILE, TILES};
use crate::level::Level;
use crate::scoring::Scoring;
use crate::workspace::lines_for;

/// Keys of a chunk: a leaf of the tree in which the states of a row are merged. A multiple of a tile. It is small
/// enough that a sequence of a few thousand keys keeps several cores busy, and large enough that ending a chunk costs a
/// hundredth of reading it.
pub(crate) const CHUNK: usize = 512;

/// The largest number of rows that share one pass.
pub(crate) const MAX_ROWS: usize = 32;

/// The heads that are read together, of so many, if each has some query rows: as many as a pass has room for, and about
/// as many in each pass.
pub(super) fn heads_together(heads: usize, rows: usize, lanes: usize) -> usize {
    let most = MAX_ROWS / gemv::padded(rows.clamp(1, MAX_ROWS), lanes);
    if rows > MAX_ROWS { 1 } else { heads.div_ceil(heads.div_ceil(most).max(1)).max(1) }
}

const _: () = assert!(CHUNK == TILE * TILES, "a group of tiles ends with its chunk");

/// Rows times tiles of one group of tiles: 8 KiB of scores, which stay in the first cache.
const GROUPED: usize = 32;

/// The tiles of a group, for a number of rows. Keys and values are two streams from memory. If the scores of several
/// tiles come before their values, each stream is longer. Measured on Zen 5 over cold caches, against one tile: 1.02 to
/// 1.07 times as fast for four rows, 1.06 to 1.2 for one. No bit depends on it.
pub(super) fn tiles_for(rows: usize) -> usize {
    (GROUPED / rows.max(1)).clamp(1, TILES)
}

/// The sequences of a call: their sizes, and where their queries are.
#[derive(Clone, Copy)]
pub(super) struct Sequences<'w> {
    /// Sizes of q and of the output; `kv_len` is that of the longest sequence.
    pub(super) shape: AttnShape,
    pub(super) queries: Queries<'w>,
    /// The cache that knows each sequence's length; `None` if all have that of the shape.
    pub(super) lens: Option<Source<'w>>,
}

impl Sequences<'_> {
    /// The number of sequences.
    pub(super) fn count(&self) -> usize {
        self.shape.batch
    }

    /// The number of queries of one sequence.
    pub(super) fn q_len(&self, sequence: usize) -> usize {
        self.queries.len(sequence, self.shape.q_len)
    }

    /// The shape of one sequence, as masks and positions see it: a call by itself.
    #[inline]
    pub(super) fn shape(&self, sequence: usize) -> AttnShape {
        match &self.lens {
            None => self.shape,
            Some(cache) => AttnShape { q_len: self.q_len(sequence), kv_len: cache.len(sequence), ..self.shape },
        }
    }

    /// The number of queries of all sequences.
    pub(super) fn all_queries(&self) -> usize {
        (0..self.count()).fold(0, |sum, sequence| sum.saturating_add(self.q_len(sequence)))
    }
}

/// Query rows that read the same keys and values: `of_head` of them, from `first` on. Row `query · group + head of the
/// group` is the row of a query and a head. Several key/value heads may be read together, each with as many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowGroup {
    /// The sequence of masks and of the cache; for shared keys that of the first row.
    pub(super) sequence: usize,
    /// The first key/value head, and the number of them.
    pub(super) kv_head: usize,
    pub(super) heads: usize,
    pub(super) first: usize,
    pub(super) of_head: usize,
    /// The rows of all heads. If there are several, each head has as many rows as the products are compiled for: its
    /// last one may be there several times.
    pub(super) rows: usize,
    /// Whether the keys precede all sequences: then rows may go on into later sequences.
    pub(super) shared: bool,
}

/// One query row of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowAt {
    /// The sequence of masks.
    pub(crate) sequence: usize,
    pub(crate) head: usize,
    pub(crate) query: usize,
    /// The indices of q and of the output: on their first and on their third axis.
    pub(super) place: [usize; 2],
}

/// The places of all rows of a group.
pub(crate) type RowPlaces = [RowAt; MAX_ROWS];

/// The rows of a group, and the shapes of their sequences.
#[derive(Clone, Copy)]
pub(super) struct Rows<'p> {
    pub(super) at: &'p [RowAt],
    /// The first row's sequence, and its shape.
    first: (usize, AttnShape),
    sequences: &'p Sequences<'p>,
}

impl<'p> Rows<'p> {
    /// The shape of the first row's sequence. Heads and dims are the same in every sequence.
    pub(super) fn shape(&self) -> &AttnShape {
        &self.first.1
    }

    /// The rows of each sequence and its shape, in order.
    #[inline(always)]
    pub(super) fn by_sequence(&self) -> impl Iterator<Item = (AttnShape, Range<usize>)> + use<'p> {
        let (Self { at, first: (first, shape), sequences }, mut done) = (*self, 0);
        at.chunk_by(|a, b| a.sequence == b.sequence).map(move |part| {
            let range = done..done + part.len();
            done = range.end;
            let sequence = part[0].sequence;
            (if sequence == first { shape } else { sequences.shape(sequence) }, range)
        })
    }
}

/// Floats of each array of one thread's scratch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) q: usize,
    pub(super) words: usize,
    pub(super) s: usize,
    pub(super) o: usize,
    pub(super) row: usize,
    pub(super) factors: usize,
    pub(super) sums: usize,
    pub(super) k: usize,
    pub(super) v: usize,
    pub(super) states: usize,
}

impl Sizes {
    /// For groups of at most `rows` rows of one head of at most `heads`, and `slots` states in a fold.
    pub(super) fn new(
        level: Level,
        (rows, heads): (usize, usize),
        [head_dim, value_dim]: [usize; 2],
        slots: usize,
    ) -> Self {
        let lanes = level.lanes();
        // The largest group may have fewer rows of more heads than the one with the most rows of a head.
        let rows = gemv::padded(rows.min(MAX_ROWS), lanes);
        let rows = rows.max(rows.saturating_mul(heads).min(MAX_ROWS));
        let (head_dim, wide) = (head_dim.next_multiple_of(lanes), value_dim.next_multiple_of(lanes));
        Self {
            q: rows * head_dim,
            words: gemv::bytes::scratch(level.digits(), rows, head_dim)
                .max(gemv::pairs::scratch(level, rows, head_dim)),
            s: rows * TILE * tiles_for(rows),
            o: rows * wide,
            row: rows.next_multiple_of(lanes),
            factors: rows.next_multiple_of(lanes) * TILES,
            sums: rows * lanes,
            k: TILE * head_dim,
            v: TILE * wide,
            states: slots * rows * (value_dim + 2),
        }
    }

    /// Cache lines of all arrays.
    pub(super) fn lines(&self) -> usize {
        let Self { q, words, s, o, row, factors, sums, k, v, states } = *self;
        [q, words, s, o, o, o, o, o, row, factors, sums, sums, k, v, states].into_iter().map(lines_for).sum()
    }
}

/// Floats of the states over shared keys that one thread holds at a time; a single query may have more.
pub(super) const PREFIX_FLOATS: usize = 1 << 18;

/// Lines of the largest state.
pub(crate) const fn state_lines(value_dim: usize) -> usize {
    lines_for(MAX_ROWS * (value_dim + 2))
}

/// Lines of the states over shared keys, of as many queries as one thread computes together.
pub(super) fn prefix_lines(queries: usize, query_floats: usize) -> usize {
    let together = (PREFIX_FLOATS / query_floats.max(1)).max(1);
    lines_for(queries.min(together).saturating_mul(query_floats))
}

/// The data that all pieces read.
pub(crate) struct Call<'w> {
    pub(super) scoring: Scoring<'w>,
    pub(super) sequences: Sequences<'w>,
    pub(super) source: Source<'w>,
    /// Keys and values that precede those of every sequence.
    pub(super) prefix: Option<Source<'w>>,
    pub(super) q: Input<'w>,
    pub(super) sizes: Sizes,
    /// Whether the heads of a token are next to each other, so that several may be read together.
    pub(super) beside: bool,
}

impl Call<'_> {
    /// The number of key/value heads, and of query heads for each.
    pub(super) fn heads(&self) -> [usize; 2] {
        [self.sequences.shape.kv_heads, self.sequences.shape.group()]
    }

    /// Whether bf16 keys are multiplied as pairs with the queries.
    pub(super) fn multiplies_pairs(&self, head_dim: usize) -> bool {
        matches!(self.q, Input::Bf16(_)) && self.scoring.multiplies_pairs(head_dim)
    }

    /// Whether queries and weights are integers of two digits where a cache is made of int8: under `Precision::Fast`,
    /// if heads share keys. One head alone waits for memory, whatever it computes.
    pub(super) fn rounds_integers(&self) -> bool {
        self.scoring.fast && self.sequences.shape.group() > 1
    }

    /// Floats of the state of some rows.
    pub(crate) fn state_len(&self, rows: usize) -> usize {
        rows * (self.sequences.shape.value_dim + 2)
    }

    /// Lines of scratch of one thread.
    pub(super) fn lines(&self) -> usize {
        if self.sizes == Sizes::default() {
            return 0;
        }
        self.sizes.lines() + state_lines(self.sequences.shape.value_dim) + self.prefix_lines()
    }

    /// Lines of the states over shared keys, of as many queries as one thread computes together.
    pub(super) fn prefix_lines(&self) -> usize {
        if self.prefix.is_some() { prefix_lines(self.sequences.all_queries(), self.query_floats()) } else { 0 }
    }

    /// Floats of the states of one query, over all heads.
    pub(super) fn query_floats(&self) -> usize {
        let [kv_heads, group] = self.heads();
        kv_heads.saturating_mul(self.state_len(group))
    }

    /// The work of the whole call, roughly: row groups times chunks.
    pub(super) fn work(&self) -> usize {
        let ([kv_heads, group], sequences) = (self.heads(), &self.sequences);
        let groups = |rows: usize| kv_heads.saturating_mul(rows.div_ceil(MAX_ROWS));
        let mut rows = 0usize;
        let before = self.prefix.map_or(0, |prefix| prefix.len(0));
        let mut of = |sequence: usize| {
            let own = group.saturating_mul(sequences.q_len(sequence));
            rows = rows.saturating_add(own);
            groups(own).saturating_mul(self.source.len(sequence).saturating_sub(before).div_ceil(CHUNK))
        };
        let own = match sequences.lens {
            None if sequences.count() == 0 => 0,
            None => of(0).saturating_mul(sequences.count()),
            Some(_) => (0..sequences.count()).fold(0, |sum: usize, n| sum.saturating_add(of(n))),
        };
        own.saturating_add(groups(rows).saturating_mul(before.div_ceil(CHUNK)))
    }

    /// Whether the rows of a group are rows of this call.
    pub(super) fn has(&self, group: &RowGroup) -> bool {
        let RowGroup { sequence, kv_head, heads, first, of_head, rows, shared } = *group;
        let of = if shared { sequence..self.sequences.count() } else { sequence..sequence + 1 };
        let lanes = self.scoring.level.lanes();
        let fits = match heads {
            1 => of_head == rows,
            _ if !self.beside || shared => false,
            _ => heads == heads_together(heads, of_head, lanes) && rows == heads * gemv::padded(of_head, lanes),
        };
        let known = sequence < self.sequences.count() && kv_head.saturating_add(heads) <= self.heads()[0];
        fits && known && (self.prefix.is_some() || !shared) && {
            let queries = of.fold(0usize, |sum, n| sum.saturating_add(self.sequences.q_len(n)));
            first.saturating_add(of_head) <= queries.saturating_mul(self.heads()[1])
        }
    }

    /// The places of a group's rows; the call must [have](Self::has) them.
    pub(super) fn rows_of<'r>(&'r self, group: &RowGroup, places: &'r mut RowPlaces) -> Rows<'r> {
        let (heads, sequences) = (self.heads()[1], &self.sequences);
        let (mut sequence, mut n) = (group.sequence, group.first);
        let (mut end, mut place) = (heads * sequences.q_len(sequence), sequences.queries.start(sequence));
        for row in &mut places[..group.of_head] {
            while n >= end && sequence < sequences.count() {
                sequence += 1;
                n = 0;
                (end, place) = (heads * sequences.q_len(sequence), sequences.queries.start(sequence));
            }
            let (head, query) = (group.kv_head * heads + n % heads, n / heads);
            *row = RowAt { sequence, head, query, place: [place[0], place[1] + query] };
            n += 1;
        }
        if group.heads > 1 {
            let each = group.rows / group.heads;
            for at in (0..group.rows).rev() {
                let row = places[(at % each).min(group.of_head - 1)];
                places[at] = RowAt { head: row.head + at / each * heads, ..row };
            }
        }
        Rows { at: &places[..group.rows], first: (group.sequence, sequences.shape(group.sequence)), sequences }
    }
}
