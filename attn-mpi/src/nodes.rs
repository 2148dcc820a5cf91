//! States merged in a tree that depends on positions alone, whichever rank computes a part, and whenever it arrives.
//!
//! The tree is that of `attn_simd`'s decode kernel: leaves are chunks of 512 keys, and a node of level `l` covers `2ˡ`
//! chunks from a multiple of `2ˡ` on. A node is merged with its sibling as soon as both are there, the left one first.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use attn_core::{Result, state};

/// Keys of a leaf.
pub(crate) const CHUNK: usize = 512;

/// Level of a node, and its number on that level.
pub(crate) type Node = (u32, usize);

/// Nodes that wait for their siblings.
#[derive(Default)]
pub(crate) struct Nodes {
    waiting: BTreeMap<Node, Vec<f32>>,
}

impl Nodes {
    /// Takes a node in.
    pub(crate) fn insert(&mut self, mut node: Node, mut rows: Vec<f32>, value_dim: usize) -> Result<()> {
        loop {
            let (level, number) = node;
            let Some(mut other) = self.waiting.remove(&(level, number ^ 1)) else {
                self.waiting.insert(node, rows);
                return Ok(());
            };
            if number % 2 == 1 {
                std::mem::swap(&mut rows, &mut other);
            }
            state::merge_states(&mut rows, &other, value_dim)?;
            node = (level + 1, number / 2);
        }
    }

    /// The states that wait, in the order of [`joined`].
    pub(crate) fn into_rows(self) -> Vec<Vec<f32>> {
        self.waiting.into_values().collect()
    }

    /// What all nodes together are, if there is any. All chunks from 0 on must have been taken in: what is missing at
    /// the right of a node are chunks that do not exist.
    pub(crate) fn finish(self, value_dim: usize) -> Result<Option<Vec<f32>>> {
        let mut nodes: Vec<(Node, Vec<f32>)> = self.waiting.into_iter().collect();
        nodes.sort_by_key(|((level, number), _)| number << level);
        while let Some((_, right)) = nodes.pop() {
            match nodes.last_mut() {
                Some((_, left)) => state::merge_states(left, &right, value_dim)?,
                None => return Ok(Some(right)),
            }
        }
        Ok(None)
    }
}

/// Which nodes wait in the end if these are taken in.
pub(crate) fn joined(nodes: impl IntoIterator<Item = Node>) -> Vec<Node> {
    let mut waiting = BTreeSet::new();
    for mut node in nodes {
        while waiting.remove(&(node.0, node.1 ^ 1)) {
            node = (node.0 + 1, node.1 / 2);
        }
        waiting.insert(node);
    }
    waiting.into_iter().collect()
}

/// The largest nodes that make up a range of chunks, in order.
pub(crate) fn cover(chunks: Range<usize>) -> Vec<Node> {
    let (mut nodes, mut at) = (Vec::new(), chunks.start);
    while at < chunks.end {
        let fits = (chunks.end - at).ilog2();
        let level = if at == 0 { fits } else { fits.min(at.trailing_zeros()) };
        nodes.push((level, at >> level));
        at += 1 << level;
    }
    nodes
}

/// A node, or those of a level below it that make it up.
pub(crate) fn parts_of((level, number): Node, highest: u32) -> impl Iterator<Item = Node> {
    let deeper = level.saturating_sub(highest);
    (number << deeper..(number + 1) << deeper).map(move |number| (level - deeper, number))
}

/// The keys of a node, of so many in all.
pub(crate) fn keys_of((level, number): Node, kv_len: usize) -> Range<usize> {
    let at = |number: usize| number.saturating_mul(CHUNK << level).min(kv_len);
    at(number)..at(number + 1)
}

/// The chunks that lie whole in a range of positions; the last chunk of a sequence may be short.
pub(crate) fn whole_chunks(range: &Range<usize>, kv_len: usize) -> Range<usize> {
    let first = range.start.div_ceil(CHUNK);
    let end = if range.end == kv_len { kv_len.div_ceil(CHUNK) } else { range.end / CHUNK };
    first..end.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row over one score.
    fn leaf(n: usize) -> Vec<f32> {
        vec![(n * 37 % 101) as f32 * 0.06 - 3.0, 1.0 + n as f32 * 0.01]
    }

    #[test]
    fn the_order_of_arrival_changes_no_bit() {
        for count in [1, 2, 7, 8, 13, 64, 65] {
            let merge = |order: &[usize]| {
                let mut nodes = Nodes::default();
                order.iter().for_each(|&n| nodes.insert((0, n), leaf(n), 0).unwrap());
                nodes.finish(0).unwrap().unwrap()
            };
            let mut order: Vec<usize> = (0..count).collect();
            let want = merge(&order);
            for step in 1..count {
                order.rotate_left(step);
                assert_eq!(merge(&order), want);
                order.reverse();
                assert_eq!(merge(&order), want);
            }
        }
    }

    #[test]
    fn nodes_cover_each_chunk_once() {
        for start in 0..40 {
            for end in start..40 {
                let mut at = start;
                for node in cover(start..end) {
                    let keys = keys_of(node, usize::MAX);
                    assert_eq!(keys.start, at * CHUNK);
                    at = keys.end / CHUNK;
                }
                assert_eq!(at, end);
            }
        }
        assert_eq!((whole_chunks(&(100..2000), 2000), whole_chunks(&(100..300), 2000)), (1..4, 1..1));
    }
}
