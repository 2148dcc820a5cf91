//! The laws that every engine obeys, at every level of this machine. Their bodies are in `attn_testing::laws`.

use attn_core::kv_cache::Queries;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Dtype, Outputs};
use attn_simd::decode::DecodePlan;
use attn_simd::{Level, Plan, Workspace};
use attn_testing::tolerance::WEIGHTS_OF_TWO_PARTS;
use attn_testing::{Engine, engine_calls, part_calls, step_calls};

/// The kernels as a plan chooses them.
pub(super) struct Simd(pub(super) Level);

impl Engine for Simd {
    fn name(&self) -> &'static str {
        "simd"
    }
    fn level(&self) -> Option<&'static str> {
        Some(self.0.name())
    }
    fn supports_dtype(&self, dtype: Dtype) -> bool {
        dtype != Dtype::F64
    }
    fn half_slack(&self) -> f64 {
        if self.0.multiplies_bf16() { WEIGHTS_OF_TWO_PARTS } else { 0.0 }
    }
    engine_calls!(f32, f16, bf16; |this, call| {
        attn_simd::forward_at(this.0, call.attn, call.q, call.k, call.v, call.outputs, &mut Workspace::new())
    });
    step_calls!(|this, call| {
        let plan = DecodePlan::new(call.attn, call.q.sizes(), Queries::All, call.cache, this.0)?;
        plan.split(call.q, call.outputs)?.run(Workspace::new().lines(plan.workspace_lines()))
    });
    part_calls!(|this, call| {
        let plan = Plan::new(call.attn, call.shape, this.0)?;
        let mut workspace = Workspace::new();
        plan.states(call.first, call.q, call.k, call.v, call.rows, workspace.lines(plan.states_lines()))
    });
    fn finish_parts<M: Mods + Sync>(
        &self,
        attn: &Attention<'_, M>,
        shape: AttnShape,
        rows: &[f32],
        outputs: Outputs<'_, f32>,
    ) -> attn_core::Result<()> {
        Plan::new(attn, shape, self.0)?.finish(rows, outputs)
    }
}

attn_testing::law_tests!(Level::available().map(Simd));

/// The kernels that multiply bf16, on the models of their instructions that every machine has.
mod amx_kernel {
    use super::*;

    attn_testing::law_tests!(Level::model_names().filter_map(|name| Level::by_name(name).ok()).map(Simd));
}
