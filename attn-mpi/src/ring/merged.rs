//! The ring by the fastest kernels: each piece of the call gives an output and its lse, merged into the rows' states.
//!
//! States are f64. A row is merged as often as there are pieces: two thousand times on a thousand ranks. In f32 each
//! merge would round sums of values of one sign in one direction, up to that many units in the last place.

use attn_core::score_mod::Mods;
use attn_core::softmax::RowState;
use attn_core::{AttnShape, Element, Layout, Outputs, Result, ViewMut, state};
use attn_parallel::Runner;
use attn_simd::KernelElement;
use bytemuck::Pod;
use rayon::prelude::*;

use super::pieces::{Most, Piece, WORK, pair, pieces};
use crate::call::{Call, states_len};
use crate::scratch::Lent;
use crate::tensors::{Shard, rows_of, write_row};

/// The states of the rank's rows so far, and room for what one call of the kernels gives.
pub(super) struct Rows<'s> {
    most: Most,
    states: Lent<'s, f64>,
    out: Lent<'s, f32>,
    lse: Lent<'s, f32>,
}

impl<'s> Rows<'s> {
    pub(super) fn new<T: KernelElement, M: Mods + Sync>(call: &Call<'s, '_, T, M>) -> Result<Self> {
        let (scratch, n) = (&call.cluster.scratch, call.q.sizes()[2]);
        let most = Most::new(pair(call), n, 0, usize::MAX, WORK);
        let piece = AttnShape { q_len: n.min(most.queries), ..call.shape };
        let mut states = scratch.lend(states_len(&AttnShape { q_len: n, ..call.shape })?);
        state::clear(&mut states, call.shape.value_dim);
        let (out, lse) = (scratch.lend(piece.rows() * piece.value_dim), scratch.lend(piece.rows()));
        Ok(Self { most, states, out, lse })
    }

    /// Attends to a shard.
    pub(super) fn take<T: KernelElement + Pod, M: Mods + Sync>(
        &mut self,
        call: &Call<'_, '_, T, M>,
        owner: usize,
        shard: Shard<'_, T>,
        poll: &mut dyn FnMut(),
    ) -> Result<()> {
        for Piece { queries, keys, local } in pieces(call, owner, self.most) {
            poll();
            let (q, part) = (rows_of(call.q, queries.clone()), shard.rows(keys));
            let shape = AttnShape::new(q.sizes(), part.k.sizes(), part.v.sizes())?;
            let (out, lse) = (&mut self.out[..shape.rows() * shape.value_dim], &mut self.lse[..shape.rows()]);
            let to = Outputs::new(ViewMut::new(out, Layout::Bhsd, shape.output())?).lse(lse);
            let mut runner = Runner::new().level(call.cluster.level).threads(call.cluster.threads);
            runner.forward(&local.attention(), q, part.k, part.v, to)?;
            self.join(&shape, call.q.sizes()[2], queries.start, call.cluster.threads);
        }
        Ok(())
    }

    /// Joins the outputs of a piece to the states of its rows: from row `first` on, of so many of a head.
    fn join(&mut self, piece: &AttnShape, all: usize, first: usize, threads: usize) {
        let (n, dim) = (piece.q_len, piece.value_dim);
        let (out, lse) = (&self.out[..], &self.lse[..]);
        let heads = |(pair, states): (usize, &mut [f64])| {
            for (i, state) in states[first * (dim + 2)..].chunks_exact_mut(dim + 2).take(n).enumerate() {
                let row = pair * n + i;
                join(state, &out[row * dim..(row + 1) * dim], lse[row]);
            }
        };
        let states = &mut self.states[..];
        let pairs = all * (dim + 2);
        if threads == 1 {
            states.chunks_exact_mut(pairs.max(1)).enumerate().for_each(heads);
        } else {
            states.par_chunks_exact_mut(pairs.max(1)).enumerate().for_each(heads);
        }
    }

    /// Takes the sinks in, divides, and writes.
    pub(super) fn finish<O: Element<Compute = f32>>(self, sinks: Option<&[f32]>, mut outputs: Outputs<'_, O>) {
        let [_, heads, len, dim] = outputs.out.sizes();
        let (mut values, mut row) = (vec![0.0; dim], Vec::with_capacity(dim));
        for (n, state) in self.states.chunks_exact(dim + 2).enumerate() {
            let head = n / len % heads;
            let lse = state::finish(state, sinks.and_then(|sinks| sinks.get(head)).copied(), &mut values);
            row.clear();
            row.extend(values.iter().map(|&x| O::from_f64(x)));
            write_row(&mut outputs.out, [n / len / heads, head, n % len], &row);
            if let Some(to) = &mut outputs.lse {
                to[n] = lse as f32;
            }
        }
    }
}

/// Joins a finished output to a state: `state::from_output` and `state::merge_states` without the row between them.
fn join(state: &mut [f64], out: &[f32], lse: f32) {
    let [max, sum, values @ ..] = state else { return };
    if lse == f32::NEG_INFINITY {
        return;
    }
    let mut row = RowState { max: *max, sum: *sum };
    let nothing_yet = row.sum == 0.0;
    let (a, b) = row.merge(RowState { max: f64::from(lse), sum: 1.0 });
    (*max, *sum) = (row.max, row.sum);
    if nothing_yet {
        values.iter_mut().zip(out).for_each(|(x, &y)| *x = f64::from(y));
    } else {
        values.iter_mut().zip(out).for_each(|(x, &y)| *x = *x * a + f64::from(y) * b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_outputs_are_merged_states() {
        let (mut got, mut want, mut one) = ([0.0f64; 4], [0.0f64; 4], [0.0f64; 4]);
        state::clear(&mut got, 2);
        state::clear(&mut want, 2);
        for (lse, out) in [
            (f32::NEG_INFINITY, [0.0; 2]),
            (0.3, [1.0, -0.0]),
            (2.5, [-3.0, 0.1]),
            (f32::NEG_INFINITY, [0.0; 2]),
            (-80.0, [9.0, 1.0]),
            (1.0, [f32::INFINITY, f32::NAN]),
            (f32::NAN, [1.0, 2.0]),
        ] {
            join(&mut got, &out, lse);
            state::from_output(&out.map(f64::from), f64::from(lse), &mut one);
            state::merge_states(&mut want, &one, 2).unwrap();
            assert_eq!(got.map(f64::to_bits), want.map(f64::to_bits), "{lse}");
        }
    }
}
