//! The engines and levels that a run goes through.

use attn_core::Dtype;
use attn_core::kv_cache::Queries;
use attn_simd::Level;
use attn_simd::backward::Inputs;
use attn_simd::decode::DecodePlan;
use attn_testing::conformance::Runner;
use attn_testing::{Engine, GradientCall, Reference, Streaming, engine_calls, gradient_calls, step_calls};

use crate::simd::Simd;

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
    engine_calls!(f32, f16, bf16; |this, call| {
        attn_parallel::Runner::new().level(this.0).forward(call.attn, call.q, call.k, call.v, call.outputs)
    });
    step_calls!(|this, call| {
        let plan = DecodePlan::new(call.attn, call.q.sizes(), Queries::All, call.cache, this.0)?;
        attn_parallel::Runner::new().attend_cache_planned(&plan, call.q, call.outputs)
    });
    gradient_calls!(|this, call| {
        let GradientCall { attn, q, k, v, out, lse, dy, gradients } = call;
        attn_parallel::Runner::new().level(this.0).backward(attn, Inputs { q, k, v, out, lse, dy }, gradients)
    });
}

/// The runners that `--engine` and `--level` leave.
pub(super) fn chosen(engine: Option<&str>, level: Option<&str>) -> Result<Vec<Box<dyn Runner>>, String> {
    let mut all: Vec<Box<dyn Runner>> = vec![Box::new(Reference), Box::new(Streaming)];
    // The model of AMX is slow, and runs only if it is named.
    let asked =
        level.and_then(|name| Level::by_name(name).ok()).filter(|level| Level::available().all(|l| l != *level));
    let levels = || Level::available().chain(asked);
    all.extend(levels().map(|level| Box::new(Simd(level)) as Box<dyn Runner>));
    all.extend(levels().map(|level| Box::new(Parallel(level)) as Box<dyn Runner>));

    if let Some(name) = engine.filter(|name| !all.iter().any(|r| r.engine() == *name)) {
        return Err(format!("no engine {name}: reference, streaming, simd, parallel"));
    }
    all.retain(|r| engine.is_none_or(|name| r.engine() == name));
    if let Some(name) = level {
        let here: Vec<&str> = levels().map(Level::name).collect();
        if !here.contains(&name) {
            return Err(format!("this machine has no level {name}: {}", here.join(", ")));
        }
        all.retain(|r| r.level() == Some(name));
        if all.is_empty() {
            return Err(format!("engine {} has no levels", engine.unwrap_or_default()));
        }
    }
    Ok(all)
}
