//! attn-core (skeleton).
