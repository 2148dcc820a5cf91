//! The rows of some tiles of keys or values: where they start, and the check that they are in their slice.
//!
//! Contiguous caches, pages, rings and strides are read alike. A tile is eight times eight rows, and only the eight of
//! each need one distance. So the products find most rows by an addition, and only each eighth in a table. Rows that
//! are not spaced so, as in pages of less than eight tokens, are copied first.

#![allow(unsafe_code, reason = "addresses of rows, which `Unchecked::check` has held against their slice")]

use super::{Heads, Stored, TILE};
use crate::isa::{Isa, MAX_LANES};
use crate::prefetch::Prefetch;

/// Rows that follow each other at one distance: the values of a chain, and the keys of some steps.
pub(crate) const EIGHT: usize = 8;

/// The largest number of tiles in a group.
pub(crate) const TILES: usize = 8;

const EIGHTS: usize = TILE / EIGHT;

/// Room for the tiles of a group and the one after it.
const PLACES: usize = ((TILES + 1) * EIGHTS).next_power_of_two();

/// The tiles that are read together: which rows of a head each holds. All but the first and the last are whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    /// The index of the first row.
    first: usize,
    /// The index after the last row.
    end: usize,
    /// The number of tiles.
    count: usize,
}

impl Group {
    /// No tiles.
    const NONE: Self = Self { first: 0, end: 0, count: 0 };

    /// As many tiles as `most`, from a row on and before `end`. A tile ends at a multiple of its size.
    pub(crate) fn new(first: usize, end: usize, most: usize) -> Self {
        let most = most.min(TILES);
        let end = end.min((first / TILE + most).saturating_mul(TILE));
        Self { first, end, count: if end > first { end.div_ceil(TILE) - first / TILE } else { 0 } }
    }

    /// The number of tiles.
    #[inline(always)]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The index after the last row.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// The first row of a tile, and its number of rows. The tile after the last one would be whole.
    #[inline(always)]
    pub(crate) fn tile(&self, n: usize) -> (usize, usize) {
        let whole = (self.first / TILE + n).saturating_mul(TILE);
        let (from, to) = (whole.max(self.first), whole.saturating_add(TILE));
        (from, if n < self.count { to.min(self.end) } else { to } - from)
    }
}

/// The tiles whose bit is set.
#[inline(always)]
pub(crate) fn tiles_of(seen: u32) -> impl Iterator<Item = usize> {
    (0..TILES).filter(move |tile| seen >> tile & 1 == 1)
}

/// Where the rows of a group start, and for the prefetch those of the tile after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    /// The index of the first element of each eight rows of a tile; a power of two of them, so that no index needs a
    /// check.
    eights: [usize; PLACES],
    group: Group,
    /// The distance in elements from a row to the next of its eight.
    step: isize,
    /// Whether `eights` is one arithmetic sequence over all rows of the group: the check of the first and the last row
    /// relies on it. Only [`Self::fill`] says yes. Of the tile after the group they are a hint.
    even: bool,
}

impl Places {
    /// Of no tiles.
    pub(crate) const NONE: Self = Self { eights: [0; PLACES], group: Group::NONE, step: 0, even: false };

    /// One tile of `len` rows, `step` apart, in a slice of its own.
    pub(crate) fn copied(len: usize, step: usize) -> Self {
        let mut this = Self { group: Group::new(0, len, 1), step: step as isize, ..Self::NONE };
        for (n, eight) in this.eights.iter_mut().enumerate() {
            *eight = (n % EIGHTS * EIGHT).min(len / EIGHT * EIGHT) * step;
        }
        this
    }

    /// Takes another group. `run` finds a row: the index of its first element, and the number of rows that follow it
    /// `step` apart, itself among them; or `None` if there is no such row. Returns whether all rows of the group were
    /// found, in whole eights.
    pub(crate) fn find(
        &mut self,
        group: &Group,
        step: isize,
        mut run: impl FnMut(usize) -> Option<(usize, usize)>,
    ) -> bool {
        (self.group, self.step, self.even) = (*group, step, false);
        if let Some((first, rows)) = run(group.first).filter(|_| group.count > 0)
            && let end = group.first.saturating_add(rows)
            && (end >= group.tile(group.count).0.saturating_add(TILE) || end >= group.end && run(end).is_none())
        {
            self.fill(first);
            return true;
        }
        let (mut at, mut left, mut run_first) = (0, 0, 0);
        for (tile, eights) in self.eights.as_chunks_mut::<EIGHTS>().0.iter_mut().enumerate().take(group.count() + 1) {
            let (first, len) = group.tile(tile);
            for (n, eight) in eights.iter_mut().enumerate().take(len.div_ceil(EIGHT)) {
                let row = first.saturating_add(n * EIGHT);
                if left == 0 || row != at {
                    match run(row) {
                        Some((first, rows)) => (run_first, left) = (first, rows),
                        // Nobody reads the tile after the group.
                        None => return tile == group.count(),
                    }
                }
                let rows = (len - n * EIGHT).min(EIGHT);
                if left < rows {
                    return tile == group.count();
                }
                *eight = run_first;
                run_first = run_first.wrapping_add_signed(step.wrapping_mul(rows as isize));
                (at, left) = (row.saturating_add(rows), left - rows);
            }
        }
        true
    }

