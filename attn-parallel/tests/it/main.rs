//! Integration tests of `attn-parallel`, one program with a module per subject.

mod backward;
mod laws;
mod memory;
mod module_gradients;
mod steps;
mod stop;
mod threads;
mod weights;
