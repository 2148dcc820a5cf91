//! The laws that every engine obeys, at every level of this machine, on the threads of the global pool. Their bodies
//! are in `attn_testing::laws`.

use attn_core::Dtype;
use attn_core::kv_cache::Queries;
use attn_parallel::{DecodePlan, Runner};
use attn_simd::Level;
use attn_testing::tolerance::WEIGHTS_OF_TWO_PARTS;
use attn_testing::{Engine, engine_calls, step_calls};

struct Parallel(Level);

impl Engine for Parallel {
    fn name(&self) -> &'static str {
        "parallel"
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
        Runner::new().level(this.0).forward(call.attn, call.q, call.k, call.v, call.outputs)
    });
    step_calls!(|this, call| {
        let plan = DecodePlan::new(call.attn, call.q.sizes(), Queries::All, call.cache, this.0)?;
        Runner::new().attend_cache_planned(&plan, call.q, call.outputs)
    });
}

attn_testing::law_tests!(Level::available().map(Parallel));