    /// Takes rows that are all spaced by the step, from the index of the first one.
    fn fill(&mut self, first: usize) {
        let group = self.group;
        for (tile, eights) in self.eights.as_chunks_mut::<EIGHTS>().0.iter_mut().enumerate().take(group.count + 1) {
            let rows = (group.tile(tile).0 - group.first) as isize;
            let first = first.wrapping_add_signed(self.step.wrapping_mul(rows));
            for (n, eight) in eights.iter_mut().enumerate() {
                *eight = first.wrapping_add_signed(self.step.wrapping_mul((n * EIGHT) as isize));
            }
        }
        self.even = true;
    }

    /// Whether some rows at one distance, from the index of the first one on, start at `last` or below.
    #[inline(always)]
    fn are_below(&self, last: usize, first: usize, rows: usize) -> bool {
        // No index of a slice exceeds isize::MAX bytes, so that a sum beyond it is outside.
        let end = first.checked_add_signed(self.step.saturating_mul(rows as isize - 1));
        first <= last && end.is_some_and(|end| end <= last)
    }

    /// The index of the first element of a row of a tile or of the tile after it.
    #[inline(always)]
    fn index(&self, tile: usize, row: usize) -> usize {
        let first = self.eights[(tile * EIGHTS + row / EIGHT) % PLACES];
        first.wrapping_add_signed(self.step.wrapping_mul((row % EIGHT) as isize))
    }
}

/// [`Rows`] before their check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unchecked<'a, T> {
    /// The elements of all rows.
    pub(crate) data: &'a [T],
    /// Where the rows start.
    pub(crate) places: &'a Places,
    /// Of which heads.
    pub(crate) heads: Heads,
    /// The number of columns of each row.
    pub(crate) columns: usize,
    /// How rows are prefetched.
    pub(crate) prefetch: Prefetch,
}

impl<'a, T: Stored> Unchecked<'a, T> {
    /// Rows that were copied. They are in the caches, so that no policy of memory matters.
    pub(crate) fn copy(data: &'a [T], places: &'a Places, columns: usize) -> Self {
        Self { data, places, heads: Heads::ONE, columns, prefetch: Prefetch::OTHER }
    }

    /// The rows, all inside the slice. Panics if one is not.
    #[inline(always)]
    pub(crate) fn check(self) -> Rows<'a, T> {
        assert!(self.is_inside(), "a row reaches outside of its slice");
        let Self { data, places, heads, columns, prefetch } = self;
        Rows { data, places, heads, columns, prefetch }
    }

    /// Whether all rows of the group are inside the slice.
    #[inline(always)]
    pub(super) fn is_inside(&self) -> bool {
        let Self { data, places, heads: Heads { first, count, step, .. }, columns, .. } = *self;
        assert!(columns > 0 && places.group.count <= TILES, "no columns, or too many tiles");
        let Some(last) = data.len().checked_sub(T::elements(columns)) else { return false };
        // Between two heads whose rows are inside, those of all are.
        let is_inside = |head: usize| {
            let offset = isize::try_from(head).ok().and_then(|head| head.checked_mul(step));
            offset.is_some_and(|offset| self.head_is_inside(last, offset))
        };
        is_inside(first) && (count == 1 || count > 1 && is_inside(first + count - 1))
    }

    /// Whether the rows of a head, some elements from that of the places, start at `last` or below.
    #[inline(always)]
    fn head_is_inside(&self, last: usize, offset: isize) -> bool {
        let places = self.places;
        let below = |first: usize, rows: usize| {
            first.checked_add_signed(offset).is_some_and(|first| places.are_below(last, first, rows))
        };
        // Between two rows that are inside, all rows at one distance are.
        if places.even {
            return below(places.eights[0], places.group.end - places.group.first);
        }
        let mut inside = true;
        for tile in 0..places.group.count {
            let (_, len) = places.group.tile(tile);
            assert!(len > 0 && len <= TILE, "a tile of no rows, or of too many");
            for n in 0..len.div_ceil(EIGHT) {
                inside &= below(places.eights[tile * EIGHTS + n], (len - n * EIGHT).min(EIGHT));
            }
        }
        inside
    }
}

