//! Pages by a table.

use super::stream::{Stream, assert_same_bits};
use crate::kv_cache::*;
use crate::outputs::Outputs;
use crate::{Align, Layout, Mask, streaming};
use crate::{Attention, AttnError, View, ViewMut};
use std::vec;
use std::vec::Vec;

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
            if cfg!(miri) && layout != Layout::Bhsd {
                continue;
            }
            let pages = 22 / page_size + 2;
            let (mut k, mut v) = (vec![f32::NAN; pages * 2 * page_size * 6], vec![f32::NAN; pages * 2 * page_size * 3]);
            let mut lens = [0, 0];
            let mut k = ViewMut::new(&mut k, layout, [pages, 2, page_size, 6]).unwrap();
            let mut v = ViewMut::new(&mut v, layout, [pages, 2, page_size, 3]).unwrap();
            for (n, counts) in chunks.iter().enumerate() {
                let (starts, given) = (lens, counts[0].max(counts[1]));
                let chunk = stream.chunk(starts, given);
                let (cq, ck, cv) = chunk.views();
                lens = [starts[0] + counts[0], starts[1] + counts[1]];
                let padded = PageTable::padded(table, &lens).unwrap();
                let (indptr, indices, last) = compressed(table, &lens, page_size);
                let csr = PageTable::csr(&indptr, &indices, &last).unwrap();
                let written_by = if n % 2 == 0 { csr } else { padded };
                append_paged(&mut k, &mut v, written_by, ck, cv, Some(counts)).unwrap();
                for table in [padded, csr] {
                    let cache = CacheView::of_pages(k.as_view(), v.as_view(), table).unwrap();
                    let (mut out, mut lse) = (vec![9.0f32; 8 * given * 3], vec![9.0f32; 8 * given]);
                    let out_view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, given, 3]).unwrap();
                    let outputs = Outputs::new(out_view).lse(&mut lse);
                    streaming::forward_cache(&attn, cq, Queries::First(counts), cache, outputs, &mut [0.0; 3]).unwrap();
                    assert_same_bits(&want, &out, &lse, starts, *counts, given);
                }
            }
        }
    }
}

/// A padded table of two sequences in the other form.
fn compressed(table: &[i32], lens: &[usize; 2], page_size: usize) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let (mut indptr, mut indices, mut last) = (vec![0], Vec::new(), Vec::new());
    for (row, len) in table.chunks(table.len() / 2).zip(lens) {
        indices.extend_from_slice(&row[..len.div_ceil(page_size)]);
        indptr.push(indices.len() as i32);
        last.push(len.checked_sub(1).map_or(7, |before| (before % page_size + 1) as i32)); // not read without pages
    }
    (indptr, indices, last)
}

#[test]
fn tables_are_checked_before_use() {
    let x = [0.0f32; 12];
    let view = View::new(&x, Layout::Bhsd, [3, 1, 2, 2]).unwrap(); // three pages of two tokens
    let new = |table: &[i32], lens: &[usize]| {
        PageTable::padded(table, lens).and_then(|table| CacheView::of_pages(view, view, table)).map(|_| ()).unwrap_err()
    };
    assert_eq!(new(&[0, 3], &[3]), AttnError::Index { what: "block_table", at: 1, value: 3, limit: 3 });
    assert_eq!(
        new(&[0, 1, 2, -1], &[3, 3]),
        AttnError::Index { what: "block_table", at: 3, value: usize::MAX, limit: 3 }
    );
    assert!(matches!(new(&[0, 1], &[5]), AttnError::Index { value: 3, limit: 3, .. }));
    assert!(matches!(new(&[0, 1, 2], &[1, 1]), AttnError::Size { .. }));
    assert!(matches!(new(&[0], &[]), AttnError::Size { .. }));
    let none = View::new(&x, Layout::Bhsd, [3, 1, 0, 2]).unwrap();
    assert!(CacheView::of_pages(none, none, PageTable::padded(&[0], &[0]).unwrap()).is_err());
    // An entry that is not used is not read.
    let cache = CacheView::of_pages(view, view, PageTable::padded(&[2, 0, 99], &[2]).unwrap()).unwrap();
    assert!(cache.run(0, 2).is_none() && cache.run(1, 0).is_none() && cache.run(0, 1).is_some());
    let q = View::matrix(&x, 3, 2).unwrap();
    let mut out = [7.0f32; 6];
    let out_view = ViewMut::matrix(&mut out, 3, 2).unwrap();
    // Three queries, two tokens.
    assert!(streaming::forward_cache(&Attention::new(), q, Queries::All, cache, out_view, &mut [0.0; 2]).is_err());
    assert_eq!(out, [7.0; 6]);
}

