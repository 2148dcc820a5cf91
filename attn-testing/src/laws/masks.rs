//! Masks as engines apply them, against brute force.

use attn_core::score::At;
use attn_core::{Attention, AttnShape, Mask, View};

use super::{attend, oracle};
use crate::cases::{Inputs, OwnedTerm, kinds, shape};
use crate::engine::Engine;
use crate::paint::Paint;
use crate::tolerance::ETA;

/// Runs the terms, and compares with the oracle under the tensor of bools that their definitions give.
fn check<E: Engine>(engine: &E, inputs: &Inputs<f32>, terms: &[&OwnedTerm]) {
    let dims = inputs.shape;
    let mut seen = Vec::with_capacity(dims.rows() * dims.kv_len);
    for batch in 0..dims.batch {
        for head in 0..dims.q_heads {
            for query in 0..dims.q_len {
                for key in 0..dims.kv_len {
                    let at = At { batch, head, query, key };
                    seen.push(terms.iter().all(|term| term.sees(&dims, at)));
                }
            }
        }
    }
    let brute = View::broadcast(&seen, &[dims.batch, dims.q_heads, dims.q_len, dims.kv_len]).expect("full size");
    let want = oracle(&Attention::new().mask(Mask::keep(brute)), inputs);
    let mask = terms.iter().fold(Mask::none(), |mask, term| mask.and(term.mask()));
    let got = attend(engine, &Attention::new().mask(mask), inputs);
    want.check(ETA, &got, &(engine.label(), dims, terms));
}

fn shapes() -> [AttnShape; 4] {
    [
        shape((2, 2, 1, 5, 9, 4, 3)),
        shape((1, 4, 2, 21, 70, 8, 5)),
        shape((2, 2, 2, 70, 33, 3, 8)),
        shape((1, 2, 1, 1, 131, 8, 8)),
    ]
}

/// Each kind of term, on shapes with more keys than queries and the reverse.
pub fn every_term_hides_what_it_says<E: Engine>(engine: &E) {
    for (n, dims) in shapes().into_iter().enumerate() {
        let inputs = Inputs::<f32>::plain(dims, 41);
        for term in kinds(&dims, 5 + n as u64) {
            check(engine, &inputs, &[&term]);
        }
    }
}

/// All pairs of kinds.
pub fn every_pair_of_terms_is_a_conjunction<E: Engine>(engine: &E) {
    let dims = shape((2, 2, 1, 9, 70, 2, 3));
    let inputs = Inputs::<f32>::plain(dims, 42);
    let all = kinds(&dims, 8);
    for (n, first) in all.iter().enumerate() {
        for second in &all[n..] {
            check(engine, &inputs, &[first, second]);
        }
    }
}

/// `mask_mod` and `score_mod`, alone and together with a mask.
pub fn mods_hide_and_change_scores<E: Engine>(engine: &E) {
    let mut paint = Paint::new(43);
    for dims in shapes() {
        let inputs = Inputs::<f32>::plain(dims, 44);
        let odd = |at: At| !(at.query + at.key + at.head).is_multiple_of(3);
        let term = kinds(&dims, paint.next())[1].clone();
        // As a tensor of bools for the oracle; the closure for the engine.
        let mut seen = Vec::new();
        let mut bias = Vec::new();
        for batch in 0..dims.batch {
            for head in 0..dims.q_heads {
                for query in 0..dims.q_len {
                    for key in 0..dims.kv_len {
                        seen.push(odd(At { batch, head, query, key }));
                        bias.push(-0.25 * (query.abs_diff(key) % 7) as f32);
                    }
                }
            }
        }
        let sizes = [dims.batch, dims.q_heads, dims.q_len, dims.kv_len];
        let keep = Mask::keep(View::broadcast(&seen, &sizes).expect("full size")).and(term.mask());
        let want =
            oracle(&Attention::new().mask(keep).bias(View::broadcast(&bias, &sizes).expect("full size")), &inputs);
        let attn = Attention::new()
            .mask(term.mask())
            .score_mod(|s, at: At| s - 0.25 * (at.query.abs_diff(at.key) % 7) as f64)
            .mask_mod(odd);
        want.check(ETA, &attend(engine, &attn, &inputs), &(engine.label(), dims));
    }
}
