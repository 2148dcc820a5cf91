//! One term of a mask, and the three questions that every term answers.

use core::ops::Range;

use super::align::{Align, Window, clip};
use super::{BlockSparse, DenseMask, Documents, Lengths, Tree, bits};
use crate::error::Result;
use crate::shape::{At, AttnShape};

/// One term of a [`Mask`](crate::Mask). The constructors on `Mask` say what each means.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Term<'a> {
    /// Keys up to the query's position.
    Causal(Align),
    /// Keys near the query's position.
    Window(Window),
    /// Keys below the prefix, and keys up to the query's position.
    Prefix {
        /// Length of the prefix.
        prefix: Lengths<'a>,
        /// The key position of query 0.
        align: Align,
    },
    /// Keys below a length.
    KvLens(Lengths<'a>),
    /// Keys from a start on.
    KvStarts(Lengths<'a>),
    /// No key at all for queries from a length on.
    QLens(Lengths<'a>),
    /// Keys of the query's own document.
    Documents(Documents<'a>),
    /// Keys of visible blocks.
    BlockSparse(BlockSparse<'a>),
    /// Keys before a forest of draft tokens, and the query's ancestors in it.
    Tree(Tree<'a>),
    /// Keys by a tensor of bools.
    Dense(DenseMask<'a>),
}

impl Term<'_> {
    pub(crate) fn check(&self, shape: &AttnShape) -> Result<()> {
        match self {
            Self::Causal(_) | Self::Window(_) => Ok(()),
            Self::Prefix { prefix, .. } => prefix.check("prefix", shape.batch, shape.kv_len),
            Self::KvLens(lens) => lens.check("kv_lens", shape.batch, shape.kv_len),
            Self::KvStarts(starts) => starts.check("kv_starts", shape.batch, shape.kv_len),
            Self::QLens(lens) => lens.check("q_lens", shape.batch, shape.q_len),
            Self::Documents(documents) => documents.check(shape),
            Self::BlockSparse(blocks) => blocks.check(shape),
            Self::Tree(tree) => tree.check(shape),
            Self::Dense(dense) => {
                dense.mask.check_broadcast("mask", [shape.batch, shape.q_heads, shape.q_len, shape.kv_len])
            }
        }
    }

    /// Whether the visible keys of a row are always a range.
    pub fn is_range(&self) -> bool {
        !matches!(self, Self::BlockSparse(_) | Self::Tree(_) | Self::Dense(_))
    }

    /// The range of keys outside of which the row sees nothing.
    pub(crate) fn row_range(&self, shape: &AttnShape, batch: usize, _head: usize, query: usize) -> Range<usize> {
        let kv_len = shape.kv_len;
        let up_to = |align: Align| clip(align.position(query, shape.q_len, kv_len).saturating_add(1), kv_len);
        match self {
            Self::Causal(align) => 0..up_to(*align),
            Self::Window(window) => window.range_at(window.align.position(query, shape.q_len, kv_len), kv_len),
            Self::Prefix { prefix, align } => 0..up_to(*align).max(prefix.of(batch)),
            Self::KvLens(lens) => 0..lens.of(batch),
            Self::KvStarts(starts) => starts.of(batch)..kv_len,
            Self::QLens(lens) => 0..if query < lens.of(batch) { kv_len } else { 0 },
            Self::Documents(documents) => documents.row_range(query),
            Self::Tree(_) => {
                let first = kv_len.saturating_sub(shape.q_len);
                0..(first + query + 1).min(kv_len)
            }
            Self::BlockSparse(_) | Self::Dense(_) => 0..kv_len,
        }
    }

    /// Whether one key is visible.
    #[inline]
    pub(crate) fn visible(&self, shape: &AttnShape, at: At) -> bool {
        match self {
            Self::BlockSparse(blocks) => blocks.visible(at.batch, at.head, at.query, at.key),
            Self::Tree(tree) => tree.visible(shape, at.query, at.key),
            Self::Dense(dense) => dense.visible(at.batch, at.head, at.query, at.key),
            _ => self.row_range(shape, at.batch, at.head, at.query).contains(&at.key),
        }
    }

    /// Bit `n` says whether the row sees key `start + n`. Bits of keys from `kv_len` on have no meaning.
    pub fn row_bits(&self, shape: &AttnShape, batch: usize, head: usize, query: usize, start: usize) -> u64 {
        match self {
            Self::BlockSparse(blocks) => blocks.row_bits(batch, head, query, start),
            Self::Tree(tree) => tree.row_bits(shape, query, start),
            Self::Dense(dense) => dense.row_bits(batch, head, query, start, shape.kv_len),
            _ => bits::range_bits(self.row_range(shape, batch, head, query), start),
        }
    }
}
