//! Exact scaled dot-product attention, `softmax(scale·q·kᵀ + mask)·v`, in `no_std` and without allocation.
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
pub mod cost;
mod dropout;
mod element;
mod error;
mod fixed;
pub mod int8;
pub mod kv_cache;
#[doc = include_str!("../docs/attention.md")]
pub mod guide {}
#[doc = include_str!("../docs/embedded.md")]
pub mod guide_embedded {}
pub mod mask;
mod modifier;
pub mod module;
mod options;
mod outputs;
pub mod partial;
pub mod position;
mod projection;
pub mod reference;
pub mod resume;
mod score;
mod shape;
mod softmax;
pub mod steps;
pub mod streaming;
pub mod variants;
mod view;
pub mod weights;
pub mod worked_example;

pub use bias::{Alibi, Bias, FromView};
pub use dropout::Dropout;
pub use element::{Dtype, Element, Real};
pub use error::{AttnError, Result};
pub use fixed::FixedAttention;
pub use half;
pub use mask::{Align, BlockSparse, DenseMask, Documents, Lengths, Mask, TileCover, Tree, Window};
pub use modifier::{Derivative, MapScore, Modifier, VisibleIf};
pub use options::{Attention, Precision};
pub use outputs::Outputs;
pub use projection::{Linear, LinearGradients};
pub use score::{At, Problem, default_scale};
pub use shape::AttnShape;
pub use softmax::{RowState, Step};
pub use view::{Layout, Row, Strided, View, ViewMut};
