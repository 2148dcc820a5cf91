//! The AMX kernel: prefill with both products in bf16, whatever the element type.
//!
//! ```text
//! layout    sizes of items, super-blocks and scratch: pure functions of shape and method
//! buffers   that scratch, by name
//! method    into which parts a call splits its numbers, and why it may not use AMX at all
//! product   AmxUnit, the trait of a unit that multiplies operands, and which parts of two split numbers are multiplied
//! model     the instructions in plain Rust, exactly: for tests, Miri and machines without AMX
//! dot       the same of the level avx512bf16
//! pack      rows of q, k, v become bf16 parts; rows that the parts cannot hold are marked
//! softmax   scores of a tile become weights, split into parts
//! values    weights that wait for their values, a group of tiles at a time
//! sweep     a super-block of keys, packed once, against several blocks of queries
//! ```
//! The leaf with the instructions is [`isa::amx`](crate::isa::amx). Masks, score modifications, dropout, totals and the
//! end of a block are those of [`prefill`](crate::prefill).
//!
//! A bfloat16 has 8 bits of significand. A bf16 input is one bfloat16; an f16 is exactly the sum of two, and an f32
//! that of three; a weight between 0 and 1 is cut into one, two or three. A product of sums is a sum of products: AMX
//! adds the largest of them, each exact, in f32 (Henry, Tang and Heinecke 2019, arXiv 1904.06376). Some numbers fit no
//! part: NaN, infinities, q and k above 2⁴⁸, v above 2⁴⁰ (see [`pack`]). Packing finds them, and the prefill kernel
//! computes the rows that meet one. So no bit of a row depends on a number that it does not see.

mod buffers;
pub(crate) mod dot;
pub(crate) mod layout;
pub(crate) mod method;
pub(crate) mod model;
pub(crate) mod pack;
pub(crate) mod product;
pub(crate) mod softmax;
pub(crate) mod sweep;
pub(crate) mod values;
