//! Scratch of a thread, by name; [`layout`](super::layout) has its sizes.

use super::layout::Layout;
use super::product::{Operand, SIDE};
use crate::workspace::{Cutter, Line};

/// Scratch of one thread; [`Layout::lines`] is its size.
pub(super) struct Buffers<'w> {
    pub(super) q: &'w mut [Operand],
    pub(super) k: &'w mut [Operand],
    pub(super) v: &'w mut [Operand],
    /// Weights of two groups of tiles.
    pub(super) p: [&'w mut [Operand]; 2],
    pub(super) out: &'w mut [f32],
    pub(super) max: &'w mut [f32],
    pub(super) sum: &'w mut [f32],
    /// Totals of groups of tiles: outputs, sums and what they have lost, and the references that they are relative to.
    pub(super) totals: [&'w mut [f32]; 5],
    pub(super) factor: &'w mut [f32],
    /// Scores of two tiles.
    pub(super) s: [&'w mut [f32]; 2],
    pub(super) stage: &'w mut [f32],
    pub(super) bias: &'w mut [f32],
}

impl<'w> Buffers<'w> {
    pub(super) fn new(lines: &'w mut [Line], layout: &Layout) -> Self {
        let mut cutter = Cutter::new(lines);
        Self {
            q: cutter.operands(layout.blocks * layout.q_operands()),
            k: cutter.operands(layout.tiles * layout.k_operands()),
            v: cutter.operands(layout.tiles * layout.v_operands()),
            p: [cutter.operands(layout.p_operands()), cutter.operands(layout.p_operands())],
            out: cutter.floats(layout.blocks * layout.out_floats()),
            max: cutter.floats(layout.blocks * SIDE),
            sum: cutter.floats(layout.blocks * SIDE),
            totals: {
                let [out, row] = layout.total_floats();
                [out, out, row, row, row].map(|len| cutter.floats(len))
            },
            factor: cutter.floats(SIDE),
            s: [cutter.floats(SIDE * SIDE), cutter.floats(SIDE * SIDE)],
            stage: cutter.floats(layout.stage_floats()),
            bias: cutter.floats(layout.bias_floats()),
        }
    }
}
