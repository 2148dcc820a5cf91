//! Forward, backward, steps and weights, in every element type.

use attn_core::dropout::Dropout;
use attn_core::half::{bf16, f16};
use attn_core::score::At;
use attn_core::weights::RowAt;
use attn_core::{Attention, Mask, Outputs, View, ViewMut, backward, reference, streaming, weights};
use attn_layers::{cost, steps};

macro_rules! engines {
    ($t:ty, $compute:ty, $streaming:ident, $reference:ident, $steps:ident, $weights:ident, $backward:ident) => {
        #[unsafe(no_mangle)]
        pub fn $streaming(
            attn: &Attention<'_>,
            qkv: &[View<'_, $t>; 3],
            out: ViewMut<'_, $t>,
            lse: Option<&mut [$compute]>,
            scratch: &mut [$compute],
        ) -> bool {
            let [q, k, v] = *qkv;
            streaming::forward(attn, q, k, v, Outputs { out, lse, weights: None }, scratch).is_ok()
        }

        #[unsafe(no_mangle)]
        pub fn $reference(
            attn: &Attention<'_>,
            qkv: &[View<'_, $t>; 3],
            outputs: Outputs<'_, $t>,
            scratch: &mut [f64],
        ) -> bool {
            let [q, k, v] = *qkv;
            reference::forward(attn, q, k, v, outputs, scratch).is_ok()
        }

        #[unsafe(no_mangle)]
        pub fn $steps(
            attn: &Attention<'_>,
            qkv: &[View<'_, $t>; 3],
            sinks: &[f32],
            scores: &mut ViewMut<'_, $compute>,
            out: &mut ViewMut<'_, $t>,
        ) -> bool {
            let [q, k, v] = *qkv;
            let done = steps::scores(q, k, scores)
                .and_then(|()| steps::scaled_scores(attn, q, k, scores))
                .and_then(|()| steps::capped_scores(attn, q, k, scores))
                .and_then(|()| steps::masked_scores(attn, q, k, scores))
                .and_then(|()| steps::softmax_with_sinks(scores, sinks));
            steps::softmax(scores);
            done.and_then(|()| steps::weighted_sum(scores.as_view(), v, out)).is_ok()
        }

        #[unsafe(no_mangle)]
        pub fn $weights(
            attn: &Attention<'_>,
            qk: &[View<'_, $t>; 2],
            at: RowAt,
            lse: &[$compute],
            out: &mut [$compute],
        ) -> bool {
            let [q, k] = *qk;
            weights::row(attn, q, k, at, lse, out).is_ok() && weights::head(attn, q, k, at, lse, out).is_ok()
        }

        #[unsafe(no_mangle)]
        pub fn $backward(
            attn: &Attention<'_>,
            qkv: &[View<'_, $t>; 3],
            dy: View<'_, $t>,
            gradients: backward::Gradients<'_, $t>,
            scratch: &mut [f64],
        ) -> bool {
            let [q, k, v] = *qkv;
            backward::gradients(attn, q, k, v, dy, gradients, scratch).is_ok()
        }
    };
}

engines!(
    f32,
    f32,
    attn_entry_streaming_f32,
    attn_entry_reference_f32,
    attn_entry_steps_f32,
    attn_entry_weights_f32,
    attn_entry_backward_f32
);
engines!(
    f64,
    f64,
    attn_entry_streaming_f64,
    attn_entry_reference_f64,
    attn_entry_steps_f64,
    attn_entry_weights_f64,
    attn_entry_backward_f64
);
engines!(
    f16,
    f32,
    attn_entry_streaming_f16,
    attn_entry_reference_f16,
    attn_entry_steps_f16,
    attn_entry_weights_f16,
    attn_entry_backward_f16
);
engines!(
    bf16,
    f32,
    attn_entry_streaming_bf16,
    attn_entry_reference_bf16,
    attn_entry_steps_bf16,
    attn_entry_weights_bf16,
    attn_entry_backward_bf16
);

/// Closures are compiled in: these cannot panic, and neither may what is around them.
#[unsafe(no_mangle)]
pub fn attn_entry_mods(
    attn: &Attention<'_>,
    qkv: &[View<'_, f32>; 3],
    out: ViewMut<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    let [q, k, v] = *qkv;
    let attn = attn.score_mod(|s, at: At| s - at.key as f64).mask_mod(|at: At| at.key != at.query);
    streaming::forward(&attn, q, k, v, out, scratch).is_ok()
}

/// Everything that is asked of a mask or a dropout without an engine.
#[unsafe(no_mangle)]
pub fn attn_entry_mask(mask: &Mask<'_>, dropout: &Dropout<'_>, shape: &attn_core::AttnShape, at: At) -> u64 {
    if mask.check(shape).is_err() {
        return 0;
    }
    let At { batch, head, query, key } = at;
    let range = mask.row_range(shape, batch, head, query);
    mask.row_bits(shape, batch, head, query, key)
        ^ dropout.row_bits(shape, batch, head, query, key)
        ^ u64::from(mask.visible(shape, at))
        ^ range.end as u64
        ^ cost::visible_pairs(mask, shape) as u64
        ^ cost::forward_flops(shape, cost::all_pairs(shape)) as u64
}
