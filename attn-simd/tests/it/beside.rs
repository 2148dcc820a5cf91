//! Caches that keep the heads of a token side by side: the kernel reads several heads together, and each gives the bits
//! that it gives where its tokens are side by side.

use attn_core::formats::{Format, StoredRows, StoredView};
use attn_core::half::{bf16, f16};
use attn_core::int8::{KeyScales, QuantizedView};
use attn_core::kv_cache::{CacheView, PageTable, Queries};
use attn_core::position::alibi::Alibi;
use attn_core::{Align, Attention, AttnError, Element, Layout, Mask, Outputs, Precision, View, ViewMut};
use attn_simd::decode::{DecodePlan, Source};
use attn_simd::{KernelElement, Level, Line};
use attn_testing::laws::{Answer, same_bits};

use super::levels_and_model;

/// Batch, heads, tokens, and numbers of a row.
type Sizes = [usize; 4];

/// The same rows with the heads of a token side by side, and `gap` numbers that nobody reads after each token.
fn beside<T: Copy>(x: &[T], [batch, heads, tokens, dim]: Sizes, gap: &[T]) -> Vec<T> {
    let row = |b: usize, h: usize, t: usize| &x[((b * heads + h) * tokens + t) * dim..][..dim];
    let token = |b, t| (0..heads).flat_map(move |h| row(b, h, t)).chain(gap);
    (0..batch * tokens).flat_map(|n| token(n / tokens, n % tokens)).copied().collect()
}

/// Views of both. `after` is the number of numbers after a token.
fn views<'x, T: Copy>(major: &'x [T], minor: &'x [T], sizes: Sizes, after: usize) -> [View<'x, T>; 2] {
    let [_, heads, tokens, dim] = sizes;
    let token = heads * dim + after;
    let strides = [tokens * token, dim, token, 1].map(|stride| stride as isize);
    [View::new(major, Layout::Bhsd, sizes), View::strided(minor, sizes, strides, 0)].map(|view| view.expect("fits"))
}

/// A step, in pieces for some threads, computed backwards.
fn step<Q: KernelElement>(
    level: Level,
    attn: &Attention<'_>,
    q: View<'_, Q>,
    cache: Source<'_>,
    threads: usize,
) -> Result<Answer<f32>, AttnError> {
    let ([batch, heads, q_len, _], value_dim) = (q.sizes(), 64);
    let rows = batch * heads * q_len;
    let mut answer = Answer { out: vec![-7.0f32; rows * value_dim], lse: vec![-7.0f32; rows] };
    let to = ViewMut::new(&mut answer.out, Layout::Bhsd, [batch, heads, q_len, value_dim])?;
    let plan = DecodePlan::new(attn, q.sizes(), Queries::All, cache, level)?;
    let mut call = plan.split(q, Outputs::new(to).lse(&mut answer.lse))?;
    let mut lines = vec![Line::ZERO; plan.workspace_lines()];
    if threads == 1 {
        call.run(&mut lines)?;
        return Ok(answer);
    }
    let round = call.cut(threads);
    let mut states = vec![f32::NAN; call.states_len(round)];
    let mut rest = states.as_mut_slice();
    for piece in call.pieces(round).collect::<Vec<_>>().into_iter().rev() {
        let (later, state) = rest.split_at_mut(rest.len() - piece.state_len());
        call.compute(&piece, state, &mut lines)?;
        rest = later;
    }
    assert!(rest.is_empty());
    call.finish(round, &mut states)?;
    Ok(answer)
}

fn numbers<T: Element>(len: usize, of: f32) -> Vec<T> {
    (0..len).map(|n| T::from_f64(f64::from((n as f32 * of).sin() * 1.5))).collect()
}

