//! The inputs of a module: the source of queries, and the source of keys and values.

use attn_core::{Element, View};

/// The inputs of a module, each `[batch, 1, seq, features]` (or any split of the features into heads).
///
/// | caller's tensor | view |
/// |---|---|
/// | batch first, `[batch, seq, d]` | `View::new(x, Layout::Bhsd, [batch, 1, seq, d])` |
/// | sequence first, `[seq, batch, d]` | `View::new(x, Layout::Sbhd, [batch, 1, seq, d])` |
/// | unbatched, `[seq, d]` | `View::matrix(x, seq, d)` |
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a, T> {
    /// The input of the queries.
    pub query: View<'a, T>,
    /// The input of the keys.
    pub key: View<'a, T>,
    /// The input of the values; as long as `key`.
    pub value: View<'a, T>,
}

impl<'a, T: Element> Sources<'a, T> {
    /// Self-attention: all three are `x`.
    pub const fn same(x: View<'a, T>) -> Self {
        Self { query: x, key: x, value: x }
    }

    /// Cross-attention: `query` attends to `memory`, as a decoder does to an encoder's output.
    pub const fn cross(query: View<'a, T>, memory: View<'a, T>) -> Self {
        Self { query, key: memory, value: memory }
    }

    /// Three inputs, which may have three numbers of features (torch's `kdim` and `vdim`).
    pub const fn new(query: View<'a, T>, key: View<'a, T>, value: View<'a, T>) -> Self {
        Self { query, key, value }
    }
}

impl<'a, T: Element> From<View<'a, T>> for Sources<'a, T> {
    fn from(x: View<'a, T>) -> Self {
        Self::same(x)
    }
}
