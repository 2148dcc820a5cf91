//! Steps over caches: every layout of the same tokens gives the same bits, in any mixture of decode steps and prefill
//! chunks.

use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{AppendCache, CacheView, PageTable, Queries, RingCache};
use attn_core::{Align, Attention, AttnError, Element, Layout, Mask, Outputs, View, ViewMut, state};
use attn_simd::decode::DecodePlan;
use attn_simd::{KernelElement, Level, Line, Plan, Workspace};
use attn_testing::Number;
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::laws::{attend_views, same_bits};

use super::decode::Pinned;

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 24;
const WIDE: usize = 20;

/// What a step over a cache gives: `[rows of q, heads, q_len, WIDE]` and lse.
fn step<T: KernelElement>(
    level: Level,
    attn: &Attention<'_>,
    q: View<'_, f32>,
    queries: Queries<'_>,
    cache: CacheView<'_, T>,
) -> Result<(Vec<f32>, Vec<f32>), AttnError> {
    let [batch, heads, q_len, _] = q.sizes();
    let (mut out, mut lse) = (vec![-7.0f32; batch * heads * q_len * WIDE], vec![-7.0f32; batch * heads * q_len]);
    let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, [batch, heads, q_len, WIDE])?).lse(&mut lse);
    let plan = DecodePlan::new(attn, q.sizes(), queries, cache, level)?;
    plan.split(q, to)?.run(Workspace::new().lines(plan.workspace_lines()))?;
    Ok((out, lse))
}

/// Rows `counts` from `starts` on of each sequence, from a plain reproducible call on the tokens so far:
/// `[heads, rows, WIDE]`.
fn plain(level: Level, attn: &Attention<'_>, all: &Inputs<f32>, sequence: usize, first: usize, end: usize) -> Vec<f32> {
    let causal = attn.mask(attn.get_mask().and(Mask::causal(Align::BottomRight)));
    let cut = |x: &Tensor4<f32>, from: usize, to: usize| {
        let mut sizes = x.sizes;
        (sizes[0], sizes[2]) = (1, to - from);
        Tensor4::<f32>::new(sizes, Memory::Bhsd, |[_, h, s, d]| f64::from(x.at([sequence, h, from + s, d])))
    };
    let (q, k, v) = (cut(&all.q, first, end), cut(&all.k, 0, end), cut(&all.v, 0, end));
    attend_views(&Pinned(level), &causal, q.view(), k.view(), v.view()).expect("accepted").out
}

/// Rows behind a sequence's last query are 0 and their lse −∞, also where no sequence has a query.
#[test]
fn rows_without_a_query_are_cleared() {
    let all = Inputs::<f32>::plain(shape((2, HEADS, KV_HEADS, 3, 5, DIM, WIDE)), 62);
    for level in Level::available() {
        for counts in [[0, 0], [0, 2]] {
            let view = CacheView::of_tensors(all.k.view(), all.v.view()).expect("a cache");
            let q = all.q.view();
            let (out, lse) = step(level, &Attention::new(), q, Queries::First(&counts), view).expect("accepted");
            for (n, (row, lse)) in out.chunks(WIDE).zip(&lse).enumerate() {
                let computed = n % 3 < counts[n / (3 * HEADS)];
                assert_eq!(row.iter().all(|&x| x == 0.0), !computed, "{level:?} {counts:?}: row {n} is {row:?}");
                assert_eq!(*lse == f32::NEG_INFINITY, !computed, "{level:?} {counts:?}: lse {n} is {lse}");
            }
        }
    }
}

