//! From sums to gradients: rows times the factor of the scores, rounded once, written by any number of threads.

use core::any::Any;
use core::fmt;

use attn_core::Element;
use attn_core::backward::Gradients;

use super::job::Job;
use super::layout::Layout;
use crate::isa::{Isa, MAX_LANES};
use crate::level::{Level, Run};
use crate::queue::rows::{RowClaim, RowQueue};

/// The rows of `dq`, `dk` and `dv` that are still to be written.
pub struct Writing<'w>(pub(super) &'w (dyn Fn() + Sync));

impl fmt::Debug for Writing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writing").finish_non_exhaustive()
    }
}

impl Writing<'_> {
    /// Writes rows until none is left.
    pub fn work(&self) {
        (self.0)();
    }
}

/// The sums of a call, and where their rows go.
pub(super) struct Output<'w, O> {
    layout: Layout,
    level: Level,
    /// `[batch][q_head][query][channel]`.
    dq: (&'w [f32], RowQueue<'w, O>),
    /// `dk` and `dv` of each key/value head.
    sums: &'w [f32],
    keys: [RowQueue<'w, O>; 2],
    factor: f64,
}

impl<'w, O: Element> Output<'w, O> {
    /// The sizes of the gradients have been checked. `sums`: of each head, on lines of its own.
    pub(super) fn new(job: &Job<'_>, dq: &'w [f32], sums: &'w [f32], gradients: Gradients<'w, O>) -> Self {
        let keys = [RowQueue::new(gradients.dk), RowQueue::new(gradients.dv)];
        Self {
            layout: job.layout,
            level: job.level,
            dq: (dq, RowQueue::new(gradients.dq)),
            sums,
            keys,
            factor: job.factor,
        }
    }

    /// Writes rows until none is left.
    pub(super) fn work(&self) {
        let (layout, (dq, to)) = (&self.layout, &self.dq);
        while let Some(mut rows) = to.claim() {
            let (first, columns) = (layout.row(rows.rows()), rows.columns());
            write(self.level, &mut rows, &dq[first * columns..], columns, self.factor);
        }
        for (n, (to, factor)) in self.keys.iter().zip([self.factor, 1.0]).enumerate() {
            while let Some(mut rows) = to.claim() {
                let from = &self.sums[layout.key(n, rows.rows())..];
                write(self.level, &mut rows, from, layout.columns[n], factor);
            }
        }
    }
}

/// Writes the rows of a claim, from sums whose rows are `stride` apart, times a factor.
pub(super) fn write<O: Element>(
    level: Level,
    rows: &mut RowClaim<'_, '_, O>,
    from: &[f32],
    stride: usize,
    factor: f64,
) {
    level.run(Write { rows, from, stride, factor });
}

/// Rows of a claim that are written on the vectors of a level.
struct Write<'w, 'q, 'o, O> {
    rows: &'w mut RowClaim<'q, 'o, O>,
    from: &'w [f32],
    stride: usize,
    factor: f64,
}

impl<O: Element> Run<()> for Write<'_, '_, '_, O> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { rows, from, stride, factor } = self;
        let columns = rows.columns();
        if columns == 0 {
            return; // no memory bounds the number of such rows
        }
        for (n, from) in from.chunks(stride).enumerate().take(rows.rows().count) {
            let from = &from[..columns];
            match rows.row(n) {
                Some(to) => rounded(isa, from, factor, to),
                None => rows.write(n, |channel| O::from_f64(f64::from(from[channel]) * factor)),
            }
        }
    }
}

/// `to = from · factor`, rounded once.
#[inline(always)]
fn rounded<I: Isa, O: Element>(isa: I, from: &[f32], factor: f64, to: &mut [O]) {
    let ((from, last_from), (to, last_to)) = (from.as_chunks::<MAX_LANES>(), to.as_chunks_mut::<MAX_LANES>());
    for (from, to) in from.iter().zip(to) {
        let near = from.map(
            #[inline(always)]
            |x| (f64::from(x) * factor) as f32,
        );
        let done = halves(isa, &near, to, is_middle_bf16, I::store_bf16)
            || halves(isa, &near, to, is_middle_f16, I::store_f16);
        if !done {
            each(from, factor, to);
        }
    }
    each(last_from, factor, last_to);
}