/// The rows of some tiles of a slice, each of `columns` contiguous numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a, T> {
    data: &'a [T],
    places: &'a Places,
    heads: Heads,
    columns: usize,
    prefetch: Prefetch,
}

impl<'a, T: Stored> Rows<'a, T> {
    /// The number of tiles.
    #[inline(always)]
    pub(crate) fn tiles(&self) -> usize {
        self.places.group.count
    }

    /// The number of columns.
    #[inline(always)]
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// The heads whose rows are read together.
    #[inline(always)]
    pub(crate) fn heads(&self) -> Heads {
        self.heads
    }

    /// The rows of one of the heads.
    #[inline(always)]
    pub(crate) fn head(&self, n: usize) -> Self {
        assert!(n < self.heads.count);
        Self { heads: self.heads.one(n), ..*self }
    }

    /// Whether the heads of a token, and then those of the next one, are spaced alike.
    #[inline(always)]
    pub(crate) fn are_even(&self) -> bool {
        self.heads.step.checked_mul(self.heads.count as isize) == Some(self.places.step)
    }

    /// Whether the rows follow each other in memory without gaps.
    #[inline(always)]
    pub(crate) fn is_contiguous(&self) -> bool {
        self.places.even && self.places.step.unsigned_abs() == T::elements(self.columns)
    }

    /// How rows are prefetched.
    #[inline(always)]
    pub(crate) fn prefetch(&self) -> &Prefetch {
        &self.prefetch
    }

    /// A tile of one of the heads.
    #[inline(always)]
    pub(crate) fn tile(&self, n: usize, head: usize) -> Tile<'a, T> {
        let Self { data, places, heads, columns, .. } = *self;
        assert!(n < places.group.count && head < heads.count);
        let offset = heads.step.wrapping_mul((heads.first + head) as isize);
        Tile { data, places, offset, n, len: places.group.tile(n).1, columns }
    }
}

/// The rows of one tile; at least one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a, T> {
    data: &'a [T],
    places: &'a Places,
    /// Elements from the rows of the places to those of this head.
    offset: isize,
    n: usize,
    len: usize,
    columns: usize,
}

impl<T: Stored> Tile<'_, T> {
    /// The number of rows.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The number of columns.
    #[inline(always)]
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes from a row to the next of its eight.
    #[inline(always)]
    pub(crate) fn step(&self) -> isize {
        self.places.step.wrapping_mul(size_of::<T>() as isize)
    }

    /// The address of a row; of the last one if there are not so many.
    #[inline(always)]
    pub(crate) fn row(&self, n: usize) -> *const T {
        let index = self.places.index(self.n, n.min(self.len - 1)).wrapping_add_signed(self.offset);
        // SAFETY: `Unchecked::check` has found that every row of the tile is inside the slice, of each head.
        unsafe { self.data.as_ptr().add(index) }
    }

    /// The addresses of all rows; after the last one its own.
    #[inline(always)]
    pub(crate) fn addresses<U>(&self) -> [*const U; TILE] {
        let (mut all, step) = ([self.row(self.len - 1).cast::<U>(); TILE], self.step());
        for (n, eight) in all[..self.len].chunks_mut(EIGHT).enumerate() {
            let mut row = self.row(n * EIGHT).cast::<U>();
            for address in eight {
                *address = row;
                row = row.wrapping_byte_offset(step);
            }
        }
        all
    }

    /// Bytes from a row to one after it, which may be of the next tile. Exact if the rows between are evenly spaced and
    /// the tile is whole; otherwise a hint.
    #[inline(always)]
    pub(crate) fn lead(&self, row: usize, ahead: usize) -> usize {
        let (to, from) = (self.places.index(self.n, row + ahead), self.places.index(self.n, row));
        to.wrapping_sub(from).wrapping_mul(size_of::<T>())
    }

    /// Whether all elements are finite. Columns are whole vectors.
    #[inline(always)]
    pub(crate) fn is_finite<I: Isa>(&self, isa: I) -> bool {
        assert!(self.columns.is_multiple_of(I::LANES));
        // Sums of x·0, in two chains: 0 if x is finite, and NaN otherwise.
        let zero = isa.splat(0.0);
        let mut sums = [zero; 2];
        for n in 0..self.len {
            let row = self.row(n);
            for (i, c) in (0..self.columns).step_by(I::LANES).enumerate() {
                // SAFETY: a whole vector below `columns` of a row that has been checked.
                let x = unsafe { T::load(isa, row, c) };
                sums[i % 2] = isa.mul_add(x, zero, sums[i % 2]);
            }
        }
        let mut lanes = [0.0; MAX_LANES];
        isa.store(isa.add(sums[0], sums[1]), &mut lanes);
        lanes.iter().all(|&x| x == 0.0)
    }
}