/// Contiguous and paged, in every layout, ragged, packed and padded: the bits of plain calls.
#[test]
fn every_layout_gives_the_same_bits() {
    let (lens, counts) = ([700usize, 3, 530], [1usize, 3, 18]);
    let longest = 700;
    let all = Inputs::<f32>::plain(shape((3, HEADS, KV_HEADS, longest, longest, DIM, WIDE)), 61);
    let window = Mask::window(400, 0, Align::BottomRight);
    for level in Level::available() {
        for attn in [Attention::new(), Attention::new().mask(window).softcap(5.0)] {
            let want: Vec<Vec<f32>> =
                (0..3).map(|b| plain(level, &attn, &all, b, lens[b] - counts[b], lens[b])).collect();
            // Queries, padded to the longest chunk, and packed.
            let q_at = |b: usize, h: usize, i: usize, d: usize| f64::from(all.q.at([b, h, lens[b] - counts[b] + i, d]));
            let padded = Tensor4::<f32>::new([3, HEADS, 18, DIM], Memory::Bshd, |[b, h, i, d]| {
                if i < counts[b] { q_at(b, h, i, d) } else { f64::NAN }
            });
            let cu = [0, 1, 4, 22];
            let packed = Tensor4::<f32>::new([1, HEADS, 24, DIM], Memory::Bhsd, |[_, h, n, d]| {
                let b = (0..3).find(|&b| n < cu[b + 1]);
                b.map_or(f64::NAN, |b| q_at(b, h, n - cu[b], d))
            });
            let check = |cache: CacheView<'_, f32>, what: &str| {
                let (out, lse) = step(level, &attn, padded.view(), Queries::First(&counts), cache).expect("accepted");
                for b in 0..3 {
                    for h in 0..HEADS {
                        let rows = (b * HEADS + h) * 18;
                        let seen = rows * WIDE..(rows + counts[b]) * WIDE;
                        let expected = &want[b][h * counts[b] * WIDE..][..counts[b] * WIDE];
                        same_bits(&out[seen], expected, &(level, what, b, h));
                        for i in counts[b]..18 {
                            assert!(out[(rows + i) * WIDE..][..WIDE].iter().all(|x| x.to_bits() == 0));
                            assert_eq!(lse[rows + i], f32::NEG_INFINITY);
                        }
                    }
                }
                let (out, lse) = step(level, &attn, packed.view(), Queries::Packed(&cu), cache).expect("accepted");
                for h in 0..HEADS {
                    for b in 0..3 {
                        let expected = &want[b][h * counts[b] * WIDE..][..counts[b] * WIDE];
                        same_bits(&out[(h * 24 + cu[b]) * WIDE..][..counts[b] * WIDE], expected, &(level, what, b, h));
                    }
                    assert!(out[(h * 24 + 22) * WIDE..][..2 * WIDE].iter().all(|x| x.to_bits() == 0));
                    assert_eq!(lse[h * 24 + 22..][..2], [f32::NEG_INFINITY; 2]);
                }
            };
            for memory in [Memory::Bhsd, Memory::Bshd, Memory::Padded, Memory::DimFirst] {
                // Slots after a sequence's length are nonfinite.
                let held = |x: &Tensor4<f32>| {
                    let mut sizes = x.sizes;
                    sizes[2] = longest + 5;
                    Tensor4::<f32>::new(sizes, memory, |[b, h, s, d]| {
                        if s < lens[b] { f64::from(x.at([b, h, s, d])) } else { f64::NAN }
                    })
                };
                let (mut k, mut v, mut lens) = (held(&all.k), held(&all.v), lens);
                let k = ViewMut::strided(&mut k.data, k.sizes, k.strides, k.offset).expect("keys");
                let v = ViewMut::strided(&mut v.data, v.sizes, v.strides, v.offset).expect("values");
                check(AppendCache::new(k, v, &mut lens).expect("a cache").view(), "contiguous");
            }
            for page_size in [1, 16, 64, 100, 1000] {
                let used: Vec<usize> = lens.iter().map(|len| len.div_ceil(page_size)).collect();
                let (pages, width) = (used.iter().sum::<usize>() + 2, used.iter().max().copied().unwrap_or(0));
                // Pages in an order of their own: 7·n modulo their number, which 7 does not divide.
                let pages = if pages.is_multiple_of(7) { pages + 1 } else { pages };
                let mut next = 0;
                let mut table = vec![-1i32; 3 * width];
                for b in 0..3 {
                    for i in 0..used[b] {
                        table[b * width + i] = (next * 7 % pages) as i32;
                        next += 1;
                    }
                }
                let paged = |x: &Tensor4<f32>| {
                    let [_, heads, _, dim] = x.sizes;
                    Tensor4::<f32>::new([pages, heads, page_size, dim], Memory::Bshd, |[page, h, slot, d]| {
                        let at = table.iter().position(|&entry| entry == page as i32);
                        let token = at.map(|at| (at / width, at % width * page_size + slot));
                        token.filter(|&(b, t)| t < lens[b]).map_or(f64::NAN, |(b, t)| f64::from(x.at([b, h, t, d])))
                    })
                };
                let (k, v) = (paged(&all.k), paged(&all.v));
                let pages = PageTable::padded(&table, &lens).expect("whole rows");
                check(CacheView::of_pages(k.view(), v.view(), pages).expect("a cache"), "paged");
                // The same rows without their padding.
                let (mut indptr, mut indices, mut last) = (vec![0], Vec::new(), Vec::new());
                for b in 0..3 {
                    indices.extend_from_slice(&table[b * width..][..used[b]]);
                    indptr.push(indices.len() as i32);
                    last.push((lens[b] - used[b].saturating_sub(1) * page_size) as i32);
                }
                let pages = PageTable::csr(&indptr, &indices, &last).expect("ascending");
                check(CacheView::of_pages(k.view(), v.view(), pages).expect("a cache"), "csr");
            }
        }
    }
}

