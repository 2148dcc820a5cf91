//! What a backward call is made of: options and inputs, and how it is cut.

use super::layout::Layout;
use crate::dtype::Input;
use crate::isa::Isa;
use crate::pack;
use crate::prefill;

/// Options and inputs of a backward call.
pub(super) struct Job<'c> {
    /// Those that the forward call had as well.
    pub(super) forward: prefill::job::Job<'c>,
    pub(super) layout: Layout,
    pub(super) out: Input<'c>,
    pub(super) dy: Input<'c>,
    pub(super) lse: &'c [f32],
    /// The derivative of a score by its product, but for the soft-cap.
    pub(super) factor: f64,
    /// The derivative of a score by its bias, but for a `score_mod`.
    pub(super) by_bias: f64,
    /// Whether a `score_mod` changes scores.
    pub(super) score_mod: bool,
}

impl Job<'_> {
    /// `δ = dy·y` of a row. `scratch` holds a row of values.
    #[inline(always)]
    pub(super) fn delta<I: Isa>(&self, isa: I, row: [usize; 3], dy: &[f32], scratch: &mut [f32]) -> f64 {
        let out = &mut scratch[..dy.len()];
        pack::read_row(isa, &self.out, row, 0, out);
        out.iter().zip(dy).map(|(&y, &dy)| product(y, dy)).sum()
    }
}

/// An output times its gradient. An output of 0 gives 0: a row that sees nothing has no gradient, whatever `dy` holds.
pub(super) fn product(y: f32, dy: f32) -> f64 {
    if y == 0.0 { 0.0 } else { f64::from(y) * f64::from(dy) }
}
