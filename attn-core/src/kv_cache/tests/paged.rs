//! Pages by a table.

use super::stream::{Stream, assert_same_bits};
use crate::kv_cache::*;
use crate::outputs::Outputs;
use crate::{Align, Layout, Mask, streaming};
use crate::{Attention, AttnError, View, ViewMut};
use std::vec;

/// Any page size and order of pages, ragged chunks: the bits of one plain call.
#[test]
fn pages_and_chunks_change_no_bit() {
    let stream = Stream::new(2, 4, 2, 11, 6, 3);
    let attn = Attention::new().mask(Mask::window(6, 0, Align::BottomRight));
    let want = stream.plain(&attn.mask(attn.get_mask().and(Mask::causal(Align::BottomRight))));
    for (page_size, table) in [
        (4, &[5, 0, 3, -1, 2, 1, 4, -1][..]),
        (1, &[0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1]),
        (16, &[1, 0]),
    ] {
        if cfg!(miri) && page_size != 4 {
            continue; // Miri takes hundreds of times as long, and looks for something else.
        }
        for (layout, chunks) in [(Layout::Bshd, &[[11usize, 11]][..]), (Layout::Bhsd, &[[4, 1], [0, 5], [7, 5]])] {
            let pages = 22 / page_size + 2;
            let (mut k, mut v) = (vec![f32::NAN; pages * 2 * page_size * 6], vec![f32::NAN; pages * 2 * page_size * 3]);
            let mut lens = [0, 0];
            let k = ViewMut::new(&mut k, layout, [pages, 2, page_size, 6]).unwrap();
            let v = ViewMut::new(&mut v, layout, [pages, 2, page_size, 3]).unwrap();
            let mut cache = PagedCacheMut::new(k, v, table, &mut lens).unwrap();
            for counts in chunks {
                let starts = [cache.as_cache().lens()[0], cache.as_cache().lens()[1]];
                let n = counts[0].max(counts[1]);
                let chunk = stream.chunk(starts, n);
                let (cq, ck, cv) = chunk.views();
                cache.append_ragged(ck, cv, counts).unwrap();
                let (mut out, mut lse) = (vec![9.0f32; 8 * n * 3], vec![9.0f32; 8 * n]);
                let out_view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, n, 3]).unwrap();
                let outputs = Outputs::new(out_view).lse(&mut lse);
                streaming::forward_cache(&attn, cq, Queries::First(counts), cache.view(), outputs, &mut [0.0; 3])
                    .unwrap();
                assert_same_bits(&want, &out, &lse, starts, *counts, n);
            }
        }
    }
}

#[test]
fn tables_are_checked_before_use() {
    let x = [0.0f32; 12];
    let view = View::new(&x, Layout::Bhsd, [3, 1, 2, 2]).unwrap(); // three pages of two tokens
    let new = |table: &[i32], lens: &[usize]| PagedCache::new(view, view, table, lens).map(|_| ()).unwrap_err();
    assert_eq!(new(&[0, 3], &[3]), AttnError::Index { what: "block_table", at: 1, value: 3, limit: 3 });
    assert_eq!(
        new(&[0, 1, 2, -1], &[3, 3]),
        AttnError::Index { what: "block_table", at: 3, value: usize::MAX, limit: 3 }
    );
    assert!(matches!(new(&[0, 1], &[5]), AttnError::Index { value: 3, limit: 3, .. }));
    assert!(matches!(new(&[0, 1, 2], &[1, 1]), AttnError::Size { .. }));
    assert!(matches!(new(&[0], &[]), AttnError::Size { .. }));
    let none = View::new(&x, Layout::Bhsd, [3, 1, 0, 2]).unwrap();
    assert!(PagedCache::new(none, none, &[0], &[0]).is_err());
    // What is not used is not looked at.
    let cache = PagedCache::new(view, view, &[2, 0, 99], &[2]).unwrap();
    assert!(cache.key(0, 0, 2).is_empty() && cache.value(1, 0, 0).is_empty() && cache.key(0, 0, 1).len() == 2);
    let q = View::matrix(&x, 3, 2).unwrap();
    let mut out = [7.0f32; 6];
    let out_view = ViewMut::matrix(&mut out, 3, 2).unwrap();
    assert!(
        streaming::forward_cache(&Attention::new(), q, Queries::All, cache.view(), out_view, &mut [0.0; 2]).is_err()
    ); // three queries, two tokens
    assert_eq!(out, [7.0; 6]);
}

#[test]
fn shared_pages_are_read_and_never_written() {
    let (mut k, mut v, mut lens) = ([0.0f32; 8], [0.0f32; 8], [2, 2]); // four pages of two tokens of dim 1
    fn view(x: &mut [f32]) -> ViewMut<'_, f32> {
        ViewMut::new(x, Layout::Bhsd, [4, 1, 2, 1]).unwrap()
    }
    let new = [5.0f32, 6.0];
    let new = View::new(&new, Layout::Bhsd, [2, 1, 1, 1]).unwrap();
    // A common first page is fine: the new tokens go to pages 1 and 2.
    let mut cache = PagedCacheMut::new(view(&mut k), view(&mut v), &[0, 1, 0, 2], &mut lens).unwrap();
    cache.append(new, new).unwrap();
    assert_eq!((k, lens), ([0.0, 0.0, 5.0, 0.0, 6.0, 0.0, 0.0, 0.0], [3, 3]));
    // A common second page is not, nor a page twice in one row, nor none at all.
    for table in [[0, 1, 0, 1], [0, 0, 3, 2], [0, 1, 0, -1]] {
        let mut lens = [2, 2];
        let mut cache = PagedCacheMut::new(view(&mut k), view(&mut v), &table, &mut lens).unwrap();
        assert!(cache.append(new, new).is_err());
        assert_eq!(lens, [2, 2]);
    }
    assert_eq!(k[2..], [5.0, 0.0, 6.0, 0.0, 0.0, 0.0]);
}
