//! For the kernels of sibling crates; no part of the interface that versions promise.

pub use crate::mask::bits::{lowest_bits, pack_bools, transpose_bits};
