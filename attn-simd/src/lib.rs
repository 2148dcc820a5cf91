//! attn-simd (skeleton).
