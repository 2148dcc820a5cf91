//! The rows of some tiles of keys or values: found in place, or copied into scratch.

use attn_core::View;
use attn_core::kv_cache::CacheView;
use attn_core::row::Row;

use crate::gemv::{Group, Heads, Places, Stored, TILE, Unchecked};
use crate::isa::{Isa, hint};
use crate::level::{Level, Run};
use crate::prefetch::Prefetch;
use crate::workspace::elements_of;

/// The rows of some heads of k or of v, group by group.
pub(super) trait TileRows {
    /// The type of the rows that the products read.
    type Number: Stored;
    /// Finds the rows of a group of tiles.
    fn find(&mut self, group: &Group);
    /// The rows of all tiles of the group and of all heads, if they can be read in place.
    fn in_place(&self) -> Option<Unchecked<'_, Self::Number>>;
    /// The rows of a tile of the group, of one of the heads, in place or copied into `scratch`, and which tile of these
    /// rows it is.
    fn tile<'r>(
        &'r mut self,
        group: &Group,
        at: TileOf,
        scratch: &'r mut [f32],
    ) -> (Unchecked<'r, Self::Number>, usize);
    /// Writes the numbers of one row of a head as the products read them, without the scale of its token. Writes
    /// nothing if the cache does not hold the token.
    fn read(&self, head: usize, token: usize, out: &mut [f32]);
}

/// A tile of a group, of one of the heads that are read together.
#[derive(Clone, Copy)]
pub(super) struct TileOf {
    pub(super) tile: usize,
    pub(super) head: usize,
}

/// Which rows of a cache.
#[derive(Clone, Copy)]
pub(super) struct Of {
    pub(super) sequence: usize,
    /// The first key/value head, and the number of those that are read together.
    pub(super) head: usize,
    pub(super) heads: usize,
    /// The query rows of each.
    pub(super) rows: usize,
}

/// The rows of some heads, in a type that the products read. The cache, of any type, tells where tokens are.
pub(super) struct Located<'s, 'c, C, T> {
    level: Level,
    cache: &'s CacheView<'c, C>,
    view: View<'c, T>,
    sequence: usize,
    /// The first head.
    head: usize,
    heads: Heads,
    /// Columns rounded up to whole vectors.
    padded: usize,
    /// Whether rows can be read in place: contiguous, and in whole vectors.
    direct: bool,
    /// Whether all rows of the group were found in whole eights, too.
    found: bool,
    /// Where they start, or a copy of one tile.
    places: Places,
    prefetch: Prefetch,
}

impl<'s, 'c, C: Copy, T: Stored> Located<'s, 'c, C, T> {
    /// The rows of some heads of one sequence.
    pub(super) fn new(
        level: Level,
        cache: &'s CacheView<'c, C>,
        view: View<'c, T>,
        Of { sequence, head, heads, rows }: Of,
        padded: usize,
    ) -> Self {
        let ([.., columns], [_, step, _, unit]) = (view.sizes(), view.strides());
        let direct = unit == 1 && columns > 0 && columns == T::elements(padded);
        let (places, prefetch) = (Places::NONE, Prefetch::detect());
        let heads = Heads { first: 0, count: heads, step, rows, beside: heads };
        Self { level, cache, view, sequence, head, heads, padded, direct, found: false, places, prefetch }
    }
}

impl<C: Copy, T: Stored> TileRows for Located<'_, '_, C, T> {
    type Number = T;

    fn find(&mut self, group: &Group) {
        let Self { cache, view, sequence, head, direct, found, places, .. } = self;
        let [row_step, head_step, slot_step, _] = view.strides();
        let step = |n: usize, stride: isize| (n as isize).wrapping_mul(stride);
        let start = view.offset().wrapping_add_signed(step(*head, head_step));
        *found = *direct
            && places.find(group, slot_step, |token| {
                let run = cache.run(*sequence, token)?;
                let first = start.wrapping_add_signed(step(run.row, row_step));
                Some((first.wrapping_add_signed(step(run.slot, slot_step)), run.len))
            });
    }

    fn in_place(&self) -> Option<Unchecked<'_, T>> {
        let Self { view, heads, found, places, padded, prefetch, .. } = self;
        found.then_some(Unchecked { data: view.data(), places, heads: *heads, columns: *padded, prefetch: *prefetch })
    }

    fn tile<'r>(
        &'r mut self,
        group: &Group,
        TileOf { tile, head }: TileOf,
        scratch: &'r mut [f32],
    ) -> (Unchecked<'r, T>, usize) {
        let Self { view, padded: columns, prefetch, .. } = *self;
        if self.found {
            let heads = self.heads.one(head);
            return (Unchecked { data: view.data(), places: &self.places, heads, columns, prefetch }, tile);
        }
        let ((token, tokens), row_len) = (group.tile(tile), T::elements(columns));
        let copy = elements_of::<T>(scratch);
        self.level.run(CopyTile { rows: self, head: self.head + head, token, tokens, to: &mut *copy, row_len });
        self.places = Places::copied(tokens, row_len);
        (Unchecked::copy(copy, &self.places, columns), 0)
    }

    fn read(&self, head: usize, token: usize, out: &mut [f32]) {
        let Some(run) = self.cache.run(self.sequence, token) else { return };
        T::read(self.view.row(run.row, self.head + head, run.slot), out);
    }
}

/// Copies the rows of a tile, and requests those of the next one meanwhile. Zeros pad a row, and replace one that the
/// cache does not hold, which is hidden.
struct CopyTile<'a, 's, 'c, C, T> {
    rows: &'a Located<'s, 'c, C, T>,
    head: usize,
    token: usize,
    tokens: usize,
    to: &'a mut [T],
    row_len: usize,
}

impl<C: Copy, T: Stored> Run<()> for CopyTile<'_, '_, '_, C, T> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { rows, head, token, tokens, to, row_len } = self;
        let (cache, sequence) = (rows.cache, rows.sequence);
        let mut to = to.chunks_exact_mut(row_len).take(tokens);
        let mut at = token;
        while to.len() > 0 {
            let run = cache.run(sequence, at);
            let len = run.map_or(1, |run| run.len).min(to.len());
            let later = cache.run(sequence, at.saturating_add(TILE));
            for (n, to) in to.by_ref().take(len).enumerate() {
                if let Some(later) = later.filter(|later| n < later.len)
                    && let Some(row) = rows.view.row(later.row, head, later.slot + n).as_slice()
                {
                    for line in row.chunks(64 / size_of::<T>()) {
                        isa.prefetch::<{ hint::SECOND }>(line.as_ptr().cast());
                    }
                }
                let src = run.map(|run| rows.view.row(run.row, head, run.slot + n));
                let len = src.as_ref().map_or(0, Row::len);
                match src.as_ref().and_then(Row::as_slice) {
                    Some(slice) => to[..len].copy_from_slice(slice),
                    None => to.iter_mut().zip(src.iter().copied().flat_map(Row::iter)).for_each(|(to, x)| *to = x),
                }
                to[len..].fill(T::default());
            }
            at += len;
        }
    }
}
