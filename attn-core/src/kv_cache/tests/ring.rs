//! Sinks and a ring.

use super::stream::{Stream, assert_same_bits};
use crate::kv_cache::*;
use crate::outputs::Outputs;
use crate::position::Positions;
use crate::position::rope::{Pairing, Rope, RopeTables};
use crate::score::At;
use crate::{Align, Layout, Mask, streaming};
use crate::{Attention, AttnError, Result, View, ViewMut};
use std::vec;
use std::vec::Vec;

/// Whatever the chunks, sinks and window, each token gets the bits of a plain call with the rule as a closure.
#[test]
fn chunks_and_eviction_follow_the_rule_bit_for_bit() {
    let stream = Stream::new(2, 4, 2, 13, 6, 3);
    // Miri takes hundreds of times as long, and looks for something else.
    let rules = if cfg!(miri) { &[(2, 3)][..] } else { &[(0, 1), (0, 4), (2, 3), (1, 20), (9, 3), (4, 9)] };
    for &(sinks, window) in rules {
        let attn = Attention::new().softcap(3.0).sinks(&[0.5, -1.0, 0.0, 2.0]);
        let rule = |at: At| at.key <= at.query && (at.query - at.key < window || at.key < sinks);
        let want = stream.plain(&attn.mask_mod(rule));
        for chunks in [&[13usize][..], &[1; 13], &[5, 7, 1]] {
            if cfg!(miri) && chunks.len() != 3 {
                continue;
            }
            let slots = sinks + window;
            let (mut k, mut v) = (vec![f32::NAN; 4 * slots * 6], vec![f32::NAN; 4 * slots * 3]);
            let mut seen = [0, 0];
            let k = ViewMut::new(&mut k, Layout::Bshd, [2, 2, slots, 6]).unwrap();
            let v = ViewMut::new(&mut v, Layout::Bhsd, [2, 2, slots, 3]).unwrap();
            let mut cache = RingCache::new(k, v, &mut seen, sinks, window).unwrap();
            for &n in chunks {
                let start = cache.seen()[0];
                let chunk = stream.chunk([start; 2], n);
                let (cq, ck, cv) = chunk.views();
                let (mut out, mut lse) = (vec![9.0f32; 8 * n * 3], vec![9.0f32; 8 * n]);
                let out_view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap();
                let outputs = Outputs::new(out_view).lse(&mut lse);
                cache.advance(&attn, cq, ck, cv, outputs, &mut [0.0; 3]).unwrap();
                assert_same_bits(&want, &out, &lse, [start; 2], [n; 2], n);
            }
            // The ring holds the tokens that the last one saw, in ascending order.
            let kept: Vec<usize> = (0..13).filter(|j| 12 - j < window || *j < sinks).collect();
            assert!(cache.positions(1).eq(kept.iter().copied()));
            let n = cache.len(1);
            let (mut k_out, mut v_out) = (vec![0.0f32; 2 * n * 6], vec![0.0f32; 2 * n * 3]);
            let mut k_out = ViewMut::new(&mut k_out, Layout::Bhsd, [1, 2, n, 6]).unwrap();
            let mut v_out = ViewMut::new(&mut v_out, Layout::Bhsd, [1, 2, n, 3]).unwrap();
            cache.unroll(1, &mut k_out, &mut v_out).unwrap();
            let (_, k, v) = stream.views();
            for (i, &t) in kept.iter().enumerate() {
                assert!(k_out.as_view().row(0, 1, i).iter().eq(k.row(1, 1, t).iter()));
                assert!(v_out.as_view().row(0, 0, i).iter().eq(v.row(1, 0, t).iter()));
                assert!(cache.key(1, 1, i).iter().eq(k.row(1, 1, t).iter()));
            }
            assert!(cache.key(1, 1, n).is_empty() && cache.unroll(2, &mut k_out, &mut v_out).is_err());
        }
    }
}

