//! Positions that are added to embeddings: fixed waves, or a learned row for each.
//!
//! [`attn_core::position`] has those that go into queries, keys and scores.

pub mod learned;
pub mod sinusoidal;
