//! The squares of sums as AVX512_BF16 computes them, in plain Rust: for tests and machines without it.
//!
//! VDPBF16PS adds two products to a lane: first that of the odd halves of two words, then that of the even ones, each
//! exact and added with one rounding to nearest even, whatever MXCSR says. Subnormal operands count as 0 and subnormal
//! sums become 0 (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). A test compares the
//! processor, on Zen 4 and Zen 5 so far.
//! The sums of a call start at 0, run over all steps, products and words, and join C by one addition.

use super::model::{halves, rounded};
use super::product::{AmxUnit, Operand, Products, SIDE, Square};

/// Rows of an operand, and words of a row.
const ROWS: usize = 16;

/// The unit in plain Rust.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DotModel;

/// VDPBF16PS on one lane.
#[inline(always)]
pub(crate) fn dot(sum: f32, a: f32, b: f32) -> f32 {
    let ((a_even, a_odd), (b_even, b_odd)) = (halves(a.to_bits()), halves(b.to_bits()));
    let sum = rounded(f64::from(a_odd) * f64::from(b_odd) + f64::from(sum));
    rounded(f64::from(a_even) * f64::from(b_even) + f64::from(sum))
}

impl AmxUnit for DotModel {
    fn refresh(&mut self) {}

    fn block(&mut self, products: Products, a: &[Operand], b: &[Operand], steps: usize, fresh: bool, c: &mut Square) {
        products.check(a, b, steps);
        let (in_a, in_b) = products.parts();
        let mut sums: Square = [0.0; SIDE * SIDE];
        for step in 0..steps {
            for &(part_a, part_b) in &products.pairs()[..products.steps().len()] {
                for (n, sum) in sums.iter_mut().enumerate() {
                    let (row, column) = (n / SIDE, n % SIDE);
                    let a = &a[(step * in_a + part_a) * 2 + row / ROWS].0[row % ROWS * ROWS..][..ROWS];
                    let b = &b[(step * in_b + part_b) * 2 + column / ROWS].0[column % ROWS..];
                    *sum = a.iter().zip(b.iter().step_by(ROWS)).fold(*sum, |sum, (a, b)| dot(sum, *a, *b));
                }
            }
        }
        for (c, sum) in c.iter_mut().zip(sums) {
            *c = if fresh { sum } else { *c + sum };
        }
    }
}
