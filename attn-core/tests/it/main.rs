//! Integration tests of `attn-core`, one program with a module per subject.

mod backward;
mod cost;
mod laws;
mod masks;
mod module;
mod module_gradients;
mod numbers;
mod projection;
mod scratch;
