//! Formats of rows in caches of keys and values: ggml's `q8_0` and `q4_0`, `fp8` e4m3fn and e5m2, int8, and halves in
//! bytes.
//!
//! | what | is |
//! |---|---|
//! | [`Format`] | a format: its blocks, and rows encoded and decoded |
//! | [`StoredRows`], [`StoredView`] | a cache in bytes, to be read: slots, rings, pages; keys and values each in a format |
//! | [`StoredCache`], [`StoredRing`], [`append_paged_stored`] | the same, tokens being appended |
//! | [`E4m3`], [`E5m2`] | the eight-bit floats |
//!
//! [`streaming::forward_stored`](crate::streaming::forward_stored) and
//! [`reference::forward_stored`](crate::reference::forward_stored) attend to such a cache, and the decode kernel of
//! `attn-simd` reads it. Numbers are widened as they are read, exactly; a scale beside the bytes multiplies a score or
//! a weight. A format of few bits keeps more of a row if a [rotation](crate::hadamard) has spread its large numbers
//! before.

mod append;
mod blocks;
mod e4m3;
mod e5m2;
mod format;
mod q4_0;
mod q8_0;
mod small_float;
mod stored;
#[cfg(test)]
mod tests;
mod written;

pub use append::{StoredCache, StoredRing, append_paged_stored};
pub use e4m3::E4m3;
pub use e5m2::E5m2;
pub use format::Format;
pub use stored::{StoredRows, StoredView};
pub use written::StoredRowsMut;
