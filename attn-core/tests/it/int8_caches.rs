//! The int8 ring caches: the integer one against a plain call with the rule as a mask, the one for f32 tokens against a
//! ring of what it stored.

use attn_core::int8::{self, Int8Attention, Int8RingCache, Quant, QuantizedRingCache, ScaledRows};
use attn_core::kv_cache::RingCache;
use attn_core::position::alibi::Alibi;
use attn_core::score::default_scale;
use attn_core::{Align, Attention, AttnError, Layout, Mask, Outputs, View, ViewMut};
use attn_testing::cases::{Inputs, Memory, shape};
use attn_testing::tolerance;

use crate::int8::Int8Inputs;

const RULES: [(usize, usize); 5] = [(0, 1), (0, 4), (2, 3), (1, 20), (4, 9)];

/// Tokens `range` of a dense `[batch, heads, 13, dim]`.
fn chunk<T: Copy + Default>(x: View<'_, T>, start: usize, n: usize) -> Vec<T> {
    let [batch, heads, _, dim] = x.sizes();
    let mut out = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for t in start..start + n {
                out.extend((0..dim).map(|d| x.at(b, h, t, d)));
            }
        }
    }
    out
}

#[test]
fn the_integer_ring_is_a_plain_call_with_its_rule() {
    let dims = shape((2, 4, 2, 13, 13, 6, 3));
    let inputs = Int8Inputs::new(&dims, Memory::Bhsd, 11, 4.0);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let attn = Int8Attention::new(inputs.quants, default_scale(6)).unwrap();
    for (sinks, window) in RULES {
        let keep: Vec<bool> =
            (0..169).map(|n| (n / 13, n % 13)).map(|(i, j)| j <= i && (i - j < window || j < sinks)).collect();
        let rule = Mask::keep(View::broadcast(&keep, &[13, 13]).unwrap());
        let mut want = vec![0i16; dims.rows() * 3];
        let to = ViewMut::new(&mut want, Layout::Bhsd, dims.output()).unwrap();
        int8::forward(&attn.mask(rule), q, k, v, to, &mut [0; 3]).unwrap();
        let want = View::new(&want, Layout::Bhsd, dims.output()).unwrap();
        for chunks in [&[13usize][..], &[1; 13], &[5, 7, 1]] {
            let slots = sinks + window;
            let (mut ck, mut cv, mut seen) = (vec![99i8; 4 * slots * 6], vec![99i8; 4 * slots * 3], [0, 0]);
            let ck = ViewMut::new(&mut ck, Layout::Bshd, [2, 2, slots, 6]).unwrap();
            let cv = ViewMut::new(&mut cv, Layout::Bhsd, [2, 2, slots, 3]).unwrap();
            let mut cache = Int8RingCache::new(ck, cv, &mut seen, sinks, window).unwrap();
            let mut start = 0;
            for &n in chunks {
                let (cq, ck, cv) = (chunk(q, start, n), chunk(k, start, n), chunk(v, start, n));
                let view = |x, heads, dim| View::new(x, Layout::Bhsd, [2, heads, n, dim]).unwrap();
                let mut out = vec![0i16; 8 * n * 3];
                let to = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap();
                cache.advance(&attn, view(&cq, 4, 6), view(&ck, 2, 6), view(&cv, 2, 3), to, &mut [0; 3]).unwrap();
                assert_eq!(out, chunk(want, start, n), "sinks {sinks}, window {window}, {chunks:?} from {start}");
                start += n;
            }
            assert_eq!((cache.seen(), cache.len(1), cache.is_empty(0)), (&[13, 13][..], slots.min(13), false));
        }
    }
}

/// A mask applies to what is held.
#[test]
fn the_integer_ring_masks_what_it_holds() {
    let quant = Quant::new(1.0, 0).unwrap();
    let attn = Int8Attention::new([quant; 4], 1.0).unwrap().mask(Mask::window(1, 0, Align::BottomRight));
    let (mut k, mut v, mut seen) = ([0i8; 4], [0i8; 4], [0]);
    let (k, v) = (ViewMut::matrix(&mut k, 4, 1).unwrap(), ViewMut::matrix(&mut v, 4, 1).unwrap());
    let mut cache = Int8RingCache::new(k, v, &mut seen, 0, 4).unwrap();
    let (zero, x) = (View::matrix(&[0i8; 5], 5, 1).unwrap(), [10i8, 20, 40, 80, 100]);
    let mut out = [0i8; 5];
    let to = ViewMut::matrix(&mut out, 5, 1).unwrap();
    cache.advance(&attn, zero, zero, View::matrix(&x, 5, 1).unwrap(), to, &mut [0]).unwrap();
    assert_eq!(out, [10, 15, 30, 60, 90]); // itself and the one before it
}

