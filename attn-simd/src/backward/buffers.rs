//! Scratch of a thread and sums of a part, by name; [`layout`](super::layout) has their sizes.

use super::amx;
use super::layout::{Layout, Scratch};
use super::words::Words;
use crate::prefill::layout::MAX_Q_TILE;
use crate::queue::Rows;
use crate::workspace::{Cutter, Line};

/// Scratch of a thread.
pub(super) struct Buffers<'w> {
    pub(super) work: Work<'w>,
    /// Rows of q and dy.
    pub(super) rows: [&'w mut [f32]; 2],
    /// Whether all of either are finite. Others are stored as 0.
    pub(super) finite: [bool; 2],
    pub(super) dq: &'w mut [f32],
    pub(super) k: &'w mut [f32],
    pub(super) clean: &'w mut [f32],
    pub(super) v: &'w mut [f32],
    pub(super) words: Words<'w>,
    /// The gradient of a bias.
    pub(super) bias_sums: &'w mut [f64],
    /// Operands and sums of AMX, if the call runs on it.
    pub(super) amx: Option<amx::Buffers<'w>>,
}

/// What the gradients of the scores of a query have in common.
#[derive(Clone, Copy)]
pub(super) struct Constants {
    /// log₂ of the sum of weights of each query: rounded, and what is missing.
    pub(super) lse: [[f32; MAX_Q_TILE]; 2],
    /// `dy·y` of each query.
    pub(super) delta: [f32; MAX_Q_TILE],
}

impl Default for Constants {
    fn default() -> Self {
        Self { lse: [[0.0; MAX_Q_TILE]; 2], delta: [0.0; MAX_Q_TILE] }
    }
}

/// Arrays of the first half of a tile.
pub(super) struct Work<'w> {
    /// `q[channel][query]`, `dy[channel][query]`.
    pub(super) transposed: [&'w mut [f32]; 2],
    pub(super) scores: &'w mut [f32],
    /// Derivatives of the soft-cap.
    pub(super) slopes: &'w mut [f32],
    /// `dy·v`.
    pub(super) dots: &'w mut [f32],
    pub(super) constants: Constants,
    pub(super) bias: &'w mut [f32],
    /// Derivatives of `score_mod`.
    pub(super) mod_slopes: &'w mut [f32],
    /// Whether `score_mod` knew all of them.
    pub(super) known: bool,
}

impl<'w> Buffers<'w> {
    pub(super) fn new(lines: &'w mut [Line], sizes: &Scratch) -> Self {
        let mut cutter = Cutter::new(lines);
        Self {
            work: Work {
                transposed: sizes.transposed.map(|len| cutter.floats(len)),
                scores: cutter.floats(sizes.tile),
                slopes: cutter.floats(sizes.tile),
                dots: cutter.floats(sizes.tile),
                constants: Constants::default(),
                bias: cutter.floats(sizes.bias),
                mod_slopes: cutter.floats(sizes.mod_slopes),
                known: true,
            },
            rows: sizes.rows.map(|len| cutter.floats(len)),
            finite: [true; 2],
            dq: cutter.floats(sizes.dq),
            k: cutter.floats(sizes.keys[0]),
            clean: cutter.floats(sizes.keys[0]),
            v: cutter.floats(sizes.keys[1]),
            words: Words::new(&mut cutter, sizes.words),
            bias_sums: cutter.doubles(sizes.bias_sums),
            amx: sizes.amx.as_ref().map(|sizes| amx::Buffers::new(&mut cutter, sizes)),
        }
    }
}

/// Sums of a part, before the factor of the scores.
pub(super) struct Sums<'w> {
    /// Takes the rows of `dq` of each block, in order; rows of whole vectors.
    pub(super) dq: &'w mut dyn FnMut(Rows, &[f32]),
    /// `[key][channel]`, rows of whole vectors.
    pub(super) dk: &'w mut [f32],
    /// The same.
    pub(super) dv: &'w mut [f32],
}

/// `dk` and `dv` of a part, or of a head.
pub(super) fn of_keys<'w>(lines: &'w mut [Line], layout: &Layout) -> [&'w mut [f32]; 2] {
    let mut cutter = Cutter::new(lines);
    layout.sums.map(|len| cutter.floats(len))
}
