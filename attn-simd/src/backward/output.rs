//! From sums to gradients: rows times the factor of the scores, rounded once, written by any number of threads.

use core::fmt;

use attn_core::backward::Gradients;
use attn_core::{AttnShape, Element};

use super::job::{Job, product};
use super::layout::Layout;
use crate::isa::Isa;
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
    fn run<I: Isa>(self, _: I) {
        let Self { rows, from, stride, factor } = self;
        let columns = rows.columns();
        if columns == 0 {
            return; // no memory bounds the number of such rows
        }
        for (n, from) in from.chunks(stride).enumerate().take(rows.rows().count) {
            let from = &from[..columns];
            rows.write(
                n,
                #[inline(always)]
                |channel| O::from_f64(f64::from(from[channel]) * factor),
            );
        }
    }
}

/// `dsink = −Σ p_sink·δ` over the rows of a head, in order.
pub(super) fn sinks(job: &Job<'_>, to: &mut [f64]) {
    to.fill(0.0);
    let (shape, Some(sinks)) = (&job.forward.shape, job.forward.sinks) else { return };
    let AttnShape { batch, q_heads, q_len, .. } = *shape;
    for b in 0..batch {
        for head in 0..q_heads {
            for query in 0..q_len {
                let lse = f64::from(job.lse[shape.row(b, head, query)]);
                let product = |channel: usize| {
                    let at = [b, head, query, channel];
                    product(job.out.at(at), job.dy.at(at))
                };
                let delta: f64 = (0..shape.value_dim).map(product).sum();
                to[head] -= libm::exp(f64::from(sinks[head]) - lse) * delta;
            }
        }
    }
}
