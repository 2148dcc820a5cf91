//! The kernels on one thread, as an engine of attn-testing: for vectors and for random calls.

use attn_core::kv_cache::Queries;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Dtype, Outputs};
use attn_simd::backward::{self, Inputs};
use attn_simd::decode::DecodePlan;
use attn_simd::{Level, Plan, Workspace};
use attn_testing::tolerance::WEIGHTS_OF_TWO_PARTS;
use attn_testing::{Engine, GradientCall, engine_calls, gradient_calls, part_calls, step_calls};

/// The [`Engine::half_slack`] of a level.
pub(crate) fn slack(level: Level) -> f64 {
    if level.multiplies_bf16() { WEIGHTS_OF_TWO_PARTS } else { 0.0 }
}

/// `attn-simd` at a level.
pub(crate) struct Simd(pub(crate) Level);

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
        slack(self.0)
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
    gradient_calls!(|this, call| {
        let GradientCall { attn, q, k, v, out, lse, dy, gradients } = call;
        let inputs = Inputs { q, k, v, out, lse, dy };
        backward::gradients_at(this.0, attn, inputs, gradients, &mut Workspace::new())
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