/// Both layouts of a cache of `T`, for queries of `Q`, by every option and number of threads.
fn check<Q: KernelElement, T: KernelElement>(level: Level, [kv_heads, group, q_len, dim]: Sizes, gap: usize) {
    let (batch, tokens, q_heads) = (2, if cfg!(miri) { 70 } else { 1100 }, kv_heads * group);
    let (sizes, wide) = ([batch, kv_heads, tokens, dim], [batch, kv_heads, tokens, 64]);
    // Masks are of one length; without, sequences differ in theirs.
    let (most, past) = (tokens - 7, f64::NAN);
    let lens = [[most, most], [most, tokens / 2]];
    let [mut k, mut v] = [(sizes, 0.37), (wide, 0.61)].map(|(sizes, of)| numbers::<T>(sizes.iter().product(), of));
    // Nobody sees what comes after a sequence.
    for (x, dim) in [(&mut k, dim), (&mut v, 64)] {
        for row in x.chunks_mut(tokens * dim) {
            row[most * dim..].fill(T::from_f64(past));
        }
    }
    // Token 40 is infinite for a head that a mask hides there, and token 41 for one that sees it.
    let keep: Vec<bool> = (0..q_heads * most).map(|n| n % most != 40 || n / most / group != 1).collect();
    for (head, token) in [(1, 40), (2, 41)] {
        if head < kv_heads {
            v[(head * tokens + token) * 64 + 3] = T::from_f64(f64::INFINITY);
        }
    }
    let gaps = vec![T::from_f64(past); gap];
    let [k2, v2] = [(&k, sizes), (&v, wide)].map(|(x, sizes)| beside(x, sizes, &gaps));
    let ([k, k2], [v, v2]) = (views(&k, &k2, sizes, gap), views(&v, &v2, wide, gap));
    let mut q = numbers::<Q>(batch * q_heads * q_len * dim, 0.83);
    // As bfloat16 this row is not multiplied in pairs, though others are.
    q[dim + 1] = Q::from_f64(1e-39);
    let q = View::new(&q, Layout::Bhsd, [batch, q_heads, q_len, dim]).expect("queries");
    let bias: Vec<f32> = numbers(q_heads * most, 0.11);
    let bias = View::new(&bias, Layout::Bhsd, [1, q_heads, 1, most]).expect("a bias");
    let keep = View::new(&keep, Layout::Bhsd, [1, q_heads, 1, most]).expect("a mask");
    let slopes: Vec<f32> = (0..q_heads).map(|h| 0.01 * (h + 1) as f32).collect();
    let base = Attention::new().mask(Mask::keep(keep));
    let all = [
        (base, 0),
        (base.mask(base.get_mask().and(Mask::window(300, 0, Align::BottomRight))).softcap(5.0), 0),
        (base.bias(bias).precision(Precision::Fast), 0),
        (Attention::new(), 1),
        (Attention::new().alibi(Alibi { slopes: &slopes, align: Align::BottomRight }), 1),
    ];
    for (attn, n) in if cfg!(miri) { &all[..1] } else { &all } {
        let caches = [(k, v), (k2, v2)].map(|(k, v)| CacheView::of_slots(k, v, &lens[*n]).expect("a cache"));
        let [want, got] = caches.map(|cache| step(level, attn, q, cache.into(), 1).expect("accepted"));
        let what = (level, [kv_heads, group, q_len, dim], gap);
        same_bits(&got.out, &want.out, &what);
        same_bits(&got.lse, &want.lse, &what);
        for threads in if cfg!(miri) { &[][..] } else { &[2, 5, 1000] } {
            let got = step(level, attn, q, caches[1].into(), *threads).expect("accepted");
            same_bits(&got.out, &want.out, &(what, threads));
        }
    }
}

#[test]
fn heads_of_a_token_are_read_together() {
    for level in levels_and_model() {
        if cfg!(miri) {
            check::<f32, f32>(level, [3, 1, 1, 16], 8);
            continue;
        }
        // As many rows as the products take and others, few heads and many, dims of copied rows.
        check::<f32, f32>(level, [8, 4, 1, 128], 0);
        check::<f32, f32>(level, [3, 1, 1, 64], 8);
        check::<f32, f32>(level, [5, 3, 1, 20], 0);
        check::<f32, f32>(level, [40, 1, 1, 32], 0);
        check::<f16, f16>(level, [8, 1, 1, 128], 0);
        check::<f32, f16>(level, [4, 7, 1, 64], 16);
        check::<f16, f32>(level, [2, 2, 3, 96], 0);
        check::<bf16, bf16>(level, [8, 4, 1, 64], 0);
        check::<bf16, bf16>(level, [6, 5, 1, 32], 1);
        check::<f32, f32>(level, [2, 1, 40, 16], 0);
    }
}

