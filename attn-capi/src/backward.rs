//! Gradients on checked views: from number types as values to the generic engine.

use attn_core::backward::Gradients;
use attn_core::half::{bf16, f16};
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::backward::{Inputs, Plan};
use attn_simd::{Input, KernelElement, Level};

use crate::args::{Backward, Callbacks, Output};
use crate::call::kernel_dtype;
use crate::error::{Error, Result};
use crate::types::AttnDtype;

/// Computes gradients.
pub(crate) fn run(
    attn: Attention<'_>,
    callbacks: Option<Callbacks>,
    runner: Runner<'_>,
    call: Backward<'_>,
) -> Result<()> {
    let has_score_mod = callbacks.is_some_and(|callbacks| callbacks.has_score_mod());
    if has_score_mod && call.derivative.is_none() {
        return Err(AttnError::Unsupported { what: "the gradient of a score_mod without score_mod_derivative" }.into());
    }
    if !has_score_mod && call.derivative.is_some() {
        return Err(Error::Idle { what: "score_mod_derivative", needs: "there is no score_mod" });
    }
    let Some(callbacks) = callbacks else { return typed(&attn, runner, call) };
    let callbacks = &callbacks.derivative(call.derivative);
    let attn = attn.mask_mod(|at| callbacks.visible(at));
    if has_score_mod {
        let (score, slope) = (|s, at| callbacks.score(s, at), |s, at| callbacks.slope(s, at));
        typed(&attn.score_mod_with(score, slope), runner, call)
    } else {
        typed(&attn, runner, call)
    }
}

/// Checks options against sizes, and explains what would run for inputs and gradients of these types.
pub(crate) fn explain(
    attn: Attention<'_>,
    callbacks: Option<Callbacks>,
    level: Level,
    shape: AttnShape,
    [inputs, gradients]: [AttnDtype; 2],
) -> Result<String> {
    let (inputs, gradients) = (kernel_dtype("dtype", inputs)?, kernel_dtype("gradients", gradients)?);
    let Some(callbacks) = callbacks else {
        return Ok(Plan::new(&attn, shape, level)?.explain(inputs, gradients).to_string());
    };
    let attn = attn.mask_mod(|at| callbacks.visible(at));
    // As in `run`: a score_mod takes scratch.
    let told = if callbacks.has_score_mod() {
        let attn = attn.score_mod(|s, at| callbacks.score(s, at));
        Plan::new(&attn, shape, level)?.explain(inputs, gradients)
    } else {
        Plan::new(&attn, shape, level)?.explain(inputs, gradients)
    };
    Ok(told.to_string())
}

/// Picks the input type, which q, k and v share.
fn typed<M: Mods + Sync>(attn: &Attention<'_, M>, runner: Runner<'_>, call: Backward<'_>) -> Result<()> {
    match (call.q, call.k, call.v) {
        (Input::F32(q), Input::F32(k), Input::F32(v)) => of_output(attn, runner, [q, k, v], call),
        (Input::F16(q), Input::F16(k), Input::F16(v)) => of_output(attn, runner, [q, k, v], call),
        (Input::Bf16(q), Input::Bf16(k), Input::Bf16(v)) => of_output(attn, runner, [q, k, v], call),
        _ => Err(AttnError::Unsupported { what: "q, k and v with different dtypes" }.into()),
    }
}

/// Picks the type of the forward call's output, which its gradient shares.
fn of_output<T: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    runner: Runner<'_>,
    qkv: [View<'_, T>; 3],
    call: Backward<'_>,
) -> Result<()> {
    match (call.out, call.dout) {
        (Input::F32(out), Input::F32(dout)) => to_gradients(attn, runner, qkv, [out, dout], call),
        (Input::F16(out), Input::F16(dout)) => to_gradients(attn, runner, qkv, [out, dout], call),
        (Input::Bf16(out), Input::Bf16(dout)) => to_gradients(attn, runner, qkv, [out, dout], call),
        _ => Err(AttnError::Unsupported { what: "out and dout with different dtypes" }.into()),
    }
}

/// Picks the type of the gradients, which they share.
fn to_gradients<T: KernelElement, G: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    runner: Runner<'_>,
    [q, k, v]: [View<'_, T>; 3],
    [out, dy]: [View<'_, G>; 2],
    call: Backward<'_>,
) -> Result<()> {
    let Backward { lse, dq, dk, dv, dsinks, dbias, .. } = call;
    let options = (dsinks, dbias);
    let inputs = Inputs { q, k, v, out, lse, dy };
    match (dq, dk, dv) {
        (Output::F32(q), Output::F32(k), Output::F32(v)) => {
            engine::<_, _, f32, M>(attn, runner, inputs, [q, k, v], options)
        }
        (Output::F16(q), Output::F16(k), Output::F16(v)) => {
            engine::<_, _, f16, M>(attn, runner, inputs, [q, k, v], options)
        }
        (Output::Bf16(q), Output::Bf16(k), Output::Bf16(v)) => {
            engine::<_, _, bf16, M>(attn, runner, inputs, [q, k, v], options)
        }
        _ => Err(AttnError::Unsupported { what: "dq, dk and dv with different dtypes" }.into()),
    }
}

fn engine<T: KernelElement, G: KernelElement, O: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    mut runner: Runner<'_>,
    inputs: Inputs<'_, T, G>,
    [dq, dk, dv]: [ViewMut<'_, O>; 3],
    (dsinks, dbias): (Option<&mut [f64]>, Option<ViewMut<'_, f64>>),
) -> Result<()> {
    let mut gradients = Gradients::new(dq, dk, dv);
    gradients.sinks = dsinks;
    gradients.bias = dbias;
    runner.backward(attn, inputs, gradients)?;
    Ok(())
}
