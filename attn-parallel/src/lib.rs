//! attn-parallel (skeleton).