/// Rows of bytes, with scales for each token that are side by side like them.
#[test]
fn heads_in_bytes_and_in_pages() {
    let (kv_heads, group, tokens) = if cfg!(miri) { (2, 1, 70) } else { (8, 4, 700) };
    let sizes = [1, kv_heads, tokens, 64];
    let q: Vec<f32> = numbers(kv_heads * group * 64, 0.83);
    let q = View::new(&q, Layout::Bhsd, [1, kv_heads * group, 1, 64]).expect("queries");
    let [k, v] = [0.37, 0.61].map(|of| numbers::<f32>(kv_heads * tokens * 64, of));
    // Miri takes hundreds of times as long, and looks for something else.
    let (levels, formats) = if cfg!(miri) { (1, 1) } else { (usize::MAX, 4) };
    for level in levels_and_model().into_iter().take(levels) {
        for attn in [Attention::new(), Attention::new().precision(Precision::Fast)] {
            let both = |caches: [Source<'_>; 2], what: &str| {
                let [want, got] = caches.map(|cache| step(level, &attn, q, cache, 1).expect("accepted"));
                assert!(want.out.iter().any(|&x| x != 0.0));
                same_bits(&got.out, &want.out, &(level, what));
            };
            let scales: Vec<f32> = (0..kv_heads * tokens).map(|n| 0.01 + (n % 11) as f32 * 0.001).collect();
            let per_token = [1, kv_heads, tokens, 1];
            let scales2 = beside(&scales, per_token, &[]);
            let scales = views(&scales, &scales2, per_token, 0);
            let bytes = [&k, &v].map(|x| x.iter().map(|x| (x * 80.0) as i8).collect::<Vec<_>>());
            let bytes2 = [0, 1].map(|n| beside(&bytes[n], sizes, &[]));
            let [k8, v8] = [0, 1].map(|n| views(&bytes[n], &bytes2[n], sizes, 0));
            both(
                [0, 1].map(|n| {
                    let cache = CacheView::of_tensors(k8[n], v8[n]).expect("a cache");
                    QuantizedView::new(cache, KeyScales::PerToken(scales[n]), scales[n]).expect("fits").into()
                }),
                "int8",
            );
            for format in [Format::Q8_0, Format::Q4_0, Format::E4m3, Format::F16].into_iter().take(formats) {
                let row = format.row_bytes(64).expect("whole blocks");
                let packed = [&k, &v].map(|x| {
                    let mut bytes = vec![0u8; x.len() / 64 * row];
                    for (x, bytes) in x.chunks(64).zip(bytes.chunks_mut(row)) {
                        format.encode(x, bytes).expect("encoded");
                    }
                    bytes
                });
                let packed_sizes = [1, kv_heads, tokens, row];
                let packed2 = [0, 1].map(|n| beside(&packed[n], packed_sizes, &[]));
                let [k, v] = [0, 1].map(|n| views(&packed[n], &packed2[n], packed_sizes, 0));
                both(
                    [0, 1].map(|n| {
                        let rows = StoredRows::new(format, format.is_scaled().then_some(scales[n])).expect("rows");
                        let cache = CacheView::of_tensors(k[n], v[n]).expect("a cache");
                        StoredView::new(cache, rows, rows).expect("fits").into()
                    }),
                    format.name(),
                );
            }
            // Pages in another order; some too short to be read in place.
            for slots in [4, 16, 64] {
                let pages = tokens.div_ceil(slots);
                let paged = |x: &[f32]| {
                    let mut out = vec![f32::NAN; pages * slots * kv_heads * 64];
                    for (t, token) in beside(x, sizes, &[]).chunks(kv_heads * 64).enumerate() {
                        let page = (t / slots * 3 + 1) % pages;
                        out[(page * slots + t % slots) * kv_heads * 64..][..kv_heads * 64].copy_from_slice(token);
                    }
                    out
                };
                if pages.is_multiple_of(3) {
                    continue; // a page would be there twice
                }
                let (k2, v2) = (paged(&k), paged(&v));
                let view = |x| View::new(x, Layout::Bshd, [pages, kv_heads, slots, 64]).expect("pages");
                let table: Vec<i32> = (0..pages).map(|n| ((n * 3 + 1) % pages) as i32).collect();
                let lens = [tokens];
                let table = PageTable::padded(&table, &lens).expect("a table");
                let plain = |x| View::new(x, Layout::Bhsd, sizes).expect("tokens");
                let cache = CacheView::of_tensors(plain(&k), plain(&v)).expect("a cache");
                let paged = CacheView::of_pages(view(&k2), view(&v2), table).expect("pages");
                both([cache.into(), paged.into()], "pages");
            }
        }
    }
}

/// A call whose heads are apart refuses pieces of several heads.
#[test]
fn pieces_of_heads_together_are_refused_elsewhere() {
    let (x, attn, sizes) = (vec![0.5f32; 4 * 40 * 64], Attention::new(), [1, 4, 40, 64]);
    let q = View::new(&x, Layout::Bhsd, [1, 4, 1, 64]).expect("queries");
    let caches = [Layout::Bshd, Layout::Bhsd].map(|layout| {
        let x = View::new(&x, layout, sizes).expect("tokens");
        CacheView::of_tensors(x, x).expect("a cache")
    });
    let plans =
        caches.map(|cache| DecodePlan::new(&attn, q.sizes(), Queries::All, cache, Level::detect()).expect("accepted"));
    let mut outs = [(); 2].map(|()| vec![0.0f32; 4 * 64]);
    let [together, apart] = outs.each_mut();
    let to = |out| ViewMut::new(out, Layout::Bhsd, [1, 4, 1, 64]).expect("output");
    let together = plans[0].split(q, to(together)).expect("accepted");
    let apart = plans[1].split(q, to(apart)).expect("accepted");
    let mut lines = vec![Line::ZERO; together.workspace_lines().max(apart.workspace_lines())];
    let piece = together.pieces(together.cut(1)).next().expect("a piece");
    assert_eq!(piece.state_len(), 4 * 66, "one piece of all heads");
    let mut state = vec![9.0; piece.state_len()];
    let refused = apart.compute(&piece, &mut state, &mut lines);
    assert!(matches!(refused, Err(AttnError::Unsupported { .. })) && state.iter().all(|&x| x == 9.0));
    assert!(together.compute(&piece, &mut state, &mut lines).is_ok());
}
