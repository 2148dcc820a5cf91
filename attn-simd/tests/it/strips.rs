//! Blocks that share widened or gathered tiles compute what each computes alone: the bits of the same numbers as plain
//! `f32` rows, which every block reads for itself. So do blocks that share what they read of a sequence too long for
//! the caches.

use attn_core::half::f16;
use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut};
use attn_simd::{Caches, KernelElement, Level, Plan, Work, Workspace};

const HEADS: [usize; 2] = [2, 1];

/// Output and lse as bits, with strips for so many threads.
fn bits<T: KernelElement>(level: Level, attn: &Attention<'_>, inputs: [View<'_, T>; 3], threads: usize) -> Vec<u32> {
    bits_on(Caches::detect(), level, attn, inputs, threads)
}

/// The same, on a core with such caches.
fn bits_on<T: KernelElement>(
    caches: Caches,
    level: Level,
    attn: &Attention<'_>,
    [q, k, v]: [View<'_, T>; 3],
    threads: usize,
) -> Vec<u32> {
    let shape = attn_core::AttnShape::new(q.sizes(), k.sizes(), v.sizes()).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; shape.rows() * shape.value_dim], vec![f32::NAN; shape.rows()]);
    let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
    let plan = Plan::new(attn, shape, level).unwrap().for_caches(caches);
    let mut workspace = Workspace::new();
    let Work::Blocks(blocks) = plan.work(q, k, v, outputs).unwrap() else { panic!("many queries are tiled") };
    blocks.shared_by(threads).run(workspace.lines(plan.workspace_lines())).unwrap();
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

