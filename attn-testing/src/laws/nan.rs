//! NaN and infinities: they influence the rows that see them, and nothing else.

use attn_core::score::At;
use attn_core::{Align, Attention, AttnShape, Mask, View};

use super::{attend, same_bits};
use crate::cases::{Inputs, Options, OwnedTerm, Table, kinds, shape};
use crate::engine::Engine;
use crate::paint::{Paint, nonfinite};

fn rows(dims: &AttnShape) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let AttnShape { batch, q_heads, q_len, .. } = *dims;
    (0..batch).flat_map(move |b| (0..q_heads).flat_map(move |h| (0..q_len).map(move |i| (b, h, i))))
}

/// Keys and values that no query of their group sees are replaced by NaN and infinities: no bit changes.
pub fn hidden_nan_changes_no_bit<E: Engine>(engine: &E) {
    for dims in [shape((2, 4, 2, 9, 70, 8, 5)), shape((1, 2, 1, 70, 33, 4, 4)), shape((1, 2, 1, 1, 100, 8, 8))] {
        let clean = Inputs::<f32>::plain(dims, 51);
        for term in kinds(&dims, 52) {
            hidden_nonfinite(engine, &clean, &Options::masked(vec![term]), &dims);
        }
        // A bias of −∞ hides as well.
        let bias: Vec<f32> = (0..dims.kv_len).map(|j| if j % 3 == 1 { f32::NEG_INFINITY } else { 0.5 }).collect();
        let options = Options { bias: Some(([1, 1, 1, dims.kv_len], Table(bias))), ..Options::default() };
        hidden_nonfinite(engine, &clean, &options, &dims);
        // As does a closure.
        let hide = |at: At| at.key % 5 != 2;
        let attn = Attention::new().mask_mod(hide);
        let mut dirty = clean.clone();
        dirty.k.each(|[_, _, j, d], x| nonfinite_if(j % 5 == 2, j + d, x));
        dirty.v.each(|[_, _, j, d], x| nonfinite_if(j % 5 == 2, j + d, x));
        let (a, b) = (attend(engine, &attn, &clean), attend(engine, &attn, &dirty));
        same_bits(&a.out, &b.out, &(engine.label(), "closure", dims));
    }
}

fn nonfinite_if(yes: bool, n: usize, x: &mut f32) {
    if yes {
        *x = nonfinite(n);
    }
}

fn hidden_nonfinite<E: Engine>(engine: &E, clean: &Inputs<f32>, options: &Options, dims: &AttnShape) {
    let attn = options.attention();
    let sees = |at: At| {
        let bias = options.bias.as_ref().is_none_or(|(_, bias)| bias[at.key] != f32::NEG_INFINITY);
        bias && options.terms.iter().all(|term| term.sees(dims, at))
    };
    let hidden = |batch: usize, kv_head: usize, key: usize| {
        let group = dims.group();
        (0..group).all(|n| (0..dims.q_len).all(|query| !sees(At { batch, head: kv_head * group + n, query, key })))
    };
    let mut dirty = clean.clone();
    dirty.k.each(|[b, h, j, d], x| nonfinite_if(hidden(b, h, j), j + d, x));
    dirty.v.each(|[b, h, j, d], x| nonfinite_if(hidden(b, h, j), j + d + 1, x));
    let (want, got) = (attend(engine, &attn, clean), attend(engine, &attn, &dirty));
    same_bits(&got.out, &want.out, &(engine.label(), dims, options));
    same_bits(&got.lse, &want.lse, &(engine.label(), dims, options));
}

/// A NaN in one key, or in one value, makes the rows that see it NaN and leaves every other row bit for bit as it was.
pub fn a_visible_nan_marks_its_rows_only<E: Engine>(engine: &E) {
    let dims = shape((2, 4, 2, 37, 70, 8, 5));
    let clean = Inputs::<f32>::plain(dims, 53);
    let mut paint = Paint::new(54);
    for term in kinds(&dims, 55) {
        let attn = Attention::new().mask(term.mask());
        let before = attend(engine, &attn, &clean);
        let (batch, kv_head, key) = (paint.below(2), paint.below(2), paint.below(dims.kv_len));
        for in_key in [true, false] {
            let mut dirty = clean.clone();
            let tensor = if in_key { &mut dirty.k } else { &mut dirty.v };
            let column = paint.below(5);
            let at = tensor.index([batch, kv_head, key, column]);
            tensor.data[at] = f32::NAN;
            let after = attend(engine, &attn, &dirty);
            for (row, (b, head, query)) in rows(&dims).enumerate() {
                let what = (engine.label(), &term, in_key, (batch, kv_head, key, column), (b, head, query));
                let mine = b == batch && dims.kv_head(head) == kv_head;
                let (old, new) = (&before.out[row * 5..row * 5 + 5], &after.out[row * 5..row * 5 + 5]);
                if mine && term.sees(&dims, At { batch, head, query, key }) {
                    // A NaN in a value reaches its own column; one in a key all of them, and the lse.
                    assert!(
                        if in_key { new.iter().all(|x| x.is_nan()) } else { new[column].is_nan() },
                        "{what:?}: {new:?}"
                    );
                    assert!(!in_key || after.lse[row].is_nan(), "{what:?}: the lse of the row is {}", after.lse[row]);
                } else {
                    same_bits(new, old, &what);
                    same_bits(&after.lse[row..=row], &before.lse[row..=row], &what);
                }
            }
        }
    }
}

