//! The prefill kernel: many queries over their keys, a tile of 64 keys at a time. Lanes are queries.
//!
//! ```text
//! layout    sizes of blocks, strips and scratch: pure functions of level, shape and caches
//! buffers   that scratch, by name
//! job       options, sizes and inputs of a call, without type parameters
//! mask      which queries see which keys of a tile, as bits
//! score     (only with soft-cap, bias, ALiBi or mods) scale, cap, add; hidden scores become −∞
//! softmax   running maximum and sum; scores become weights
//! nonfinite (only in partial tiles) keeps NaN and infinite values from rows that do not see them
//! total     sums over many tiles, whose error does not grow with their number
//! prefetch  requests the lines that a block writes at its end and the next one reads first
//! finish    divides, transposes, rounds, writes
//! call      the running call: how threads share its blocks, and which of the two kernels computes them
//! sweep     the loops over blocks and tiles that call all of these
//! ```
//! The two products are in [`gemm`](crate::gemm); [`pack`](crate::pack) brings inputs into the form that they read.

pub(crate) mod buffers;
pub(crate) mod call;
pub(crate) mod finish;
pub(crate) mod job;
pub(crate) mod layout;
pub(crate) mod mask;
pub(crate) mod nonfinite;
pub(crate) mod prefetch;
pub(crate) mod score;
pub(crate) mod softmax;
pub(crate) mod sweep;
pub(crate) mod total;
