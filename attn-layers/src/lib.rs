//! Layers around attention, in `no_std` and without allocation: modules over borrowed parameters, relatives of
//! attention, its textbook steps, and its costs.
//!
//! [`attn_core`] is attention itself. This crate uses it, and so do all of its users: views, options and errors are
//! those of [`attn_core`].
//!
//! | module | holds |
//! |---|---|
//! | [`guide`] | from the formula to the streaming algorithm, with one sentence as the example |
//! | [`steps`] | every step of attention as a function of its own |
//! | [`worked_example`] | the guide's sentence, every intermediate value |
//! | [`module`](mod@module) | self, causal, concatenated and multi-head attention, forward and backward |
//! | [`position`] | sinusoidal and learned positions, which are added to embeddings |
//! | [`variants`] | linear, latent (MLA) and differential attention |
//! | [`cost`] | FLOPs and bytes in closed form |
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

pub use projection::{Linear, LinearGradients};
