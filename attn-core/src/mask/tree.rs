//! Trees of draft tokens, for speculative decoding.

use crate::error::{AttnError, Result};
use crate::shape::AttnShape;

/// The last `q_len` keys are the nodes of a forest, in the order of the queries; a node sees itself, its ancestors, and
/// all keys before the forest (Miao et al., SpecInfer, arXiv 2305.09781).
///
/// ```
/// use attn_core::{AttnShape, Mask};
/// use attn_core::mask::Tree;
/// use attn_core::score::At;
/// // Two cached tokens; then a root with two children: 0 → {1, 2}.
/// let mask = Mask::tree(Tree { parents: &[None, Some(0), Some(0)] });
/// let shape = AttnShape::new([1, 1, 3, 8], [1, 1, 5, 8], [1, 1, 5, 8])?;
/// mask.check(&shape)?;
/// let sees = |query, key| mask.visible(&shape, At { batch: 0, head: 0, query, key });
/// assert!(sees(2, 0) && sees(2, 2) && sees(2, 4) && !sees(2, 3)); // not its sibling
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tree<'a> {
    /// For each node the node above it, which must come before it; `None` for a root. `[q_len]`.
    pub parents: &'a [Option<usize>],
}

impl Tree<'_> {
    pub(crate) fn check(&self, shape: &AttnShape) -> Result<()> {
        AttnError::check_size("tree parents against q_len", shape.q_len, self.parents.len())?;
        if shape.kv_len < shape.q_len {
            return Err(AttnError::Size { what: "tree keys (kv_len)", expected: shape.q_len, found: shape.kv_len });
        }
        for (at, parent) in self.parents.iter().enumerate() {
            if let &Some(value) = parent
                && value >= at
            {
                return Err(AttnError::Index { what: "tree parents", at, value, limit: at });
            }
        }
        Ok(())
    }

    /// Calls `f` with the node of `query` and every ancestor, upwards; stops when `f` says so.
    fn walk(&self, query: usize, mut f: impl FnMut(usize) -> bool) {
        let mut node = query;
        // Parents come before their children, so that the walk ends; a table that breaks this was refused by `check`,
        // and the bound on the steps keeps it finite even then.
        for _ in 0..self.parents.len() {
            if f(node) {
                return;
            }
            match self.parents.get(node) {
                Some(&Some(parent)) => node = parent,
                _ => return,
            }
        }
    }

    pub(crate) fn visible(&self, shape: &AttnShape, query: usize, key: usize) -> bool {
        let first = shape.kv_len.saturating_sub(shape.q_len);
        let Some(target) = key.checked_sub(first) else {
            return true;
        };
        let mut found = false;
        self.walk(query, |node| {
            found = node == target;
            node <= target
        });
        found
    }

    /// The 64 keys from `start` on as bits, by one walk to the root.
    pub(crate) fn row_bits(&self, shape: &AttnShape, query: usize, start: usize) -> u64 {
        let first = shape.kv_len.saturating_sub(shape.q_len);
        let mut bits = super::bits::range_bits(0..first, start);
        self.walk(query, |node| {
            let key = first + node;
            if let Some(n) = key.checked_sub(start)
                && n < 64
            {
                bits |= 1 << n;
            }
            key < start
        });
        bits
    }
}