/// A ring that has turned: the bits of a plain call on the tokens that it holds.
#[test]
fn a_ring_reads_its_tokens_in_order() {
    let (sinks, ring, tokens) = (3, 97, 250);
    let all = Inputs::<f32>::plain(shape((2, HEADS, KV_HEADS, tokens, tokens, DIM, WIDE)), 62);
    let (mut k, mut v) = (vec![f32::NAN; 2 * KV_HEADS * 100 * DIM], vec![f32::NAN; 2 * KV_HEADS * 100 * WIDE]);
    let mut seen = [0, 0];
    let k = ViewMut::new(&mut k, Layout::Bhsd, [2, KV_HEADS, 100, DIM]).expect("keys");
    let v = ViewMut::new(&mut v, Layout::Bshd, [2, KV_HEADS, 100, WIDE]).expect("values");
    let mut cache = RingCache::new(k, v, &mut seen, sinks, ring).expect("a ring");
    cache.insert(all.k.view(), all.v.view()).expect("fits");
    let held: Vec<usize> = cache.positions(0).collect();
    let cut = |x: &Tensor4<f32>| {
        let mut sizes = x.sizes;
        sizes[2] = held.len();
        Tensor4::<f32>::new(sizes, Memory::Bhsd, |[b, h, s, d]| f64::from(x.at([b, h, held[s], d])))
    };
    let (k, v) = (cut(&all.k), cut(&all.v));
    let q = Tensor4::<f32>::painted([2, HEADS, 1, DIM], Memory::Bhsd, 63, 1.0);
    for level in Level::available() {
        let want = attend_views(&Pinned(level), &Attention::new(), q.view(), k.view(), v.view()).expect("accepted");
        let (out, lse) = step(level, &Attention::new(), q.view(), Queries::All, cache.view()).expect("accepted");
        same_bits(&out, &want.out, &level);
        same_bits(&lse, &want.lse, &level);
    }
    let two = Tensor4::<f32>::painted([2, HEADS, 2, DIM], Memory::Bhsd, 63, 1.0);
    let refused = step(Level::detect(), &Attention::new(), two.view(), Queries::All, cache.view());
    assert!(matches!(refused, Err(AttnError::Unsupported { .. })), "{refused:?}");
}

/// Queries in f32 over caches of halves: as over the same numbers in f32.
#[test]
fn queries_and_caches_may_differ_in_type() {
    fn check<T: KernelElement + Number>(level: Level) {
        let dims = shape((1, 4, 1, 2, 640, 32, WIDE));
        let halves = Inputs::<T>::plain(dims, 64);
        let wide = |x: &Tensor4<T>| Tensor4::<f32>::new(x.sizes, Memory::Bhsd, |at| Element::to_f64(x.at(at)));
        let (q, k, v) = (wide(&halves.q), wide(&halves.k), wide(&halves.v));
        let attn = Attention::new();
        let narrow = CacheView::of_tensors(halves.k.view(), halves.v.view()).expect("a cache");
        let same = CacheView::of_tensors(k.view(), v.view()).expect("a cache");
        let got = step(level, &attn, q.view(), Queries::All, narrow).expect("accepted");
        assert!(got == step(level, &attn, q.view(), Queries::All, same).expect("accepted"), "{level:?}");
    }
    for level in Level::available() {
        check::<f16>(level);
        check::<bf16>(level);
    }
}

