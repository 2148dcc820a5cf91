//! Masks joined: a key is visible if every term shows it.

use core::ops::Range;

use super::align::{Align, Window};
use super::bits;
use super::block_sparse::BlockSparse;
use super::dense::DenseMask;
use super::documents::Documents;
use super::lengths::Lengths;
use super::term::Term;
use super::tree::Tree;
use crate::error::{AttnError, Result};
use crate::shape::{At, AttnShape};
use crate::view::View;

/// How many terms a [`Mask`] holds.
pub const MAX_TERMS: usize = 8;

/// A conjunction of mask [`Term`]s. The empty conjunction lets every key through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mask<'a> {
    terms: [Option<Term<'a>>; MAX_TERMS],
    /// A term was lost for want of room; reported by [`Mask::check`], before anything is computed.
    overflowed: bool,
}

impl<'a> Mask<'a> {
    /// Every key is visible.
    pub const fn none() -> Self {
        Self { terms: [None; MAX_TERMS], overflowed: false }
    }

    /// A mask of one term.
    pub const fn term(term: Term<'a>) -> Self {
        let mut mask = Self::none();
        mask.terms[0] = Some(term);
        mask
    }

    /// Query `i` sees keys `j ≤ i + offset`, the offset being the alignment's.
    pub const fn causal(align: Align) -> Self {
        Self::term(Term::Causal(align))
    }

    /// Query `i`, standing at `p = i + offset`, sees keys `p − left ≤ j ≤ p + right`: inclusive distances, so that
    /// `window(0, 0, ..)` is only the token itself. Use [`Window`] for a side without bound.
    pub const fn window(left: usize, right: usize, align: Align) -> Self {
        Self::term(Term::Window(Window { left: Some(left), right: Some(right), align }))
    }

    /// Prefix-LM: keys below the prefix are visible to every query, the others causally.
    pub const fn prefix_lm(prefix: Lengths<'a>, align: Align) -> Self {
        Self::term(Term::Prefix { prefix, align })
    }

    /// Keys `j ≥ lens[batch]` are hidden: right padding.
    pub const fn kv_lens(lens: &'a [usize]) -> Self {
        Self::term(Term::KvLens(Lengths::PerBatch(lens)))
    }

    /// Keys `j < starts[batch]` are hidden: left padding.
    pub const fn kv_starts(starts: &'a [usize]) -> Self {
        Self::term(Term::KvStarts(Lengths::PerBatch(starts)))
    }

    /// Queries `i ≥ lens[batch]` see nothing: their rows are zero.
    pub const fn q_lens(lens: &'a [usize]) -> Self {
        Self::term(Term::QLens(Lengths::PerBatch(lens)))
    }

    /// Padding of a self-attention batch: padded positions neither send nor receive.
    pub const fn padding(lens: &'a [usize]) -> Self {
        Self::kv_lens(lens).and(Self::q_lens(lens))
    }

    /// Packed sequences of different lengths: attention stays inside a document.
    pub const fn documents(documents: Documents<'a>) -> Self {
        Self::term(Term::Documents(documents))
    }

    /// Whole blocks of the score matrix are visible or hidden.
    pub const fn block_sparse(blocks: BlockSparse<'a>) -> Self {
        Self::term(Term::BlockSparse(blocks))
    }

    /// Speculative decoding: the last `q_len` keys are nodes of a tree, and a node sees its ancestors.
    pub const fn tree(tree: Tree<'a>) -> Self {
        Self::term(Term::Tree(tree))
    }

    /// A boolean tensor that broadcasts to `[batch, q_heads, q_len, kv_len]`; `true` keeps a key visible.
    pub const fn keep(mask: View<'a, bool>) -> Self {
        Self::term(Term::Dense(DenseMask { mask, keep: true }))
    }

    /// A boolean tensor that broadcasts to `[batch, q_heads, q_len, kv_len]`; `true` hides a key.
    pub const fn drop(mask: View<'a, bool>) -> Self {
        Self::term(Term::Dense(DenseMask { mask, keep: false }))
    }