#[cfg(test)]
mod tests {
    use attn_core::half::bf16;

    use super::*;
    use crate::Level;
    use crate::gemv::{Sums, blocks, dots, pairs, weighted};
    use crate::isa::pairs::{PairModel, Pairs};
    use crate::isa::portable::Portable;
    use crate::level::Run;

    /// Rows of `columns` numbers in 41 pages of `slots` rows, the pages in another order and a gap after each row.
    fn paged(row: usize, slots: usize, columns: usize) -> usize {
        (row / slots * 5 + 7) % 41 * (slots * (columns + 3)) + row % slots * (columns + 3)
    }

    fn find(group: &Group, step: isize, slots: usize, columns: usize) -> (Places, bool) {
        let mut places = Places::NONE;
        let found =
            places.find(group, step, |row| (row < 600).then(|| (paged(row, slots, columns), slots - row % slots)));
        (places, found)
    }

    #[test]
    fn rows_are_found_in_whole_eights() {
        for (first, end) in [(0, 512), (64, 200), (40, 300), (7, 9), (0, 1), (512, 600)] {
            let group = Group::new(first, end, TILES);
            assert_eq!((group.end(), group.count()), (end, (end - 1) / TILE - first / TILE + 1));
            for slots in [1, 4, 8, 16, 24, 64, 640] {
                let (places, found) = find(&group, 19, slots, 16);
                // Each eight of a tile must be in one page; few rows may, whatever the size.
                let want = (0..group.count()).map(|n| group.tile(n)).all(|(from, len)| {
                    (0..len).step_by(8).all(|n| (from + n) / slots == (from + (n + 7).min(len - 1)) / slots)
                });
                assert_eq!(found, want, "rows {first} to {end} in pages of {slots}");
                assert_eq!(places.even, slots == 640, "rows {first} to {end} in pages of {slots}");
                for n in (0..group.count()).filter(|_| found) {
                    let (from, len) = group.tile(n);
                    for row in 0..len {
                        assert_eq!(places.index(n, row), paged(from + row, slots, 16), "{n} {row} {slots}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_outside_is_found() {
        let data = [0.0f32; 100];
        let inside = |len: usize, step: isize, first: usize, columns| {
            let mut places = Places::NONE;
            let [even, by_eights] = [len, len + 1].map(|rows| {
                places.find(&Group::new(0, len, 1), step, |row| (row < rows).then_some((first, len)));
                assert_eq!(places.even, rows == len);
                Unchecked::copy(&data, &places, columns).is_inside()
            });
            assert_eq!(even, by_eights);
            even
        };
        assert!(inside(10, 10, 0, 10) && !inside(10, 10, 1, 10) && !inside(11, 10, 0, 10));
        // The eights of a tile need not be full.
        assert!(inside(9, 12, 0, 4) && !inside(9, 12, 0, 5));
        assert!(inside(5, -20, 80, 20) && !inside(5, -20, 79, 20) && !inside(5, -21, 80, 20));
        assert!(!inside(3, isize::MAX, 0, 1) && !inside(3, isize::MIN, 0, 1) && !inside(1, 0, usize::MAX, 1));
        assert!(!inside(1, 0, 0, 101));
    }

    #[test]
    #[should_panic(expected = "reaches outside")]
    fn a_row_outside_is_refused() {
        let mut places = Places::NONE;
        places.find(&Group::new(0, 2, 1), 10, |_| Some((0, 2)));
        Unchecked::copy(&[0.0f32; 19], &places, 10).check();
    }

    /// Both products over a group in pages of eight, or those of pairs, against plain sums.
    struct Products<'a, T> {
        rows: usize,
        keys: Unchecked<'a, T>,
        /// The numbers of the keys.
        data: &'a [f32],
        group: Group,
    }

    impl<T: Stored> Run<()> for Products<'_, T> {
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) {
            let Self { rows, keys, data, group } = self;
            let (columns, padded) = (keys.columns, crate::gemv::padded(rows, I::LANES));
            let q: Vec<f32> = (0..padded * columns).map(|n| (n % 7) as f32 - 3.0).collect();
            let mut words = vec![0.0; q.len() / I::WORD];
            if I::WORD == 1 {
                words.copy_from_slice(&q);
            } else {
                assert_eq!(pairs::write(&q, columns, padded, &mut words).count_ones() as usize, padded);
            }
            let (stride, size) = (padded * TILE, padded * columns);
            let mut s = vec![f32::NAN; stride * group.count()];
            let keys = keys.check();
            for (first, count) in blocks::<T>(rows, I::LANES) {
                let q = &words[first * columns / I::WORD..];
                dots(isa, count, (&keys, 0..group.count()), q, (&mut s[first * TILE..], stride));
            }
            let at = |n: usize, row: usize| &data[paged(group.tile(n).0 + row, 8, columns)..][..columns];
            for n in 0..group.count() {
                for (r, row) in (0..rows).flat_map(|r| (0..group.tile(n).1).map(move |row| (r, row))) {
                    // Small integers: every sum is exact.
                    let want: f32 = at(n, row).iter().zip(&q[r * columns..]).map(|(x, q)| x * q).sum();
                    assert_eq!(s[n * stride + r * TILE + row], want, "{} lanes, {rows} rows, {columns}", I::LANES);
                }
            }
            if I::WORD > 1 {
                return;
            }
            let p: Vec<f32> = (0..s.len()).map(|n| (n % 5) as f32).collect();
            let factors = vec![0.5; padded * group.count()];
            let (mut o, mut rest, mut waiting) = (vec![2.0; size], vec![0.0; size], [(); 3].map(|()| vec![0.0; size]));
            for (first, count) in blocks::<T>(rows, I::LANES) {
                let mut sums =
                    Sums { o: &mut o, rest: &mut rest, waiting: waiting.each_mut().map(|array| array.as_mut_slice()) };
                let weights = [(&p[first * TILE..], stride), (&factors[first..], padded)];
                weighted(isa, count, (&keys, 0..group.count()), weights, sums.from(first * columns));
            }
            for (r, c) in (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))) {
                let want = (0..group.count()).fold(2.0, |o, n| {
                    let sum: f32 = (0..group.tile(n).1).map(|row| at(n, row)[c] * p[n * stride + r * TILE + row]).sum();
                    o * 0.5 + sum
                });
                let got = o[r * columns + c] + rest[r * columns + c];
                assert_eq!(got, want, "{} lanes, {rows} rows, channel {c} of {columns}", I::LANES);
            }
        }
    }

