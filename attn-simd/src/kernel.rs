//! The phases of one tile, generic over the instruction set, and the block kernel that strings them together.
//!
//! ```text
//! pack      q[channel][query] once per block; keys and values of a tile only where they are not contiguous f32
//! prefetch  requests what the block writes at its end and the next one reads first
//! visible   which queries see which keys of a tile, as bits
//! score     (only with soft-cap, bias, ALiBi or mods) scale, cap, add; hidden scores become −∞
//! softmax   running maximum and sum, scores become weights
//! nonfinite (only in partial tiles) keeps NaN and infinite values from rows that do not see them
//! total     sums over many tiles, whose error does not grow with their number
//! finish    divide, transpose, round, write
//! ```
//! The two products stand in [`isa::product`](crate::isa::product); [`sweep`] is the loop over the tiles of a block.

pub(crate) mod finish;
pub(crate) mod nonfinite;
pub(crate) mod pack;
pub(crate) mod prefetch;
pub(crate) mod score;
pub(crate) mod softmax;
pub(crate) mod sweep;
pub(crate) mod total;
pub(crate) mod visible;
