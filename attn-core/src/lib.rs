//! Exact scaled dot-product attention, `softmax(scale·q·kᵀ + mask)·v`, in `no_std` and without allocation.
//!
//! ```
//! use attn_core::{Align, Attention, Layout, Mask, View, ViewMut, streaming};
//!
//! let (q_heads, kv_heads, len, dim) = (4, 2, 16, 8); // two query heads share a key/value head
//! let q: Vec<f32> = (0..q_heads * len * dim).map(|n| (n as f32).sin()).collect();
//! let kv: Vec<f32> = (0..kv_heads * len * dim).map(|n| (n as f32).cos()).collect();
//! let (mut out, mut scratch) = (vec![0.0f32; q.len()], vec![0.0f32; dim]); // arrays do as well: nothing is allocated
//!
//! let attn = Attention::new().mask(Mask::causal(Align::BottomRight)); // scale 1/√dim unless you say otherwise
//! let q = View::new(&q, Layout::Bhsd, [1, q_heads, len, dim])?; // [batch, heads, seq, dim], any strides
//! let kv = View::new(&kv, Layout::Bhsd, [1, kv_heads, len, dim])?;
//! let to = ViewMut::new(&mut out, Layout::Bhsd, [1, q_heads, len, dim])?;
//! streaming::forward(&attn, q, kv, kv, to, &mut scratch)?;
//! # Ok::<(), attn_core::AttnError>(())
//! ```
//!
//! | I want … | take … |
//! |---|---|
//! | the speed of the hardware | the crate `attn-parallel`: same options, same views, all cores |
//! | attention without an allocator | [`streaming::forward`] |
//! | an oracle in `f64` | [`reference::forward`](mod@reference) |
//! | masks: causal, windows, padding, documents, trees, my own tensor | [`Mask`], [`Align`], [`mask`] |
//! | ALiBi, soft-cap, sinks, dropout, a bias, functions of my own | the methods of [`Attention`] |
//! | to generate text, token by token | [`kv_cache`], [`streaming::forward_cache`] |
//! | caches as ggml, vLLM and others store them: `q8_0`, `q4_0`, fp8, int8 | [`formats`], [`hadamard`] |
//! | the weights | [`weights`], from the lse of any engine; [`Outputs::weights`] |
//! | gradients | [`backward`] |
//! | rotary positions | [`position::rope`] |
//! | a microcontroller | [`guide_embedded`]: [`fixed::FixedAttention`], [`int8`], [`resume`] |
//! | projections and modules around it | the crate `attn-layers` |
//! | keys in several places, joined | [`state`] |
//!
//! # What f32 can hold
//!
//! [`mod@reference`] computes in `f64`. [`streaming`] and the kernels of other crates add in `f32` ([`streaming`]
//! computes `f64` tensors in `f64`). Finite inputs give the exact result up to rounding if
//!
//! - **products** `q·k`, and the scores made of them, stay within ±3.4·10³⁸. Larger scores overflow to ±∞: +∞ makes its
//!   row NaN, −∞ has the weight 0. [`Attention::scale`] says which factors are accepted. Ordinary inputs are far below.
//! - **values** stay below 3.4·10³⁸ divided by the number of keys that a row sees. An engine adds up to `Σ |v|` and
//!   divides last, so that a larger sum gives ±∞ or NaN.
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
pub mod formats;
pub mod hadamard;
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

#[doc(inline)]
pub use bias::Bias;
#[doc(inline)]
pub use element::numbers::{Dtype, Element};
#[doc(inline)]
pub use error::{AttnError, Result};
pub use half;
#[doc(inline)]
pub use mask::align::Align;
#[doc(inline)]
pub use mask::conjunction::Mask;
#[doc(inline)]
pub use options::{Attention, Precision};
#[doc(inline)]
pub use outputs::Outputs;
#[doc(inline)]
pub use shape::AttnShape;
#[doc(inline)]
pub use view::{Layout, View, ViewMut};
