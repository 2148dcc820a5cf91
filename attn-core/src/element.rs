//! The number types of tensors: `f64`, `f32`, `f16`, `bf16`, and the reals that engines compute in.
//!
//! Half floats are stored, never computed in: every engine widens them to [`Element::Compute`] when it reads them and
//! rounds once when it writes. (Half accumulation overflows before the softmax; peers learned that the hard way.)

pub(crate) mod numbers;

pub(crate) use numbers::Element;
pub use numbers::Real;
