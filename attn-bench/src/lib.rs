//! attn-bench (skeleton).
