//! States over a part of the keys: maximum, sum and undivided output of each query, merged and divided later.

use attn_core::score_mod::Mods;
use attn_core::state;
use attn_core::{Attention, AttnError, AttnShape, Outputs, View};
use attn_simd::{Input, KernelElement, Level, Plan, Workspace};

use crate::args::{Callbacks, Finish, Output, Part};
use crate::call::with_callbacks;
use crate::error::Result;

/// Computes the states of a part, on this thread.
pub(crate) fn compute(
    attn: Attention<'_>,
    callbacks: Option<Callbacks>,
    level: Level,
    shape: AttnShape,
    scratch: &mut Workspace,
    part: Part<'_>,
) -> Result<()> {
    with_callbacks!(attn, callbacks, |attn| {
        let plan = Plan::new(attn, shape, level)?;
        let Part { first, q, k, v, states } = part;
        match (k, v) {
            (Input::F32(k), Input::F32(v)) => of_query(&plan, first, q, [k, v], states, scratch),
            (Input::F16(k), Input::F16(v)) => of_query(&plan, first, q, [k, v], states, scratch),
            (Input::Bf16(k), Input::Bf16(v)) => of_query(&plan, first, q, [k, v], states, scratch),
            _ => Err(AttnError::Unsupported { what: "k and v with different dtypes" }.into()),
        }
    })
}

/// Picks the queries' type, which may be another.
fn of_query<T: KernelElement, M: Mods + Sync>(
    plan: &Plan<'_, '_, M>,
    first: usize,
    q: Input<'_>,
    [k, v]: [View<'_, T>; 2],
    states: &mut [f32],
    scratch: &mut Workspace,
) -> Result<()> {
    // First, so that wrong sizes allocate no scratch.
    AttnError::check_size("states (rows · (2 + value_dim))", state::len(plan.shape())?, states.len())?;
    let lines = scratch.try_lines(plan.states_lines())?;
    match q {
        Input::F32(q) => plan.states(first, q, k, v, states, lines)?,
        Input::F16(q) => plan.states(first, q, k, v, states, lines)?,
        Input::Bf16(q) => plan.states(first, q, k, v, states, lines)?,
    }
    Ok(())
}

/// Divides merged states, and writes the outputs.
pub(crate) fn finish(attn: Attention<'_>, level: Level, shape: AttnShape, end: Finish<'_>) -> Result<()> {
    let plan = Plan::new(&attn, shape, level)?; // the caller's functions have been called
    let Finish { states, out, lse } = end;
    match out {
        Output::F32(out) => plan.finish(states, Outputs { out, lse, weights: None })?,
        Output::F16(out) => plan.finish(states, Outputs { out, lse, weights: None })?,
        Output::Bf16(out) => plan.finish(states, Outputs { out, lse, weights: None })?,
    }
    Ok(())
}
