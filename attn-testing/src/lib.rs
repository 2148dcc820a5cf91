//! Shared by the tests of the attn crates, and never published: the conformance suites and their runner, case grids,
//! painted inputs, the one table of tolerances, and laws (test bodies) that every engine must obey.
//!
//! Everything is generic over [`Engine`], so that the reference, the streaming engine, the SIMD kernels at each level
//! and the parallel driver run the same tests. This crate sees `attn-core` and `attn-layers`
//! only; the other engines implement [`Engine`] in their own tests.

pub mod cases;
pub mod conformance;
mod engine;
pub mod exact;
pub mod gradients;
pub mod laws;
mod levels;
pub mod numbers;
pub mod paint;
pub mod random;
pub mod stored;
pub mod tolerance;
pub mod ulp;

pub use engine::{Call, Engine, GradientCall, Number, PartCall, Reference, StepCall, Streaming};
pub use levels::{is_demanded, is_emulated, levels};
