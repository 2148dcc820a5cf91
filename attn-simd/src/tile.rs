//! The kernel on matrix tiles: both products through bf16 tiles, whatever the element type.
//!
//! ```text
//! unit      the seam: trait TileProduct, tiles, and which parts of two split numbers are multiplied
//! model     the tile instructions in plain Rust, exactly: what tests, Miri and machines without tiles run
//! method    which split a call uses, and why it may not use tiles at all
//! layout    where everything lies: tile counts, super-blocks, scratch
//! pack      rows of q, k, v become tiles of bf16 parts; rows that the parts cannot hold are marked
//! softmax   scores of a chunk become weights, split into tiles
//! values    weights that wait for their values, a group of chunks at a time
//! sweep     a super-block of keys, packed once, against several blocks of queries
//! ```
//! The leaf on the processor's tile unit is [`isa::amx`](crate::isa::amx).
//!
//! A bfloat16 has 8 bits of significand. A bf16 input is one; an f16 is the sum of two and an f32 that of three,
//! exactly; a weight between 0 and 1 is cut into one, two or three. A product of sums is a sum of products: the largest
//! of them, each exact, are added up in f32 by the tile unit (Henry, Tang and Heinecke 2019, arXiv 1904.06376). What no
//! part can hold (NaN, infinities, q and k above 2⁴⁸ and v above 2⁴⁰; see [`pack`]) is found while packing; the rows of
//! queries that meet such a number are computed by the vector kernel instead, so that neither a hidden number nor a
//! neighbour's changes a bit of any other row.
//!
//! Masks, score modifications, dropout and the end of a block are those of [`kernel`](crate::kernel).

pub(crate) mod layout;
pub(crate) mod method;
pub(crate) mod model;
pub(crate) mod pack;
pub(crate) mod softmax;
pub(crate) mod sweep;
pub(crate) mod unit;
pub(crate) mod values;
