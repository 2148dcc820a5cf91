//! Integration tests of `attn-layers`, one program with a module per subject.

mod cost;
mod linear_gradients;
mod module;
mod module_gradients;
mod projection;
