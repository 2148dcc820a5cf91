//! Keys and values that change as the kernel reads them: int8 and fp8, whose scales are applied to scores and weights,
//! and keys with rope, applied by their index in the cache.

use attn_core::View;
use attn_core::formats::StoredView;
use attn_core::int8::{KeyScales, QuantizedView};
use attn_core::kv_cache::CacheView;
use attn_core::position::rope::RopeTables;
use attn_core::row::Row;

use crate::gemv::{Places, TILE, Unchecked};
use crate::isa::Isa;
use crate::level::Run;

/// The scales of one sequence.
pub(super) struct Scaling<'s, 'c, T> {
    /// Tells where tokens are.
    pub(super) cache: &'s CacheView<'c, T>,
    pub(super) scales: Scales<'c>,
    pub(super) sequence: usize,
}

/// The scales of a cache, if its keys and its values have some. Those of tokens are `[batch or pages, kv_heads, slots,
/// 1]`.
#[derive(Clone, Copy)]
pub(super) struct Scales<'c> {
    pub(super) keys: Option<KeyScales<'c>>,
    pub(super) values: Option<View<'c, f32>>,
}

impl<'c> Scales<'c> {
    pub(super) const NONE: Self = Self { keys: None, values: None };

    /// The scales of an int8 cache.
    pub(super) fn quantized(cache: &QuantizedView<'c>) -> Self {
        Self { keys: Some(cache.key_scales()), values: Some(cache.value_scales()) }
    }

    /// The scales of a cache in packed formats, which it stores beside the bytes.
    pub(super) fn stored(cache: &StoredView<'c>) -> Self {
        Self { keys: cache.keys().scales().map(KeyScales::PerToken), values: cache.values().scales() }
    }
}

impl<'c, T: Copy> Scaling<'_, 'c, T> {
    /// One scale for each channel of the keys, if the cache has such.
    pub(super) fn channels(&self, head: usize) -> Option<Row<'c, f32>> {
        match self.scales.keys? {
            KeyScales::PerToken(_) => None,
            KeyScales::PerChannel(scales) => Some(scales.row(0, head, 0)),
        }
    }

    /// One scale for each of some keys, if the cache has such.
    pub(super) fn of_keys(&self, head: usize, token: usize, tokens: usize) -> Option<[f32; TILE]> {
        match self.scales.keys? {
            KeyScales::PerToken(scales) => Some(self.gather(scales, head, token, tokens)),
            KeyScales::PerChannel(_) => None,
        }
    }

    /// One scale for each of some values, if the cache has such.
    pub(super) fn of_values(&self, head: usize, token: usize, tokens: usize) -> Option<[f32; TILE]> {
        Some(self.gather(self.scales.values?, head, token, tokens))
    }

    /// Reads the scales of some tokens. They are 0 after the last token, and for tokens that the cache does not hold.
    fn gather(&self, scales: View<'_, f32>, head: usize, token: usize, tokens: usize) -> [f32; TILE] {
        let (mut all, mut done) = ([0.0; TILE], 0);
        let [.., step, _] = scales.strides();
        while done < tokens {
            let Some(run) = self.cache.run(self.sequence, token + done) else {
                done += 1;
                continue;
            };
            let len = run.len.min(tokens - done);
            let [rows, heads, ..] = scales.strides();
            let place = |n: usize, stride: isize| (n as isize).wrapping_mul(stride);
            let offset = place(run.row, rows).wrapping_add(place(head, heads)).wrapping_add(place(run.slot, step));
            let first = scales.offset().wrapping_add_signed(offset);
            let part = &mut all[done..done + len];
            match scales.data().get(first..first.wrapping_add(len)) {
                Some(lie) if step == 1 => part.copy_from_slice(lie),
                _ => part.iter_mut().enumerate().for_each(|(n, x)| *x = scales.at(run.row, head, run.slot + n, 0)),
            }
            done += len;
        }
        all
    }
}

/// Multiplies the scores or weights of each key by that key's scale, in all rows.
pub(super) struct ScaleColumns<'a> {
    pub(super) rows: usize,
    /// The number of keys, rounded up to whole vectors.
    pub(super) vectors: usize,
    pub(super) scales: &'a [f32; TILE],
    pub(super) s: &'a mut [f32],
}

impl Run<()> for ScaleColumns<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { rows, vectors, scales, s } = self;
        for row in s.chunks_exact_mut(TILE).take(rows) {
            for (x, scale) in row[..vectors].chunks_exact_mut(I::LANES).zip(scales.chunks_exact(I::LANES)) {
                isa.store(isa.mul(isa.load(x), isa.load(scale)), x);
            }
        }
    }
}

/// A copy of a tile of keys.
pub(super) struct Copied<'r> {
    data: &'r [f32],
    places: Places,
    columns: usize,
}

impl Copied<'_> {
    /// The rows as the products read them.
    pub(super) fn as_unchecked(&self) -> Unchecked<'_, f32> {
        Unchecked::copy(self.data, &self.places, self.columns)
    }
}

/// Writes the keys of a tile in `f32`, by `read`, and applies rope to each, by its index in the cache.
pub(super) fn keys_with_rope<'r>(
    read: &dyn Fn(usize, &mut [f32]),
    tables: &RopeTables<'_, f32>,
    (token, tokens): (usize, usize),
    (head_dim, columns): (usize, usize),
    copy: &'r mut [f32],
) -> Copied<'r> {
    for (n, row) in copy.chunks_exact_mut(columns).enumerate().take(tokens) {
        row.fill(0.0);
        let row = &mut row[..head_dim];
        read(token + n, row);
        tables.apply_to_slice(row, token + n);
    }
    Copied { data: copy, places: Places::copied(tokens, columns), columns }
}
