//! Integration tests of `attn-core`, one program with a module per subject.

mod numbers;
mod projection;