#[test]
fn compressed_tables_are_checked_before_use() {
    let x = [0.0f32; 12];
    let view = View::new(&x, Layout::Bhsd, [3, 1, 2, 2]).unwrap(); // three pages of two tokens
    let of = |indptr: &[i32], indices: &[i32], last: &[i32]| {
        let cache = PageTable::csr(indptr, indices, last).and_then(|table| CacheView::of_pages(view, view, table))?;
        Ok([cache.len(0), cache.len(1)])
    };
    // Pages may be shared. Indices outside of all rows and the last length of an empty sequence are not read.
    assert_eq!(of(&[0, 2, 3], &[2, 0, 2], &[1, 2]), Ok([3, 2]));
    assert_eq!(of(&[1, 1, 2], &[99, 0, -1], &[-5, 2]), Ok([0, 2]));
    assert_eq!(of(&[0], &[], &[]), Ok([0, 0]));
    let index = |what, at, value, limit| Err(AttnError::Index { what, at, value, limit });
    assert_eq!(of(&[0, 2, 4], &[2, 0, 1], &[1, 1]), index("kv_indptr", 2, 4, 4));
    assert_eq!(of(&[-1, 2, 3], &[2, 0, 1], &[1, 1]), index("kv_indptr", 0, usize::MAX, 4));
    assert_eq!(of(&[0, 2, 1], &[2, 0, 1], &[1, 1]), Err(AttnError::Order { what: "kv_indptr", at: 2 }));
    assert_eq!(of(&[0, 2, 3], &[2, 0, 3], &[1, 1]), index("kv_indices", 2, 3, 3));
    assert_eq!(of(&[0, 2, 3], &[2, -1, 1], &[1, 1]), index("kv_indices", 1, usize::MAX, 3));
    assert_eq!(of(&[0, 2, 3], &[2, 0, 1], &[1, 3]), index("kv_last_page_len", 1, 3, 3));
    assert_eq!(of(&[0, 2, 3], &[2, 0, 1], &[-1, 1]), index("kv_last_page_len", 0, usize::MAX, 3));
    assert!(matches!(of(&[0, 2, 3], &[2, 0, 1], &[0, 1]), Err(AttnError::Option { .. })));
    for (indptr, last) in [(&[0, 2][..], &[1, 1][..]), (&[0, 2, 3], &[1]), (&[], &[])] {
        assert!(matches!(of(indptr, &[2, 0, 1], last), Err(AttnError::Size { .. })));
    }
    // A page that was given back.
    let table = PageTable::csr(&[0, 2], &[-1, 1], &[2]).unwrap();
    assert!(CacheView::of_pages(view, view, table).is_err());
    let cache = CacheView::of_pages(view, view, table.with_evicted()).unwrap();
    assert_eq!((cache.len(0), cache.evicted(0, 1), cache.evicted(0, 2)), (4, 1, 0));
}

#[test]
fn shared_pages_are_read_and_never_written() {
    let (mut k, mut v) = ([0.0f32; 8], [0.0f32; 8]); // four pages of two tokens of dim 1
    fn view(x: &mut [f32]) -> ViewMut<'_, f32> {
        ViewMut::new(x, Layout::Bhsd, [4, 1, 2, 1]).unwrap()
    }
    let new = [5.0f32, 6.0];
    let new = View::new(&new, Layout::Bhsd, [2, 1, 1, 1]).unwrap();
    let mut append = |table: [i32; 4], lens: [usize; 2]| {
        let padded = PageTable::padded(&table, &lens)?;
        let padded = append_paged(&mut view(&mut k), &mut view(&mut v), padded, new, new, None);
        let last = lens.map(|len| (len - 1) as i32 % 2 + 1);
        let csr = PageTable::csr(&[0, 2, 4], &table, &last)?;
        assert_eq!(append_paged(&mut view(&mut k), &mut view(&mut v), csr, new, new, None).is_ok(), padded.is_ok());
        padded
    };
    // A common first page is fine: the new tokens go to pages 1 and 2.
    append([0, 1, 0, 2], [3, 3]).unwrap();
    // A common second page is not, nor a page twice in one row, nor none at all.
    for table in [[0, 1, 0, 1], [0, 0, 3, 2], [0, 1, 0, -1]] {
        assert!(append(table, [3, 3]).is_err());
    }
    assert_eq!(k, [0.0, 0.0, 5.0, 0.0, 6.0, 0.0, 0.0, 0.0]);
    // The table counts the new tokens: there cannot be fewer.
    let (table, lens) = ([0, 1], [0, 1]);
    let table = PageTable::padded(&table, &lens).unwrap();
    let fewer = append_paged(&mut view(&mut k), &mut view(&mut v), table, new, new, None);
    assert!(matches!(fewer, Err(AttnError::Index { at: 0, value: 1, limit: 1, .. })), "{fewer:?}");
    assert!(append_paged(&mut view(&mut k), &mut view(&mut v), table, new, new, Some(&[0, 2])).is_err());
    append_paged(&mut view(&mut k), &mut view(&mut v), table, new, new, Some(&[0, 1])).unwrap();
    assert_eq!(k[2..4], [6.0, 0.0]);
}
