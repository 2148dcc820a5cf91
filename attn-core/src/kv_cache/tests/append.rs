//! The plain cache.

use super::stream::{Stream, assert_same_bits};
use crate::dropout::Dropout;
use crate::kv_cache::*;
use crate::outputs::Outputs;
use crate::score::At;
use crate::{Align, Layout, Mask, streaming};
use crate::{Attention, AttnError, View, ViewMut};
use std::vec;

/// Any chunks, ragged lengths, junk in the free slots: each sequence gets the bits of one plain call.
#[test]
fn chunks_and_neighbours_change_no_bit() {
    let stream = Stream::new(2, 4, 2, 11, 6, 3);
    let sinks = [0.5f32, -1.0, 0.0, 2.0];
    let attn = Attention::new()
        .softcap(3.0)
        .sinks(&sinks)
        .mask(Mask::window(5, 0, Align::BottomRight))
        .score_mod(|s, at: At| s + at.batch as f64 * 0.25);
    let whole = attn.mask(Mask::window(5, 0, Align::BottomRight).and(Mask::causal(Align::BottomRight)));
    let want = stream.plain(&whole);

    for chunks in [&[[11usize, 11]][..], &[[4, 1], [0, 5], [7, 5]], &[[1, 2]; 5]] {
        if cfg!(miri) && chunks.len() != 3 {
            continue; // Miri takes hundreds of times as long, and looks for something else.
        }
        let (mut k, mut v) = (vec![f32::NAN; 2 * 2 * 13 * 6], vec![f32::NAN; 2 * 2 * 13 * 3]);
        let mut lens = [0, 0];
        let mut cache = AppendCache::new(
            ViewMut::new(&mut k, Layout::Bshd, [2, 2, 13, 6]).unwrap(),
            ViewMut::new(&mut v, Layout::Bhsd, [2, 2, 13, 3]).unwrap(),
            &mut lens,
        )
        .unwrap();
        for counts in chunks {
            let starts = [cache.lens()[0], cache.lens()[1]];
            let n = counts[0].max(counts[1]);
            let chunk = stream.chunk(starts, n);
            let (cq, ck, cv) = chunk.views();
            cache.append_ragged(ck, cv, counts).unwrap();
            let (mut out, mut lse) = (vec![9.0f32; 2 * 4 * n * 3], vec![9.0f32; 2 * 4 * n]);
            let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap()).lse(&mut lse);
            streaming::forward_cache(&attn, cq, Queries::First(counts), cache.view(), outputs, &mut [0.0; 3]).unwrap();
            assert_same_bits(&want, &out, &lse, starts, *counts, n);
        }
    }
}

#[test]
fn a_sequence_is_a_view_for_any_engine() {
    let stream = Stream::new(2, 2, 2, 5, 4, 4);
    let (mut k, mut v, mut lens) = (vec![0.0; 2 * 2 * 8 * 4], vec![0.0; 2 * 2 * 8 * 4], [0, 0]);
    let sizes = [2, 2, 8, 4];
    let mut cache = AppendCache::new(
        ViewMut::new(&mut k, Layout::Sbhd, sizes).unwrap(),
        ViewMut::new(&mut v, Layout::Bhsd, sizes).unwrap(),
        &mut lens,
    )
    .unwrap();
    let chunk = stream.chunk([0, 0], 5);
    let (q, k_new, v_new) = chunk.views();
    cache.append(k_new, v_new).unwrap();
    let mut all = vec![0.0f32; 2 * 2 * 5 * 4];
    let out = ViewMut::new(&mut all, Layout::Bhsd, [2, 2, 5, 4]).unwrap();
    streaming::forward_cache(&Attention::new(), q, Queries::All, cache.view(), out, &mut [0.0; 4]).unwrap();
    let (k1, v1) = cache.sequence(1).unwrap();
    let q1 = View::strided(q.data(), [1, 2, 5, 4], q.strides(), q.offset() + q.strides()[0] as usize).unwrap();
    let mut one = vec![0.0f32; 2 * 5 * 4];
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
    let out = ViewMut::new(&mut one, Layout::Bhsd, [1, 2, 5, 4]).unwrap();
    streaming::forward(&causal, q1, k1, v1, out, &mut [0.0; 4]).unwrap();
    assert_eq!(one[..], all[40..]);
    assert!(cache.sequence(0).unwrap().0.row(0, 1, 4).iter().eq(k_new.row(0, 1, 4).iter()));
    assert!(cache.sequence(2).is_err());
    cache.truncate(1, 3).unwrap();
    assert_eq!((cache.lens(), cache.sequence(1).unwrap().0.sizes()), (&[5, 3][..], [1, 2, 3, 4]));
    assert!(cache.truncate(1, 4).is_err() && cache.truncate(2, 0).is_err());
}

#[test]
fn what_does_not_fit_is_refused_before_writing() {
    let (mut k, mut v, mut lens) = ([1.0f32; 8], [1.0f32; 8], [1, 4]);
    fn view(x: &mut [f32]) -> ViewMut<'_, f32> {
        ViewMut::new(x, Layout::Bhsd, [2, 1, 4, 1]).unwrap()
    }
    assert!(AppendCache::new(view(&mut k), view(&mut v), &mut [0, 5]).is_err());
    assert!(AppendCache::new(view(&mut k), view(&mut v), &mut [0]).is_err());
    let mut cache = AppendCache::new(view(&mut k), view(&mut v), &mut lens).unwrap();
    let new = [7.0f32; 4];
    let two = View::new(&new, Layout::Bhsd, [2, 1, 2, 1]).unwrap();
    assert_eq!(
        cache.append(two, two).unwrap_err(),
        AttnError::Index { what: "cache lens after appending", at: 1, value: 6, limit: 5 }
    );
    assert!(cache.append_ragged(two, two, &[3, 0]).is_err());
    assert!(cache.append_ragged(two, two, &[1]).is_err());
    let wide = View::new(&new, Layout::Bhsd, [2, 1, 1, 2]).unwrap();
    let one = View::new(&new, Layout::Bhsd, [2, 1, 1, 1]).unwrap();
    assert!(cache.append_ragged(wide, one, &[0, 0]).is_err() && cache.append_ragged(one, wide, &[0, 0]).is_err());
    let mut out = [7.0f32; 4];
    let mut attend = |attn: Attention<'_>, cache: &AppendCache<'_, f32>, scratch: usize| {
        let out = ViewMut::new(&mut out, Layout::Bhsd, [2, 1, 2, 1]).unwrap();
        streaming::forward_cache(&attn, two, Queries::All, cache.view(), out, &mut [0.0; 2][..scratch]).unwrap_err()
    };
    let attn = Attention::new();
    assert!(matches!(attend(attn, &cache, 1), AttnError::Index { at: 0, value: 2, limit: 2, .. }));
    cache.append_ragged(two, two, &[1, 0]).unwrap();
    assert!(matches!(attend(attn, &cache, 0), AttnError::TooShort { .. }));
    let dropout = attn.dropout(Dropout::Seeded { p: 0.5, seed: 0 });
    assert!(matches!(attend(dropout, &cache, 1), AttnError::Unsupported { .. }));
    assert!(matches!(attend(attn.scale(f64::NAN), &cache, 1), AttnError::Option { .. }));
    assert_eq!((out, k, lens), ([7.0; 4], [1.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [2, 4]));
}
