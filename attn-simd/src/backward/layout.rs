//! How a backward call is cut into parts, and the sizes of its scratch: pure functions of level and shape.
//!
//! A part is some blocks of queries of one key/value head: its heads of queries one after the other, each cut into
//! blocks. Parts of a head have about equally many keys to visit ([`Job::blocks`](super::job::Job::blocks)). Each has
//! sums of `dk` and `dv` of its own, which are added to those of the head in order. So many threads can compute one
//! head, and the order of every sum follows from shape and mask.

use attn_core::{AttnError, AttnShape, Result};

use super::amx::layout::{BLOCK, Sizes};
use super::words::WordSizes;
use crate::amx::product::SIDE;
use crate::prefill::layout::Tiles;
use crate::queue::Rows;
use crate::scoring::KV_TILE;
use crate::workspace::lines_for;

/// Fewest parts of a call, if it has as many blocks of queries: enough to keep some threads busy.
const PARTS: usize = 16;
/// Fewest blocks of a part, on average: its sums of `dk` and `dv` are as large as the head's keys and values.
const BLOCKS: usize = 4;
/// The same on AMX, whose blocks have more queries.
const AMX_BLOCKS: usize = 2;
/// Tiles of keys whose gradient of a bias one thread computes before it writes them.
pub(crate) const BIAS_TILES: usize = 4;

/// Sizes of a backward call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    shape: AttnShape,
    lanes: usize,
    /// Queries of a block.
    pub(crate) q_tile: usize,
    /// Blocks of one head of queries.
    blocks: usize,
    /// Parts of a key/value head.
    pub(crate) parts: usize,
    /// Floats of a row of `dk`, and of `dv`: whole vectors.
    pub(crate) columns: [usize; 2],
    /// Floats of `dk` and of `dv`: of a part, and of a key/value head.
    pub(crate) sums: [usize; 2],
    /// Floats of each array of a thread's scratch.
    pub(crate) scratch: Scratch,
}

/// Floats of each array of a thread's scratch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    /// `q[channel][query]`, `dy[channel][query]`.
    pub(crate) transposed: [usize; 2],
    /// Rows of q and dy, in whole vectors.
    pub(crate) rows: [usize; 2],
    /// `[key][query]`: scores, which become weights; `dy·v`, which become gradients of scores; slopes of the soft-cap.
    pub(crate) tile: usize,
    /// `dq[channel][query]`.
    pub(crate) dq: usize,
    /// Keys and values of a tile.
    pub(crate) keys: [usize; 2],
    /// `bias[key][query]`.
    pub(crate) bias: usize,
    /// Derivatives of `score_mod` of a tile.
    pub(crate) mod_slopes: usize,
    /// Operands of products of pairs.
    pub(crate) words: WordSizes,
    /// Doubles: the gradient of a bias from some tiles of keys, `[key][query]`.
    pub(crate) bias_sums: usize,
    /// Operands and sums of AMX, if the call runs on it.
    pub(crate) amx: Option<Sizes>,
}

impl Scratch {
    /// Lines of all of it.
    pub(crate) fn lines(&self) -> usize {
        let Self { transposed: [qt, dyt], rows: [q, dy], tile, dq, keys: [k, v], .. } = *self;
        let Self { bias, mod_slopes, bias_sums, words, amx, .. } = *self;
        let floats = [qt, dyt, q, dy, tile, tile, tile, dq, k, k, v, bias, mod_slopes, 2 * bias_sums];
        floats.into_iter().chain(words.all()).map(lines_for).sum::<usize>() + amx.map_or(0, |sizes| sizes.lines())
    }
}

impl Layout {
    /// `words`: whether there are products of pairs, and whether all five are.
    pub(crate) fn of(
        shape: AttnShape,
        tiles: &Tiles,
        (with_bias, with_score_mod): (bool, bool),
        words: Option<bool>,
    ) -> Result<Self> {
        let AttnShape { head_dim, value_dim, .. } = shape;
        let (q_tile, lanes) = (tiles.q_tile(), tiles.lanes);
        let columns = [head_dim, value_dim].map(|dim| dim.next_multiple_of(lanes));
        let width = q_tile;
        let tile = KV_TILE.next_multiple_of(tiles.acc_rows) * width;
        let scratch = Scratch {
            transposed: [columns[0] * width, columns[1] * width],
            rows: [q_tile * columns[0], q_tile * columns[1]],
            tile,
            dq: head_dim.next_multiple_of(lanes).max(head_dim.next_multiple_of(tiles.acc_rows)) * width,
            keys: [KV_TILE * head_dim, KV_TILE * value_dim],
            bias: if with_bias { KV_TILE.next_multiple_of(lanes) * width } else { 0 },
            mod_slopes: if with_score_mod { tile } else { 0 },
            words: words.map_or(WordSizes::default(), |all| WordSizes::of(KV_TILE, width, [head_dim, value_dim], all)),
            bias_sums: BIAS_TILES * KV_TILE * width,
            amx: None,
        };
        Self::with(shape, lanes, q_tile, columns, scratch)
    }

