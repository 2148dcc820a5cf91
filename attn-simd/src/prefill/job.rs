//! One call of the prefill and amx kernels: options, sizes and inputs, without type parameters.

use core::ops::Deref;

use attn_core::AttnShape;
use attn_core::score::Problem;
use attn_core::score_mod::Mods;

use super::layout::Tiles;
use crate::dtype::Input;
use crate::level::Level;
use crate::scoring::Scoring;

/// What a call computes on, ready to run.
#[derive(Clone, Copy)]
pub(crate) struct Job<'j> {
    pub(crate) scoring: Scoring<'j>,
    pub(crate) shape: AttnShape,
    pub(crate) tiles: Tiles,
    pub(crate) q: Input<'j>,
    pub(crate) k: Input<'j>,
    pub(crate) v: Input<'j>,
}

impl<'j> Job<'j> {
    /// From a checked problem.
    pub(crate) fn new<M: Mods + Sync>(
        problem: &'j Problem<'j, 'j, M>,
        level: Level,
        [q, k, v]: [Input<'j>; 3],
    ) -> Self {
        let (attn, shape) = (problem.attn(), *problem.shape());
        Self { scoring: Scoring::new(attn, problem.scale(), level), shape, tiles: Tiles::of(level), q, k, v }
    }
}

impl<'j> Deref for Job<'j> {
    type Target = Scoring<'j>;

    #[inline(always)]
    fn deref(&self) -> &Scoring<'j> {
        &self.scoring
    }
}
