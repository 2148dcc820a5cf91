//! Positions of tokens: rotary embeddings (RoPE) and ALiBi, and a survey of all methods.
//!
//! Attention itself does not know the order of its keys: a permutation of the keys permutes the terms of a sum. A
//! position enters at one of three places:
//!
//! | where | how | here |
//! |---|---|---|
//! | added to the embeddings | fixed waves, or a learned row per position | `attn_layers::position` |
//! | applied to queries and keys | pairs of dims rotate by the position | [`rope`], with the long-context [`scaling`]s |
//! | added to the scores | a penalty that grows with the distance | [`alibi`], by [`Attention::alibi`](crate::Attention::alibi) |
//!
//! All angles and frequencies are computed in `f64`: at position 100 000 an `f32` angle has lost two decimals, and the
//! rotation with it. [`Positions`] holds the positions of all tokens of a call.

pub mod alibi;
mod positions;
pub mod rope;
pub mod scaling;

pub use positions::Positions;