/// Parts of whole chunks, merged in the tree, give the bits of the whole call; any parts give the numbers.
#[test]
fn parts_merge_into_the_whole() {
    let dims = shape((2, HEADS, KV_HEADS, 2, 2048, DIM, WIDE));
    let all = Inputs::<f32>::plain(dims, 65);
    let sinks = [0.5, -1.0, 2.0, 0.0, 1.0, 3.0];
    let attn = Attention::new().mask(Mask::causal(Align::BottomRight)).sinks(&sinks).reproducible();
    for level in Level::available() {
        let plan = Plan::new(&attn, dims, level).expect("accepted");
        let want = attend_views(&Pinned(level), &attn, all.q.view(), all.k.view(), all.v.view()).expect("accepted");
        let part = |from: usize, to: usize| {
            let cut = |x: &Tensor4<f32>| {
                let mut sizes = x.sizes;
                sizes[2] = to - from;
                Tensor4::<f32>::new(sizes, Memory::Bhsd, |[b, h, s, d]| f64::from(x.at([b, h, from + s, d])))
            };
            let (k, v) = (cut(&all.k), cut(&all.v));
            let mut rows = vec![f32::NAN; state::len(&dims).expect("small")];
            let mut lines = vec![Line::ZERO; plan.states_lines()];
            plan.states(from, all.q.view(), k.view(), v.view(), &mut rows, &mut lines).expect("accepted");
            rows
        };
        let finish = |rows: &[f32]| {
            let (mut out, mut lse) = (vec![f32::NAN; dims.rows() * WIDE], vec![f32::NAN; dims.rows()]);
            let view = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).expect("output");
            plan.finish(rows, Outputs::new(view).lse(&mut lse)).expect("accepted");
            (out, lse)
        };
        let (mut left, mut right) = (part(0, 512), part(1024, 1536));
        state::merge_states(&mut left, &part(512, 1024), WIDE).expect("as many rows");
        state::merge_states(&mut right, &part(1536, 2048), WIDE).expect("as many rows");
        state::merge_states(&mut left, &right, WIDE).expect("as many rows");
        let (out, lse) = finish(&left);
        same_bits(&out, &want.out, &level);
        same_bits(&lse, &want.lse, &level);

        let mut odd = part(0, 77);
        state::merge_states(&mut odd, &part(77, 2048), WIDE).expect("as many rows");
        let (out, _) = finish(&odd);
        assert!(out.iter().zip(&want.out).all(|(a, b)| (a - b).abs() < 2e-6), "{level:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let (x, q) = (vec![0.5f32; 3 * 8 * WIDE], vec![0.5f32; 3 * 2 * WIDE]);
    let mut lens = [8usize, 4, 1];
    let (mut k, mut v) = (x.clone(), x.clone());
    let sizes = [3, 1, 8, WIDE];
    let cache = AppendCache::new(
        ViewMut::new(&mut k, Layout::Bhsd, sizes).expect("keys"),
        ViewMut::new(&mut v, Layout::Bhsd, sizes).expect("values"),
        &mut lens,
    )
    .expect("a cache");
    let view = cache.view();
    let padded = View::new(&q, Layout::Bhsd, [3, 1, 2, WIDE]).expect("queries");
    let packed = View::new(&q, Layout::Bhsd, [1, 1, 6, WIDE]).expect("queries");
    let level = Level::detect();
    let attn = Attention::new();
    let refused = |attn: &Attention<'_>, q, queries| step(level, attn, q, queries, view).expect_err("refused");
    assert!(matches!(refused(&attn, padded, Queries::All), AttnError::Index { at: 2, value: 2, limit: 2, .. }));
    assert!(matches!(refused(&attn, padded, Queries::First(&[1, 1])), AttnError::Size { expected: 3, found: 2, .. }));
    assert!(matches!(refused(&attn, padded, Queries::First(&[1, 3, 1])), AttnError::Index { at: 1, value: 3, .. }));
    assert!(matches!(refused(&attn, padded, Queries::Packed(&[0, 1, 2, 3])), AttnError::Size { expected: 1, .. }));
    assert!(matches!(refused(&attn, packed, Queries::Packed(&[0, 2, 1, 3])), AttnError::Order { at: 2, .. }));
    assert!(matches!(refused(&attn, packed, Queries::Packed(&[1, 2, 3, 4])), AttnError::Size { found: 1, .. }));
    assert!(matches!(refused(&attn, packed, Queries::Packed(&[0, 2, 4, 7])), AttnError::Index { value: 7, .. }));
    assert!(matches!(refused(&attn.scale(f64::NAN), packed, Queries::Packed(&[0, 2, 4, 5])), AttnError::Option { .. }));
    assert!(matches!(
        refused(
            &attn.dropout(attn_core::dropout::Dropout::Seeded { p: 0.5, seed: 1 }),
            packed,
            Queries::Packed(&[0, 2, 4, 5])
        ),
        AttnError::Unsupported { .. }
    ));
    assert!(step(level, &attn, packed, Queries::Packed(&[0, 2, 4, 5]), view).is_ok());
}
