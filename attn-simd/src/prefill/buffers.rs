//! Scratch of a thread, by name; [`layout`](super::layout) has its sizes.

use super::layout::{GROUPS, Scratch};
use super::nonfinite::Finite;
use crate::workspace::{Cutter, Line};

/// Scratch of a thread.
pub(crate) struct Buffers<'w> {
    pub(super) q: Each<'w>,
    pub(super) max: Each<'w>,
    pub(super) sum: Each<'w>,
    /// Groups of tiles that wait to join the totals: outputs, sums of weights and the maxima they are relative to.
    pub(super) groups: [[Each<'w>; 3]; GROUPS],
    /// Totals over groups of tiles: outputs and sums (each what it is, and what is missing in it) and the maxima they
    /// are relative to.
    pub(super) totals: [Each<'w>; 5],
    pub(super) factor: &'w mut [f32],
    pub(super) scores: &'w mut [f32],
    pub(super) k: &'w mut [f32],
    pub(super) v: &'w mut [f32],
    pub(super) bias: &'w mut [f32],
    /// Which values are known to be finite.
    pub(super) finite: Finite,
    /// Most blocks of a strip.
    pub(super) strip: usize,
}

/// An array for each block of a strip.
pub(super) struct Each<'w> {
    all: &'w mut [f32],
    /// Floats of one.
    len: usize,
}

impl<'w> Each<'w> {
    fn new(cutter: &mut Cutter<'w>, len: usize, count: usize) -> Self {
        Self { all: cutter.floats(len * count), len }
    }

    /// The array of a block.
    #[inline(always)]
    pub(super) fn of(&mut self, block: usize) -> &mut [f32] {
        &mut self.all[block * self.len..][..self.len]
    }
}

impl<'w> Buffers<'w> {
    pub(crate) fn new(lines: &'w mut [Line], sizes: Scratch) -> Self {
        let (mut cutter, strip) = (Cutter::new(lines), sizes.strip);
        Self {
            q: Each::new(&mut cutter, sizes.q, strip),
            scores: cutter.floats(sizes.scores),
            max: Each::new(&mut cutter, sizes.row, strip),
            sum: Each::new(&mut cutter, sizes.row, strip),
            groups: core::array::from_fn(|n| {
                let there = usize::from(n < sizes.groups);
                [sizes.out, sizes.row, sizes.row].map(|len| Each::new(&mut cutter, there * len, strip))
            }),
            totals: {
                let there = usize::from(sizes.groups > 1);
                [sizes.out, sizes.out, sizes.row, sizes.row, sizes.row]
                    .map(|len| Each::new(&mut cutter, there * len, strip))
            },
            factor: cutter.floats(sizes.row),
            k: cutter.floats(sizes.k),
            v: cutter.floats(sizes.v),
            bias: cutter.floats(sizes.bias),
            finite: Finite::default(),
            strip,
        }
    }
}