struct Memories {
    k: Vec<i8>,
    v: Vec<i8>,
    k_scales: Vec<f32>,
    v_scales: Vec<f32>,
    seen: Vec<usize>,
}

impl Memories {
    fn new(slots: usize) -> Self {
        let scales = || vec![f32::NAN; 4 * slots];
        Self {
            k: vec![99; 4 * slots * 6],
            v: vec![99; 4 * slots * 3],
            k_scales: scales(),
            v_scales: scales(),
            seen: vec![0; 2],
        }
    }

    /// Two sequences of two heads; keys of 6, values of 3.
    fn cache(&mut self, sinks: usize, window: usize) -> QuantizedRingCache<'_> {
        let slots = sinks + window;
        let view = |x, dim| ViewMut::new(x, Layout::Bhsd, [2, 2, slots, dim]).unwrap();
        let scale = |x| ViewMut::new(x, Layout::Bhsd, [2, 2, slots, 1]).unwrap();
        let k = ScaledRows::new(view(&mut self.k, 6), scale(&mut self.k_scales)).unwrap();
        let v = ScaledRows::new(view(&mut self.v, 3), scale(&mut self.v_scales)).unwrap();
        QuantizedRingCache::new(k, v, &mut self.seen, sinks, window).unwrap()
    }
}

/// What a row becomes: numbers by its own scale, and back.
fn rounded(row: &[f32]) -> Vec<f32> {
    let scale = row.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
    row.iter().map(|x| scale * (x / scale).round()).collect()
}

#[test]
fn the_ring_for_f32_tokens_is_a_ring_of_what_it_stored() {
    let dims = shape((2, 4, 2, 13, 13, 6, 3));
    let inputs = Inputs::<f32>::plain(dims, 21);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let store = |x: View<'_, f32>, dim| chunk(x, 0, 13).chunks(dim).flat_map(rounded).collect::<Vec<_>>();
    let (ks, vs) = (store(k, 6), store(v, 3));
    // No number moved by more than half a step.
    let moved = |stored: &[f32], x: View<'_, f32>, dim: usize| {
        for (row, now) in chunk(x, 0, 13).chunks(dim).zip(stored.chunks(dim)) {
            let step = row.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
            assert!(row.iter().zip(now).all(|(a, b)| (a - b).abs() <= step * 0.5001));
        }
    };
    moved(&ks, k, 6);
    moved(&vs, v, 3);
    let slopes = [0.5, 0.25, 0.125, 0.0625];
    let sinks_of_heads = [0.1, -2.0, 1.0, 0.0];
    let alibi = Alibi { slopes: &slopes, align: Align::BottomRight };
    let attn = Attention::new().softcap(8.0).alibi(alibi).sinks(&sinks_of_heads);
    for (sinks, window) in RULES {
        let slots = sinks + window;
        let (mut pk, mut pv, mut seen) = (vec![0.0f32; 4 * slots * 6], vec![0.0f32; 4 * slots * 3], [0, 0]);
        let pk = ViewMut::new(&mut pk, Layout::Bhsd, [2, 2, slots, 6]).unwrap();
        let pv = ViewMut::new(&mut pv, Layout::Bhsd, [2, 2, slots, 3]).unwrap();
        let mut plain = RingCache::new(pk, pv, &mut seen, sinks, window).unwrap();
        let (mut want, mut want_lse) = (vec![0.0f32; dims.rows() * 3], vec![0.0f32; dims.rows()]);
        let to = ViewMut::new(&mut want, Layout::Bhsd, dims.output()).unwrap();
        let (kv, vv) =
            (View::new(&ks, Layout::Bhsd, k.sizes()).unwrap(), View::new(&vs, Layout::Bhsd, v.sizes()).unwrap());
        plain.advance(&attn, q, kv, vv, Outputs::new(to).lse(&mut want_lse), &mut [0.0; 3]).unwrap();

        let mut memory = Memories::new(slots);
        let mut cache = memory.cache(sinks, window);
        let (mut out, mut lse) = (vec![0.0f32; dims.rows() * 3], vec![0.0f32; dims.rows()]);
        let to = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).unwrap();
        cache.advance(&attn, q, k, v, Outputs::new(to).lse(&mut lse), &mut [0.0; 3]).unwrap();
        // Scores of 6 normal products stay below 20, values below 5.
        let bound = tolerance::TWICE.bound(attn_core::Dtype::F32, 20.0) * 5.0;
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| f64::from((a - b).abs()) <= bound);
        assert!(near(&out, &want) && near(&lse, &want_lse), "sinks {sinks}, window {window}: {out:?} against {want:?}");
    }
}

