//! The gradient of the sinks: `dsink = −Σ p_sink·δ` over the rows of a head in all batch entries, where `p_sink` is the
//! sink's weight and `δ = dy·out`.

use core::fmt;
use core::ops::Range;

use attn_core::{AttnError, AttnShape, Result};

use super::buffers::Buffers;
use super::job::Job;
use crate::isa::Isa;
use crate::level::Run;
use crate::pack;
use crate::workspace::Line;

/// Rows between two looks at the caller's flag.
const ROWS: usize = 64;

/// The gradient of the sinks of a call. One thread computes each head, and no bit depends on which.
pub struct SinksCall<'s> {
    call: &'s Job<'s>,
    sinks: &'s [f32],
}

impl fmt::Debug for SinksCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SinksCall").field("heads", &self.heads()).finish_non_exhaustive()
    }
}

impl<'s> SinksCall<'s> {
    /// `None` if the call has no sinks.
    pub(super) fn of(call: &'s Job<'_>) -> Option<Self> {
        call.forward.sinks.map(|sinks| Self { call, sinks })
    }

    /// Query heads, each of which has a sink.
    pub fn heads(&self) -> usize {
        self.sinks.len()
    }

    /// Lines of scratch of one thread.
    pub fn scratch_lines(&self) -> usize {
        self.call.layout.scratch.lines()
    }

    /// Computes the gradient of the sink of a query head, in `scratch`, which may hold anything.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such head, [`AttnError::TooShort`] if lines are too few,
    /// [`AttnError::Stopped`] as [`Plan::stop_when`](super::Plan::stop_when) says.
    pub fn compute(&self, head: usize, scratch: &mut [Line]) -> Result<f64> {
        let Some(&sink) = self.sinks.get(head) else {
            return Err(AttnError::Index { what: "head", at: 0, value: head, limit: self.heads() });
        };
        AttnError::check_len("workspace lines", self.scratch_lines(), scratch.len())?;
        let mut buffers = Buffers::new(scratch, &self.call.layout.scratch);
        let AttnShape { batch, q_len, .. } = self.call.forward.shape;
        let mut sum = 0.0;
        for b in 0..batch {
            for first in (0..q_len).step_by(ROWS) {
                self.call.forward.unless_stopped()?;
                let queries = first..q_len.min(first + ROWS);
                let rows = Rows { call: self.call, sink, place: [b, head], queries, buffers: &mut buffers, sum };
                sum = self.call.level.run(rows);
            }
        }
        Ok(sum)
    }
}

/// Rows of a head, whose terms are added to a sum.
struct Rows<'r, 'w> {
    call: &'r Job<'r>,
    sink: f32,
    /// Batch entry and head.
    place: [usize; 2],
    queries: Range<usize>,
    buffers: &'r mut Buffers<'w>,
    sum: f64,
}

impl Run<f64> for Rows<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> f64 {
        let Self { call, sink, place: [batch, head], queries, buffers, mut sum } = self;
        let (shape, Buffers { rows, v, .. }) = (&call.forward.shape, buffers);
        let dy = &mut rows[1][..shape.value_dim];
        for query in queries {
            let lse = f64::from(call.lse[shape.row(batch, head, query)]);
            // A row that sees nothing. Without a sink its lse is −∞, as a sink that is none.
            if lse == f64::NEG_INFINITY {
                continue;
            }
            pack::read_row(isa, &call.dy, [batch, head, query], 0, dy);
            let delta = call.delta(isa, [batch, head, query], dy, v);
            sum -= libm::exp(f64::from(sink) - lse) * delta;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicBool, Ordering};
    use std::vec;

    use attn_core::backward::Gradients;
    use attn_core::{Attention, AttnError, AttnShape, Layout, View, ViewMut};

    use crate::backward::{Inputs, Plan, Sweep};
    use crate::{Level, Workspace};

    /// Of dy = 1, out = 2 and an lse of 0: each of `5·70` rows adds `−exp(sink)·2·3`. Once the flag is set, and where
    /// there is no such head or too little scratch, an error.
    #[test]
    fn rows_are_summed_until_the_caller_stops() {
        let (sizes, sinks) = ([5, 2, 70, 3], [0.0, 1.0]);
        let attn = Attention::new().sinks(&sinks);
        let (x, out, lse) = ([1.0f32; 2100], [2.0f32; 2100], [0.0f32; 700]);
        let [x, out] = [&x, &out].map(|x| View::new(x, Layout::Bhsd, sizes).unwrap());
        let stop = AtomicBool::new(false);
        let plan = Plan::new(&attn, AttnShape::new(sizes, sizes, sizes).unwrap(), Level::detect()).unwrap();
        let plan = plan.stop_when(&stop);
        let (mut gradients, mut found, mut seen) = (vec![0.0f32; 6300], [f64::NAN; 2], false);
        let (dq, rest) = gradients.split_at_mut(2100);
        let (dk, dv) = rest.split_at_mut(2100);
        let [dq, dk, dv] = [dq, dk, dv].map(|to| ViewMut::new(to, Layout::Bhsd, sizes).unwrap());
        let (mut sums, mut scratch) = (Workspace::new(), Workspace::new());
        let sums = sums.try_lines(plan.sums_lines()).unwrap();
        let to = Gradients::new(dq, dk, dv).sinks(&mut found);
        let done = plan.run_with(Inputs { q: x, k: x, v: x, out, lse: &lse, dy: x }, to, sums, |sweep| {
            let Sweep::Sinks(sinks, to) = sweep else { return Ok(()) };
            let lines = scratch.try_lines(sinks.scratch_lines())?;
            for (head, to) in to.iter_mut().enumerate() {
                *to = sinks.compute(head, lines)?;
            }
            let limit = sinks.heads();
            assert_eq!(sinks.compute(2, lines), Err(AttnError::Index { what: "head", at: 0, value: 2, limit }));
            assert!(matches!(sinks.compute(0, &mut []), Err(AttnError::TooShort { .. })));
            stop.store(true, Ordering::Relaxed);
            assert_eq!(sinks.compute(0, lines), Err(AttnError::Stopped));
            seen = true;
            Ok(())
        });
        assert_eq!((done, seen), (Ok(()), true));
        for (found, want) in found.into_iter().zip([-2100.0, -2100.0 * core::f64::consts::E]) {
            assert!((found - want).abs() < 1e-9, "{found}, not {want}");
        }
    }
}
