//! The rows of the output: one thread writes each once, at the end of a call.

use attn_core::ViewMut;
use attn_core::half::f16;

use crate::dtype::RowTarget;
use crate::isa::{Isa, MAX_LANES};
use crate::level::Run;

/// Writes one row, `values · factor`, rounded once if the output's type is narrower.
pub(crate) struct Write<'w, 'o> {
    pub(crate) target: &'w mut RowTarget<'o>,
    /// Batch, head and query of the output.
    pub(crate) at: [usize; 3],
    /// `None` for a row that has seen no key: it becomes zeros.
    pub(crate) values: Option<(&'w [f32], f64)>,
}

impl Run<()> for Write<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { target, at, values } = self;
        let Some((values, factor)) = values else {
            match target {
                RowTarget::F32(view) => clear(view, at),
                RowTarget::F16(view) => clear(view, at),
                RowTarget::Bf16(view) => clear(view, at),
            }
            return;
        };
        let product = |x: f32| (f64::from(x) * factor) as f32;
        match target {
            RowTarget::F32(view) => put(view, at, values, |dst, src| {
                dst.iter_mut().zip(src).for_each(|(d, &x)| *d = product(x));
            }),
            RowTarget::F16(view) => put(view, at, values, |dst, src| {
                let (mut wide, mut narrow) = ([0.0f32; MAX_LANES], [f16::ZERO; MAX_LANES]);
                for (dst, src) in dst.chunks_mut(I::LANES).zip(src.chunks(I::LANES)) {
                    wide.iter_mut().zip(src).for_each(|(w, &x)| *w = product(x));
                    isa.store_f16(isa.load(&wide), &mut narrow);
                    dst.copy_from_slice(&narrow[..dst.len()]);
                }
            }),
            RowTarget::Bf16(view) => put(view, at, values, |dst, src| {
                dst.iter_mut().zip(src).for_each(|(d, &x)| *d = crate::isa::narrow_bf16(product(x)));
            }),
        }
    }
}

/// Writes a whole row if it is contiguous, otherwise element by element.
#[inline(always)]
fn put<T: Copy + Default>(
    view: &mut ViewMut<'_, T>,
    [batch, head, query]: [usize; 3],
    values: &[f32],
    convert: impl Fn(&mut [T], &[f32]),
) {
    if let Some(row) = view.row_mut(batch, head, query) {
        convert(row, values);
        return;
    }
    for (c, x) in values.iter().enumerate() {
        let mut one = [T::default()];
        convert(&mut one, core::slice::from_ref(x));
        view.set(batch, head, query, c, one[0]);
    }
}

/// Writes a row of zeros.
fn clear<T: Copy + Default>(view: &mut ViewMut<'_, T>, [batch, head, query]: [usize; 3]) {
    let [.., columns] = view.sizes();
    for c in 0..columns {
        view.set(batch, head, query, c, T::default());
    }
}
