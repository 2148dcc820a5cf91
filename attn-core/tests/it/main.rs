//! Integration tests of `attn-core`, one program with a module per subject.

#[cfg(feature = "ndarray")]
mod array;
mod backward;
mod cost;
mod int8;
mod int8_caches;
mod kv_caches;
mod laws;
mod masks;
mod module;
mod module_gradients;
mod numbers;
mod projection;
mod resume;
mod scratch;
