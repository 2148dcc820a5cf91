//! Exact scaled dot-product attention, `softmax(scale·q·kᵀ + mask)·v`, in `no_std` and without allocation.
//!
//! # What f32 can hold
//!
//! [`mod@reference`] computes in `f64`. [`streaming`], the caches and the kernels of other crates compute in `f32`
//! ([`streaming`] computes `f64` tensors in `f64`). Finite inputs give the exact result up to rounding if
//!
//! - **products** `q·k`, and the scores made of them, stay within ±3.4·10³⁸. A larger score may be ±∞: +∞ makes its row
//!   NaN, −∞ has no weight. [`Attention::scale`] says which factors are accepted. Ordinary inputs are far below.
//! - **values** stay below 3.4·10³⁸ divided by the number of keys that a row sees. An engine first adds up to `Σ |v|`,
//!   and divides by the sum of the weights at the end. A sum that overflows is ±∞ or NaN.
//!
//! **Infinite values**, in every engine: if the weight of a visible key underflows to 0, a ±∞ in its value gives NaN
//! (0·∞). A hidden key never does.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(test)]
extern crate std;

mod appended;
#[cfg(feature = "ndarray")]
mod array;
pub mod backward;
mod bias;
pub mod bits;
#[cfg(feature = "bytemuck")]
mod bytes;
mod dot;
pub mod dropout;
pub mod element;
#[doc(hidden)]
pub mod engine;
mod error;
pub mod fixed;
pub mod int8;
pub mod kv_cache;
#[doc = include_str!("../docs/embedded.md")]
pub mod guide_embedded {}
pub mod mask;
mod options;
mod outputs;
pub mod position;
pub mod reference;
pub mod resume;
pub mod row;
pub mod score;
pub mod score_mod;
mod shape;
pub mod softmax;
pub mod state;
pub mod streaming;
mod view;
pub mod weights;

pub use bias::Bias;
pub use element::numbers::{Dtype, Element};
pub use error::{AttnError, Result};
pub use half;
pub use mask::align::Align;
pub use mask::conjunction::Mask;
pub use options::{Attention, Precision};
pub use outputs::Outputs;
pub use shape::AttnShape;
pub use view::{Layout, View, ViewMut};
