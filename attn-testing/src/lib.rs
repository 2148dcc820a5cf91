//! attn-testing (skeleton).
