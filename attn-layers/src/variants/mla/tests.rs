//! Both forms against the definition, computed head by head with the reference engine.

use attn_core::position::Positions;
use attn_core::position::rope::Pairing;
use attn_core::position::rope::Rope;
use attn_core::{Layout, reference};

use super::*;
use std::vec;
use std::vec::Vec;

const HEADS: usize = 3;
const MODEL: usize = 5;
const LATENT: usize = 4;
const NOPE: usize = 3;
const ROTARY: usize = 2;
const VALUE: usize = 2;
const RANK: usize = 6;

struct Weights(Vec<f64>);

impl Weights {
    fn new() -> Self {
        Self((0..400).map(|i| libm::sin(0.7 + i as f64 * 2.3)).collect())
    }

    fn matrix(&self, seed: usize, rows: usize, columns: usize) -> View<'_, f64> {
        View::strided(&self.0, [1, 1, rows, columns], [0, 0, columns as isize, 1], seed).unwrap()
    }

    fn up(&self, seed: usize, columns: usize) -> View<'_, f64> {
        let strides = [0, (LATENT * columns) as isize, columns as isize, 1];
        View::strided(&self.0, [1, HEADS, LATENT, columns], strides, seed).unwrap()
    }

    fn mla(&self, low_rank: bool) -> Mla<'_, f64> {
        let queries = HEADS * (NOPE + ROTARY);
        let query = if low_rank {
            MlaQuery::LowRank {
                w_dq: self.matrix(1, MODEL, RANK),
                norm: Some(&self.0[9..9 + RANK]),
                w_uq: self.matrix(2, RANK, queries),
            }
        } else {
            MlaQuery::Full(self.matrix(3, MODEL, queries))
        };
        Mla {
            query,
            w_dkv: self.matrix(4, MODEL, LATENT),
            kv_norm: low_rank.then(|| &self.0[5..5 + LATENT]),
            w_kr: self.matrix(6, MODEL, ROTARY),
            w_uk: self.up(7, NOPE),
            w_uv: self.up(8, VALUE),
            w_o: self.matrix(10, HEADS * VALUE, MODEL),
            norm_eps: 1e-3,
            rope: Rope::new(Pairing::Interleaved).base(100.0),
            scale: None,
        }
    }
}

/// `x·W` for rows of `x`.
fn times(x: &[f64], w: View<'_, f64>, head: usize) -> Vec<f64> {
    let [_, _, rows, columns] = w.sizes();
    let entry = |x: &[f64], c| (0..rows).map(|r| x[r] * w.at(0, head, r, c)).sum::<f64>();
    x.chunks(rows).flat_map(|x| (0..columns).map(move |c| entry(x, c))).collect()
}

fn normed(x: &[f64], weight: Option<&[f64]>, len: usize) -> Vec<f64> {
    let Some(weight) = weight else { return x.to_vec() };
    let root = |x: &[f64]| libm::sqrt(x.iter().map(|t| t * t).sum::<f64>() / len as f64 + 1e-3);
    x.chunks(len).flat_map(|x| x.iter().zip(weight).map(move |(t, w)| t / root(x) * w)).collect()
}

/// The definition, head by head with the reference engine, for one sequence.
fn definition(mla: &Mla<'_, f64>, x: &[f64]) -> Vec<f64> {
    let n = x.len() / MODEL;
    let rotate = |x: &mut [f64]| {
        mla.rope.apply_in_place(&mut ViewMut::matrix(x, n, ROTARY).unwrap(), Positions::Offset(0)).unwrap();
    };
    let q = match mla.query {
        MlaQuery::Full(w_q) => times(x, w_q, 0),
        MlaQuery::LowRank { w_dq, norm, w_uq } => times(&normed(&times(x, w_dq, 0), norm, RANK), w_uq, 0),
    };
    let latents = normed(&times(x, mla.w_dkv, 0), mla.kv_norm, LATENT);
    let mut rotary_key = times(x, mla.w_kr, 0);
    rotate(&mut rotary_key);
    let mut context = vec![0.0; n * HEADS * VALUE];
    for head in 0..HEADS {
        let of_head = |range: std::ops::Range<usize>| {
            let width = HEADS * (NOPE + ROTARY);
            let start = head * (NOPE + ROTARY);
            q.chunks(width).flat_map(|q| q[start..][range.clone()].to_vec()).collect::<Vec<f64>>()
        };
        let mut rotary_query = of_head(NOPE..NOPE + ROTARY);
        rotate(&mut rotary_query);
        let join = |a: &[f64], b: &[f64]| {
            a.chunks(NOPE).zip(b.chunks(ROTARY)).flat_map(|(a, b)| [a, b].concat()).collect::<Vec<f64>>()
        };
        let queries = join(&of_head(0..NOPE), &rotary_query);
        let keys = join(&times(&latents, mla.w_uk, head), &rotary_key);
        let values = times(&latents, mla.w_uv, head);
        let out = ViewMut::strided(&mut context, [1, 1, n, VALUE], [0, 0, (HEADS * VALUE) as isize, 1], head * VALUE);
        reference::forward(
            &Attention::new().mask(Mask::causal(Align::TopLeft)),
            View::matrix(&queries, n, NOPE + ROTARY).unwrap(),
            View::matrix(&keys, n, NOPE + ROTARY).unwrap(),
            View::matrix(&values, n, VALUE).unwrap(),
            out.unwrap(),
            &mut vec![0.0; n],
        )
        .unwrap();
    }
    times(&context, mla.w_o, 0)
}

