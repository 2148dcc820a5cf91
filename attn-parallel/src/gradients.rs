//! Gradients on the threads of the current rayon pool: each takes parts of the call until none is left.

use std::sync::{Mutex, PoisonError};

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Element, Result};
use attn_simd::backward::{Inputs, Plan, Sweep};
use attn_simd::{KernelElement, Level, Workspace};

use crate::scratch::Scratch;
use crate::threads::on_threads;
use crate::worth;

/// Computes the gradients at a level, on at most `threads` threads.
pub(crate) fn run<T: KernelElement, G: KernelElement, O: Element, M: Mods + Sync>(
    (level, threads, mut scratch): (Level, usize, Scratch<'_>),
    attn: &Attention<'_, M>,
    inputs: Inputs<'_, T, G>,
    gradients: Gradients<'_, O>,
) -> Result<()> {
    let shape = AttnShape::new(inputs.q.sizes(), inputs.k.sizes(), inputs.v.sizes())?;
    let plan = Plan::new(attn, shape, level)?;
    plan.check(&inputs, &gradients)?;
    let mut sums = Workspace::new();
    let sums = sums.try_lines(plan.sums_lines())?;
    let useful = |count: usize| worth::in_pool(threads.min(count).min(worth::computing(&shape)));
    plan.run_with(inputs, gradients, sums, |sweep| {
        let scratch = scratch.round();
        match sweep {
            Sweep::Parts(call, sums) => {
                let left = Mutex::new((0..call.parts()).rev().zip(sums.chunks_mut(call.part_lines().max(1)).rev()));
                on_threads(useful(call.parts()), &|| {
                    scratch.with(call.scratch_lines(), |lines| {
                        // The last parts first: under a causal mask they have the most keys.
                        loop {
                            let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
                            let Some((part, sums)) = next else { return Ok(()) };
                            call.compute(part, sums, lines)?;
                        }
                    })
                })
            }
            Sweep::Bias(bias, to) => {
                let (left, to) = (Mutex::new(0..bias.pieces()), Mutex::new(to));
                on_threads(useful(bias.pieces()), &|| {
                    scratch.with(bias.scratch_lines(), |lines| {
                        loop {
                            let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
                            let Some(piece) = next else { return Ok(()) };
                            let piece = bias.compute(piece, lines)?;
                            piece.write(&mut to.lock().unwrap_or_else(PoisonError::into_inner));
                        }
                    })
                })
            }
        }
    })
}
