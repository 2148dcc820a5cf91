//! Caches whose keys get rope as they are read, or are in pages that were given back.

use attn_core::half::f16;
use attn_core::kv_cache::{CacheView, PageTable, Queries, RingCache};
use attn_core::position::Positions;
use attn_core::position::rope::{Pairing, Rope, RopeTables};
use attn_core::score::At;
use attn_core::{Align, Attention, AttnError, Element, Layout, Mask, Outputs, View, ViewMut};
use attn_simd::decode::DecodePlan;
use attn_simd::{KernelElement, Level, Workspace};
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::laws::{Answer, oracle, same_bits};
use attn_testing::tolerance::TWICE;

use super::quantized::step;

const HEADS: usize = 4;
const DIM: usize = 24;
const WIDE: usize = 20;

/// A table of cos and one of sin, for 16 of the dims of a head.
fn tables(rope: &Rope<'_>, rows: usize) -> [Vec<f32>; 2] {
    let mut both = [vec![0.0f32; rows * 8], vec![0.0f32; rows * 8]];
    let [cos, sin] = &mut both;
    let table = |x| ViewMut::new(x, Layout::Bhsd, [1, 1, rows, 8]).expect("a table");
    rope.tables(DIM, Positions::Offset(0), &mut table(cos), &mut table(sin)).expect("fits");
    both
}

fn view_of([cos, sin]: &[Vec<f32>; 2], pairing: Pairing, rows: usize) -> RopeTables<'_, f32> {
    let table = |x| View::new(x, Layout::Bhsd, [1, 1, rows, 8]).expect("a table");
    RopeTables::new(pairing, table(cos), table(sin)).expect("alike")
}

/// A ring with tables: what turning copies of the keys held by hand gives.
#[test]
fn a_ring_with_tables_is_read_with_rope() {
    fn check<T: KernelElement + Element<Compute = f32>>(pairing: Pairing, tokens: usize, queries: usize) {
        let (sinks, window, slots) = (3, 97, 100);
        let all = Inputs::<f32>::plain(shape((1, HEADS, 2, tokens, tokens, DIM, WIDE)), 91);
        let narrow = |x: &Tensor4<f32>| Tensor4::<T>::new(x.sizes, Memory::Bhsd, |at| f64::from(x.at(at)));
        let (new_k, new_v) = (narrow(&all.k), narrow(&all.v));
        let (mut k, mut v) = (vec![T::default(); 2 * slots * DIM], vec![T::default(); 2 * slots * WIDE]);
        let mut seen = [0];
        let rope = Rope::new(pairing).rotary_dim(16);
        let tables = tables(&rope, slots);
        let mut ring = RingCache::new(
            ViewMut::new(&mut k, Layout::Bhsd, [1, 2, slots, DIM]).expect("keys"),
            ViewMut::new(&mut v, Layout::Bshd, [1, 2, slots, WIDE]).expect("values"),
            &mut seen,
            sinks,
            window,
        )
        .expect("a ring");
        ring.insert(new_k.view(), new_v.view()).expect("fits");
        let q = Tensor4::<f32>::painted([1, HEADS, queries, DIM], Memory::Bhsd, 92, 1.0);
        let attn = Attention::new();
        let plain = step(Level::detect(), &attn, q.view(), ring.view(), WIDE).expect("accepted");
        let ring = ring.cache_relative(view_of(&tables, pairing, slots)).expect("fits");

        let held: Vec<usize> = ring.positions(0).collect();
        let cut = |x: &Tensor4<T>| {
            let [_, heads, _, dim] = x.sizes;
            Tensor4::<f32>::new([1, heads, held.len(), dim], Memory::Bhsd, |[_, h, s, d]| {
                x.at([0, h, held[s], d]).to_f64()
            })
        };
        let (dims, first) = (shape((1, HEADS, 2, queries, held.len(), DIM, WIDE)), held.len() - queries);
        let mut roped = Inputs { shape: dims, q: q.clone(), k: cut(&new_k), v: cut(&new_v) };
        for (x, from) in [(&mut roped.k, 0), (&mut roped.q, first)] {
            let mut view = ViewMut::new(&mut x.data, Layout::Bhsd, x.sizes).expect("dense");
            rope.apply_in_place(&mut view, Positions::Offset(from as isize)).expect("fits");
        }
        let causal = attn.mask(Mask::causal(Align::BottomRight));
        for level in Level::available() {
            let got = step(level, &attn, q.view(), ring.view(), WIDE).expect("accepted");
            oracle(&causal, &roped).check(TWICE, &got, &(level, pairing, tokens));
            assert_ne!(got, plain, "the tables must make a difference");
        }
    }
    for pairing in [Pairing::Half, Pairing::Interleaved] {
        check::<f32>(pairing, 250, 1);
        check::<f32>(pairing, 80, 5); // nothing has gone yet: a chunk
        check::<f16>(pairing, 250, 1);
    }
}

