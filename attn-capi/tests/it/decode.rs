//! Decoding over caches from C: what a cache gives is what a plain call over the same keys gives, bit for bit.

use attn::types::{AttnCache, AttnCacheKind, AttnDtype, AttnOptions, AttnQueries, AttnStatus, AttnTensor};
use attn_core::half::f16;

use crate::c::{self, Arguments, cache, floats, options, queries, tensor, tensor_mut};

/// Tokens of each sequence, and how many of them are queries of the call.
const LENS: [usize; 2] = [70, 33];
const NEW: [usize; 2] = [1, 5];
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;
const VALUE_DIM: usize = 24;
/// Slots of a sequence; those behind its tokens hold NaN.
const CAPACITY: usize = 80;

fn paint(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|n| ((n * 31 + seed * 977) as f32 * 0.37).sin() * 2.0).collect()
}

/// Keys or values of all tokens, `[2, KV_HEADS, CAPACITY, dim]`.
fn filled(dim: usize, seed: usize) -> Vec<f32> {
    let mut x = paint(2 * KV_HEADS * CAPACITY * dim, seed);
    for (row, values) in x.chunks_mut(dim).enumerate() {
        if row % CAPACITY >= LENS[row / CAPACITY / KV_HEADS] {
            values.fill(f32::NAN);
        }
    }
    x
}

/// Queries packed end to end, `[1, Q_HEADS, 6, DIM]`.
fn packed_queries() -> Vec<f32> {
    paint(Q_HEADS * 6 * DIM, 3)
}

