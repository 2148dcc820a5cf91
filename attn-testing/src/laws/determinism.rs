//! What the bits of a row may depend on.
//!
//! On one level an output row's bits depend on that row's query, its keys and values, the mask and the options: not on
//! the batch, on the rows beside it, on scratch, or on what came before.

use attn_core::{Align, Attention, AttnShape, Mask};

use super::{attend, same_bits};
use crate::cases::{Case, Inputs, shape};
use crate::engine::Engine;
use crate::paint::{nonfinite, normal_at};

/// A sequence alone gives the bits that it gives in a batch.
pub fn a_row_does_not_depend_on_its_batch<E: Engine>(engine: &E) {
    for (q_len, kv_len) in [(1, 50), (5, 33), (40, 40), (97, 64)] {
        let whole_shape = shape((3, 4, 2, q_len, kv_len, 24, 20));
        let whole = Inputs::<f32>::plain(whole_shape, 21);
        let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
        let together = attend(engine, &attn, &whole);
        for batch in 0..3 {
            let one = AttnShape { batch: 1, ..whole_shape };
            let mut alone = Inputs::<f32>::plain(one, 0);
            alone.q.each(|[_, h, s, d], x| *x = whole.q.at([batch, h, s, d]));
            alone.k.each(|[_, h, s, d], x| *x = whole.k.at([batch, h, s, d]));
            alone.v.each(|[_, h, s, d], x| *x = whole.v.at([batch, h, s, d]));
            let answer = attend(engine, &attn, &alone);
            let (rows, len) = (one.rows(), one.rows() * one.value_dim);
            same_bits(&answer.out, &together.out[batch * len..][..len], &(engine.label(), q_len, batch));
            same_bits(&answer.lse, &together.lse[batch * rows..][..rows], &(engine.label(), q_len, batch));
        }
    }
}

/// Changing every other query leaves a row's bits alone.
pub fn a_row_does_not_depend_on_the_other_queries<E: Engine>(engine: &E) {
    for q_len in [2, 17, 70] {
        let inputs = Inputs::<f32>::plain(shape((1, 2, 1, q_len, 75, 16, 12)), 22);
        let before = attend(engine, &Attention::new(), &inputs);
        for kept in [0, q_len / 2, q_len - 1] {
            let mut others = inputs.clone();
            others.q.each(|[_, h, s, d], x| {
                if s != kept {
                    // Larger by far, and in one head not even numbers.
                    *x = if h == 0 { 50.0 * *x } else { nonfinite(d) };
                }
            });
            let after = attend(engine, &Attention::new(), &others);
            for head in 0..2 {
                let row = (head * q_len + kept) * 12..(head * q_len + kept + 1) * 12;
                same_bits(&before.out[row.clone()], &after.out[row], &(engine.label(), q_len, kept, head));
            }
        }
    }
}

/// The same call gives the same bits, whatever ran in between.
pub fn running_again_gives_the_same_bits<E: Engine>(engine: &E) {
    let cases: Vec<Case> = (0..12).map(|n| Case::random(900 + n)).collect();
    let run = |case: &Case| attend(engine, &case.options.attention(), &case.inputs::<f32>());
    let first: Vec<_> = cases.iter().map(run).collect();
    for (case, before) in cases.iter().zip(&first).rev() {
        let after = run(case);
        same_bits(&before.out, &after.out, &(engine.label(), case));
        same_bits(&before.lse, &after.lse, &(engine.label(), case));
    }
}

/// Under a causal mask rows up to `i` have the same bits whatever follows key `i`.
pub fn future_tokens_never_change_past_rows<E: Engine>(engine: &E) {
    let len = 80;
    let inputs = Inputs::<f32>::plain(shape((1, 2, 1, len, len, 16, 9)), 23);
    let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
    let before = attend(engine, &causal, &inputs);
    for cut in [0, 1, 15, 16, 47, 48, 63, 64, 78] {
        for kind in 0..3 {
            let mut later = inputs.clone();
            let change = |[b, h, s, d]: [usize; 4], x: &mut f32| {
                if s > cut {
                    *x = match kind {
                        0 => normal_at(99, [b, h, s, d]) as f32,
                        1 => 1e30 * *x,
                        _ => nonfinite(s + d),
                    };
                }
            };
            later.k.each(change);
            later.v.each(change);
            let after = attend(engine, &causal, &later);
            for head in 0..2 {
                let rows = head * len * 9..(head * len + cut + 1) * 9;
                same_bits(&before.out[rows.clone()], &after.out[rows], &(engine.label(), cut, kind));
                let rows = head * len..head * len + cut + 1;
                same_bits(&before.lse[rows.clone()], &after.lse[rows], &(engine.label(), cut, kind));
            }
        }
    }
}