    /// On AMX. `fast`: whether weights are one part.
    pub(crate) fn of_amx(
        shape: AttnShape,
        lanes: usize,
        (with_bias, with_score_mod): (bool, bool),
        fast: bool,
    ) -> Result<Self> {
        let dims = [shape.head_dim, shape.value_dim];
        let columns = dims.map(|dim| dim.next_multiple_of(lanes));
        let tile = KV_TILE * SIDE;
        let scratch = Scratch {
            transposed: [0; 2],
            rows: [SIDE * columns[0], columns[0].max(columns[1])],
            tile,
            dq: 0,
            keys: [0, shape.value_dim],
            bias: if with_bias { tile } else { 0 },
            mod_slopes: if with_score_mod { tile } else { 0 },
            words: WordSizes::default(),
            bias_sums: 0,
            amx: Some(Sizes::of(dims, fast)),
        };
        Self::with(shape, lanes, BLOCK, columns, scratch)
    }

    fn with(shape: AttnShape, lanes: usize, q_tile: usize, columns: [usize; 2], scratch: Scratch) -> Result<Self> {
        const OVERFLOW: AttnError = AttnError::Overflow { what: "scratch of the gradients" };
        let AttnShape { batch, kv_heads, q_len, kv_len, head_dim, .. } = shape;
        let blocks = q_len.div_ceil(q_tile);
        let all = blocks.checked_mul(shape.group()).ok_or(OVERFLOW)?;
        let heads = batch.saturating_mul(kv_heads).max(1);
        let parts = PARTS.div_ceil(heads).min(all / if scratch.amx.is_some() { AMX_BLOCKS } else { BLOCKS }).max(1);
        let times = |a: usize, b: usize| a.checked_mul(b).filter(|&n| n < isize::MAX as usize / 64).ok_or(OVERFLOW);
        let sums = [times(kv_len, columns[0])?, times(kv_len, columns[1])?];
        let layout = Self { shape, lanes, q_tile, blocks, parts, columns, sums, scratch };
        times(times(batch, kv_heads)?, layout.sum_lines())?;
        times(times(times(batch, shape.q_heads)?, q_len)?, head_dim)?;
        Ok(layout)
    }

    /// Lines of `dk` and `dv` of a part, and of a head.
    pub(crate) fn sum_lines(&self) -> usize {
        self.sums.into_iter().map(lines_for).sum()
    }

    /// Key/value heads of all batch entries.
    pub(crate) fn heads(&self) -> usize {
        self.shape.batch * self.shape.kv_heads
    }

    /// Floats of `dq` of all rows, `[batch][q_head][query][channel]`.
    pub(crate) fn dq_len(&self) -> usize {
        self.shape.rows() * self.shape.head_dim
    }

    /// Number of the first of some rows of `dq` among those of all heads.
    pub(crate) fn row(&self, Rows { batch, head, first, .. }: Rows) -> usize {
        self.shape.row(batch, head, first)
    }

    /// Where the first of some keys' rows of `dk` (0) or `dv` (1) starts in the sums of all heads.
    pub(crate) fn key(&self, which: usize, Rows { batch, head, first: key, .. }: Rows) -> usize {
        let before = if which == 0 { 0 } else { 16 * lines_for(self.sums[0]) };
        (batch * self.shape.kv_heads + head) * 16 * self.sum_lines() + before + key * self.columns[which]
    }

    /// Parts of all key/value heads.
    pub(crate) fn count(&self) -> usize {
        self.heads() * self.parts
    }

    /// Batch entry and key/value head of a part, and its place among those of that head.
    pub(crate) fn place(&self, part: usize) -> [usize; 3] {
        let head = part / self.parts;
        [head / self.shape.kv_heads, head % self.shape.kv_heads, part % self.parts]
    }

    /// Blocks of a key/value head: those of one of its heads of queries after the other's.
    pub(crate) fn blocks_of_group(&self) -> usize {
        self.blocks * self.shape.group()
    }

    /// The `n`-th block of a key/value head.
    pub(crate) fn block_of_group(&self, [batch, kv_head]: [usize; 2], n: usize) -> Rows {
        self.block(batch, kv_head * self.shape.group() + n / self.blocks, n % self.blocks)
    }

    /// Blocks of a head of queries.
    pub(crate) fn blocks_of_head(&self) -> usize {
        self.blocks
    }

    /// A block of a head of queries. The first one takes the rest of full blocks.
    pub(crate) fn block(&self, batch: usize, head: usize, block: usize) -> Rows {
        let start = |block: usize| (block * self.q_tile).saturating_sub(self.blocks * self.q_tile - self.shape.q_len);
        let first = start(block);
        Rows { batch, head, first, count: start(block + 1) - first }
    }

    /// Vectors of a block.
    pub(crate) fn vecs(&self, rows: usize) -> usize {
        rows.div_ceil(self.lanes)
    }
}
