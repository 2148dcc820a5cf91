//! Integration tests of `attn-core`, one program with a module per subject.

mod cost;
mod numbers;
mod projection;
