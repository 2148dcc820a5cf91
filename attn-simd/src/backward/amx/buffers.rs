//! Scratch of a block on AMX, by name; [`layout`](super::layout) has its sizes.

use super::layout::Sizes;
use crate::amx::product::{Operand, SIDE};
use crate::scoring::KV_TILE;
use crate::workspace::Cutter;

/// Scratch of a block, beside the arrays that vectors have as well.
pub(crate) struct Buffers<'w> {
    /// q and dy as B of the products of scores, words of two channels: `[group][step][16 queries]`.
    pub(super) across: [&'w mut [Operand]; 2],
    /// The same as B of the sums over queries, words of two queries: `[square of channels][group][16 channels]`.
    pub(super) rows: [&'w mut [Operand]; 2],
    /// k and v as A of the products of scores: `[half][step][16 keys]`.
    pub(super) keys: [&'w mut [Operand]; 2],
    /// k as A of `dq`, words of two keys: `[square of channels][half][16 channels]`.
    pub(super) k_across: &'w mut [Operand],
    /// Weights and gradients of scores as A, words of two queries: `[half][group][part][16 keys]`.
    pub(super) weights: [&'w mut [Operand]; 2],
    /// Gradients of scores of a group as B, words of two keys: `[half][part][16 queries]`.
    pub(super) gradients: &'w mut [Operand],
    /// Scores and `dy·v` of the next group: `[key][query]`.
    pub(super) next: [&'w mut [f32]; 2],
    /// `dq[channel][query]` of each group.
    pub(super) dq: &'w mut [f32],
    /// A square of sums.
    pub(super) sum: &'w mut [f32],
    pub(super) stage: &'w mut [f32],
}

impl<'w> Buffers<'w> {
    pub(crate) fn new(cutter: &mut Cutter<'w>, sizes: &Sizes) -> Self {
        let mut of_both = |of: fn(&Sizes, usize) -> usize| [0, 1].map(|which| cutter.operands(of(sizes, which)));
        Self {
            across: of_both(Sizes::of_rows),
            rows: of_both(Sizes::of_rows),
            keys: of_both(Sizes::of_keys),
            k_across: cutter.operands(sizes.of_keys(0)),
            weights: [cutter.operands(sizes.of_weights()), cutter.operands(sizes.of_weights())],
            gradients: cutter.operands(sizes.of_group()),
            next: [cutter.floats(KV_TILE * SIDE), cutter.floats(KV_TILE * SIDE)],
            dq: cutter.floats(sizes.dq()),
            sum: cutter.floats(SIDE * SIDE),
            stage: cutter.floats(sizes.stage()),
        }
    }
}
