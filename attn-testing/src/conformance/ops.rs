//! The ops of the suites: the calls of each case. One file per family.
//!
//! A runner reads the case's tensors and parameters, calls the library, and hands back every output as doubles; it
//! computes nothing itself that the library is asked to compute. Runners are generic over the engine and the element
//! type.

mod attention;
mod backward;
mod cache;
mod formats;
mod mha;
mod modules;
mod onnx;
mod parts;
mod positional;
mod selected;
mod variants;
mod wide;
mod worked;

use super::loaded::{Loaded, Produced};
use super::stop::Stop;
use super::{Case, Suite};
use crate::engine::Engine;

/// On which engines an op is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// On each: the engine is part of the computation.
    Engine,
    /// It has one implementation, run once.
    Once,
    /// `attn-core` has one implementation, and so have engines that attend to parts of the keys.
    Parts,
    /// `attn-core` has one implementation, and so have engines that compute gradients.
    Gradients,
}

/// On which engines an op is run; `None` for an op that is not built.
pub fn scope(op: &str) -> Option<Scope> {
    Some(match op {
        "sdpa" | "sdpa_varlen" | "sink_attention" | "block_sparse" | "sdpa_dropout" => Scope::Engine,
        "wide_attention" | "selected_attention" | "kv_format_attention" | "ring_attention" => Scope::Engine,
        "onnx_attention" | "worked_example" => Scope::Engine,
        "kv_append_attend" | "kv_decode" | "paged_decode" => Scope::Engine,
        "mha" | "self_attention" | "multihead_concat" | "multihead_fused" => Scope::Engine,
        "sdpa_backward" | "sink_attention_backward" | "sdpa_dropout_backward" => Scope::Gradients,
        "attention_backward" | "wide_attention_backward" => Scope::Gradients,
        "mha_backward" | "self_attention_backward" | "multihead_fused_backward" => Scope::Once,
        "rope" | "alibi" | "sinusoidal" | "onnx_rotary_embedding" => Scope::Once,
        "linear_attention" | "mla" | "differential_attention" => Scope::Once,
        "kv_quantize" | "hadamard" => Scope::Once,
        "merge_states" => Scope::Parts,
        _ => return None,
    })
}

/// Why an op is skipped.
pub fn not_built(op: &str) -> String {
    let what = match op {
        "gated_delta" | "mamba2_ssd" | "decay_gate" => "recurrent layers with gates",
        "lightning_indexer" | "block_topk" => "choosing the keys that a query sees",
        _ => return format!("op {op} is unknown to this runner"),
    };
    format!("op {op} is not built ({what})")
}

/// Runs a case.
///
/// # Errors
/// Why there is no result.
pub fn run<E: Engine>(engine: &E, suite: &Suite, case: &Case) -> Result<Produced, Stop> {
    let loaded = Loaded { suite, case };
    match case.op.as_str() {
        "sdpa" | "sink_attention" | "block_sparse" | "sdpa_dropout" => attention::dense(engine, loaded),
        "sdpa_varlen" => attention::varlen(engine, loaded),
        "wide_attention" => wide::attention(engine, loaded),
        "selected_attention" => selected::attention(engine, loaded),
        "kv_format_attention" => formats::attention(engine, loaded),
        "kv_quantize" => formats::quantize(loaded),
        "hadamard" => formats::hadamard(loaded),
        "ring_attention" => parts::ring(engine, loaded),
        "merge_states" => parts::merge_states(engine, loaded),
        "onnx_attention" => onnx::attention(engine, loaded),
        "worked_example" => worked::example(engine, loaded),
        "sdpa_backward" | "sink_attention_backward" | "sdpa_dropout_backward" => backward::attention(engine, loaded),
        "attention_backward" | "wide_attention_backward" => backward::attention(engine, loaded),
        "mha" | "mha_backward" => mha::attention(engine, loaded),
        "self_attention" | "self_attention_backward" => modules::self_attention(engine, loaded),
        "multihead_concat" => modules::concat(engine, loaded),
        "multihead_fused" | "multihead_fused_backward" => modules::fused(engine, loaded),
        "rope" => positional::rope(loaded),
        "alibi" => positional::alibi(loaded),
        "sinusoidal" => positional::sinusoidal(loaded),
        "onnx_rotary_embedding" => positional::onnx_rotary(loaded),
        "kv_decode" => cache::decode(engine, loaded),
        "kv_append_attend" => cache::append_attend(engine, loaded),
        "paged_decode" => cache::paged(engine, loaded),
        "linear_attention" => variants::linear(loaded),
        "mla" => variants::mla(loaded),
        "differential_attention" => variants::differential(loaded),
        other => Err(Stop::Skip(not_built(other))),
    }
}