/// What each packed row gets from plain calls, one for each sequence, over the tokens that `held` says: out and lse as
/// bits.
fn plain(options: &AttnOptions, held: [&[usize]; 2]) -> Vec<u32> {
    let (q, k, v) = (packed_queries(), filled(DIM, 1), filled(VALUE_DIM, 2));
    let (mut out, mut lse) = (vec![0.0f32; Q_HEADS * 6 * VALUE_DIM], vec![0.0f32; Q_HEADS * 6]);
    for (b, held) in held.into_iter().enumerate() {
        let gather = |x: &[f32], dim: usize| -> Vec<f32> {
            let row = |head: usize, token: usize| ((b * KV_HEADS + head) * CAPACITY + token) * dim;
            (0..KV_HEADS)
                .flat_map(|h| held.iter().flat_map(move |&t| row(h, t)..row(h, t) + dim))
                .map(|at| x[at])
                .collect()
        };
        let (k, v) = (gather(&k, DIM), gather(&v, VALUE_DIM));
        let (first, count) = ([0, 1][b], NEW[b]);
        let rows = |x: &AttnTensor, dim: usize| AttnTensor {
            shape: [1, Q_HEADS, count, dim],
            strides: [0, 6 * dim as isize, dim as isize, 1],
            offset: first * dim,
            ..*x
        };
        let mut own = vec![0.0f32; Q_HEADS * count];
        let status = c::forward(Arguments {
            options: Some(&AttnOptions { causal: 2, reproducible: 1, ..*options }),
            q: Some(&rows(&floats(&q, [1, Q_HEADS, 6, DIM]), DIM)),
            k: Some(&floats(&k, [1, KV_HEADS, held.len(), DIM])),
            v: Some(&floats(&v, [1, KV_HEADS, held.len(), VALUE_DIM])),
            out: Some(&rows(&tensor_mut(&mut out, AttnDtype::F32, [1, Q_HEADS, 6, VALUE_DIM]), VALUE_DIM)),
            lse: (own.as_mut_ptr(), own.len()),
        });
        assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
        for (n, x) in own.into_iter().enumerate() {
            lse[n / count * 6 + first + n % count] = x;
        }
    }
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

/// `attn_decode` with packed queries: out and lse as bits.
fn decoded(options: &AttnOptions, cache: &AttnCache) -> Vec<u32> {
    let (q, mut out, mut lse) = (packed_queries(), vec![7.0f32; Q_HEADS * 6 * VALUE_DIM], vec![7.0f32; Q_HEADS * 6]);
    let status = c::decode(
        cache,
        Some(&queries(&[], &[0, 1, 6])),
        Arguments {
            options: Some(options),
            q: Some(&floats(&q, [1, Q_HEADS, 6, DIM])),
            k: None,
            v: None,
            out: Some(&tensor_mut(&mut out, AttnDtype::F32, [1, Q_HEADS, 6, VALUE_DIM])),
            lse: (lse.as_mut_ptr(), lse.len()),
        },
    );
    assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

fn all_tokens() -> [Vec<usize>; 2] {
    LENS.map(|len| (0..len).collect())
}

#[test]
fn slots_and_pages_give_the_bits_of_plain_calls() {
    let [first, second] = all_tokens();
    let sinks = [0.5f32, -1.0, 0.0, 2.0];
    for threads in [0, 1, 3] {
        let mut options = options();
        (options.threads, options.softcap) = (threads, 20.0);
        (options.sinks, options.sinks_len) = (sinks.as_ptr(), 4);
        (options.window, options.window_left) = (2, 40); // at the bottom right, to the 40th key before
        let want = plain(&options, [&first, &second]);
        let (k, v, mut lens) = (filled(DIM, 1), filled(VALUE_DIM, 2), LENS);
        let of = |x: &[f32], dim| floats(x, [2, KV_HEADS, CAPACITY, dim]);
        let (tk, tv) = (of(&k, DIM), of(&v, VALUE_DIM));
        assert!(decoded(&options, &cache(&tk, &tv, &mut lens)) == want, "slots, {threads} threads");
        // Pages of eight tokens are the same memory cut up: page n of sequence b's head h must be found at [n, h].
        let page = |dim: usize, x: &[f32]| -> Vec<f32> {
            let row = |n: usize, h: usize| ((n / 10 * KV_HEADS + h) * CAPACITY + n % 10 * 8) * dim;
            (0..20)
                .flat_map(|n| (0..KV_HEADS).flat_map(move |h| row(n, h)..row(n, h) + 8 * dim))
                .map(|at| x[at])
                .collect()
        };
        let (k, v) = (page(DIM, &k), page(VALUE_DIM, &v));
        let of = |x: &[f32], dim| floats(x, [20, KV_HEADS, 8, dim]);
        let (tk, tv) = (of(&k, DIM), of(&v, VALUE_DIM));
        let table: Vec<i32> = (0..20).map(|n| if n % 10 < LENS[n / 10].div_ceil(8) { n as i32 } else { -1 }).collect();
        let (kind, block_table, block_table_len) = (AttnCacheKind::Paged as u32, table.as_ptr(), table.len());
        let paged = AttnCache { kind, block_table, block_table_len, ..cache(&tk, &tv, &mut lens) };
        assert!(decoded(&options, &paged) == want, "pages, {threads} threads");
        // The same pages in compressed rows: sequence 0 has 9 of them, sequence 1 has 5.
        let indices: Vec<i32> = table.into_iter().filter(|&page| page >= 0).collect();
        assert!(decoded(&options, &csr(&tk, &tv, &[0, 9, 14], &indices, &[6, 1])) == want, "csr, {threads} threads");
    }
}

/// Pages in compressed rows.
fn csr(k: &AttnTensor, v: &AttnTensor, indptr: &[i32], indices: &[i32], last: &[i32]) -> AttnCache {
    AttnCache {
        kind: AttnCacheKind::Paged as u32,
        lens: std::ptr::null_mut(),
        kv_indptr: indptr.as_ptr(),
        kv_indptr_len: indptr.len(),
        kv_indices: indices.as_ptr(),
        kv_indices_len: indices.len(),
        kv_last_page_len: last.as_ptr(),
        ..cache(k, v, &mut [])
    }
}

/// Tokens appended through compressed tables, which count them already.
#[test]
fn compressed_tables_are_appended_to() {
    let [first, second] = all_tokens();
    let want = plain(&options(), [&first, &second]);
    let pages = 20; // of eight tokens
    let empty = |dim| vec![f32::NAN; pages * KV_HEADS * 8 * dim];
    let (mut k, mut v) = (empty(DIM), empty(VALUE_DIM));
    let tk = tensor_mut(&mut k, AttnDtype::F32, [pages, KV_HEADS, 8, DIM]);
    let tv = tensor_mut(&mut v, AttnDtype::F32, [pages, KV_HEADS, 8, VALUE_DIM]);
    let (mut done, mut indices) = ([0usize; 2], vec![]);
    let mut last_call = None;
    for counts in [[20, 20], [30, 10], [20, 3]] {
        let end = [done[0] + counts[0], done[1] + counts[1]];
        let used = end.map(|len| len.div_ceil(8));
        // Sequence 0 has the even pages, backwards; sequence 1 the odd ones.
        indices = (0..used[0]).map(|n| 18 - 2 * n as i32).chain((0..used[1]).map(|n| 2 * n as i32 + 1)).collect();
        let indptr = [0, used[0] as i32, indices.len() as i32];
        let last = end.map(|len| (len as i32 - 1) % 8 + 1);
        let cache = csr(&tk, &tv, &indptr, &indices, &last);
        assert_eq!(append(&cache, done, counts), AttnStatus::Ok, "{}", c::last_error());
        (done, last_call) = (end, Some((indptr, last)));
    }
    let (indptr, last) = last_call.expect("three calls");
    assert!(decoded(&options(), &csr(&tk, &tv, &indptr, &indices, &last)) == want);
    // Fewer tokens than new ones: nothing is written.
    let before: Vec<u32> = k.iter().map(|x| x.to_bits()).collect();
    let tk = tensor_mut(&mut k, AttnDtype::F32, [pages, KV_HEADS, 8, DIM]);
    let few = csr(&tk, &tv, &[0, 1, 2], &[0, 1], &[3, 1]);
    assert_eq!(append(&few, [0, 0], [2, 2]), AttnStatus::Table);
    assert!(c::last_error().contains("[1] is 2"), "{}", c::last_error());
    assert!(k.iter().map(|x| x.to_bits()).eq(before));
}

/// Appends a chunk of tokens of the stream `filled` to every sequence.
fn append(cache: &AttnCache, starts: [usize; 2], counts: [usize; 2]) -> AttnStatus {
    let n = counts[0].max(counts[1]);
    let chunk = |dim: usize, seed: usize| -> Vec<f32> {
        let x = filled(dim, seed);
        let row =
            |b: usize, h: usize, t: usize| ((b * KV_HEADS + h) * CAPACITY + (starts[b] + t).min(CAPACITY - 1)) * dim;
        let heads = (0..2).flat_map(|b| (0..KV_HEADS).map(move |h| (b, h)));
        heads.flat_map(|(b, h)| (0..n).flat_map(move |t| row(b, h, t)..row(b, h, t) + dim)).map(|at| x[at]).collect()
    };
    let (k, v) = (chunk(DIM, 1), chunk(VALUE_DIM, 2));
    let (k, v) = (floats(&k, [2, KV_HEADS, n, DIM]), floats(&v, [2, KV_HEADS, n, VALUE_DIM]));
    c::append(cache, &k, &v, if counts[0] == counts[1] { None } else { Some(&counts) })
}

#[test]
fn what_was_appended_in_chunks_is_what_is_there() {
    let [first, second] = all_tokens();
    let want = plain(&options(), [&first, &second]);
    let empty = |dim| vec![f32::NAN; 2 * KV_HEADS * CAPACITY * dim];
    let (mut k, mut v, mut lens) = (empty(DIM), empty(VALUE_DIM), [0; 2]);
    let tk = tensor_mut(&mut k, AttnDtype::F32, [2, KV_HEADS, CAPACITY, DIM]);
    let tv = tensor_mut(&mut v, AttnDtype::F32, [2, KV_HEADS, CAPACITY, VALUE_DIM]);
    let mut done = [0; 2];
    for counts in [[20, 20], [30, 10], [20, 3], [0, 0]] {
        assert_eq!(append(&cache(&tk, &tv, &mut lens), done, counts), AttnStatus::Ok, "{}", c::last_error());
        done = [done[0] + counts[0], done[1] + counts[1]];
        assert_eq!(lens, done);
    }
    assert_eq!(lens, LENS);
    assert!(decoded(&options(), &cache(&tk, &tv, &mut lens)) == want);
    // No room: refused, and nothing counted or written.
    let before = k.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(append(&cache(&tk, &tv, &mut lens), [0, 0], [11, 11]), AttnStatus::Table);
    assert!(c::last_error().contains("81"), "{}", c::last_error());
    assert_eq!(lens, LENS);
    assert!(k.iter().map(|x| x.to_bits()).eq(before));
}

/// One query for each of two sequences of this cache, of any dtype of `k` and `v`.
fn step(cache: &AttnCache, threads: usize) -> (AttnStatus, Vec<u32>) {
    let (q, mut out) = (paint(2 * Q_HEADS * DIM, 5), vec![7.0f32; 2 * Q_HEADS * VALUE_DIM]);
    let status = c::decode(
        cache,
        None,
        Arguments {
            options: Some(&AttnOptions { threads, ..options() }),
            q: Some(&floats(&q, [2, Q_HEADS, 1, DIM])),
            k: None,
            v: None,
            out: Some(&tensor_mut(&mut out, AttnDtype::F32, [2, Q_HEADS, 1, VALUE_DIM])),
            lse: (std::ptr::null_mut(), 0),
        },
    );
    (status, out.iter().map(|x| x.to_bits()).collect())
}

#[test]
fn a_ring_gives_the_bits_of_the_tokens_that_it_holds() {
    let (sinks, window) = (2, 6);
    let empty = |dim| vec![f32::NAN; 2 * KV_HEADS * 8 * dim];
    let (mut k, mut v, mut seen) = (empty(DIM), empty(VALUE_DIM), [0; 2]);
    let tk = tensor_mut(&mut k, AttnDtype::F32, [2, KV_HEADS, 8, DIM]);
    let tv = tensor_mut(&mut v, AttnDtype::F32, [2, KV_HEADS, 8, VALUE_DIM]);
    let kind = AttnCacheKind::Ring as u32;
    let ring = |seen: &mut [usize]| AttnCache { kind, sinks, window, ..cache(&tk, &tv, seen) };
    for (start, count) in [(0, 3), (3, 4), (7, 20), (27, 6)] {
        assert_eq!(append(&ring(&mut seen), [start; 2], [count; 2]), AttnStatus::Ok, "{}", c::last_error());
        let end = start + count;
        let held: Vec<usize> = (0..end).filter(|&t| t < sinks || t + window >= end).collect();
        let gather = |dim: usize, seed: usize| -> Vec<f32> {
            let x = filled(dim, seed);
            let rows = (0..2 * KV_HEADS).flat_map(|row| held.iter().map(move |&t| row * CAPACITY + t));
            rows.flat_map(|row| row * dim..(row + 1) * dim).map(|at| x[at]).collect()
        };
        let (k, v, mut lens) = (gather(DIM, 1), gather(VALUE_DIM, 2), [held.len(); 2]);
        let (k, v) = (floats(&k, [2, KV_HEADS, held.len(), DIM]), floats(&v, [2, KV_HEADS, held.len(), VALUE_DIM]));
        let want = step(&cache(&k, &v, &mut lens), 1);
        assert_eq!(want.0, AttnStatus::Ok);
        assert!(step(&ring(&mut seen), 0) == want, "after {end} tokens");
    }
    assert_eq!(seen, [33; 2]);
    assert_eq!(append(&ring(&mut seen), [0; 2], [2, 1]), AttnStatus::Unsupported);
}

#[test]
fn halves_are_read_as_what_they_are() {
    let halves = |dim, seed| filled(dim, seed).into_iter().map(f16::from_f32).collect::<Vec<_>>();
    let (k, v, mut lens) = (halves(DIM, 1), halves(VALUE_DIM, 2), LENS);
    let wide = |x: &[f16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    let (wide_k, wide_v) = (wide(&k), wide(&v));
    let of = |x: &[f32], dim| floats(x, [2, KV_HEADS, CAPACITY, dim]);
    let want = step(&cache(&of(&wide_k, DIM), &of(&wide_v, VALUE_DIM), &mut lens), 1);
    let of = |x: &[f16], dim| tensor(x, AttnDtype::F16, [2, KV_HEADS, CAPACITY, dim]);
    let (tk, tv) = (of(&k, DIM), of(&v, VALUE_DIM));
    let found = step(&cache(&tk, &tv, &mut lens), 1);
    assert_eq!((want.0, found.0), (AttnStatus::Ok, AttnStatus::Ok));
    let near = |(&a, &b): (&u32, &u32)| (f32::from_bits(a) - f32::from_bits(b)).abs() < 1e-6;
    assert!(found.1.iter().zip(&want.1).all(near));
}

/// A decode call that is right until `breaks` breaks it; the outputs must be as they were.
fn refuses(
    want: AttnStatus,
    words: &[&str],
    breaks: impl FnOnce(&mut AttnCache, &mut AttnQueries, &mut Arguments<'_>),
) {
    let (q, kv, mut lens, first) = (vec![0.5f32; 2 * 2 * 3 * 4], vec![0.25f32; 2 * 8 * 4], [5, 2], [3, 1]);
    let (mut out, mut lse) = (vec![7.0f32; 48], vec![7.0f32; 12]);
    let (options, q) = (options(), floats(&q, [2, 2, 3, 4]));
    let kv = floats(&kv, [2, 1, 8, 4]);
    let to = tensor_mut(&mut out, AttnDtype::F32, [2, 2, 3, 4]);
    let lse_pointer = (lse.as_mut_ptr(), 12);
    let (mut cache, mut queries) = (cache(&kv, &kv, &mut lens), queries(&first, &[]));
    let mut a = Arguments { options: Some(&options), q: Some(&q), k: None, v: None, out: Some(&to), lse: lse_pointer };
    breaks(&mut cache, &mut queries, &mut a);
    let status = c::decode(&cache, Some(&queries), a);
    assert_eq!(status, want, "{}", c::last_error());
    for word in words {
        assert!(c::last_error().contains(word), "{:?} does not say {word:?}", c::last_error());
    }
    let untouched = out.iter().chain(&lse).all(|&x| x == 7.0);
    assert_eq!(untouched, status != AttnStatus::Ok);
}

#[test]
fn wrong_caches_and_queries_are_refused() {
    use AttnStatus::{Bounds, Misaligned, NullPointer, Ok, Option, Overflow, Overlap, Shape, StructSize, Table};
    let (long, short, six) = ([9usize, 2], [5usize; 1], [0usize, 3, 7]);
    refuses(Ok, &[], |_, _, _| {});
    refuses(NullPointer, &["cache k"], |cache, _, _| cache.k = std::ptr::null());
    refuses(NullPointer, &["lens"], |cache, _, _| cache.lens = std::ptr::null_mut());
    refuses(Option, &["kind"], |cache, _, _| cache.kind = 3);
    refuses(Option, &["AttnCache.window is", "KIND_RING"], |cache, _, _| cache.window = 2);
    refuses(Option, &["AttnCache.sinks is", "KIND_RING"], |cache, _, _| cache.sinks = 2);
    // A table without entries is one too.
    let pages = [0i32; 2];
    for len in [0, 2] {
        refuses(Option, &["AttnCache.block_table is", "KIND_PAGED"], |cache, _, _| {
            (cache.block_table, cache.block_table_len) = (pages.as_ptr(), len);
        });
    }
    refuses(Option, &["reserved"], |cache, _, _| cache.reserved = 1);
    refuses(StructSize, &["AttnCache"], |cache, _, _| cache.struct_size = 2);
    refuses(StructSize, &["AttnQueries"], |_, queries, _| queries.struct_size = 1 << 20);
    refuses(Table, &["lens[0]", "9"], |cache, _, _| cache.lens = long.as_ptr().cast_mut());
    refuses(Shape, &["lens", "2", "1"], |cache, _, _| (cache.lens, cache.lens_len) = (short.as_ptr().cast_mut(), 1));
    refuses(Overflow, &["lens"], |cache, _, _| cache.lens_len = usize::MAX);
    refuses(Misaligned, &["lens"], |cache, _, _| cache.lens = cache.lens.wrapping_byte_add(1));
    refuses(Option, &["null if cu"], |_, queries, _| (queries.cu, queries.cu_len) = (six.as_ptr(), 3));
    refuses(Table, &["cached tokens"], |cache, _, _| cache.lens = [2usize, 2].as_ptr().cast_mut());
    refuses(Table, &["q_lens"], |_, queries, _| queries.lens = [4usize, 1].as_ptr());
    refuses(Overlap, &["out", "cache"], |cache, _, a| a.out = Some(c::borrowed(cache.k)));
    refuses(Shape, &["lse"], |_, _, a| a.lse.1 = 11);
    // Rings and pages.
    let ring = |cache: &mut AttnCache, sinks, window| (cache.kind, cache.sinks, cache.window) = (1, sinks, window);
    refuses(Ok, &[], |cache, _, _| ring(cache, 2, 6));
    refuses(Option, &["window"], |cache, _, _| ring(cache, 2, 0));
    refuses(Bounds, &["sinks", "9", "8"], |cache, _, _| ring(cache, 3, 6));
    refuses(Overflow, &["sinks"], |cache, _, _| ring(cache, usize::MAX, usize::MAX));
    refuses(AttnStatus::Unsupported, &["dropped"], |cache, _, _| {
        ring(cache, 1, 3);
    });
    let table = |cache: &mut AttnCache, table: &'static [i32]| {
        (cache.kind, cache.block_table, cache.block_table_len) = (2, table.as_ptr(), table.len());
    };
    refuses(Ok, &[], |cache, _, _| table(cache, &[1, 0]));
    refuses(Table, &["block_table[1]", "2"], |cache, _, _| table(cache, &[1, 2]));
    refuses(Table, &["block_table[0]"], |cache, _, _| table(cache, &[-1, 0]));
    refuses(Shape, &["block_table"], |cache, _, _| table(cache, &[0, 1, 0]));
    refuses(Table, &["width"], |cache, _, _| table(cache, &[]));
    refuses(NullPointer, &["AttnCache.block_table", "paged", "kv_indptr"], |cache, _, _| cache.kind = 2);
    // Compressed rows of pages.
    let rows = |indptr: &'static [i32], indices: &'static [i32], last: &'static [i32]| {
        move |cache: &mut AttnCache, _: &mut AttnQueries, _: &mut Arguments<'_>| {
            *cache = csr(c::borrowed(cache.k), c::borrowed(cache.v), indptr, indices, last);
        }
    };
    refuses(Ok, &[], rows(&[0, 1, 2], &[1, 0], &[5, 2]));
    refuses(Table, &["kv_indptr[2]", "3", "2"], rows(&[0, 1, 3], &[1, 0], &[5, 2]));
    refuses(Table, &["kv_indptr[2]"], rows(&[0, 1, 0], &[1, 0], &[5, 2]));
    refuses(Table, &["kv_indices[1]", "2", "1"], rows(&[0, 1, 2], &[1, 2], &[5, 2]));
    refuses(Table, &["kv_last_page_len[0]", "9", "8"], rows(&[0, 1, 2], &[1, 0], &[9, 2]));
    refuses(Option, &["kv_last_page_len"], rows(&[0, 1, 2], &[1, 0], &[5, 0]));
    refuses(Shape, &["kv_indptr"], rows(&[], &[1, 0], &[]));
    let right = rows(&[0, 1, 2], &[1, 0], &[5, 2]);
    let csr_but = |breaks: fn(&mut AttnCache)| {
        move |cache: &mut AttnCache, queries: &mut AttnQueries, a: &mut Arguments<'_>| {
            right(cache, queries, a);
            breaks(cache);
        }
    };
    refuses(NullPointer, &["kv_last_page_len"], csr_but(|cache| cache.kv_last_page_len = std::ptr::null()));
    refuses(NullPointer, &["kv_indices"], csr_but(|cache| cache.kv_indices = std::ptr::null()));
    refuses(Overflow, &["kv_indptr"], csr_but(|cache| cache.kv_indptr_len = usize::MAX));
    refuses(
        Option,
        &["AttnCache.kv_indptr, kv_indices or kv_last_page_len is", "KIND_PAGED"],
        csr_but(|cache| cache.kind = 0),
    );
    refuses(Option, &["AttnCache.block_table is", "null"], csr_but(|cache| cache.block_table = cache.kv_indices));
    refuses(Option, &["AttnCache.lens is", "null"], csr_but(|cache| cache.lens_len = 2));
}