#[test]
fn chunks_change_no_bit_of_the_ring_for_f32_tokens() {
    let dims = shape((2, 4, 2, 13, 13, 6, 3));
    let inputs = Inputs::<f32>::plain(dims, 22);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let run = |chunks: &[usize]| {
        let mut memory = Memories::new(7);
        let mut cache = memory.cache(2, 5);
        let (mut all, mut start) = (vec![Vec::new(); 8], 0);
        for &n in chunks {
            let (cq, ck, cv) = (chunk(q, start, n), chunk(k, start, n), chunk(v, start, n));
            let view = |x, heads, dim| View::new(x, Layout::Bhsd, [2, heads, n, dim]).unwrap();
            let mut out = vec![0.0f32; 8 * n * 3];
            let to = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap();
            let (q, k, v) = (view(&cq, 4, 6), view(&ck, 2, 6), view(&cv, 2, 3));
            cache.advance(&Attention::new(), q, k, v, to, &mut [0.0; 3]).unwrap();
            all.iter_mut().zip(out.chunks(n * 3)).for_each(|(all, head)| all.extend_from_slice(head));
            start += n;
        }
        all
    };
    let whole = run(&[13]);
    assert_eq!((run(&[1; 13]), run(&[6, 1, 6])), (whole.clone(), whole));
}

#[test]
fn a_token_that_is_no_number_shows_in_the_rows_that_see_it() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut memory = Memories::new(4);
        let mut cache = memory.cache(0, 4);
        let dims = shape((2, 4, 2, 9, 9, 6, 3));
        let mut inputs = Inputs::<f32>::plain(dims, 23);
        let run = |cache: &mut QuantizedRingCache<'_>, inputs: &Inputs<f32>| {
            let mut out = vec![0.0f32; dims.rows() * 3];
            let to = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).unwrap();
            let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
            cache.advance(&Attention::new(), q, k, v, to, &mut [0.0; 3]).unwrap();
            out
        };
        let clean = run(&mut cache, &inputs);
        // Token 3 of sequence 1, head 0, which query heads 0 and 1 read: seen by tokens 3 to 6.
        inputs.v.each(|place, x| {
            if place == [1, 0, 3, 1] {
                *x = bad;
            }
        });
        let mut memory = Memories::new(4);
        let out = run(&mut memory.cache(0, 4), &inputs);
        for (i, (a, b)) in out.iter().zip(&clean).enumerate() {
            let (batch, head, token) = (i / 3 / 9 / 4, i / 3 / 9 % 4, i / 3 % 9);
            let sees = batch == 1 && head < 2 && (3..7).contains(&token);
            assert!(if sees { a.is_nan() } else { a == b }, "{batch} {head} {token}: {a}");
        }
    }
}

#[test]
fn caches_refuse_what_does_not_fit() {
    fn view(x: &mut [i8]) -> ViewMut<'_, i8> {
        ViewMut::new(x, Layout::Bhsd, [1, 1, 4, 2]).unwrap()
    }
    let (mut k, mut v, mut seen) = ([0i8; 8], [0i8; 8], [0]);
    assert!(matches!(
        Int8RingCache::new(view(&mut k), view(&mut v), &mut seen, 2, 3),
        Err(AttnError::TooShort { needed: 5, found: 4, .. })
    ));
    assert!(matches!(Int8RingCache::new(view(&mut k), view(&mut v), &mut seen, 2, 0), Err(AttnError::Option { .. })));
    let mut short = [0.0f32; 3];
    let scales = ViewMut::matrix(&mut short, 3, 1).unwrap();
    assert!(matches!(ScaledRows::new(view(&mut k), scales), Err(AttnError::Size { expected: 4, found: 3, .. })));
    let quant = Quant::new(1.0, 0).unwrap();
    let attn = Int8Attention::new([quant; 4], 1.0).unwrap();
    let mut cache = Int8RingCache::new(view(&mut k), view(&mut v), &mut seen, 0, 4).unwrap();
    let (two, one) = ([1i8; 4], [1i8; 2]);
    let (two, one) = (View::matrix(&two, 2, 2).unwrap(), View::matrix(&one, 1, 2).unwrap());
    let mut out = [9i8; 4];
    fn to(out: &mut [i8]) -> ViewMut<'_, i8> {
        ViewMut::matrix(out, 2, 2).unwrap()
    }
    assert!(matches!(cache.advance(&attn, one, two, two, to(&mut out), &mut [0; 2]), Err(AttnError::Size { .. })));
    assert!(matches!(
        cache.advance(&attn, two, two, two, to(&mut out), &mut [0; 1]),
        Err(AttnError::TooShort { needed: 2, found: 1, .. })
    ));
    // A table that fits one key but not the second that will be held.
    let starts = [2];
    let masked = attn.mask(Mask::kv_starts(&starts));
    assert!(matches!(cache.advance(&masked, two, two, two, to(&mut out), &mut [0; 2]), Err(AttnError::Index { .. })));
    assert_eq!((cache.seen(), out), (&[0][..], [9; 4]));
}
