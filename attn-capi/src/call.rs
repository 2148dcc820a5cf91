//! One call on checked views: from number types as values to the generic engines.

use attn_core::half::{bf16, f16};
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Outputs, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::decode::DecodePlan;
use attn_simd::{Input, KernelElement, Level, Plan};

use crate::args::{Call, Callbacks, Decode, Output, sizes};
use crate::error::{Error, Result};
use crate::types::AttnDtype;

/// A runner on at most so many threads, 0 for all.
pub(crate) fn on_threads(threads: usize) -> Runner<'static> {
    Runner::new().threads(if threads == 0 { usize::MAX } else { threads })
}

/// The options with the caller's functions, if there are any: the two kinds of calls that are compiled.
macro_rules! with_callbacks {
    ($attn:expr, $callbacks:expr, |$whole:ident| $body:expr) => {
        match $callbacks {
            None => {
                let $whole = &$attn;
                $body
            }
            Some(callbacks) => {
                let callbacks: &Callbacks = &callbacks;
                let $whole = &$attn.score_mod(|s, at| callbacks.score(s, at)).mask_mod(|at| callbacks.visible(at));
                $body
            }
        }
    };
}

pub(crate) use with_callbacks;

/// Computes.
pub(crate) fn run(
    attn: Attention<'_>,
    callbacks: Option<Callbacks>,
    level: Level,
    planned: AttnShape,
    runner: Runner<'_>,
    call: Call<'_>,
) -> Result<()> {
    with_callbacks!(attn, callbacks, |attn| typed(&Plan::new(attn, planned, level)?, runner, call))
}

/// Computes over a cache.
pub(crate) fn decode(
    attn: Attention<'_>,
    callbacks: Option<Callbacks>,
    level: Level,
    runner: Runner<'_>,
    call: Decode<'_>,
) -> Result<()> {
    let Decode { q, queries, tokens, out, lse } = call;
    let sizes = sizes(&q);
    with_callbacks!(attn, callbacks, |attn| {
        let plan = DecodePlan::new(attn, sizes, queries, tokens.source()?, level)?;
        match q {
            Input::F32(q) => plan_to_output(runner, &plan, q, out, lse),
            Input::F16(q) => plan_to_output(runner, &plan, q, out, lse),
            Input::Bf16(q) => plan_to_output(runner, &plan, q, out, lse),
        }
    })
}

/// Picks the output type of a plan.
fn plan_to_output<T: KernelElement, M: Mods + Sync>(
    mut runner: Runner<'_>,
    plan: &DecodePlan<'_, '_, '_, M>,
    q: View<'_, T>,
    out: Output<'_>,
    lse: Option<&mut [f32]>,
) -> Result<()> {
    match out {
        Output::F32(out) => runner.attend_cache_planned(plan, q, Outputs { out, lse, weights: None })?,
        Output::F16(out) => runner.attend_cache_planned(plan, q, Outputs { out, lse, weights: None })?,
        Output::Bf16(out) => runner.attend_cache_planned(plan, q, Outputs { out, lse, weights: None })?,
    }
    Ok(())
}

/// Checks options against sizes, and explains which kernel would run.
pub(crate) fn explain(
    attn: Attention<'_>,
    callbacks: Option<Callbacks>,
    level: Level,
    shape: AttnShape,
    dtype: AttnDtype,
) -> Result<String> {
    let dtype = kernel_dtype("dtype", dtype)?;
    Ok(with_callbacks!(attn, callbacks, |attn| Plan::new(attn, shape, level)?.explain(dtype).to_string()))
}

/// Checks options against sizes; the lines of scratch that a thread needs.
pub(crate) fn workspace_lines(
    attn: Attention<'_>,
    callbacks: Option<Callbacks>,
    level: Level,
    shape: AttnShape,
) -> Result<usize> {
    Ok(with_callbacks!(attn, callbacks, |attn| Plan::new(attn, shape, level)?.workspace_lines()))
}

pub(crate) fn kernel_dtype(what: &'static str, dtype: AttnDtype) -> Result<attn_core::Dtype> {
    match dtype {
        AttnDtype::F32 => Ok(attn_core::Dtype::F32),
        AttnDtype::F16 => Ok(attn_core::Dtype::F16),
        AttnDtype::Bf16 => Ok(attn_core::Dtype::Bf16),
        _ => Err(Error::Dtype { what, wanted: "F32, F16 or BF16", value: dtype as u32 }),
    }
}

/// Picks the input type, which q, k and v share.
fn typed<M: Mods + Sync>(plan: &Plan<'_, '_, M>, runner: Runner<'_>, call: Call<'_>) -> Result<()> {
    let Call { q, k, v, out, lse } = call;
    match (q, k, v) {
        (Input::F32(q), Input::F32(k), Input::F32(v)) => to_output::<f32, M>(plan, runner, [q, k, v], out, lse),
        (Input::F16(q), Input::F16(k), Input::F16(v)) => to_output::<f16, M>(plan, runner, [q, k, v], out, lse),
        (Input::Bf16(q), Input::Bf16(k), Input::Bf16(v)) => to_output::<bf16, M>(plan, runner, [q, k, v], out, lse),
        _ => Err(attn_core::AttnError::Unsupported { what: "q, k and v with different dtypes" }.into()),
    }
}

/// Picks the output type.
fn to_output<T: KernelElement, M: Mods + Sync>(
    plan: &Plan<'_, '_, M>,
    runner: Runner<'_>,
    qkv: [View<'_, T>; 3],
    out: Output<'_>,
    lse: Option<&mut [f32]>,
) -> Result<()> {
    match out {
        Output::F32(out) => engine(plan, runner, qkv, out, lse),
        Output::F16(out) => engine(plan, runner, qkv, out, lse),
        Output::Bf16(out) => engine(plan, runner, qkv, out, lse),
    }
}

fn engine<'o, T: KernelElement, O: KernelElement, M: Mods + Sync>(
    plan: &Plan<'_, '_, M>,
    mut runner: Runner<'_>,
    [q, k, v]: [View<'_, T>; 3],
    out: ViewMut<'o, O>,
    lse: Option<&'o mut [f32]>,
) -> Result<()> {
    let mut outputs = Outputs::new(out);
    outputs.lse = lse;
    runner.forward_planned(plan, q, k, v, outputs)?;
    Ok(())
}