/// Exactly +0 and an lse of −∞, whatever k and v hold, alone or among live rows.
pub fn fully_masked_rows_are_zero<E: Engine>(engine: &E) {
    for dims in [shape((2, 2, 1, 20, 40, 8, 6)), shape((1, 1, 1, 1, 3, 2, 1)), shape((1, 2, 2, 100, 70, 4, 9))] {
        let mut inputs = Inputs::<f32>::plain(dims, 56);
        let none = vec![false; 1];
        let every_third: Vec<bool> = (0..dims.q_len).map(|i| i % 3 != 0).collect();
        for (keep, sizes) in [(&none, [1, 1, 1, 1]), (&every_third, [1, 1, dims.q_len, 1])] {
            let term = OwnedTerm::Keep(sizes, Table(keep.clone()));
            let answer = attend(engine, &Attention::new().mask(term.mask()), &inputs);
            for (row, (batch, head, query)) in rows(&dims).enumerate() {
                let out = &answer.out[row * dims.value_dim..(row + 1) * dims.value_dim];
                let dead = !term.sees(&dims, At { batch, head, query, key: 0 });
                let what = (engine.label(), dims, row);
                assert_eq!(out.iter().all(|x| x.to_bits() == 0), dead, "{what:?}: {out:?}");
                assert_eq!(answer.lse[row] == f32::NEG_INFINITY, dead, "{what:?}: {}", answer.lse[row]);
            }
        }
        inputs.k.each(|[_, _, j, d], x| *x = nonfinite(j + d));
        inputs.v.each(|[_, _, j, d], x| *x = nonfinite(j + d));
        let hidden = Attention::new().mask(Mask::drop(View::broadcast(&[true], &[]).expect("a scalar")));
        let answer = attend(engine, &hidden, &inputs);
        assert!(answer.out.iter().all(|x| x.to_bits() == 0), "{}: nonfinite numbers behind a mask", engine.label());
        // With a sink: zero still, and the lse is the sink.
        let sinks: Vec<f32> = (0..dims.q_heads).map(|h| h as f32 - 0.5).collect();
        let answer = attend(engine, &hidden.sinks(&sinks), &inputs);
        assert!(answer.out.iter().all(|x| x.to_bits() == 0), "{}: a sink on a masked row", engine.label());
        for (row, (_, head, _)) in rows(&dims).enumerate() {
            assert!((answer.lse[row] - sinks[head]).abs() < 1e-6, "{}: lse {}", engine.label(), answer.lse[row]);
        }
    }
}

/// A score of +∞ makes its row NaN, and no other.
pub fn an_infinite_score_is_nan<E: Engine>(engine: &E) {
    let dims = shape((1, 1, 1, 20, 70, 4, 3));
    for place in [0, 1, 15, 16, 63, 64, 69] {
        let mut inputs = Inputs::<f32>::plain(dims, 57);
        inputs.k.each(|[_, _, j, _], x| {
            if j == place {
                *x = f32::INFINITY;
            }
        });
        // All queries positive or negative throughout: the score is +∞ or −∞, never a NaN of its own.
        inputs.q.each(|[_, _, i, _], x| *x = if i % 2 == 0 { x.abs() + 0.1 } else { -x.abs() - 0.1 });
        let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
        let answer = attend(engine, &causal, &inputs);
        for query in 0..20 {
            let sees = place <= query + 50;
            let row = &answer.out[query * 3..query * 3 + 3];
            let what = (engine.label(), place, query);
            if sees && query % 2 == 0 {
                assert!(row.iter().all(|x| x.is_nan()), "{what:?}: +inf gave {row:?}");
            } else {
                assert!(row.iter().all(|x| x.is_finite()), "{what:?}: {row:?}");
            }
        }
    }
}

/// A NaN in a query makes its row NaN, never zero, and leaves the others alone.
pub fn nan_in_a_query_marks_its_row_only<E: Engine>(engine: &E) {
    for q_len in [1, 20, 70] {
        let dims = shape((1, 2, 1, q_len, 50, 8, 4));
        let clean = Inputs::<f32>::plain(dims, 58);
        let before = attend(engine, &Attention::new(), &clean);
        for marked in [0, q_len / 2, q_len - 1] {
            let mut dirty = clean.clone();
            let at = dirty.q.index([0, 1, marked, 3]);
            dirty.q.data[at] = f32::NAN;
            let after = attend(engine, &Attention::new(), &dirty);
            for row in 0..2 * q_len {
                let (old, new) = (&before.out[row * 4..row * 4 + 4], &after.out[row * 4..row * 4 + 4]);
                if row == q_len + marked {
                    assert!(new.iter().all(|x| x.is_nan()), "{}: {new:?}", engine.label());
                } else {
                    same_bits(new, old, &(engine.label(), q_len, marked, row));
                }
            }
        }
    }
}
