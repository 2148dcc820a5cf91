//! How large the blocks are: pure functions of the level, the shape and the caches.
//!
//! A block of `q_tile` queries meets the keys in tiles of `kv_tile`. The inner loops read `Qᵀ`, the scores of one tile
//! and the output of the block over and over; at head_dim 64 these are 12 KiB each with AVX-512 and stay in L1. Keys
//! and values are read once per block, from L2 or beyond, with `q_tile` multiplications for every float: hence the
//! largest block that registers allow.
//!
//! If keys and values are not plain `f32` rows, they are widened or gathered tile by tile: once for all blocks of a
//! strip, whose queries and outputs then stay in L2. If keys and values exceed the caches they are read in strips, too:
//! each tile stays in the caches while all blocks of the strip pass over it.
//!
//! The tile of keys decides the order of sums and so the bits, which are the same on every machine of a level: it
//! follows from the level alone. The length of a strip changes no bit; it follows from the shape and this machine's
//! [`Caches`].

use attn_core::AttnShape;

use crate::caches::Caches;
use crate::level::Level;
use crate::scoring::KV_TILE;
use crate::workspace::lines_for;

/// Most queries of a block at any level.
pub(crate) const MAX_Q_TILE: usize = 64;

/// Tiles of a group, and groups that wait before they join a total: four equal ones are added up without an error.
pub(crate) const GROUP: usize = 4;
/// See [`GROUP`].
pub(crate) const GROUPS: usize = 4;

/// Most blocks of a strip.
pub(crate) const STRIP: usize = 8;

/// Block sizes of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Floats in a vector.
    pub(crate) lanes: usize,
    /// Vectors of queries in a full block.
    pub(crate) q_vecs: usize,
    /// Keys of a tile: at most [`KV_TILE`], and a multiple of `acc_rows`.
    pub(crate) kv_tile: usize,
    /// Rows of accumulators of both products.
    pub(crate) acc_rows: usize,
}

impl Tiles {
    /// The sizes of a level; `instances!` of [`sweep`](super::sweep) compiles exactly these.
    pub(crate) const fn of(level: Level) -> Self {
        let lanes = level.lanes();
        match level {
            // 12 accumulators, as many sums of chains before, 3 vectors of B and one broadcast of 32 registers.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Self { lanes, q_vecs: 3, kv_tile: 64, acc_rows: 4 },
            // 12 accumulators, 2 vectors of B and one broadcast of 16 registers.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Self { lanes, q_vecs: 2, kv_tile: 60, acc_rows: 6 },
            // 16 accumulators of 32 registers on aarch64; on SSE2 and simd128 half of them spill, and 2 × 4 is better.
            // Levels of AMX never come here: their vectors are those of another level.
            _ => {
                let q_vecs = if cfg!(target_arch = "aarch64") { 4 } else { 2 };
                Self { lanes, q_vecs, kv_tile: 60, acc_rows: 4 }
            }
        }
    }

    /// Queries of a full block.
    pub(crate) const fn q_tile(&self) -> usize {
        self.lanes * self.q_vecs
    }

    /// Keys of a group.
    pub(crate) const fn group(&self) -> usize {
        GROUP * self.kv_tile
    }

    /// Vectors that hold `rows` queries.
    pub(crate) const fn vecs_for(&self, rows: usize) -> usize {
        rows.div_ceil(self.lanes)
    }

    /// Most blocks of a strip: their queries and outputs fill a quarter of the second cache; keys and values pass
    /// through the rest. No more than a head has.
    pub(crate) const fn strip(&self, shape: &AttnShape, caches: Caches) -> usize {
        let block = (shape.head_dim + shape.value_dim + 1) * self.q_tile() * size_of::<f32>();
        let most = min(caches.l2 / 4 / block, shape.q_len.div_ceil(self.q_tile()));
        if most == 0 { 1 } else { min(most, STRIP) }
    }

    /// Whether keys and values of a head outgrow the second cache, which then does not keep them from one block to the
    /// next.
    ///
    /// Measured in strips of eight against one by one, one thread. Zen 4 (1 MiB): AVX2 ×1.02 to 1.07 from 1.5 to 4 MiB
    /// on, AVX-512 ×0.99 to 1.01; for less than 1 MiB, AVX-512 ×0.96 to 1.0. Zen 5 (1 MiB): 8 MiB ×1.02, 4 MiB ×0.99 to
    /// 1.01.
    pub(crate) const fn is_far(shape: &AttnShape, caches: Caches) -> bool {
        let row = (shape.head_dim + shape.value_dim).saturating_mul(size_of::<f32>());
        row != 0 && shape.kv_len > caches.l2 / row
    }

