//! Integration tests of `attn-layers`, one program with a module per subject.

mod cost;
mod module;
mod module_gradients;
mod projection;
