//! Relatives of attention: linear, latent (MLA) and differential attention.
//!
//! Most relatives with a name of their own are an option of the one engine, and run in all of them:
//!
//! | name | how |
//! |---|---|
//! | sliding-window (local) attention | [`Mask::window`](attn_core::Mask::window) (Longformer, arXiv 2004.05150) |
//! | block-sparse attention | [`Mask::block_sparse`](attn_core::Mask::block_sparse) (BigBird, arXiv 2007.14062) |
//! | attention sinks, "off-by-one" softmax | [`sinks`](attn_core::Attention::sinks) (arXiv 2309.17453); a sink of 0 adds 1 |
//! | grouped-query and multi-query attention | fewer heads in k and v than in q (arXiv 2305.13245, 1911.02150) |
//! | prefix-LM, tree, packed documents | [`Mask`](attn_core::Mask) |
//! | soft-capped attention | [`Attention::softcap`](attn_core::Attention::softcap) (arXiv 2408.00118) |
//! | relative biases, ALiBi | [`bias`](attn_core::Attention::bias), [`alibi`](attn_core::Attention::alibi), [`score_mod`] |
//!
//! These are not, because they compute something else:
//!
//! | module | what changes |
//! |---|---|
//! | [`linear`] | no softmax: a running sum of `φ(k)·vᵀ` replaces the keys, O(n) in time and O(1) in state |
//! | [`mla`] | keys and values come from one small latent per token, and the cache holds the latents alone |
//! | [`differential`] | the difference of two softmax maps, which cancels the keys that both attend to |
//!
//! [`score_mod`]: attn_core::Attention::score_mod

pub mod differential;
pub mod linear;
pub mod mla;
