//! Masks as the tiled engines ask them, against the definitions key by key: one key, a row's range, 64 keys as bits, a
//! tile.

use attn_core::score::At;
use attn_core::{AttnShape, Mask};
use attn_testing::cases::{OwnedTerm, kinds, shape};

fn shapes() -> Vec<AttnShape> {
    let all = [
        (2, 2, 1, 5, 9, 1, 1),
        (1, 2, 2, 21, 70, 1, 1),
        (2, 2, 1, 40, 17, 1, 1),
        (1, 1, 1, 3, 131, 1, 1),
        (1, 1, 1, 4, 0, 1, 1),
    ];
    all.into_iter().map(shape).collect()
}

/// Rows of a head: what each key is by definition.
fn brute(dims: &AttnShape, terms: &[&OwnedTerm], batch: usize, head: usize) -> Vec<Vec<bool>> {
    let sees = |query, key| terms.iter().all(|term| term.sees(dims, At { batch, head, query, key }));
    (0..dims.q_len).map(|query| (0..dims.kv_len).map(|key| sees(query, key)).collect()).collect()
}

fn check(dims: &AttnShape, terms: &[&OwnedTerm]) {
    let mask = terms.iter().fold(Mask::none(), |mask, term| mask.and(term.mask()));
    mask.check(dims).unwrap_or_else(|error| panic!("{terms:?} on {dims:?}: {error}"));
    for batch in 0..dims.batch {
        for head in 0..dims.q_heads {
            let rows = brute(dims, terms, batch, head);
            for (query, row) in rows.iter().enumerate() {
                let what = || format!("{terms:?} on {dims:?}, batch {batch}, head {head}, query {query}");
                let range = mask.row_range(dims, batch, head, query);
                assert!(range.end <= dims.kv_len, "{}: {range:?}", what());
                for (key, &sees) in row.iter().enumerate() {
                    assert_eq!(mask.visible(dims, At { batch, head, query, key }), sees, "{}, key {key}", what());
                    assert!(!sees || range.contains(&key), "{}: key {key} outside {range:?}", what());
                    assert!(sees || !mask.is_ranges() || !range.contains(&key), "{}: hole {key} in {range:?}", what());
                }
                for start in [0, 1, 7, 63, 64, 65, 128, dims.kv_len, dims.kv_len + 1] {
                    let want = (0..64).fold(0u64, |bits, n| bits | u64::from(row.get(start + n) == Some(&true)) << n);
                    let got = mask.row_bits(dims, batch, head, query, start);
                    assert_eq!(got, want, "{}, bits from {start}: {got:b}, not {want:b}", what());
                }
            }
        }
    }
}

#[test]
fn every_term_answers_as_it_is_defined() {
    for (n, dims) in shapes().iter().enumerate() {
        for seed in 0..3 {
            for term in kinds(dims, 100 * n as u64 + seed) {
                check(dims, &[&term]);
            }
        }
    }
}

#[test]
fn every_pair_of_terms_answers_as_both() {
    for dims in [shape((1, 2, 1, 7, 20, 1, 1)), shape((2, 1, 1, 9, 66, 1, 1))] {
        let all = kinds(&dims, 7);
        for (n, first) in all.iter().enumerate() {
            for second in &all[n..] {
                check(&dims, &[first, second]);
            }
        }
    }
}

#[test]
fn no_mask_shows_everything() {
    for dims in shapes() {
        check(&dims, &[]);
    }
}
