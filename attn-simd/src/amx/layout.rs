//! Places and sizes of all arrays of a call on AMX: pure functions of shape and method.
//!
//! A work item is some blocks of 32 queries of one head, up to 2048 queries. If one thread has a shorter head to
//! itself, the item is the head, so that keys and values are packed once. They are packed a super-block at a time, and
//! all blocks of the item read it before the next one is packed: this pays for the packing. The super-block stays in
//! the second cache (2 MiB on processors with AMX), and the blocks' queries and outputs pass through it. The arrays
//! that one block reads over and over (the scores of a tile, their weights, the block's queries and output) stay in the
//! first cache: 28 KiB at head_dim 64 and one part each.

use attn_core::{AttnShape, Dtype};

use super::method::Method;
use super::product::SIDE;
use crate::workspace::lines_for;

/// Bytes of a super-block's keys and values.
const PACKED_BYTES: usize = 640 << 10;
/// Bytes of queries and outputs of an item.
const ITEM_BYTES: usize = 768 << 10;
/// Most blocks of an item: 2048 queries, by then packing is a hundredth of the work.
pub(crate) const MAX_BLOCKS: usize = 64;
/// Fewest blocks of an item if threads share a call, as far as there are as many: packing is paid for by the blocks
/// that use it.
const MIN_BLOCKS: usize = 4;
/// Most tiles of a super-block.
pub(crate) const MAX_TILES: usize = 16;

/// Tiles that are added up plainly before they join a total. Products of parts have 16 bits, so that sums of 256 like
/// ones are exact.
pub(crate) const GROUP: usize = 8;

/// Sizes of a call on AMX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) method: Method,
    /// Steps of the score product: 32 channels each.
    pub(crate) depth: usize,
    /// Squares of an output: 32 channels each.
    pub(crate) squares: usize,
    /// Tiles of 32 keys of a super-block; an even number.
    pub(crate) tiles: usize,
    /// Most blocks of 32 queries of a work item.
    pub(crate) blocks: usize,
    /// Whether there is a bias.
    bias: bool,
    /// Whether groups of tiles join a total: where an f32 output shows what long sums lose.
    pub(crate) totals: bool,
}

impl Layout {
    pub(crate) fn of(shape: &AttnShape, method: Method, bias: bool, output: Dtype) -> Self {
        let (depth, squares) = (shape.head_dim.div_ceil(SIDE), shape.value_dim.div_ceil(SIDE));
        // A pair of operands is 2 KiB.
        let tile_bytes = (depth * method.qk_parts() + squares * method.v_parts()) << 11;
        let there = shape.kv_len.div_ceil(2 * SIDE).max(1) * 2;
        let tiles = (PACKED_BYTES / tile_bytes.max(1) / 2 * 2).clamp(2, MAX_TILES).min(there);
        let block_bytes = (depth * method.qk_parts() + squares * 2) << 11;
        let most = (ITEM_BYTES / block_bytes.max(1)).clamp(1, MAX_BLOCKS);
        let blocks = most.min(shape.q_len.div_ceil(SIDE).max(1));
        let totals = matches!(output, Dtype::F32) && shape.kv_len > GROUP * SIDE;
        Self { method, depth, squares, tiles, blocks, bias, totals }
    }

    /// Most queries of a work item.
    pub(crate) const fn rows(&self) -> usize {
        self.blocks * SIDE
    }

    /// Queries of a work item if a call of this shape is to be cut into `items` at least: as many as scratch holds, so
    /// that keys and values are packed as seldom as possible, or fewer, so that there are enough items.
    pub(crate) fn rows_for(&self, shape: &AttnShape, items: usize) -> usize {
        let heads = shape.batch.saturating_mul(shape.q_heads);
        let all = heads.saturating_mul(shape.q_len.div_ceil(SIDE));
        (all / items.max(1)).max(MIN_BLOCKS).min(self.blocks) * SIDE
    }

    /// Operands of the queries of a block.
    pub(crate) const fn q_operands(&self) -> usize {
        self.depth * self.method.qk_parts() * 2
    }

    /// Operands of the keys of a tile.
    pub(crate) const fn k_operands(&self) -> usize {
        self.depth * self.method.qk_parts() * 2
    }

    /// Operands of the values of a tile.
    pub(crate) const fn v_operands(&self) -> usize {
        self.squares * self.method.v_parts() * 2
    }

    /// Where the value operands of a tile and a square start: `v[group][square][tile of the group][part][2]`.
    pub(crate) const fn v_start(&self, tile: usize, square: usize) -> usize {
        let log2 = self.method.tiles_log2();
        let (group, within) = (tile >> log2, tile & (self.method.tiles() - 1));
        (((group * self.squares + square) << log2) + within) * self.method.v_parts() * 2
    }

    /// Operands of the weights of a group of tiles.
    pub(crate) const fn p_operands(&self) -> usize {
        self.method.tiles() * self.method.p_parts() * 2
    }

    /// Floats of the output of a block.
    pub(crate) const fn out_floats(&self) -> usize {
        self.squares * SIDE * SIDE
    }

    /// Floats of the arrays of a total, of all blocks: outputs, and sums or maxima.
    pub(crate) const fn total_floats(&self) -> [usize; 2] {
        let blocks = if self.totals { self.blocks } else { 0 };
        [blocks * self.out_floats(), blocks * SIDE]
    }

    /// Floats of the rows that are read before they become operands: a tile of the wider of keys and values.
    pub(crate) fn stage_floats(&self) -> usize {
        self.depth.max(self.squares) * SIDE * SIDE
    }

    /// Floats of a tile of the bias.
    pub(crate) const fn bias_floats(&self) -> usize {
        if self.bias { SIDE * SIDE } else { 0 }
    }

    /// Lines of all of it.
    pub(crate) fn lines(&self) -> usize {
        let operands = self.blocks * self.q_operands()
            + self.tiles * (self.k_operands() + self.v_operands())
            + 2 * self.p_operands();
        let floats = [
            self.blocks * self.out_floats(),
            self.blocks * SIDE, // maxima
            self.blocks * SIDE, // sums
            SIDE,               // factors
            2 * SIDE * SIDE,    // scores of two tiles
            self.stage_floats(),
            self.bias_floats(),
        ];
        let [out, row] = self.total_floats().map(lines_for);
        operands * lines_for(256) + floats.into_iter().map(lines_for).sum::<usize>() + 2 * out + 3 * row
    }
}
