//! Which keys a query sees: a small algebra of masks, none of which stores an n×n tensor unless the caller passed one.
//!
//! A [`Mask`] is a conjunction of terms; a key is visible when every term lets it through. Each term answers three
//! questions: is one key visible, which range of keys can a row see at most, and which of up to 64 keys does a row see
//! (as bits). Engines use the range to skip keys they need not read and the bits to mask tiles that are only partly
//! visible, so that the reference, a microcontroller and the tiled kernels skip the same work.
//!
//! The pictures show `q_len = 4`, `kv_len = 6`; rows are queries, columns keys, `■` is visible.
//!
//! ```text
//! causal(TopLeft)  causal(BottomRight)  window(1, 0)      prefix_lm(2, TopLeft)  kv_lens([4])
//!                                       BottomRight
//! ■ · · · · ·      ■ ■ ■ · · ·          · ■ ■ · · ·       ■ ■ · · · ·            ■ ■ ■ ■ · ·
//! ■ ■ · · · ·      ■ ■ ■ ■ · ·          · · ■ ■ · ·       ■ ■ · · · ·            ■ ■ ■ ■ · ·
//! ■ ■ ■ · · ·      ■ ■ ■ ■ ■ ·          · · · ■ ■ ·       ■ ■ ■ · · ·            ■ ■ ■ ■ · ·
//! ■ ■ ■ ■ · ·      ■ ■ ■ ■ ■ ■          · · · · ■ ■       ■ ■ ■ ■ · ·            ■ ■ ■ ■ · ·
//!
//! documents        block_sparse 2×2     tree: 2 branches  q_lens([2])            keep / drop
//! [0,2,4],[0,3,6]  (keep ■ blocks)      after 2 tokens
//! ■ ■ ■ · · ·      ■ ■ · · ■ ■          ■ ■ ■ · · ·       ■ ■ ■ ■ ■ ■            any pattern, from
//! ■ ■ ■ · · ·      ■ ■ · · ■ ■          ■ ■ ■ ■ · ·       ■ ■ ■ ■ ■ ■            a tensor of bools
//! · · · ■ ■ ■      · · ■ ■ · ·          ■ ■ ■ · ■ ·       · · · · · ·            that broadcasts
//! · · · ■ ■ ■      · · ■ ■ · ·          ■ ■ ■ · ■ ■       · · · · · ·
//! ```
//!
//! ```
//! use attn_core::{Align, AttnShape, Mask};
//! let mask = Mask::causal(Align::BottomRight).and(Mask::window(128, 0, Align::BottomRight));
//! let shape = AttnShape::new([1, 1, 4, 8], [1, 1, 1000, 8], [1, 1, 1000, 8])?;
//! mask.check(&shape)?;
//! assert_eq!(mask.row_range(&shape, 0, 0, 3), 871..1000); // itself and the 128 keys before it
//! # Ok::<(), attn_core::AttnError>(())
//! ```

pub(crate) mod align;
pub(crate) mod bits;
mod block_sparse;
pub(crate) mod conjunction;
mod dense;
mod documents;
mod lengths;
mod term;
mod tree;

pub(crate) use align::Align;
pub use align::Window;
pub use block_sparse::BlockSparse;
pub use conjunction::MAX_TERMS;
pub(crate) use conjunction::Mask;
pub use dense::DenseMask;
pub use documents::Documents;
pub use lengths::Lengths;
pub use term::Term;
pub use tree::Tree;
