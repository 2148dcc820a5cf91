//! Attention with its learned part: projections, heads, output projection, over borrowed parameters.
//!
//! | module | what it is |
//! |---|---|
//! | [`SelfAttention`] | one head: `softmax(x·W_q·(x·W_k)ᵀ/√d_k)·x·W_v`, and `·W_o` if given |
//! | [`CausalAttention`] | the same with a causal mask and dropout |
//! | [`ConcatHeads`] | a list of single heads, their outputs side by side |
//! | [`MultiHeadAttention`] | all heads in three fused matrices, then the output projection |
//! | [`FixedSelfAttention`] | the same with constant sizes, for firmware: no scratch, the smallest image |
//!
//! ```text
//! x ─┬─ W_q ─ q ─┐
//!    ├─ W_k ─ k ─┼─ softmax(q·kᵀ/√d_k + mask)·v ─ heads side by side ─ W_o ─ y
//!    └─ W_v ─ v ─┘
//! ```
//!
//! (Vaswani et al. 2017, arXiv 1706.03762, §3.2.2.) There are three matrices, because a token has three roles: it asks,
//! it is found, and it is passed on. The options of [`Attention`](attn_core::Attention) apply to the heads in the
//! middle: masks, GQA, soft-cap, dropout, mods.
//!
//! - **Weights** are borrowed [`Linear`](crate::Linear) layers, in the `x·W` or the torch convention, each with or
//!   without bias. Nothing is copied or repacked.
//! - **Inputs** are [`Sources`]: one view for self-attention, two or three for cross-attention. Batch-first,
//!   sequence-first and unbatched tensors are views; see its table.
//! - **The engine** is an argument: [`Reference`] computes in `f64`, [`Streaming`] in the element's own precision, and
//!   a crate with kernels implements [`Engine`].
//! - **Memory** is the caller's: `scratch_len` says how many elements (the projected heads and the engine's own).
//! - **Gradients** of everything, inputs and weights: `backward`, by a [`GradientEngine`].
//!
//! Norms, residuals, feed-forward layers and position codes are not here; `position` has the last.

mod backward;
mod causal_attention;
mod concat_heads;
mod engine;
mod fixed;
mod gradients;
mod multi_head;
mod outputs;
mod run;
mod self_attention;
mod sources;

pub use causal_attention::CausalAttention;
pub use concat_heads::ConcatHeads;
pub use engine::{Engine, GradientEngine, Reference, SavedHeads, Streaming};
pub use fixed::{FixedProjection, FixedSelfAttention};
pub use gradients::{InputGradients, ModuleGradients};
pub use multi_head::MultiHeadAttention;
pub use outputs::{LayerOutputs, WeightsOut};
pub use self_attention::SelfAttention;
pub use sources::Sources;
