//! The ops of the suites: what each case asks of the library. One file per family.
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

use std::collections::BTreeMap;

use attn_core::{AttnError, Element};

use super::{Case, Suite, Tensor};
use crate::engine::Engine;

/// Why a case has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The library has no way to run it.
    Skip(String),
    /// It should have run.
    Fail(String),
}

impl From<AttnError> for Stop {
    fn from(error: AttnError) -> Self {
        match error {
            AttnError::Unsupported { .. } => Self::Skip(error.to_string()),
            _ => Self::Fail(format!("refused: {error}")),
        }
    }
}

/// A shape and its elements, row-major.
pub type Dense = (Vec<usize>, Vec<f64>);

/// The outputs of a case: role to shape and elements. What the library computes in several ways has several answers.
#[derive(Clone, Debug, Default)]
pub struct Produced(BTreeMap<String, Vec<Dense>>);

impl Produced {
    /// Adds an output, or one more answer to it.
    pub fn put<T: Element>(&mut self, role: &str, shape: &[usize], values: &[T]) {
        let answer = (shape.to_vec(), values.iter().map(|x| x.to_f64()).collect());
        self.0.entry(role.to_owned()).or_default().push(answer);
    }

    /// All answers to an output; none where it was not produced.
    pub fn get(&self, role: &str) -> &[Dense] {
        self.0.get(role).map_or(&[], Vec::as_slice)
    }
}

/// A case with its tensors.
#[derive(Clone, Copy, Debug)]
pub struct Loaded<'s> {
    suite: &'s Suite,
    /// The case.
    pub case: &'s Case,
}

impl<'s> Loaded<'s> {
    /// An input that must be there.
    ///
    /// # Errors
    /// The case is malformed where it is not.
    pub fn input(&self, role: &str) -> Result<&'s Tensor, Stop> {
        self.optional(role)?.ok_or_else(|| Stop::Fail(format!("input {role} is missing")))
    }

    /// An input that may be absent.
    ///
    /// # Errors
    /// The case is malformed where it names a tensor that the file does not have.
    pub fn optional(&self, role: &str) -> Result<Option<&'s Tensor>, Stop> {
        match self.case.inputs.get(role) {
            None => Ok(None),
            Some(name) => match self.suite.tensors.get(name) {
                Some(tensor) => Ok(Some(tensor)),
                None => Err(Stop::Fail(format!("input {role}: no tensor {name}"))),
            },
        }
    }
}

/// On which engines an op is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// On each: the engine is part of the computation.
    Engine,
    /// It has one implementation, run once.
    Once,
    /// `attn-core` has one implementation, and so have engines that attend to parts of the keys.
    Parts,
}

/// On which engines an op is run; `None` for an op that is not built.
pub fn scope(op: &str) -> Option<Scope> {
    Some(match op {
        "sdpa" | "sdpa_varlen" | "sink_attention" | "block_sparse" | "sdpa_dropout" => Scope::Engine,
        "wide_attention" | "selected_attention" | "kv_format_attention" | "ring_attention" => Scope::Engine,
        "onnx_attention" | "worked_example" => Scope::Engine,
        "kv_append_attend" | "kv_decode" | "paged_decode" => Scope::Engine,
        "mha" | "self_attention" | "multihead_concat" | "multihead_fused" => Scope::Engine,
        "sdpa_backward" | "sink_attention_backward" | "sdpa_dropout_backward" => Scope::Once,
        "attention_backward" | "wide_attention_backward" => Scope::Once,
        "mha_backward" | "self_attention_backward" | "multihead_fused_backward" => Scope::Once,
        "rope" | "alibi" | "sinusoidal" | "onnx_rotary_embedding" => Scope::Once,
        "linear_attention" | "mla" | "differential_attention" => Scope::Once,
        "merge_states" => Scope::Parts,
        _ => return None,
    })
}

/// Why an op is skipped.
pub fn not_built(op: &str) -> String {
    let what = match op {
        "gated_delta" | "mamba2_ssd" | "decay_gate" => "recurrent layers with gates",
        "lightning_indexer" | "block_topk" => "choosing the keys that a query sees",
        "kv_quantize" => "q8_0, q4_0 and fp8",
        "hadamard" => "Hadamard rotations",
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

/// Refuses, with a reason, a precision that the engine does not take.
pub(crate) fn check_dtype<E: Engine>(engine: &E, case: &Case) -> Result<attn_core::Dtype, Stop> {
    let dtype = case.dtype()?;
    if engine.supports_dtype(dtype) {
        Ok(dtype)
    } else {
        Err(Stop::Skip(format!("the {} engine takes no {}", engine.name(), dtype.name())))
    }
}

/// Evaluates an expression with `T` standing for the type that a dtype names.
macro_rules! by_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            attn_core::Dtype::F64 => {
                type $T = f64;
                $body
            }
            attn_core::Dtype::F32 => {
                type $T = f32;
                $body
            }
            attn_core::Dtype::F16 => {
                type $T = attn_core::half::f16;
                $body
            }
            attn_core::Dtype::Bf16 => {
                type $T = attn_core::half::bf16;
                $body
            }
        }
    };
}
pub(crate) use by_dtype;
