//! The engines of `attn-core`.

use attn_core::kv_cache::Queries;
use attn_core::{Dtype, reference, streaming};

use super::Engine;
use crate::{engine_calls, stored_calls};

/// `attn_core::reference`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Engine for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }
    fn supports_dtype(&self, _: Dtype) -> bool {
        true
    }
    fn gives_weights(&self) -> bool {
        true
    }
    fn is_exact(&self) -> bool {
        true
    }
    engine_calls!(f64, f32, f16, bf16; |_this, call| {
        let mut scratch = vec![0.0; call.k.sizes()[2]];
        reference::forward(call.attn, call.q, call.k, call.v, call.outputs, &mut scratch)
    });
    stored_calls!(|_this, call| {
        let mut scratch = vec![0.0; reference::stored_scratch_len(&call.cache)];
        reference::forward_stored(call.attn, call.q, Queries::All, call.cache, call.outputs, &mut scratch)
    });
}

/// `attn_core::streaming`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Streaming;

impl Engine for Streaming {
    fn name(&self) -> &'static str {
        "streaming"
    }
    fn supports_dtype(&self, _: Dtype) -> bool {
        true
    }
    engine_calls!(f64, f32, f16, bf16; |_this, call| {
        let mut scratch = vec![Default::default(); call.v.sizes()[3]];
        streaming::forward(call.attn, call.q, call.k, call.v, call.outputs, &mut scratch)
    });
    stored_calls!(|_this, call| {
        let mut scratch = vec![0.0; streaming::stored_scratch_len(&call.cache)];
        streaming::forward_stored(call.attn, call.q, Queries::All, call.cache, call.outputs, &mut scratch)
    });
}