/// Rounds once more if `to` is of halves `H`. That is as good where no middle of two halves lies between a number and
/// the nearest f32; says whether it was done.
#[inline(always)]
fn halves<I: Isa, H: 'static>(
    isa: I,
    near: &[f32; MAX_LANES],
    to: &mut dyn Any,
    is_middle: impl Fn(f32) -> bool,
    store: impl Fn(I, I::F, &mut [H]),
) -> bool {
    let Some(to) = to.downcast_mut::<[H; MAX_LANES]>() else { return false };
    if near.iter().fold(false, |any, &x| any | is_middle(x)) {
        return false;
    }
    for lane in (0..MAX_LANES).step_by(I::LANES) {
        store(isa, isa.load(&near[lane..]), &mut to[lane..]);
    }
    true
}

/// Number by number.
#[inline(always)]
fn each<O: Element>(from: &[f32], factor: f64, to: &mut [O]) {
    to.iter_mut().zip(from).for_each(|(to, &x)| *to = O::from_f64(f64::from(x) * factor));
}

/// Whether a number is in the middle between two of bf16.
#[inline(always)]
fn is_middle_bf16(x: f32) -> bool {
    x.to_bits() & 0xffff == 0x8000
}

/// Whether a number is in the middle between two of f16. Subnormal ones are multiples of 2⁻²⁴, the unit of f32 from 1/2
/// on.
#[inline(always)]
fn is_middle_f16(x: f32) -> bool {
    const UNIT: f32 = 1.0 / (1 << 24) as f32;
    let size = x.abs();
    let nearest = (size + 0.5) - 0.5;
    let among_small = (size < UNIT * 1024.0) & ((size - nearest).abs() == UNIT / 2.0);
    among_small | (x.to_bits() & 0x1fff == 0x1000)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use attn_core::half::{bf16, f16};

    use super::*;
    use crate::isa::portable::Portable;

    /// Products beside, on and just beyond the middles of two numbers, of all sizes, and those that are not numbers.
    #[test]
    fn products_are_rounded_once() {
        let isa = <Portable>::PROVEN;
        let mut from: Vec<f32> = Vec::new();
        for high in [0x0000u32, 0x0001, 0x007f, 0x0080, 0x3f80, 0x3f81, 0x7f7e, 0x7f7f, 0x7f80, 0x7fc1] {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                for sign in [0, 0x8000_0000] {
                    from.push(f32::from_bits(sign | high << 16 | low));
                }
            }
        }
        // Beside, on and just beyond middles of f16: subnormal ones and others.
        for half in [0u16, 1, 2, 0x3fe, 0x3ff, 0x400, 0x401, 0x3c00, 0x7bfe, 0x7bff] {
            let x = f16::from_bits(half).to_f32();
            let middle = if half < 0x400 { (x + 0.5 / (1 << 24) as f32).to_bits() } else { x.to_bits() + 0x1000 };
            from.extend([middle - 1, middle, middle + 1].map(f32::from_bits));
        }
        for factor in [1.7, 1.0, 1.0 + 1e-9, 1.0 - 1e-9, 0.125, 1e-3, 1e30] {
            if cfg!(miri) && factor != 1.7 {
                break; // Miri takes hundreds of times as long, and looks for something else.
            }
            for count in [0, 1, 15, 16, 33, from.len()] {
                check::<f32>(isa, &from[..count], factor);
                check::<f64>(isa, &from[..count], factor);
                check::<f16>(isa, &from[..count], factor);
                check::<bf16>(isa, &from[..count], factor);
            }
            // One at a time, so that no middle beside it is looked at.
            for x in from.iter().filter(|x| x.is_finite()) {
                check::<bf16>(isa, &[*x; MAX_LANES], factor);
                check::<f16>(isa, &[*x; MAX_LANES], factor);
            }
        }
    }

    fn check<O: Element>(isa: Portable, from: &[f32], factor: f64) {
        let mut to: Vec<O> = from.iter().map(|_| O::default()).collect();
        rounded(isa, from, factor, &mut to);
        for (&x, to) in from.iter().zip(to) {
            let want = O::from_f64(f64::from(x) * factor);
            assert!(to == want || want.to_f64().is_nan() && to.to_f64().is_nan(), "{x:e} * {factor}: {to:?}, {want:?}");
        }
    }
}
