//! Integration tests of `attn-simd`, one program with a module per subject.

mod laws;
mod level;