/// Tables for any cache, and those that do not fit.
#[test]
fn tables_are_checked() {
    let x = vec![0.5f32; 2 * 10 * DIM];
    let x = View::new(&x, Layout::Bhsd, [1, 2, 10, DIM]).expect("keys");
    let (cache, rope) = (CacheView::of_tensors(x, x).expect("a cache"), Rope::new(Pairing::Half).rotary_dim(16));
    let (short, long) = (tables(&rope, 9), tables(&rope, 12));
    let refused = cache.cache_relative(view_of(&short, Pairing::Half, 9)).map(|_| ());
    assert!(matches!(refused, Err(AttnError::TooShort { needed: 10, found: 9, .. })), "{refused:?}");
    let roped = cache.cache_relative(view_of(&long, Pairing::Half, 12)).expect("fits");
    assert!(roped.rope().is_some() && roped.after(2).is_ok());
    let refused = roped.after(3).map(|_| ()); // tokens 3..13, rows 0..12
    assert!(matches!(refused, Err(AttnError::TooShort { needed: 13, found: 12, .. })), "{refused:?}");
    // Tables of two heads or sequences, and of more pairs than a key has.
    let table = vec![0.0f32; 2 * 10 * DIM];
    let of = |sizes: [usize; 4]| {
        let len: usize = sizes.iter().product();
        let table = View::new(&table[..len], Layout::Bhsd, sizes).expect("a table");
        let tables = RopeTables::new(Pairing::Half, table, table).expect("alike");
        cache.cache_relative(tables).map(|_| ())
    };
    for sizes in [[1, 2, 10, 8], [2, 1, 10, 8]] {
        assert!(matches!(of(sizes), Err(AttnError::Size { expected: 1, found: 2, .. })), "{:?}", of(sizes));
    }
    let refused = of([1, 1, 10, DIM / 2 + 1]);
    assert!(matches!(refused, Err(AttnError::Index { value: 13, limit: 13, .. })), "{refused:?}");
    assert_eq!(of([1, 1, 10, DIM / 2]), Ok(()));
    let wide = [vec![0.0f64; 80], vec![0.0f64; 80]];
    let [cos, sin] = wide.each_ref().map(|x| View::new(x, Layout::Bhsd, [1, 1, 10, 8]).expect("a table"));
    let doubles = cache.cache_relative(RopeTables::new(Pairing::Half, cos, sin).expect("alike")).expect("fits");
    let q = [1, 2, 1, DIM];
    let refused = DecodePlan::new(&Attention::new(), q, Queries::All, doubles, Level::detect()).map(|_| ());
    assert!(matches!(refused, Err(AttnError::Unsupported { .. })), "{refused:?}");
}

/// Queries behind a shared prefix get rope by their index behind it; the tables of the prefix must have rows for them.
#[test]
fn a_prefix_gets_rope_with_what_follows() {
    let (before, tokens, queries) = (70, 100, 3);
    let all = Inputs::<f32>::plain(shape((1, HEADS, 2, queries, tokens, DIM, WIDE)), 96);
    let cut = |x: &Tensor4<f32>, from: usize, to: usize| {
        let [_, heads, _, dim] = x.sizes;
        Tensor4::<f32>::new([1, heads, to - from, dim], Memory::Bhsd, |[_, h, s, d]| {
            f64::from(x.at([0, h, from + s, d]))
        })
    };
    let [prefix, own] =
        [(0, before), (before, tokens)].map(|(from, to)| [cut(&all.k, from, to), cut(&all.v, from, to)]);
    let [prefix, own] = [&prefix, &own].map(|[k, v]| CacheView::of_tensors(k.view(), v.view()).expect("a cache"));
    let rope = Rope::new(Pairing::Half).rotary_dim(16);
    let (short, long) = (tables(&rope, tokens - 1), tables(&rope, tokens));
    let (short, long) = (view_of(&short, Pairing::Half, tokens - 1), view_of(&long, Pairing::Half, tokens));
    fn roped<'c>(cache: CacheView<'c, f32>, tables: RopeTables<'c, f32>) -> CacheView<'c, f32> {
        cache.cache_relative(tables).expect("fits")
    }

    let q = cut(&all.q, 0, queries);
    let mut meant = Inputs { q: q.clone(), k: cut(&all.k, 0, tokens), ..all };
    for (x, from) in [(&mut meant.k, 0), (&mut meant.q, tokens - queries)] {
        let mut view = ViewMut::new(&mut x.data, Layout::Bhsd, x.sizes).expect("dense");
        rope.apply_in_place(&mut view, Positions::Offset(from as isize)).expect("fits");
    }
    let attn = Attention::new();
    let with_prefix = |prefix, own, level| DecodePlan::with_prefix(&attn, q.sizes, Queries::All, prefix, own, level);
    let want = oracle(&attn.mask(Mask::causal(Align::BottomRight)), &meant);
    for level in Level::available() {
        let plan = with_prefix(roped(prefix, long), roped(own, long), level).expect("accepted");
        let mut got = Answer { out: vec![-7.0f32; HEADS * queries * WIDE], lse: vec![-7.0f32; HEADS * queries] };
        let to = ViewMut::new(&mut got.out, Layout::Bhsd, [1, HEADS, queries, WIDE]).expect("output");
        let call = plan.split(q.view(), Outputs::new(to).lse(&mut got.lse)).expect("accepted");
        call.run(Workspace::new().lines(plan.workspace_lines())).expect("room");
        want.check(TWICE, &got, &level);
    }
    let refused = |prefix, own| with_prefix(prefix, own, Level::detect()).map(|_| ()).expect_err("refused");
    let error = refused(roped(prefix, short), roped(own, long));
    assert!(matches!(error, AttnError::TooShort { needed: 100, found: 99, .. }), "{error:?}");
    for (prefix, own) in [(roped(prefix, long), own), (prefix, roped(own, long))] {
        assert!(matches!(refused(prefix, own), AttnError::Unsupported { .. }));
    }
}

