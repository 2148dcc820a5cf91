//! Merges the states of a row in a fixed tree, so that bits do not depend on the threads or the order of computation.
//!
//! The leaves are chunks of [`CHUNK`](super::CHUNK) keys, numbered from key 0 on. A node of level `l` covers `2ˡ`
//! chunks from a multiple of `2ˡ` on: the tree is a function of a key's position and of nothing else. A chunk without
//! visible keys changes no bit of the state that it is merged with. So longer sequences, windows and masks do not
//! change the tree of the visible keys.
//!
//! [`Fold`] takes the leaves in order and keeps the nodes that wait for their right sibling: at most one per level.

use attn_core::state;

/// Nodes in order. Each is merged into its left sibling as soon as it is complete.
pub(super) struct Fold<'s> {
    slots: &'s mut [f32],
    /// Floats of one node.
    size: usize,
    value_dim: usize,
    /// Level and number of each waiting node, in the order of their slots.
    nodes: [(u32, usize); usize::BITS as usize + 1],
    waiting: usize,
}

/// Slots for this many leaves: one for each node that can wait, and one for the leaf that is being written.
pub(super) const fn slots_for(leaves: usize) -> usize {
    (usize::BITS - leaves.leading_zeros()) as usize + 1
}

impl<'s> Fold<'s> {
    /// A fold without nodes. `slots` has room for [`slots_for`] nodes of `size` floats.
    pub(super) fn new(slots: &'s mut [f32], size: usize, value_dim: usize) -> Self {
        Self { slots, size, value_dim, nodes: [(0, 0); usize::BITS as usize + 1], waiting: 0 }
    }

    /// The slot of the next node: the caller writes it, then [pushes](Self::push) it.
    #[inline(always)]
    pub(super) fn slot(&mut self) -> &mut [f32] {
        &mut self.slots[self.waiting * self.size..][..self.size]
    }

    /// As [`slot`](Self::slot), if the node is in the slots already: moves the `n`-th node there.
    pub(super) fn take(&mut self, n: usize) {
        if n != self.waiting {
            self.slots.copy_within(n * self.size..(n + 1) * self.size, self.waiting * self.size);
        }
    }

    /// Adds node `number` of `level`, which the caller has written. Numbers ascend.
    pub(super) fn push(&mut self, level: u32, number: usize) {
        self.nodes[self.waiting] = (level, number);
        self.waiting += 1;
        // A right child is complete. Its parent takes its place, merged with the left child if there is one.
        while let (level, number) = self.nodes[self.waiting - 1]
            && number % 2 == 1
        {
            if self.waiting > 1 && self.nodes[self.waiting - 2] == (level, number - 1) {
                self.merge();
            }
            self.nodes[self.waiting - 1] = (level + 1, number / 2);
        }
    }

    /// Merges the last node into the one before it.
    fn merge(&mut self) {
        self.waiting -= 1;
        let (left, right) = self.slots.split_at_mut(self.waiting * self.size);
        let left = &mut left[(self.waiting - 1) * self.size..];
        let merged = state::merge_states(left, &right[..self.size], self.value_dim);
        debug_assert!(merged.is_ok(), "both are whole rows of one size");
    }

    /// The merged state of all nodes, in the first slot; `None` if there is no node.
    pub(super) fn finish(mut self) -> Option<&'s mut [f32]> {
        // A node that still waits has no right sibling: all chunks there are empty.
        while self.waiting > 1 {
            self.merge();
        }
        (self.waiting == 1).then(|| &mut self.slots[..self.size])
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use super::*;

    /// A row over one score, without outputs.
    fn leaf(n: usize) -> [f32; 2] {
        [(n * 37 % 101) as f32 * 0.06 - 3.0, 1.0 + n as f32 * 0.01]
    }

    fn walk(leaves: core::ops::Range<usize>, level: u32) -> [f32; 2] {
        // Nodes of a level first, each by a walk of its own, then those.
        let nodes: Vec<(usize, [f32; 2])> = (leaves.start >> level..leaves.end.div_ceil(1 << level))
            .map(|node| {
                let part = leaves.start.max(node << level)..leaves.end.min((node + 1) << level);
                let mut slots = vec![f32::NAN; 2 * slots_for(part.len())];
                let mut fold = Fold::new(&mut slots, 2, 0);
                for n in part {
                    fold.slot().copy_from_slice(&leaf(n));
                    fold.push(0, n);
                }
                (node, fold.finish().expect("not empty").try_into().expect("two floats"))
            })
            .collect();
        let mut slots: Vec<f32> = nodes.iter().flat_map(|(_, state)| *state).collect();
        let mut fold = Fold::new(&mut slots, 2, 0);
        for (n, (node, _)) in nodes.iter().enumerate() {
            fold.take(n);
            fold.push(level, *node);
        }
        fold.finish().expect("not empty").try_into().expect("two floats")
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri rounds exponentials at random")]
    fn cutting_at_any_level_changes_no_bit() {
        for leaves in [0..1, 0..2, 0..7, 0..8, 0..9, 3..8, 5..6, 1..37, 16..33, 7..64] {
            let want = walk(leaves.clone(), 0).map(f32::to_bits);
            for level in 1..7 {
                assert_eq!(walk(leaves.clone(), level).map(f32::to_bits), want, "{leaves:?} at level {level}");
            }
        }
    }

    #[test]
    fn nothing_is_nothing() {
        assert!(Fold::new(&mut [], 2, 0).finish().is_none());
        assert_eq!((slots_for(0), slots_for(1), slots_for(8), slots_for(9)), (1, 2, 5, 5));
    }
}
