//! Caches as a server uses them: many pages, pages that were given back, continuations, lengths at the ends of their
//! types.

use attn_core::kv_cache::{CacheView, PageTable, append_paged};
use attn_core::{AttnError, Layout, View, ViewMut};

const PAGE: usize = 2;

fn pages(x: &mut [f32]) -> ViewMut<'_, f32> {
    let pages = x.len() / PAGE;
    ViewMut::new(x, Layout::Bhsd, [pages, 1, PAGE, 1]).unwrap()
}

/// More pages to be written than are looked up at a time, each alone but for one that is planted.
#[test]
fn a_page_that_is_used_twice_is_found_among_many() {
    // Two sequences: 300 old pages each, of which the first 100 are shared, and 150 new ones.
    let (old, new, batch) = (300usize, 150usize, 2usize);
    let width = old + new;
    let page = |b: usize, i: usize| if i < 100 { i } else { 100 + b * (width - 100) + i - 100 };
    let table: Vec<i32> = (0..batch).flat_map(|b| (0..width).map(move |i| page(b, i) as i32)).collect();
    let count = 100 + batch * (width - 100);
    let tokens = vec![1.0f32; batch * new * PAGE];
    let tokens = View::new(&tokens, Layout::Bhsd, [batch, 1, new * PAGE, 1]).unwrap();
    let append = |table: &[i32]| {
        let (mut k, mut v, lens) = (vec![0.0f32; count * PAGE], vec![0.0f32; count * PAGE], [(old + new) * PAGE; 2]);
        let table = PageTable::padded(table, &lens).unwrap();
        let result = append_paged(&mut pages(&mut k), &mut pages(&mut v), table, tokens, tokens, None);
        let written = k.iter().filter(|&&x| x == 1.0).count();
        assert_eq!(written, if result.is_ok() { batch * new * PAGE } else { 0 });
        result
    };
    append(&table).unwrap();
    // (where, which page stands there instead): an old page of its own, one of the other's, a new one of either, near
    // and far.
    for (at, instead) in [
        (old, page(0, 0)),
        (old, page(0, 299)),
        (old + 149, page(1, 299)),
        (width + old + 70, page(0, old + 3)),
        (width + old, page(1, old + 149)),
        (old + 1, page(0, old)),
    ] {
        let mut table = table.clone();
        table[at] = instead as i32;
        let refused = append(&table);
        assert!(matches!(refused, Err(AttnError::Overlap { .. })), "page {instead} at {at}: {refused:?}");
    }
}

/// A sliding window gives its oldest pages back and goes on; new tokens need pages.
#[test]
fn pages_are_given_back_and_written_again() {
    let (mut k, mut v) = (vec![0.0f32; 2 * PAGE], vec![0.0f32; 2 * PAGE]);
    let token = [5.0f32];
    let token = View::new(&token, Layout::Bhsd, [1, 1, 1, 1]).unwrap();
    let (mut k, mut v) = (pages(&mut k), pages(&mut v));
    for (len, table) in [(4, [0, 1, -1]), (5, [-1, 1, 0])] {
        let lens = [len];
        let table = PageTable::padded(&table, &lens).unwrap().with_evicted();
        append_paged(&mut k, &mut v, table, token, token, None).unwrap();
    }
    assert_eq!(v.as_view().data(), [5.0, 0.0, 0.0, 5.0]);
    for entries in [[-1, 1, -1], [-1, 1, 2]] {
        let table = PageTable::padded(&entries, &[5]).unwrap();
        assert!(CacheView::of_pages(k.as_view(), v.as_view(), table).is_err());
        // The fifth token's page was given back, which hides it; a page that there never was is a mistake.
        let with = CacheView::of_pages(k.as_view(), v.as_view(), table.with_evicted());
        assert_eq!(with.is_ok(), entries[2] < 0);
        let appended = append_paged(&mut k, &mut v, table.with_evicted(), token, token, None);
        assert!(matches!(appended, Err(AttnError::Index { at: 2, .. })));
    }
    let table = PageTable::padded(&[-1, 1, 0], &[5]).unwrap().with_evicted();
    let view = CacheView::of_pages(k.as_view(), v.as_view(), table).unwrap();
    assert!(view.has_evicted() && view.evicted(0, 0) == 2 && view.evicted(0, 1) == 1 && view.evicted(0, 2) == 0);
    assert!(
        view.run(0, 1).is_none() && view.run(0, 2).is_some() && view.run(0, 5).is_none() && view.evicted(0, 5) == 0
    );
}

/// Tokens behind others that lie elsewhere are numbered from there on.
#[test]
fn a_continuation_counts_on() {
    let x = [0.0f32; 12];
    let x = View::new(&x, Layout::Bhsd, [2, 1, 6, 1]).unwrap();
    let (lens, table) = ([4, 0], [1, 0, 1, 0]);
    let rows = CacheView::of_slots(x, x, &lens).unwrap();
    let paged = CacheView::of_pages(x, x, PageTable::padded(&table, &lens).unwrap()).unwrap();
    for cache in [rows, paged] {
        let after = cache.after(100).unwrap();
        assert_eq!((after.first(), after.len(0), after.len(1), after.len(2)), (100, 104, 100, 0));
        assert_eq!((after.run(0, 102), after.run(0, 99), after.run(0, 104)), (cache.run(0, 2), None, None));
        assert!(matches!(cache.after(usize::MAX - 3), Err(AttnError::Overflow { .. })));
        assert!(after.after(usize::MAX - 103).is_err() && after.after(usize::MAX - 104).is_ok());
    }
    assert!(matches!(CacheView::of_slots(x, x, &[7, 0]), Err(AttnError::Index { value: 7, limit: 7, .. })));
    assert!(matches!(CacheView::of_slots(x, x, &[7]), Err(AttnError::Size { .. })));
    let table = PageTable::padded(&[2, 0, 1, 0], &lens).unwrap();
    assert!(matches!(CacheView::of_pages(x, x, table), Err(AttnError::Index { value: 2, .. })));
}
