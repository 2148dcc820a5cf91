//! Positions that are added to embeddings: fixed waves, or a learned row for each.
//!
//! [`attn_core::position`] has the positions that are applied to queries, keys and scores.

pub mod learned;
pub mod sinusoidal;
