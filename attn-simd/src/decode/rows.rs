//! The rows of a tile of keys or values: found in place, or copied into scratch.

use attn_core::View;
use attn_core::kv_cache::CacheView;

use crate::gemv::{self, Starts, Stored, TILE, Unchecked};
use crate::isa::Isa;
use crate::level::{Level, Run};
use crate::prefetch::Prefetch;
use crate::workspace::elements_of;

/// The rows of one head of k or of v, tile by tile.
pub(super) trait TileRows {
    /// The type of the rows that the products read.
    type Number: Stored;
    /// Finds the rows of the next tile, which has `tokens` of them from `token` on.
    fn find_next(&mut self, level: Level, token: usize, tokens: usize);
    /// Makes the next tile the present one.
    fn advance(&mut self);
    /// The rows of the present tile, which begins at `token`: in place, or copied into `scratch`.
    fn rows<'r>(&'r mut self, token: usize, tokens: usize, scratch: &'r mut [f32]) -> Unchecked<'r, Self::Number>;
    /// Writes the numbers of one row as the products read them, without the scale of its token. Writes nothing if the
    /// cache does not hold the token.
    fn read(&self, token: usize, out: &mut [f32]);
}

/// The rows of one head, in a type that the products read. The cache, of any type, tells where tokens are.
pub(super) struct Located<'s, 'c, C, T> {
    cache: &'s CacheView<'c, C>,
    view: View<'c, T>,
    sequence: usize,
    head: usize,
    /// Columns rounded up to whole vectors.
    padded: usize,
    /// Whether rows can be read in place: contiguous, and in whole vectors.
    direct: bool,
    /// The index of each row's first element, for two tiles.
    starts: Starts,
    /// Where the indices of the present tile begin.
    base: usize,
    prefetch: Prefetch,
}

/// Runs [`gemv::evenly`] at a level.
struct Evenly<'a> {
    starts: &'a mut [usize; TILE],
    first: usize,
    step: isize,
    len: usize,
}

impl Run<()> for Evenly<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) {
        gemv::evenly(self.starts, self.first, self.step, self.len);
    }
}

impl<'s, 'c, C: Copy, T: Stored> Located<'s, 'c, C, T> {
    /// Finds the first tile: `tokens` rows from `token` on.
    pub(super) fn new(
        level: Level,
        cache: &'s CacheView<'c, C>,
        view: View<'c, T>,
        [sequence, head]: [usize; 2],
        padded: usize,
        (token, tokens): (usize, usize),
    ) -> Self {
        let ([.., columns], [.., unit]) = (view.sizes(), view.strides());
        let direct = unit == 1 && columns > 0 && columns == T::elements(padded);
        let mut this = Self {
            cache,
            view,
            sequence,
            head,
            padded,
            direct,
            starts: [0; 2 * TILE],
            base: TILE,
            prefetch: Prefetch::detect(),
        };
        this.find_next(level, token, tokens);
        this.advance();
        this
    }
}

impl<C: Copy, T: Stored> TileRows for Located<'_, '_, C, T> {
    type Number = T;

    fn find_next(&mut self, level: Level, token: usize, tokens: usize) {
        if !self.direct || tokens == 0 {
            return;
        }
        let [row_step, head_step, slot_step, _] = self.view.strides();
        let step = |n: usize, stride: isize| (n as isize).wrapping_mul(stride);
        let head = self.view.offset().wrapping_add_signed(step(self.head, head_step));
        let Some((starts, _)) = self.starts[TILE - self.base..].split_first_chunk_mut::<TILE>() else { return };
        let mut done = 0;
        while done < tokens {
            let Some(run) = self.cache.run(self.sequence, token + done) else {
                // Tokens of an evicted page are hidden, so any row can stand in for them.
                let gone = self.cache.evicted(self.sequence, token + done);
                // A token that does not exist gets an index outside of every slice: `Unchecked::check` refuses it.
                starts[done..].fill(if gone > 0 { head } else { usize::MAX });
                if gone == 0 {
                    return;
                }
                done += gone;
                continue;
            };
            let len = run.len.min(tokens - done);
            let first =
                head.wrapping_add_signed(step(run.row, row_step)).wrapping_add_signed(step(run.slot, slot_step));
            if done == 0 {
                // Usually the run fills the tile; otherwise the next runs overwrite the rest.
                level.run(Evenly { starts, first, step: slot_step, len });
            } else {
                for (n, start) in starts[done..].iter_mut().enumerate() {
                    *start = first.wrapping_add_signed(step(n.min(len - 1), slot_step));
                }
            }
            done += len;
        }
    }

    fn advance(&mut self) {
        self.base = TILE - self.base;
    }

    fn rows<'r>(&'r mut self, token: usize, tokens: usize, scratch: &'r mut [f32]) -> Unchecked<'r, T> {
        if self.direct {
            let (data, starts, base, columns) = (self.view.data(), &self.starts, self.base, self.padded);
            return Unchecked { data, starts, base, len: tokens, columns, prefetch: self.prefetch };
        }
        let copy = elements_of::<T>(scratch);
        self.starts.fill(0);
        for (n, row) in copy.chunks_exact_mut(self.padded).enumerate().take(tokens) {
            let Some(run) = self.cache.run(self.sequence, token + n) else { continue };
            let src = self.view.row(run.row, self.head, run.slot);
            match src.as_slice() {
                Some(slice) => row[..slice.len()].copy_from_slice(slice),
                None => row.iter_mut().zip(src.iter()).for_each(|(d, x)| *d = x),
            }
            row[src.len()..].fill(T::default());
            self.starts[n] = n * self.padded;
        }
        Unchecked {
            data: copy,
            starts: &self.starts,
            base: 0,
            len: tokens,
            columns: self.padded,
            prefetch: self.prefetch,
        }
    }

    fn read(&self, token: usize, out: &mut [f32]) {
        let Some(run) = self.cache.run(self.sequence, token) else { return };
        T::read(self.view.row(run.row, self.head, run.slot), out);
    }
}

const _: () = assert!(TILE == crate::scoring::KV_TILE, "a word of mask bits is a tile");