    #[test]
    fn products_read_every_row_where_it_is() {
        let models = Level::model_names().map(|name| Level::by_name(name).unwrap());
        for level in Level::available().chain(models).filter(|level| level.without_tiles() == *level) {
            // One block of channels and several, one chain of sums and several, whole groups of keys and others.
            // Miri takes hundreds of times as long, and looks for something else.
            let widths = [32, 16, 64, 80, 96, 112, 128, 192, 256, 272];
            for &columns in if cfg!(miri) { &widths[..1] } else { &widths } {
                let data: Vec<f32> = (0..41 * 8 * (columns + 3)).map(|n| (n % 11) as f32 - 5.0).collect();
                let halves: Vec<bf16> = data.iter().map(|&x| bf16::from_f32(x)).collect();
                for (first, end) in if cfg!(miri) { &[(40, 76)][..] } else { &[(40, 139), (0, 1), (64, 87)] } {
                    let group = Group::new(*first, *end, TILES);
                    let (places, found) = find(&group, columns as isize + 3, 8, columns);
                    assert!(found);
                    for &rows in if cfg!(miri) { &[1, 3][..] } else { &[1, 2, 3, 4, 6, 8, 11] } {
                        for prefetch in [Prefetch::OTHER, Prefetch::IN_ORDER] {
                            let (data, halves, places) = (&*data, &*halves, &places);
                            let keys = Unchecked { data: halves, places, heads: Heads::ONE, columns, prefetch };
                            // The vectors of any machine, whatever those of this one.
                            if level == Level::portable() && columns.is_multiple_of(2 * level.lanes()) {
                                let isa = Pairs(PairModel(<Portable>::PROVEN));
                                Products { rows, keys, data, group }.run(isa);
                            }
                            if level.uses_dot_products() {
                                if pairs::fit(level, columns) {
                                    level.run_pairs(Products { rows, keys, data, group }).unwrap();
                                }
                                continue;
                            }
                            level.run(Products { rows, keys, data, group });
                            level.run(Products {
                                rows,
                                keys: Unchecked { data, places, heads: Heads::ONE, columns, prefetch },
                                data,
                                group,
                            });
                        }
                    }
                }
            }
        }
    }
}
