//! The modules of `attn-layers` (self-, cross- and multi-head attention over borrowed weights) on the kernels and
//! threads of this crate, forward and backward.

use attn_core::backward::Gradients;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Element, Outputs, Result, View};
use attn_layers::module::{Engine, GradientEngine, SavedHeads};
use attn_simd::Level;
use attn_simd::backward::Inputs;

use crate::Runner;

/// Runs a module's attention on the threads of the current rayon pool.
///
/// The plain loops of `attn-layers` compute the projections, in `f32`, and their gradients. An application with a
/// matrix library projects with that, and calls [`forward`](crate::forward) in between.
///
/// ```
/// use attn_layers::module::{MultiHeadAttention, Sources};
/// use attn_core::{Attention, Layout, View, ViewMut};
/// use attn_parallel::Kernels;
/// // torch's packed weights: embed_dim 4, 2 heads; here the identity three times, so that q = k = v = x.
/// let mut in_proj = [0.0f32; 3 * 4 * 4];
/// for n in 0..12 {
///     in_proj[n * 4 + n % 4] = 1.0;
/// }
/// let mha = MultiHeadAttention::packed(4, 2, &in_proj, None)?;
/// let x: Vec<f32> = (0..2 * 3 * 4).map(|n| (n as f32).sin()).collect(); // 2 sequences of 3 tokens
/// let x = View::new(&x, Layout::Bhsd, [2, 1, 3, 4])?;
/// let run = |y: &mut [f32]| {
///     let mut engine = Kernels::default();
///     let mut scratch = vec![0.0; mha.scratch_len(&engine, 2, 3, 3)?];
///     let y = ViewMut::new(y, Layout::Bhsd, [2, 1, 3, 4])?;
///     mha.forward(&mut engine, &Attention::new(), Sources::same(x), y, &mut scratch)
/// };
/// let mut y = [0.0f32; 24];
/// run(&mut y)?;
///
/// // The same by the oracle.
/// use attn_layers::module::Reference;
/// let mut want = [0.0f32; 24];
/// let mut scratch = vec![0.0; mha.scratch_len(&Reference, 2, 3, 3)?];
/// let to = ViewMut::new(&mut want, Layout::Bhsd, [2, 1, 3, 4])?;
/// mha.forward(&mut Reference, &Attention::new(), Sources::same(x), to, &mut scratch)?;
/// assert!(y.iter().zip(want).all(|(y, want)| (y - want).abs() < 1e-6));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    /// The instruction-set level to run.
    pub level: Level,
}

impl Default for Kernels {
    /// The best level of this machine, or the one that `ATTN_LEVEL` names.
    fn default() -> Self {
        Self { level: Level::detect() }
    }
}

impl<T: Element<Compute = f32>> Engine<T> for Kernels {
    type Mid = f32;

    fn scratch_len(&self, _: &AttnShape) -> Result<usize> {
        Ok(0) // threads keep their own
    }

    fn attend<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        [q, k, v]: [View<'_, f32>; 3],
        outputs: Outputs<'_, f32>,
        _: &mut [f32],
    ) -> Result<()> {
        Runner::new().level(self.level).forward(attn, q, k, v, outputs)
    }
}

impl<T: Element<Compute = f32>> GradientEngine<T> for Kernels {
    fn gradients_scratch_len(&self, _: &AttnShape) -> Result<usize> {
        Ok(0) // threads keep their own
    }

    fn gradients<M: Mods + Sync>(
        &mut self,
        attn: &Attention<'_, M>,
        SavedHeads { q, k, v, out, lse, dy }: SavedHeads<'_, f32>,
        gradients: Gradients<'_, f32>,
        _: &mut [f32],
    ) -> Result<()> {
        Runner::new().level(self.level).backward(attn, Inputs { q, k, v, out, lse, dy }, gradients)
    }
}
