//! Sizes of the scratch of a block on AMX.

use crate::amx::product::SIDE;
use crate::scoring::KV_TILE;
use crate::workspace::lines_for;

/// Groups of 32 queries of a block: so many steps have the sums over queries, whose squares are loaded and stored once
/// for all of them. Keys are packed once for a block.
pub(crate) const GROUPS: usize = 4;
/// Queries of a block.
pub(crate) const BLOCK: usize = GROUPS * SIDE;
/// Halves of a tile of keys: each is a side of a square.
pub(crate) const HALVES: usize = KV_TILE / SIDE;

/// Sizes of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Squares of a row of q and k, and of one of v and dy.
    pub(crate) squares: [usize; 2],
    /// Most parts of a weight.
    pub(crate) parts: usize,
}

impl Sizes {
    pub(crate) fn of(dims: [usize; 2], fast: bool) -> Self {
        Self { squares: dims.map(|dim| dim.div_ceil(SIDE)), parts: if fast { 1 } else { 3 } }
    }

    /// Operands of the rows of q or dy of a block.
    pub(crate) fn of_rows(&self, which: usize) -> usize {
        GROUPS * self.squares[which] * 2
    }

    /// Operands of the rows of k or v of a tile.
    pub(crate) fn of_keys(&self, which: usize) -> usize {
        HALVES * self.squares[which] * 2
    }

    /// Operands of the weights of a tile, or of the gradients of its scores.
    pub(crate) fn of_weights(&self) -> usize {
        HALVES * GROUPS * self.parts * 2
    }

    /// Operands of the gradients of the scores of a group.
    pub(crate) fn of_group(&self) -> usize {
        HALVES * self.parts * 2
    }

    /// Floats of `dq`.
    pub(crate) fn dq(&self) -> usize {
        GROUPS * self.squares[0] * SIDE * SIDE
    }

    /// Floats of the rows that are read before they become operands.
    pub(crate) fn stage(&self) -> usize {
        self.squares[0].max(self.squares[1]) * SIDE * SIDE
    }

    /// Lines of all of it.
    pub(crate) fn lines(&self) -> usize {
        let of_both = |of: fn(&Self, usize) -> usize| of(self, 0) + of(self, 1);
        let operands = 2 * of_both(Self::of_rows)
            + of_both(Self::of_keys)
            + self.of_keys(0)
            + 2 * self.of_weights()
            + self.of_group();
        let tile = KV_TILE * SIDE;
        let floats = [tile, tile, self.dq(), SIDE * SIDE, self.stage()];
        operands * lines_for(256) + floats.into_iter().map(lines_for).sum::<usize>()
    }
}
