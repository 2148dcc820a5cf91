//! Weights as an output: the kernels never hold them, so they are recomputed from the lse, after the call.

use alloc::vec::Vec;

use attn_core::{AttnError, AttnShape, Element, Outputs, Result};

/// Runs a call without its weights; then `fill` writes them, from the lse. Without weights it is `run` alone.
///
/// Allocates the lse if the caller has none. Errors come before any write, because `fill` only repeats checks.
pub fn with_weights<'o, O: Element<Compute = f32>>(
    shape: &AttnShape,
    outputs: Outputs<'o, O>,
    run: impl FnOnce(Outputs<'_, O>) -> Result<()>,
    fill: impl FnOnce(&[f32], &mut [f32]) -> Result<()>,
) -> Result<()> {
    if outputs.weights.is_none() {
        return run(outputs);
    }
    outputs.check(shape)?;
    let mut own = Vec::new();
    if outputs.lse.is_none() {
        let bytes = shape.rows().saturating_mul(size_of::<f32>());
        own.try_reserve_exact(shape.rows()).map_err(|_| AttnError::Memory { what: "lse", bytes })?;
        own.resize(shape.rows(), 0.0);
    }
    let Outputs { out, lse, weights } = outputs;
    let lse = lse.unwrap_or(&mut own);
    run(Outputs::new(out).lse(&mut *lse))?;
    weights.map_or(Ok(()), |weights| fill(lse, weights))
}