/// The same numbers as halves, as `f32` with gaps between the channels, and as plain rows, with some values that are
/// not finite.
fn check(attn: &Attention<'_>, [q_len, kv_len, head_dim, value_dim]: [usize; 4], broken: &[(usize, f32)]) {
    let numbers = |n: usize, seed: f32| -> Vec<f16> {
        (0..n).map(|i| f16::from_f32((seed + i as f32 * 0.7).sin() * 2.0)).collect()
    };
    let [q_heads, kv_heads] = HEADS;
    let sizes = [[1, q_heads, q_len, head_dim], [1, kv_heads, kv_len, head_dim], [1, kv_heads, kv_len, value_dim]];
    let mut halves = [0, 1, 2].map(|n| numbers(sizes[n].iter().product(), n as f32));
    for &(key, x) in broken {
        halves[2][key * value_dim + value_dim / 2] = f16::from_f32(x);
    }
    let plain = halves.each_ref().map(|x| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
    let gaps = plain.each_ref().map(|x| x.iter().flat_map(|&x| [x, f32::NAN]).collect::<Vec<_>>());
    let views = |n: usize| View::new(&plain[n], Layout::Bhsd, sizes[n]).unwrap();
    let half_views = |n: usize| View::new(&halves[n], Layout::Bhsd, sizes[n]).unwrap();
    let gap_views = |n: usize| {
        let [_, heads, len, dim] = sizes[n].map(|n| n as isize);
        View::strided(&gaps[n], sizes[n], [2 * heads * len * dim, 2 * len * dim, 2 * dim, 2], 0).unwrap()
    };
    for level in Level::available() {
        let want = bits(level, attn, [0, 1, 2].map(views), 1);
        for &threads in if attn_testing::is_emulated() { &[2][..] } else { &[1, 2, 100] } {
            let name = level.name();
            assert!(bits(level, attn, [0, 1, 2].map(half_views), threads) == want, "{name}, halves, {threads} threads");
            assert!(bits(level, attn, [0, 1, 2].map(gap_views), threads) == want, "{name}, gaps, {threads} threads");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "large")]
fn everything_visible() {
    for q_len in [97, 144, 300] {
        check(&Attention::new(), [q_len, 190, 40, 24], &[]);
    }
    check(&Attention::new(), [200, 70, 256, 300], &[]);
}

#[test]
#[cfg_attr(miri, ignore = "large")]
fn blocks_that_see_different_keys() {
    let masks = [
        Mask::causal(Align::BottomRight),
        Mask::causal(Align::TopLeft),
        Mask::window(30, 50, Align::TopLeft),
        Mask::causal(Align::TopLeft).and(Mask::window(20, 0, Align::TopLeft)),
    ];
    for mask in masks {
        check(&Attention::new().mask(mask), [300, 333, 24, 40], &[]);
    }
}

#[test]
#[cfg_attr(miri, ignore = "large")]
fn a_dense_mask_and_values_that_are_not_finite() {
    // What one block cleans, the next one meets again.
    let seen: Vec<bool> = (0..300 * 200).map(|n| n % 7 != 3 && n % 200 > n / 900).collect();
    let dense = View::broadcast(&seen, &[300, 200]).unwrap();
    let attn = Attention::new().mask(Mask::keep(dense));
    check(&attn, [300, 200, 24, 40], &[(3, f32::NAN), (64, f32::INFINITY), (150, f32::NEG_INFINITY)]);
    let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
    check(&causal, [300, 200, 24, 40], &[(70, f32::NAN), (199, f32::INFINITY)]);
}

#[test]
#[cfg_attr(miri, ignore = "large")]
fn caches_of_any_size() {
    let (q_len, kv_len, dim) = (230, 1900, 40);
    let numbers = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.7).sin()).collect() };
    let (q, kv) = (numbers(q_len * dim), numbers(kv_len * dim));
    let q = View::new(&q, Layout::Bhsd, [1, 1, q_len, dim]).unwrap();
    let kv = View::new(&kv, Layout::Bhsd, [1, 1, kv_len, dim]).unwrap();
    let masks = [Mask::none(), Mask::causal(Align::BottomRight), Mask::window(600, 0, Align::BottomRight)];
    for mask in masks {
        let attn = Attention::new().mask(mask);
        for level in Level::available() {
            // So large a cache holds everything: block by block. The others hold strips of one, of some and of all
            // blocks, but not the sequence.
            let want = bits_on(Caches { l2: 1 << 30 }, level, &attn, [q, kv, kv], 1);
            for l2 in [0, 60 << 10, 140 << 10] {
                for threads in [1, 2] {
                    let got = bits_on(Caches { l2 }, level, &attn, [q, kv, kv], threads);
                    assert!(got == want, "{}, {l2} bytes, {threads} threads", level.name());
                }
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "minutes; strips of other blocks are checked above")]
fn a_row_does_not_depend_on_its_block() {
    const LEN: usize = 90;
    let (sizes, row) = ([1, 1, LEN, 24], 20);
    let numbers = |seed: f32, n: usize| -> Vec<f32> { (0..n).map(|i| (seed + i as f32 * 0.7).sin() * 2.0).collect() };
    let (q, k, v) = (numbers(0.0, LEN * 24), numbers(1.0, LEN * 24), numbers(2.0, LEN * row));
    let keys = View::new(&k, Layout::Bhsd, sizes).unwrap();
    let values = View::new(&v, Layout::Bhsd, [1, 1, LEN, row]).unwrap();
    // Other blocks begin and end at other keys, odd and even.
    for (left, right) in [(3, 0), (8, 5), (33, 0), (LEN, 0), (20, LEN)] {
        for level in Level::available() {
            let mask = |from: usize| Mask::window(left, right, Align::Offset(from as isize));
            let queries = View::new(&q, Layout::Bhsd, sizes).unwrap();
            let whole = bits(level, &Attention::new().mask(mask(0)), [queries, keys, values], 1);
            for (from, to) in [(0, 33), (1, 40), (2, 35), (5, 68), (7, LEN)] {
                let queries = View::new(&q[from * 24..to * 24], Layout::Bhsd, [1, 1, to - from, 24]).unwrap();
                let some = bits(level, &Attention::new().mask(mask(from)), [queries, keys, values], 1);
                let (out, lse) = some.split_at((to - from) * row);
                let name = level.name();
                assert_eq!(out, &whole[from * row..to * row], "{name}, window {left}, {right}, rows {from}..{to}");
                assert_eq!(lse, &whole[LEN * row..][from..to], "{name}, window {left}, {right}, lse {from}..{to}");
            }
        }
    }
}
