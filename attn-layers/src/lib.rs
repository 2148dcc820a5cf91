//! Layers around attention, in `no_std` and without allocation: modules over borrowed parameters, relatives of
//! attention, its textbook steps, and its costs.
//!
//! ```
//! use attn_core::{Align, Attention, Mask, View, ViewMut};
//! use attn_layers::Linear;
//! use attn_layers::module::{MultiHeadAttention, Sources, Streaming};
//!
//! let (tokens, width, heads) = (5, 8, 2);
//! let w: Vec<f32> = (0..width * width).map(|n| (n as f32).sin()).collect();
//! let w = Linear::new(&w, width, width)?; // the same matrix four times, to be short
//! let layer = MultiHeadAttention::new(heads, heads, w, w, w)?.output(w)?;
//!
//! let x: Vec<f32> = (0..tokens * width).map(|n| (n as f32).cos()).collect();
//! let (mut y, mut scratch) = (vec![0.0f32; x.len()], vec![0.0; layer.scratch_len(&Streaming, 1, tokens, tokens)?]);
//! let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
//! let (x, to) = (View::matrix(&x, tokens, width)?, ViewMut::matrix(&mut y, tokens, width)?);
//! layer.forward(&mut Streaming, &attn, Sources::same(x), to, &mut scratch)?;
//! # Ok::<(), attn_core::AttnError>(())
//! ```
//!
//! | I want … | take … |
//! |---|---|
//! | self, causal, cross or multi-head attention with its projections | [`module`](mod@module) |
//! | the same on all cores | `attn_parallel::Kernels` as the module's engine |
//! | the same with constant sizes, for firmware | [`module::FixedSelfAttention`] |
//! | gradients of a layer | the modules' `backward` |
//! | linear, latent (MLA) or differential attention | [`variants`] |
//! | positions that are added to embeddings | [`position`] (rotary ones: [`attn_core::position`]) |
//! | to learn it: from the formula to the streaming algorithm | [`guide`], with [`worked_example`] |
//! | every step of attention as a function of its own | [`steps`] |
//! | FLOPs and bytes in closed form | [`cost`] |
//!
//! This crate uses [`attn_core`], which is attention itself, and so do all of its users: views, options and errors are
//! those of [`attn_core`].
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(test)]
extern crate std;

pub mod cost;
#[doc = include_str!("../docs/attention.md")]
pub mod guide {}
pub mod module;
pub mod position;
mod projection;
pub mod steps;
pub mod variants;
pub mod worked_example;

#[doc(inline)]
pub use projection::{Linear, LinearGradients};
