//! Rows in packed formats that the products cannot read [in place](crate::gemv::packed): each tile is widened to `f32`
//! in scratch. These are f16 and bf16 stored as bytes, keys and values of two formats, and rows that are no whole
//! number of vectors.
//!
//! A tile of 64 rows is widened once for all query rows, and stays in the first or second cache until the products have
//! read it. Only the packed bytes come from memory. [`scales`](super::scales) has the scales that the cache stores
//! beside the bytes.

use attn_core::View;
use attn_core::formats::Format;
use attn_core::kv_cache::CacheView;

use super::rows::{Of, TileOf, TileRows};
use crate::gemv::packed::widen;
use crate::gemv::{Group, Places, TILE, Unchecked};
use crate::isa::{Isa, hint};
use crate::level::{Level, Run};

/// The rows of some heads of k or of v, in a packed format.
pub(super) struct Widened<'s, 'c> {
    level: Level,
    cache: &'s CacheView<'c, u8>,
    bytes: View<'c, u8>,
    format: Format,
    sequence: usize,
    /// The first head.
    head: usize,
    /// Columns rounded up to whole vectors.
    padded: usize,
    places: Places,
}

impl<'s, 'c> Widened<'s, 'c> {
    /// The rows of some heads of one sequence.
    pub(super) fn new(
        level: Level,
        cache: &'s CacheView<'c, u8>,
        (bytes, format): (View<'c, u8>, Format),
        Of { sequence, head, .. }: Of,
        padded: usize,
    ) -> Self {
        Self { level, cache, bytes, format, sequence, head, padded, places: Places::NONE }
    }

    /// The bytes of a row.
    #[inline(always)]
    fn row(&self, head: usize, token: usize) -> Option<&'c [u8]> {
        let run = self.cache.run(self.sequence, token)?;
        self.bytes.row(run.row, self.head + head, run.slot).as_slice()
    }
}

impl TileRows for Widened<'_, '_> {
    type Number = f32;

    fn find(&mut self, _: &Group) {}

    fn in_place(&self) -> Option<Unchecked<'_, f32>> {
        None
    }

    fn tile<'r>(
        &'r mut self,
        group: &Group,
        TileOf { tile, head }: TileOf,
        scratch: &'r mut [f32],
    ) -> (Unchecked<'r, f32>, usize) {
        let (token, tokens) = group.tile(tile);
        self.places = Places::copied(tokens, self.padded);
        self.level.run(Tile { rows: self, head: self.head + head, token, tokens, to: scratch });
        (Unchecked::copy(scratch, &self.places, self.padded), 0)
    }

    fn read(&self, head: usize, token: usize, out: &mut [f32]) {
        if let Some(bytes) = self.row(head, token) {
            self.format.widen(bytes, out);
        }
    }
}

/// Widens a tile to rows of `padded` numbers. Zeros pad a row, and replace one that the cache does not hold.
struct Tile<'a, 's, 'c> {
    rows: &'a Widened<'s, 'c>,
    head: usize,
    token: usize,
    tokens: usize,
    to: &'a mut [f32],
}

impl Run<()> for Tile<'_, '_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { rows, head, token, tokens, to } = self;
        let Widened { cache, bytes, format, sequence, padded, .. } = *rows;
        let ([.., row_bytes], [.., slot_step, _]) = (bytes.sizes(), bytes.strides());
        let numbers = (row_bytes / format.block_bytes() * format.block()).min(padded);
        // The byte distance to the row of the next tile. It is exact if rows are evenly spaced, and otherwise only a
        // hint.
        let ahead = slot_step.wrapping_mul(TILE as isize);
        let mut to = to.chunks_exact_mut(padded.max(1)).take(tokens);
        let mut token = token;
        while to.len() > 0 {
            let run = cache.run(sequence, token);
            let len = run.map_or(1, |run| run.len).min(to.len());
            for (n, row) in to.by_ref().take(len).enumerate() {
                let (numbers, rest) = row.split_at_mut(if run.is_some() { numbers } else { 0 });
                let bytes = run.and_then(|run| bytes.row(run.row, head, run.slot + n).as_slice()).unwrap_or_default();
                for line in (0..row_bytes).step_by(64) {
                    isa.prefetch::<{ hint::SECOND }>(bytes.as_ptr().wrapping_byte_offset(ahead).wrapping_add(line));
                }
                widen(isa, format, bytes, numbers);
                rest.fill(0.0);
            }
            token += len;
        }
    }
}
