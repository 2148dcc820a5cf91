//! Steps over caches: the bits of one thread for any number of them, in any number of rounds.

use attn_core::int8::{KeyScales, QuantizedView, quantize};
use attn_core::kv_cache::{AppendCache, CacheView, PageTable, Queries, RingCache};
use attn_core::{Align, Attention, AttnError, Layout, Mask, Outputs, View, ViewMut};
use attn_parallel::{DecodePlan, Runner, attend_cache};
use attn_simd::{Level, Workspace};

use crate::threads::paint;

const SIZES: [usize; 4] = [3, 2, 1600, 40];

/// Keys or values.
fn kv(x: &[f32]) -> View<'_, f32> {
    View::new(x, Layout::Bhsd, SIZES).unwrap()
}

/// Output and lse as bits, computed by `run`.
fn bits(rows: usize, wide: usize, run: impl FnOnce(Outputs<'_, f32>)) -> Vec<u32> {
    let (mut out, mut lse) = (vec![f32::NAN; rows * wide], vec![f32::NAN; rows]);
    let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 4, rows / 4, wide]).unwrap();
    run(Outputs::new(to).lse(&mut lse));
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Decode steps and a prefill chunk together, over a contiguous cache, pages, a ring, int8 and a shared prefix.
#[test]
fn the_same_bits_for_one_to_sixteen_threads() {
    let len: usize = SIZES.iter().product();
    let (k, v) = (paint(len, 1), paint(len, 2));
    let (lens, cu) = ([1600, 3, 900], [0, 1, 4, 41]);
    let q = paint(4 * 41 * 40, 3);
    let q = View::new(&q, Layout::Bhsd, [1, 4, 41, 40]).unwrap();
    let rows = CacheView::of_slots(kv(&k), kv(&v), &lens).unwrap();

    // The same tokens in pages of 100, backwards.
    let table: Vec<i32> = (0..48).map(|n| 47 - n).collect();
    let paged = |x: &[f32]| -> Vec<f32> {
        let view = kv(x);
        let pages = (0..48).map(|page| 47 - page).flat_map(|n| (0..2).map(move |h| (n / 16, h, n % 16 * 100)));
        let rows = pages.flat_map(|(b, h, t)| (t..t + 100).map(move |t| (b, h, t)));
        rows.flat_map(|(b, h, t)| view.row(b, h, t).iter()).collect()
    };
    let (k_pages, v_pages) = (paged(&k), paged(&v));
    let page = |x| View::new(x, Layout::Bhsd, [48, 2, 100, 40]).unwrap();
    let pages = CacheView::of_pages(page(&k_pages), page(&v_pages), PageTable::padded(&table, &lens).unwrap()).unwrap();

    let mut numbers = [vec![0i8; len], vec![0i8; len]];
    let mut scales = [vec![0.0f32; len / 40], vec![0.0f32; len / 40]];
    for ((x, numbers), scales) in [&k, &v].into_iter().zip(&mut numbers).zip(&mut scales) {
        for ((x, numbers), scale) in x.chunks(40).zip(numbers.chunks_mut(40)).zip(scales) {
            *scale = quantize(x, numbers);
        }
    }
    let [k_numbers, v_numbers] = numbers.each_ref().map(|x| View::new(x, Layout::Bhsd, SIZES).unwrap());
    let [k_scales, v_scales] = scales.each_ref().map(|x| View::new(x, Layout::Bhsd, [3, 2, 1600, 1]).unwrap());
    let int8 = CacheView::of_slots(k_numbers, v_numbers, &lens).unwrap();
    let int8 = QuantizedView::new(int8, KeyScales::PerToken(k_scales), v_scales).unwrap();

    let prompt = (paint(2 * 1300 * 40, 4), paint(2 * 1300 * 40, 5));
    let prompt_view = |x| View::new(x, Layout::Bshd, [1, 2, 1300, 40]).unwrap();
    let prefix = CacheView::of_tensors(prompt_view(&prompt.0), prompt_view(&prompt.1)).unwrap();

    let attn = Attention::new().softcap(8.0);
    for level in Level::available() {
        let steps = [
            DecodePlan::new(&attn, q.sizes(), Queries::Packed(&cu), rows, level).unwrap(),
            DecodePlan::new(&attn, q.sizes(), Queries::Packed(&cu), pages, level).unwrap(),
            DecodePlan::new(&attn, q.sizes(), Queries::Packed(&cu), int8, level).unwrap(),
            DecodePlan::with_prefix(&attn, q.sizes(), Queries::Packed(&cu), prefix, rows, level).unwrap(),
            DecodePlan::with_prefix(&attn, q.sizes(), Queries::Packed(&cu), prefix, int8, level).unwrap(),
        ];
        let of = |plan: &DecodePlan<'_, '_, '_>| {
            bits(4 * 41, 40, |outputs| Runner::new().attend_cache_planned(plan, q, outputs).unwrap())
        };
        let want: Vec<_> = steps.iter().map(|plan| pool(1).install(|| of(plan))).collect();
        assert!(want[0] == want[1] && want[0] != want[2] && want[0] != want[3], "{level:?}");
        for threads in 2..=16 {
            let pool = pool(threads);
            for (n, (plan, want)) in steps.iter().zip(&want).enumerate() {
                assert!(pool.install(|| of(plan)) == *want, "step {n}, {level:?}, {threads} threads");
            }
        }
    }
}

