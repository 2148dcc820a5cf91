//! Masks and options of a random call. Tables stay small: a dense one of a large shape is broadcast.

use attn_core::mask::Window;
use attn_core::{Align, AttnShape};

use crate::cases::{Drop, Options, OwnedTerm, Table};
use crate::paint::{Paint, bools, normals};

/// Most elements of a table.
const MOST: usize = 1 << 17;

/// Adds options and terms of a mask to what is there: nothing at all in two calls of five, so that a row has many keys.
pub(super) fn draw(options: &mut Options, shape: &AttnShape, paint: &mut Paint) {
    if paint.chance(0.4) {
        return;
    }
    for _ in 0..paint.pick(&[0, 1, 1, 1, 2, 3]) {
        options.terms.push(term(shape, paint));
    }
    if paint.chance(0.25) {
        let size = 2f64.powf(8.0 * paint.uniform() - 6.0);
        options.scale = Some(paint.pick(&[0.5, 0.05, -0.25, 1.0, size]));
    }
    if paint.chance(0.15) {
        options.softcap = Some(paint.pick(&[1.0, 5.0, 30.0, 50.0]));
    }
    if paint.chance(0.15) {
        options.temperature = Some(paint.pick(&[0.5, 2.0, 0.7]));
    }
    if paint.chance(0.2) {
        let sizes = dense(shape, paint);
        let sigma = paint.pick(&[0.1, 2.0, 2.0, 20.0]);
        let mut bias: Vec<f32> = normals(paint.next(), sizes.iter().product(), sigma);
        for x in &mut bias {
            if paint.chance(0.05) {
                *x = f32::NEG_INFINITY;
            }
        }
        options.bias = Some((sizes, Table(bias)));
    }
    if paint.chance(0.15) {
        let slopes = (0..shape.q_heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect();
        options.alibi = Some((slopes, align(paint)));
    }
    if paint.chance(0.2) {
        options.sinks = Some(normals(paint.next(), shape.q_heads, 2.0));
    }
    if paint.chance(0.05) {
        options.dropout = Drop::Seeded(paint.pick(&[0.1, 0.5]), paint.next());
    }
}

fn align(paint: &mut Paint) -> Align {
    let offset = paint.below(100) as isize - 20;
    paint.pick(&[Align::TopLeft, Align::BottomRight, Align::BottomRight, Align::Offset(offset)])
}

/// The shape of a dense table, which broadcasts if it would be too large.
fn dense(shape: &AttnShape, paint: &mut Paint) -> [usize; 4] {
    let mut sizes = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
    for size in &mut sizes {
        if paint.chance(0.4) {
            *size = 1;
        }
    }
    for axis in 0..4 {
        if sizes.iter().product::<usize>() > MOST {
            sizes[axis] = 1;
        }
    }
    sizes
}

/// Bounds of documents: some of which may be empty, the first not always at 0.
fn bounds(limit: usize, documents: usize, paint: &mut Paint) -> Vec<usize> {
    let mut cu: Vec<usize> = (0..=documents).map(|_| paint.below(limit + 1)).collect();
    if paint.chance(0.6) {
        (cu[0], cu[documents]) = (0, limit);
    }
    cu.sort_unstable();
    cu
}

/// One term of a mask, of any kind.
fn term(shape: &AttnShape, paint: &mut Paint) -> OwnedTerm {
    let &AttnShape { batch, q_heads, q_len, kv_len, .. } = shape;
    let far = |paint: &mut Paint, limit: usize| if paint.chance(0.8) { Some(paint.below(limit + 1)) } else { None };
    // Lengths near the end more often than near the beginning: rows keep keys.
    let lens = |paint: &mut Paint, limit: usize| -> Vec<usize> {
        (0..batch).map(|_| limit - paint.below(limit + 1).min(paint.below(limit + 1))).collect()
    };
    let window =
        |paint: &mut Paint| Window { left: far(paint, kv_len), right: far(paint, kv_len), align: align(paint) };
    match paint.below(16) {
        0..4 => OwnedTerm::Causal(align(paint)),
        4 | 5 => OwnedTerm::Window(window(paint)),
        6 => OwnedTerm::Prefix(lens(paint, kv_len), align(paint)),
        7 => OwnedTerm::KvLens(lens(paint, kv_len)),
        8 => OwnedTerm::KvStarts(lens(paint, kv_len).into_iter().map(|len| kv_len - len).collect()),
        9 => OwnedTerm::QLens(lens(paint, q_len)),
        10 | 11 => {
            let documents = 1 + paint.below(4);
            OwnedTerm::Documents {
                cu_q: bounds(q_len, documents, paint),
                cu_k: bounds(kv_len, documents, paint),
                causal: paint.chance(0.4).then(|| align(paint)),
                window: paint.chance(0.2).then(|| window(paint)),
            }
        }
        12 => {
            let (block_q, block_k) = (1 + paint.below(70), 1 + paint.below(70));
            let sizes = [
                if paint.chance(0.5) { batch } else { 1 },
                if paint.chance(0.5) { q_heads } else { 1 },
                q_len.div_ceil(block_q),
                kv_len.div_ceil(block_k),
            ];
            let blocks = Table(bools(paint.next(), sizes.iter().product(), 0.6));
            OwnedTerm::BlockSparse { sizes, blocks, block_q, block_k }
        }
        13 if kv_len >= q_len => {
            let parent =
                |n: usize, paint: &mut Paint| if n == 0 || paint.chance(0.2) { None } else { Some(paint.below(n)) };
            OwnedTerm::Tree((0..q_len).map(|n| parent(n, paint)).collect())
        }
        n => {
            let sizes = dense(shape, paint);
            let share = paint.pick(&[0.5, 0.9, 0.05]);
            let mask = Table(bools(paint.next(), sizes.iter().product(), share));
            if n == 14 { OwnedTerm::Drop(sizes, mask) } else { OwnedTerm::Keep(sizes, mask) }
        }
    }
}