#[test]
fn both_forms_are_the_definition_whole_or_in_chunks() {
    let weights = Weights::new();
    let x: Vec<f64> = (0..2 * 7 * MODEL).map(|i| libm::cos(i as f64 * 1.1)).collect();
    // Miri takes hundreds of times as long, and looks for something else.
    for low_rank in if cfg!(miri) { &[true][..] } else { &[false, true] } {
        let mla = weights.mla(*low_rank);
        let want = x.chunks(7 * MODEL).flat_map(|x| definition(&mla, x)).collect::<Vec<f64>>();
        let mut caches = Vec::new();
        for (form, chunks) in [
            (MlaForm::Expanded, &[7usize][..]),
            (MlaForm::Absorbed, &[7]),
            (MlaForm::Expanded, &[3, 1, 3]),
            (MlaForm::Absorbed, &[5, 1, 1]),
        ] {
            if cfg!(miri) && chunks.len() == 1 {
                continue;
            }
            // A longer cache than needed, with junk behind.
            let (mut cache, mut out) = (vec![f64::NAN; 2 * 9 * (LATENT + ROTARY)], vec![0.0; x.len()]);
            let mut past = 0;
            for &n in chunks {
                let sizes = |n| [2, 1, n, MODEL];
                let strides = [7 * MODEL as isize, 0, MODEL as isize, 1];
                let tokens = View::strided(&x, sizes(n), strides, past * MODEL).unwrap();
                let mut y = ViewMut::strided(&mut out, sizes(n), strides, past * MODEL).unwrap();
                let mut scratch = vec![0.0; mla.scratch_len(form, n, past).unwrap()];
                let mut cache = ViewMut::new(&mut cache, Layout::Bhsd, [2, 1, 9, LATENT + ROTARY]).unwrap();
                mla.forward(form, tokens, &mut cache, past, &mut y, &mut scratch).unwrap();
                past += n;
            }
            for (got, want) in out.iter().zip(&want) {
                assert!((got - want).abs() < 1e-12, "{form:?} {chunks:?}: {got} {want}");
            }
            caches.push(cache[..7 * (LATENT + ROTARY)].to_vec());
        }
        assert!(caches.iter().all(|cache| cache == &caches[0]));
    }
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let weights = Weights::new();
    let mla = weights.mla(true);
    let x = vec![0.5; 2 * MODEL];
    let x = View::matrix(&x, 2, MODEL).unwrap();
    let (mut cache, mut out) = (vec![7.0; 4 * (LATENT + ROTARY)], vec![7.0; 2 * MODEL]);
    let mut refused = |mla: &Mla<'_, f64>, past: usize, rows: usize, less: usize| {
        let needed = mla.scratch_len(MlaForm::Absorbed, 2, past.min(9)).unwrap_or(100);
        let mut cache = ViewMut::matrix(&mut cache, rows, LATENT + ROTARY).unwrap();
        let mut out = ViewMut::matrix(&mut out, 2, MODEL).unwrap();
        mla.forward(MlaForm::Absorbed, x, &mut cache, past, &mut out, &mut vec![0.0; needed - less]).is_err()
    };
    assert!(refused(&mla, 3, 4, 0) && refused(&mla, usize::MAX, 4, 0) && refused(&mla, 0, 4, 1));
    assert!(refused(&Mla { w_kr: weights.matrix(0, MODEL, ROTARY + 1), ..mla }, 0, 4, 0));
    assert!(refused(&Mla { w_uk: weights.up(0, NOPE + 1), ..mla }, 0, 4, 0));
    let uneven = View::strided(&weights.0, [1, HEADS, LATENT + 1, NOPE], [0, 1, 1, 1], 0).unwrap();
    assert!(refused(&Mla { w_uk: uneven, ..mla }, 0, 4, 0));
    assert!(refused(&Mla { w_o: weights.matrix(0, HEADS, MODEL), ..mla }, 0, 4, 0));
    assert!(refused(&Mla { kv_norm: Some(&[1.0]), ..mla }, 0, 4, 0));
    assert!(refused(&Mla { norm_eps: f64::NAN, ..mla }, 0, 4, 0));
    assert!(refused(&Mla { scale: Some(f64::NAN), ..mla }, 0, 4, 0));
    assert!(out.iter().chain(&cache).all(|&x| x == 7.0));
}