    /// Floats of each array in a block's scratch.
    pub(crate) fn scratch(&self, shape: &AttnShape, caches: Caches, with_bias: bool, pack_k: bool) -> Scratch {
        if shape.rows() == 0 {
            // No block needs it, and the dims of a tensor without rows may be anything.
            return Scratch::default();
        }
        let width = self.q_tile();
        Scratch {
            strip: self.strip(shape, caches),
            q: channels_of(shape.head_dim, self.lanes, 1) * width,
            scores: KV_TILE.next_multiple_of(self.acc_rows) * width,
            out: channels_of(shape.value_dim, self.lanes, self.acc_rows) * width,
            row: width,
            groups: 1 + min(shape.kv_len.saturating_sub(1) / self.group(), GROUPS - 1),
            k: if pack_k { KV_TILE * shape.head_dim } else { 0 },
            v: KV_TILE * shape.value_dim,
            bias: if with_bias { KV_TILE.next_multiple_of(self.lanes) * width } else { 0 },
        }
    }
}

const fn min(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

/// Rounds channels up to whole vectors and whole groups of rows: transposed squares of LANES × LANES and stored groups
/// of rows may reach past the last channel.
const fn channels_of(n: usize, lanes: usize, rows: usize) -> usize {
    let (a, b) = (n.next_multiple_of(lanes), n.next_multiple_of(rows));
    if a > b { a } else { b }
}

/// Floats of each array of a block's scratch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scratch {
    /// Blocks that share what is packed of keys and values.
    pub(crate) strip: usize,
    /// `q[channel][query]`.
    pub(crate) q: usize,
    /// `s[key][query]`, which becomes `p`.
    pub(crate) scores: usize,
    /// `o[channel][query]`.
    pub(crate) out: usize,
    /// One float per query: maximum, sum, factor.
    pub(crate) row: usize,
    /// Groups of tiles: those that wait to join a total, or the only one.
    pub(crate) groups: usize,
    /// Keys of a tile, widened or made contiguous.
    pub(crate) k: usize,
    /// Values of a tile, widened, made contiguous or cleaned.
    pub(crate) v: usize,
    /// `bias[key][query]`.
    pub(crate) bias: usize,
}

impl Scratch {
    /// Lines of all of it.
    pub(crate) fn lines(self) -> usize {
        let Self { strip, q, scores, out, row, groups, k, v, bias } = self;
        let kept = [strip * q, scores, strip * row, strip * row, row, k, v, bias];
        let group = [out, row, row].map(|len| strip * len);
        let total = [out, out, row, row, row].map(|len| if groups > 1 { strip * len } else { 0 });
        kept.into_iter().chain(group.into_iter().cycle().take(3 * groups)).chain(total).map(lines_for).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kv_len: usize, head_dim: usize, value_dim: usize) -> AttnShape {
        AttnShape::new([1, 1, 1 << 10, head_dim], [1, 1, kv_len, head_dim], [1, 1, kv_len, value_dim]).unwrap()
    }

    #[test]
    fn strips_fit_the_second_cache_and_scratch_fits_the_strips() {
        for level in Level::available() {
            let tiles = Tiles::of(level.vectors());
            for l2 in [0, 100 << 10, 256 << 10, 1 << 20, 2 << 20, usize::MAX] {
                for dim in [0, 1, 40, 64, 128, 512, 1 << 18] {
                    let (shape, caches) = (shape(100, dim, dim), Caches { l2 });
                    let strip = tiles.strip(&shape, caches);
                    assert!((1..=STRIP).contains(&strip));
                    let floats = strip * tiles.q_tile() * (2 * dim + 1);
                    assert!(strip == 1 || floats * size_of::<f32>() <= l2 / 4, "{strip} blocks of {dim} in {l2}");
                    assert_eq!(tiles.scratch(&shape, caches, false, false).strip, strip);
                    let two = AttnShape { q_len: tiles.q_tile() + 1, ..shape };
                    assert_eq!(
                        tiles.strip(&two, caches),
                        strip.min(2),
                        "blocks that a head does not have take no scratch"
                    );
                }
            }
        }
    }

    #[test]
    fn far_is_what_the_second_cache_does_not_hold() {
        let caches = Caches { l2: 1 << 20 };
        // Keys and values of 64 + 64 floats take 512 bytes a token: 2048 of them are 1 MiB.
        assert!(!Tiles::is_far(&shape(2048, 64, 64), caches));
        assert!(Tiles::is_far(&shape(2049, 64, 64), caches));
        assert!(Tiles::is_far(&shape(1025, 128, 128), caches));
        assert!(!Tiles::is_far(&shape(usize::MAX >> 8, 0, 0), caches), "no bytes at all");
        assert!(Tiles::is_far(&shape(usize::MAX >> 8, 1, 0), caches));
    }
}
