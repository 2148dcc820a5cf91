//! The parameters that each op knows. An unknown one would change nothing, and a case that passes without it proves
//! nothing.

use serde_json::Value;

use super::Case;
use super::stop::Stop;

/// The parameters of an op besides `dtype`, separated by spaces; `None` if there is no list.
fn known(op: &str) -> Option<&'static str> {
    Some(match op {
        "sdpa" | "sdpa_backward" | "sink_attention" | "sink_attention_backward" => "scale causal window softcap",
        "sdpa_varlen" | "self_attention" | "self_attention_backward" => "scale causal",
        "block_sparse" => "scale causal window softcap block_q block_k",
        "sdpa_dropout" | "sdpa_dropout_backward" => "scale causal window softcap dropout_p",
        "attention_backward" => "scale causal window softcap dropout_p layouts",
        "wide_attention" | "wide_attention_backward" => "scale causal window softcap v_dim",
        "selected_attention" => "scale causal query_block key_block v_dim",
        "kv_format_attention" => "scale causal window k_format v_format k_hadamard v_hadamard",
        "kv_quantize" => "format",
        "hadamard" => "block scale",
        "ring_attention" => "scale softcap causal window_left q_start kv_start q_shards kv_shards",
        "merge_states" => "",
        "onnx_attention" => {
            "opset since_version rank mask_rank mask_dtype q_num_heads kv_num_heads is_causal left_window_size \
             right_window_size scale softcap softmax_precision qk_matmul_output_mode"
        }
        "onnx_rotary_embedding" => "opset since_version rank num_heads interleaved rotary_embedding_dim",
        "mha" | "mha_backward" => {
            "embed_dim num_heads kdim vdim bias add_bias_kv add_zero_attn batch_first batched self_attention need_weights \
             average_attn_weights"
        }
        "multihead_concat" => "causal num_heads",
        "multihead_fused" | "multihead_fused_backward" => "causal num_heads num_kv_heads",
        "worked_example" => "scale",
        "sinusoidal" => "base d_model n_positions offset",
        "rope" => "style rotary_dim base scaling seq_len",
        "alibi" => "num_heads q_len kv_len causal",
        "kv_decode" => "scale chunks window sinks rope",
        "kv_append_attend" => "scale window",
        "paged_decode" => "scale page_size",
        "linear_attention" => "causal eps feature_map",
        "mla" => {
            "num_heads qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank q_lora_rank latent_norm norm_eps rope_base \
             rope_style past_len scale"
        }
        "differential_attention" => "scale causal lambda_init norm_eps",
        _ => return None,
    })
}

/// The keys of a parameter that is an object.
fn keys(name: &str) -> &'static str {
    match name {
        "window" => "left right align",
        "layouts" => "q k v dy",
        "rope" => "positions style base",
        "scaling" => {
            "type factor max_position original_max_position beta_fast beta_slow truncate attention_factor mscale mscale_all_dim \
             low_freq_factor high_freq_factor short_factor long_factor"
        }
        _ => "",
    }
}

/// Refuses a parameter that the case's op does not know, by name. Null is as good as absent.
///
/// # Errors
/// The case is malformed, or its op has no list here.
pub(super) fn check(case: &Case) -> Result<(), Stop> {
    let Some(known) = known(&case.op) else {
        return Err(Stop::Fail(format!("the parameters of op {} are not listed", case.op)));
    };
    let has = |list: &str, name: &str| list.split_whitespace().any(|word| word == name);
    for (name, value) in case.params.iter().filter(|(_, value)| !value.is_null()) {
        if name != "dtype" && !has(known, name) {
            return Err(Stop::Fail(format!("op {} has no parameter {name} (= {value})", case.op)));
        }
        let object = value.as_object().into_iter().flatten();
        for (key, value) in object.filter(|(_, value): &(_, &Value)| !value.is_null()) {
            if !has(keys(name), key) {
                return Err(Stop::Fail(format!("parameter {name} has no {key} (= {value})")));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Outcome, Runner, Suite};
    use super::*;
    use crate::engine::Reference;

    /// A committed case that uses a window, and what becomes of it with another parameter.
    fn with(change: impl FnOnce(&mut Case)) -> Outcome {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
        let suite = Suite::load(&dir.join("torch_sdpa.json")).expect("the committed vectors");
        let windowed = |case: &&Case| case.op == "sdpa" && case.params["window"].is_object();
        let mut case = suite.cases.iter().find(windowed).expect("a case with a window").clone();
        change(&mut case);
        Reference.run(&suite, &case)
    }

    #[test]
    fn an_unknown_parameter_is_an_error_that_names_it() {
        assert!(matches!(with(|_| ()), Outcome::Passed { .. }));
        let set =
            |name: &'static str, value: Value| move |case: &mut Case| drop(case.params.insert(name.into(), value));
        assert!(matches!(with(set("zigzag", Value::Null)), Outcome::Passed { .. }));
        let named = |outcome: Outcome, text: &str| assert_eq!(outcome, Outcome::Failed(text.into()));
        named(with(set("zigzag", 3.into())), "op sdpa has no parameter zigzag (= 3)");
        // Known, but to another op.
        named(with(set("block_q", 4.into())), "op sdpa has no parameter block_q (= 4)");
        let nested = |case: &mut Case| match case.params.get_mut("window") {
            Some(window) => window["wide"] = true.into(),
            None => unreachable!("a case with a window"),
        };
        named(with(nested), "parameter window has no wide (= true)");
        // A mutant is not caught by that.
        let mutant = |case: &mut Case| {
            case.must_fail = true;
            case.params.insert("zigzag".into(), 3.into());
        };
        named(with(mutant), "op sdpa has no parameter zigzag (= 3)");
    }
}