/// RoPE relative to the cache, against RoPE applied to copies of the keys held, token by token.
#[test]
fn cache_relative_positions_are_places_in_the_cache() {
    let (sinks, window, len) = (2, 3, 9);
    let stream = Stream::new(1, 2, 1, len, 6, 3);
    let (q, k, v) = stream.views();
    let rope = Rope::new(Pairing::Half).rotary_dim(4);
    let (mut cos, mut sin) = ([0.0f32; 10], [0.0f32; 10]);
    let (mut c, mut s) = (ViewMut::matrix(&mut cos, 5, 2).unwrap(), ViewMut::matrix(&mut sin, 5, 2).unwrap());
    rope.tables(6, Positions::Offset(0), &mut c, &mut s).unwrap();
    let tables = RopeTables::new(Pairing::Half, c.as_view(), s.as_view()).unwrap();
    let (mut ck, mut cv, mut seen) = ([0.0f32; 30], [0.0f32; 15], [0]);
    let (ck, cv) = (ViewMut::matrix(&mut ck, 5, 6).unwrap(), ViewMut::matrix(&mut cv, 5, 3).unwrap());
    let mut cache = RingCache::new(ck, cv, &mut seen, sinks, window).unwrap().cache_relative(tables).unwrap();
    let mut got = vec![0.0f32; 2 * len * 3];
    let out = ViewMut::new(&mut got, Layout::Bhsd, [1, 2, len, 3]).unwrap();
    assert_eq!(cache.scratch_len(), 9);
    cache.advance(&Attention::new(), q, k, v, out, &mut [0.0; 9]).unwrap();
    for t in 0..len {
        let kept: Vec<usize> = (0..=t).filter(|&j| t - j < window || j < sinks).collect();
        let n = kept.len();
        let rows = |x: View<'_, f32>| kept.iter().flat_map(|&j| x.row(0, 0, j).iter()).collect::<Vec<f32>>();
        let (mut keys, values) = (rows(k), rows(v));
        rope.apply_in_place(&mut ViewMut::matrix(&mut keys, n, 6).unwrap(), Positions::Offset(0)).unwrap();
        for head in 0..2 {
            let mut query: Vec<f32> = q.row(0, head, t).iter().collect();
            let place = Positions::Offset(n as isize - 1);
            rope.apply_in_place(&mut ViewMut::matrix(&mut query, 1, 6).unwrap(), place).unwrap();
            let mut want = [0.0f32; 3];
            streaming::forward(
                &Attention::new(),
                View::matrix(&query, 1, 6).unwrap(),
                View::matrix(&keys, n, 6).unwrap(),
                View::matrix(&values, n, 3).unwrap(),
                ViewMut::matrix(&mut want, 1, 3).unwrap(),
                &mut [0.0; 3],
            )
            .unwrap();
            for (got, want) in got[(head * len + t) * 3..].iter().zip(want) {
                assert!((got - want).abs() < 1e-5, "token {t}: {got} {want}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let (mut k, mut v, mut seen) = ([1.0f32; 3], [1.0f32; 3], [1]);
    fn ring<'c>(
        k: &'c mut [f32],
        v: &'c mut [f32],
        seen: &'c mut [usize],
        sinks: usize,
        window: usize,
    ) -> Result<RingCache<'c, f32>> {
        RingCache::new(ViewMut::matrix(k, 3, 1)?, ViewMut::matrix(v, 3, 1)?, seen, sinks, window)
    }
    assert!(matches!(ring(&mut k, &mut v, &mut seen, 3, 0), Err(AttnError::Option { .. })));
    assert!(matches!(ring(&mut k, &mut v, &mut seen, 2, 2), Err(AttnError::TooShort { .. })));
    assert!(matches!(ring(&mut k, &mut v, &mut seen, usize::MAX, 1), Err(AttnError::Overflow { .. })));
    let mut cache = ring(&mut k, &mut v, &mut seen, 1, 2).unwrap();
    let x = [7.0f32; 4];
    let x = View::matrix(&x, 4, 1).unwrap();
    let mut out = [7.0f32; 4];
    // A mask that fits the first lengths and not the last.
    let lens = [1usize];
    let mut advance = |attn: Attention<'_>, scratch: &mut [f32]| {
        cache.advance(&attn, x, x, x, ViewMut::matrix(&mut out, 4, 1).unwrap(), scratch).unwrap_err()
    };
    let keep = [true; 2];
    let mask = Mask::keep(View::broadcast(&keep, &[2]).unwrap());
    assert!(matches!(advance(Attention::new().mask(mask), &mut [0.0]), AttnError::Broadcast { .. }));
    let attn = Attention::new().mask(Mask::kv_lens(&lens).and(Mask::causal(Align::BottomRight)));
    assert!(matches!(advance(attn, &mut []), AttnError::TooShort { .. }));
    let table = [0.0f32; 2];
    let tables =
        RopeTables::new(Pairing::Half, View::matrix(&table, 2, 1).unwrap(), View::matrix(&table, 2, 1).unwrap());
    assert!(cache.insert(x, View::matrix(&[0.0; 3], 3, 1).unwrap()).is_err());
    assert!(matches!(cache.cache_relative(tables.unwrap()), Err(AttnError::TooShort { .. })));
    assert!(ring(&mut k, &mut v, &mut [usize::MAX], 1, 2).unwrap().insert(x, x).is_err());
    assert_eq!((out, k, seen), ([7.0; 4], [1.0; 3], [1]));
}
