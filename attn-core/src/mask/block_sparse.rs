//! Whole blocks of the score matrix visible or hidden.

use crate::error::{AttnError, Result};
use crate::shape::AttnShape;
use crate::view::View;

/// Block-sparse visibility (Child et al. 2019, arXiv 1904.10509; BigBird, arXiv 2007.14062): query `i` sees key `j`
/// where `blocks[batch, head, i / block_q, j / block_k]` is true. Axes of size 1 for batch and heads broadcast.
#[derive(Clone, Copy, Debug)]
pub struct BlockSparse<'a> {
    /// `[batch or 1, q_heads or 1, ⌈q_len / block_q⌉, ⌈kv_len / block_k⌉]`.
    pub blocks: View<'a, bool>,
    /// Queries per block; not 0.
    pub block_q: usize,
    /// Keys per block; not 0.
    pub block_k: usize,
}

impl BlockSparse<'_> {
    pub(crate) fn check(&self, shape: &AttnShape) -> Result<()> {
        if self.block_q == 0 || self.block_k == 0 {
            return Err(AttnError::Option { name: "block size", must: "at least 1" });
        }
        let to = [shape.batch, shape.q_heads, shape.q_len.div_ceil(self.block_q), shape.kv_len.div_ceil(self.block_k)];
        let sizes = self.blocks.sizes();
        for axis in 0..4 {
            let (found, expected) = (sizes.get(axis).copied().unwrap_or(0), to.get(axis).copied().unwrap_or(0));
            if found != expected && !(axis < 2 && found == 1) {
                return Err(AttnError::Broadcast { what: "block mask", axis, found, expected });
            }
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn visible(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        let (Some(row), Some(column)) = (query.checked_div(self.block_q), key.checked_div(self.block_k)) else {
            return false;
        };
        let [nb, nh, ..] = self.blocks.sizes();
        self.blocks.at(if nb == 1 { 0 } else { batch }, if nh == 1 { 0 } else { head }, row, column)
    }

    /// The 64 keys from `start` on as bits: one question per block that they touch.
    pub(crate) fn row_bits(&self, batch: usize, head: usize, query: usize, start: usize) -> u64 {
        let mut bits = 0;
        let mut n = 0;
        while n < 64 {
            let key = start + n;
            let Some(into) = key.checked_rem(self.block_k) else {
                return 0;
            };
            let run = (self.block_k - into).min(64 - n);
            if self.visible(batch, head, query, key) {
                bits |= super::bits::lowest_bits(run) << n;
            }
            n += run;
        }
        bits
    }
}
