//! The gradient of an additive bias: that of the scores, summed over the axes along which the bias is broadcast.
//!
//! A sweep of its own, because sums over heads and batch entries would be shared by parts. One thread owns a piece of
//! the bias and recomputes the tiles that are summed there one after the other: two products of the five. So memory
//! does not grow, and the order of every sum follows from the shape.

use core::ops::Range;

use attn_core::ViewMut;

use super::job::Job;
use super::layout::BIAS_TILES;
use crate::queue::Rows;
use crate::scoring::{KV_TILE, TileAt};

/// A piece of a bias: some keys of one block of queries, or of all, of one head or of all.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Which batch entry and head of the bias.
    place: [usize; 2],
    /// The block of queries, unless the bias is the same for all queries.
    block: Option<usize>,
    /// The first key, unless the bias is the same for all keys.
    key: Option<usize>,
    /// Lanes of a row of sums.
    lanes: usize,
}

/// The pieces of a bias whose sizes broadcast to those of the scores.
#[derive(Clone, Copy)]
pub(super) struct Pieces<'j, 'c> {
    pub(super) call: &'j Job<'c>,
    sizes: [usize; 4],
}

impl<'j, 'c> Pieces<'j, 'c> {
    pub(super) fn of(call: &'j Job<'c>, sizes: [usize; 4]) -> Self {
        Self { call, sizes }
    }

    /// Whether it is the same for all queries, and for all keys.
    fn same(&self) -> [bool; 2] {
        let shape = &self.call.forward.shape;
        [self.sizes[2] == 1 && shape.q_len != 1, self.sizes[3] == 1 && shape.kv_len != 1]
    }

    /// Pieces along queries and along keys.
    fn counts(&self) -> [usize; 2] {
        let [same_q, same_k] = self.same();
        [
            if same_q { 1 } else { self.call.layout.blocks_of_head() },
            if same_k { 1 } else { self.sizes[3].div_ceil(BIAS_TILES * KV_TILE) },
        ]
    }

    /// Pieces in all.
    pub(super) fn count(&self) -> usize {
        let [batch, heads, ..] = self.sizes;
        let [q, k] = self.counts();
        batch.saturating_mul(heads).saturating_mul(q).saturating_mul(k)
    }

    /// The `n`-th piece.
    pub(super) fn piece(&self, n: usize) -> Piece {
        let ([q, k], [same_q, same_k]) = (self.counts(), self.same());
        let (place, n) = (n / (q * k), n % (q * k));
        Piece {
            place: [place / self.sizes[1], place % self.sizes[1]],
            block: (!same_q).then_some(n / k),
            key: (!same_k).then_some(n % k * BIAS_TILES * KV_TILE),
            lanes: if same_q { 1 } else { self.call.layout.q_tile },
        }
    }

    /// The blocks of queries whose tiles are summed in a piece, in order: of the batch entries and heads that share its
    /// place.
    pub(super) fn blocks(&self, piece: &Piece) -> impl Iterator<Item = Rows> + use<> {
        let (shape, layout) = (self.call.forward.shape, self.call.layout);
        let along = |n: usize, size: usize, all: usize| if size == 1 { 0..all } else { n..n + 1 };
        let heads = along(piece.place[1], self.sizes[1], shape.q_heads);
        let blocks = piece.block.map_or(0..layout.blocks_of_head(), |n| n..n + 1);
        along(piece.place[0], self.sizes[0], shape.batch).flat_map(move |batch| {
            let blocks = blocks.clone();
            heads.clone().flat_map(move |head| blocks.clone().map(move |n| layout.block(batch, head, n)))
        })
    }

    /// Writes the sums of a piece, times the derivative of a score by its bias.
    pub(super) fn write(&self, piece: &Piece, sums: &[f64], to: &mut ViewMut<'_, f64>) {
        let [batch, head] = piece.place;
        let queries = piece.block.map_or(0..1, |n| {
            let rows = self.call.layout.block(batch, head, n);
            rows.first..rows.first + rows.count
        });
        let keys = piece.key.map_or(0..1, |key| key..(key + BIAS_TILES * KV_TILE).min(self.sizes[3]));
        let by_bias = self.call.by_bias;
        for (row, key) in sums.chunks_exact(piece.lanes).zip(keys) {
            for (x, query) in row.iter().zip(queries.clone()) {
                to.set(batch, head, query, key, x * by_bias);
            }
        }
    }
}

impl Piece {
    /// Those of `any` keys that the piece covers.
    pub(super) fn keys(&self, any: Range<usize>) -> Range<usize> {
        match self.key {
            None => any,
            Some(key) => any.start.max(key)..any.end.min(key + BIAS_TILES * KV_TILE),
        }
    }

    /// Adds the gradients of the scores of a tile, `[key][query]`, `width` apart.
    pub(super) fn add(&self, sums: &mut [f64], tile: TileAt, width: usize, gradients: &[f32]) {
        for (n, row) in gradients.chunks_exact(width).enumerate().take(tile.keys) {
            let at = self.key.map_or(0, |first| tile.key + n - first);
            let sums = &mut sums[at * self.lanes..][..self.lanes];
            for (lane, &x) in row[..tile.rows].iter().enumerate() {
                sums[if self.lanes == 1 { 0 } else { lane }] += f64::from(x);
            }
        }
    }
}