/// Pages that were given back hide their tokens and nothing else, wherever they are; what lies in other pages' place
/// does not matter.
#[test]
fn tokens_of_evicted_pages_are_hidden() {
    let (page_size, len) = (16, 700);
    let pages = len / page_size + 2;
    let painted = |dim, seed| {
        // Page 0 is nobody's.
        Tensor4::<f32>::new([pages, 2, page_size, dim], Memory::Bshd, |[page, h, s, d]| {
            if page == 0 { f64::NAN } else { attn_testing::paint::normal_at(seed, [page, h, s, d]) }
        })
    };
    let (k, v) = (painted(DIM, 93), painted(WIDE, 94));
    let whole: Vec<i32> = (1..=pages as i32 - 1).collect();
    for gone in [0..20, 3..9, 0..1, 43..44, 0..44] {
        let mut table = whole.clone();
        table[gone.clone()].fill(-1);
        let hidden = gone.start * page_size..gone.end * page_size;
        let lens = [len];
        let [table, whole] = [&table, &whole].map(|entries| PageTable::padded(entries, &lens).expect("one row"));
        assert!(CacheView::of_pages(k.view(), v.view(), table).is_err());
        let holes = CacheView::of_pages(k.view(), v.view(), table.with_evicted()).expect("a cache");
        let full = CacheView::of_pages(k.view(), v.view(), whole).expect("a cache");
        for queries in [1, 3] {
            let q = Tensor4::<f32>::painted([1, HEADS, queries, DIM], Memory::Bhsd, 95, 1.0);
            let rule = Attention::new().mask_mod(|at: At| !hidden.contains(&at.key));
            for level in Level::available() {
                let got = step(level, &Attention::new(), q.view(), holes, WIDE).expect("accepted");
                let mut want = Answer { out: vec![0.0f32; HEADS * queries * WIDE], lse: vec![0.0f32; HEADS * queries] };
                let to = ViewMut::new(&mut want.out, Layout::Bhsd, [1, HEADS, queries, WIDE]).expect("output");
                let outputs = Outputs::new(to).lse(&mut want.lse);
                let plan = DecodePlan::new(&rule, q.sizes, Queries::All, full, level).expect("accepted");
                let mut scratch = Workspace::new();
                plan.split(q.view(), outputs)
                    .expect("accepted")
                    .run(scratch.lines(plan.workspace_lines()))
                    .expect("room");
                same_bits(&got.out, &want.out, &(level, &gone, queries));
                same_bits(&got.lse, &want.lse, &(level, &gone, queries));
            }
            // The streaming form agrees.
            let mut out = vec![0.0f32; HEADS * queries * WIDE];
            let to = ViewMut::new(&mut out, Layout::Bhsd, [1, HEADS, queries, WIDE]).expect("output");
            attn_core::streaming::forward_cache(&Attention::new(), q.view(), Queries::All, holes, to, &mut [0.0; WIDE])
                .expect("accepted");
            let got = step(Level::detect(), &Attention::new(), q.view(), holes, WIDE).expect("accepted");
            assert!(out.iter().zip(&got.out).all(|(a, b)| (a - b).abs() < 4e-6), "{gone:?}");
        }
    }
}
