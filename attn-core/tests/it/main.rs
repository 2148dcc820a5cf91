//! Integration tests of `attn-core`, one program with a module per subject.

#[cfg(feature = "ndarray")]
mod array;
mod backward;
mod formats;
mod int8;
mod int8_caches;
mod kv_caches;
mod laws;
mod masks;
mod resume;
mod scratch;