/// Chunks of a prompt into a ring, as steps: the bits of the whole prompt over a contiguous cache, by any number of
/// threads.
#[test]
fn a_prompt_may_come_in_chunks_into_a_ring() {
    let (tokens, dim) = (1400, 24);
    let [q, k, v] = [6, 7, 8].map(|seed| paint(2 * tokens * dim, seed));
    let tokens_of = |x, from: usize, n: usize| {
        View::strided(
            x,
            [1, 2, n, dim],
            [(2 * tokens * dim) as isize, (tokens * dim) as isize, dim as isize, 1],
            from * dim,
        )
        .unwrap()
    };
    let mut whole = vec![f32::NAN; 2 * tokens * dim];
    let cache = CacheView::of_tensors(tokens_of(&k, 0, tokens), tokens_of(&v, 0, tokens)).unwrap();
    let to = ViewMut::new(&mut whole, Layout::Bhsd, [1, 2, tokens, dim]).unwrap();
    let attn = Attention::new();
    pool(3).install(|| attend_cache(&attn, tokens_of(&q, 0, tokens), Queries::All, cache, to)).unwrap();

    let (mut ring_k, mut ring_v, mut seen) = (vec![0.0f32; 2 * tokens * dim], vec![0.0f32; 2 * tokens * dim], [0]);
    let ring_of = |x| ViewMut::new(x, Layout::Bshd, [1, 2, tokens, dim]).unwrap();
    let mut ring = RingCache::new(ring_of(&mut ring_k), ring_of(&mut ring_v), &mut seen, 4, tokens - 4).unwrap();
    let mut done = 0;
    for (n, chunk) in [600, 1, 500, 299].into_iter().enumerate() {
        ring.insert(tokens_of(&k, done, chunk), tokens_of(&v, done, chunk)).unwrap();
        let mut out = vec![f32::NAN; 2 * chunk * dim];
        let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 2, chunk, dim]).unwrap();
        pool(n + 1).install(|| attend_cache(&attn, tokens_of(&q, done, chunk), Queries::All, ring.view(), to)).unwrap();
        for head in 0..2 {
            let want = &whole[(head * tokens + done) * dim..][..chunk * dim];
            assert!(out[head * chunk * dim..][..chunk * dim] == *want, "chunk {n}, head {head}");
        }
        done += chunk;
    }
}

/// A prompt whose states are too many for one round: the bits of one thread, which needs no rounds.
#[test]
fn long_prompts_are_computed_in_rounds() {
    let (q_len, wide) = (600, 1022);
    let (q, k, v) = (paint(4 * q_len * 8, 9), paint(q_len * 8, 10), paint(q_len * wide, 11));
    let q = View::new(&q, Layout::Bhsd, [1, 4, q_len, 8]).unwrap();
    let (mut k, mut v, mut lens) = (k, v, [q_len]);
    let cache = AppendCache::new(
        ViewMut::new(&mut k, Layout::Bhsd, [1, 1, q_len, 8]).unwrap(),
        ViewMut::new(&mut v, Layout::Bhsd, [1, 1, q_len, wide]).unwrap(),
        &mut lens,
    )
    .unwrap();
    let attn = Attention::new().mask(Mask::window(100, 0, Align::BottomRight));
    let plan = DecodePlan::new(&attn, q.sizes(), Queries::All, cache.view(), Level::detect()).unwrap();
    let alone = bits(4 * q_len, wide, |outputs| {
        let mut scratch = Workspace::new();
        plan.split(q, outputs).unwrap().run(scratch.lines(plan.workspace_lines())).unwrap();
    });
    for threads in [2, 5] {
        let got = pool(threads).install(|| {
            bits(4 * q_len, wide, |outputs| Runner::new().attend_cache_planned(&plan, q, outputs).unwrap())
        });
        assert!(got == alone, "{threads} threads");
    }
    // In scratch of the caller's, on as many threads as there are workspaces.
    for count in [1, 3] {
        let mut kept = vec![Workspace::new(); count];
        let mut runner = Runner::new().workspaces(&mut kept);
        let run = |outputs: Outputs<'_, f32>| runner.attend_cache_planned(&plan, q, outputs).unwrap();
        assert!(pool(4).install(|| bits(4 * q_len, wide, run)) == alone, "{count} workspaces");
    }
}

#[test]
fn no_workspace_is_an_error() {
    let (x, mut out, attn) = ([0.5f32; 8], [7.0f32; 8], Attention::new());
    let x = View::matrix(&x, 2, 4).unwrap();
    let cache = CacheView::of_tensors(x, x).unwrap();
    let mut runner = Runner::new().workspaces(&mut []);
    let missing = Err(AttnError::TooShort { what: "workspaces", needed: 1, found: 0 });
    assert_eq!(runner.forward(&attn, x, x, x, ViewMut::matrix(&mut out, 2, 4).unwrap()), missing);
    assert_eq!(runner.attend_cache(&attn, x, Queries::All, cache, ViewMut::matrix(&mut out, 2, 4).unwrap()), missing);
    assert_eq!(out, [7.0; 8]);
}
