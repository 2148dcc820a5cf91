//! Integration tests of `attn-parallel`, one program with a module per subject.

mod backward;
mod laws;
mod memory;
mod steps;
mod threads;
mod weights;