    /// Both masks at once: a key is visible when both show it. More than [`MAX_TERMS`] terms are an error that
    /// [`Mask::check`] reports.
    pub const fn and(mut self, other: Self) -> Self {
        let (mut from, mut to) = (0, 0);
        while from < MAX_TERMS {
            if let Some(term) = other.terms[from] {
                while to < MAX_TERMS && self.terms[to].is_some() {
                    to += 1;
                }
                if to < MAX_TERMS {
                    self.terms[to] = Some(term);
                } else {
                    self.overflowed = true;
                }
            }
            from += 1;
        }
        self.overflowed |= other.overflowed;
        self
    }

    /// The terms.
    pub fn terms(&self) -> impl Iterator<Item = &Term<'a>> {
        self.terms.iter().flatten()
    }

    /// Whether every key is visible whatever the shape.
    pub fn is_none(&self) -> bool {
        self.terms().next().is_none()
    }

    /// Checks every table against the shape. All other methods assume a checked mask, and answer "hidden" rather than
    /// fail where a table is too short.
    ///
    /// # Errors
    /// The size, order, index or broadcast that does not fit; [`AttnError::MaskTerms`].
    pub fn check(&self, shape: &AttnShape) -> Result<()> {
        if self.overflowed {
            return Err(AttnError::MaskTerms { max: MAX_TERMS });
        }
        self.terms().try_for_each(|term| term.check(shape))
    }

    /// Whether one key is visible to one query.
    #[inline]
    pub fn visible(&self, shape: &AttnShape, at: At) -> bool {
        self.terms().all(|term| term.visible(shape, at))
    }

    /// Whether each row sees exactly its [`row_range`](Self::row_range), without holes.
    pub fn is_ranges(&self) -> bool {
        self.terms().all(Term::is_range)
    }

    /// A range of keys outside of which the row sees nothing. Exact where [`is_ranges`](Self::is_ranges).
    pub fn row_range(&self, shape: &AttnShape, batch: usize, head: usize, query: usize) -> Range<usize> {
        let mut range = 0..shape.kv_len;
        for term in self.terms() {
            let r = term.row_range(shape, batch, head, query);
            range = range.start.max(r.start)..range.end.min(r.end);
        }
        if range.start >= range.end { 0..0 } else { range }
    }

    /// Calls `f` with each key that a row sees of a part of its [`row_range`](Self::row_range), in order.
    #[inline]
    pub(crate) fn for_each_in(
        &self,
        shape: &AttnShape,
        [batch, head, query]: [usize; 3],
        keys: Range<usize>,
        mut f: impl FnMut(usize),
    ) {
        // If a row's keys are its range, no key needs the terms again.
        let ranges = self.is_ranges();
        for key in keys {
            if ranges || self.visible(shape, At { batch, head, query, key }) {
                f(key);
            }
        }
    }

    /// Bit `n` says whether the row sees key `start + n`, for `n < 64`; keys from `kv_len` on are hidden.
    pub fn row_bits(&self, shape: &AttnShape, batch: usize, head: usize, query: usize, start: usize) -> u64 {
        let range = self.row_range(shape, batch, head, query);
        self.row_bits_within(shape, [batch, head, query], start, range)
    }

    /// As [`row_bits`](Self::row_bits), for an engine that knows the row's [`row_range`](Self::row_range)
    /// before.
    #[inline]
    pub fn row_bits_within(
        &self,
        shape: &AttnShape,
        [batch, head, query]: [usize; 3],
        start: usize,
        range: Range<usize>,
    ) -> u64 {
        let mut bits = bits::range_bits(range, start);
        for term in self.terms().filter(|term| !term.is_range()) {
            if bits == 0 {
                break;
            }
            bits &= term.row_bits(shape, batch, head, query, start);
        }
        bits
    }
}
