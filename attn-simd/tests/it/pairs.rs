//! Few queries over keys in bfloat16, where a level multiplies pairs of them: rows that cannot be pairs, the model of
//! the instruction, and prefill.

use attn_core::half::bf16;
use attn_core::kv_cache::{CacheView, PageTable, Queries};
use attn_core::{Align, Attention, Dtype, Layout, Mask, Outputs, View, ViewMut};
use attn_simd::decode::DecodePlan;
use attn_simd::{Level, Plan, Workspace};
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::laws::{Answer, attend, oracle, same_bits};
use attn_testing::tolerance::{ETA, TWICE};

use super::laws::Simd;
use super::levels_and_model;

/// Heads of one query each over one head of keys.
fn inputs(heads: usize, kv_len: usize, dims: [usize; 2], memory: Memory, seed: u64) -> Inputs<bf16> {
    Inputs::painted(shape((1, heads, 1, 1, kv_len, dims[0], dims[1])), memory, seed, 1.0)
}

/// Few queries, whatever the level: on models only such a call runs on the kernel for few.
fn options<'a>() -> Attention<'a> {
    Attention::new().reproducible()
}

/// The answer for one head by itself.
fn alone(level: Level, all: &Inputs<bf16>, head: usize) -> Vec<bf16> {
    let mut one = all.clone();
    one.shape.q_heads = 1;
    one.q = inputs(1, 1, [all.shape.head_dim, 1], Memory::Bhsd, 0).q;
    one.q.each(|[b, _, s, d], x| *x = all.q.at([b, head, s, d]));
    attend(&Simd(level), &options(), &one).out
}

/// Products of pairs take numbers below 2⁻¹²⁶ for 0. Here such numbers meet keys so large that they decide.
#[test]
fn a_row_that_is_no_pairs_is_right_and_changes_no_other() {
    let (heads, kv_len, dims) = (7, if cfg!(miri) { 40 } else { 200 }, [64, 24]);
    let mut all = inputs(heads, kv_len, dims, Memory::Bhsd, 5);
    all.k.each(|[.., d], x| *x = bf16::from_f32(if d == 0 { x.to_f32() * 5e37 } else { x.to_f32() }));
    all.q.each(|[_, head, _, d], x| {
        *x = bf16::from_f32(match (head, d) {
            (1, 0) => 9e-39,
            (1, 1..60) | (3, _) | (_, 0) => 0.0,
            (2, _) => x.to_f32() * 2e15,
            (4, 63) => -1e-40,
            _ => x.to_f32(),
        });
    });
    let oracle = oracle(&options(), &all);
    for level in levels_and_model() {
        let answer = attend(&Simd(level), &options(), &all);
        oracle.check(ETA, &answer, &level);
        for head in 0..heads {
            same_bits(&answer.out[head * dims[1]..][..dims[1]], &alone(level, &all, head), &(level, head));
        }
        // Rows that are no numbers are NaN, and the others stay.
        let mut broken = all.clone();
        broken.q.each(|[_, head, ..], x| match head {
            0 => *x = bf16::NAN,
            5 => *x = bf16::INFINITY,
            _ => {}
        });
        let got = attend(&Simd(level), &options(), &broken).out;
        for (head, row) in got.chunks(dims[1]).enumerate() {
            match head {
                0 | 5 => assert!(row.iter().all(|x| x.is_nan()), "{level:?}, head {head}: {row:?}"),
                _ => same_bits(row, &answer.out[head * dims[1]..][..dims[1]], &(level, head)),
            }
        }
    }
}

/// Every number of rows, whole vectors of pairs and others, keys in any layout.
#[test]
fn groups_of_any_size_match_the_reference_and_the_model() {
    let levels = levels_and_model();
    let pairs: Vec<Level> = levels.iter().copied().filter(|level| level.name().starts_with("avx512bf16")).collect();
    let dims = [32, 40, 64, 96, 128, 160, 256];
    for (n, &dim) in dims.iter().enumerate().filter(|(n, _)| !cfg!(miri) || *n == 2) {
        for heads in if cfg!(miri) { 3..=3 } else { 1..=9 } {
            let memory = Memory::ALL[(n + heads) % Memory::ALL.len()];
            let all = inputs(heads, if cfg!(miri) { 20 } else { 150 }, [dim, 32], memory, (n * 10 + heads) as u64);
            let oracle = oracle(&options(), &all);
            for &level in &levels {
                let answer = attend(&Simd(level), &options(), &all);
                oracle.check(ETA, &answer, &(level, dim, heads, memory));
            }
            // With and without the instruction: the vectors beside it are the same on a machine that has it.
            if let [unit, model] = pairs[..] {
                let [unit, model] = [unit, model].map(|level| attend(&Simd(level), &options(), &all).out);
                same_bits(&unit, &model, &(dim, heads, memory));
            }
        }
    }
    if pairs.len() < 2 {
        eprintln!("no AVX512_BF16 here: the model was compared with the reference only");
    }
}

/// A token that is decoded gets the bits that it gets when it is prefilled.
#[test]
fn decoding_and_prefilling_give_the_same_bits() {
    let (len, dims) = (if cfg!(miri) { 40 } else { 530 }, [64, 17]);
    let mut whole = Inputs::<bf16>::plain(shape((1, 4, 2, len, len, dims[0], dims[1])), 44);
    whole.q.each(|[.., s, d], x| *x = if s % 3 == 0 && d == 7 { bf16::from_bits(3) } else { *x });
    let attn = options().mask(Mask::causal(Align::BottomRight));
    for level in levels_and_model() {
        let all = attend(&Simd(level), &attn, &whole).out;
        for token in if cfg!(miri) { 39..40 } else { 511..514 } {
            let mut part = Inputs::<bf16>::plain(shape((1, 4, 2, 1, token + 1, dims[0], dims[1])), 0);
            part.q.each(|[b, h, _, d], x| *x = whole.q.at([b, h, token, d]));
            part.k.each(|at, x| *x = whole.k.at(at));
            part.v.each(|at, x| *x = whole.v.at(at));
            let got = attend(&Simd(level), &attn, &part).out;
            for (head, row) in got.chunks(dims[1]).enumerate() {
                same_bits(row, &all[(head * len + token) * dims[1]..][..dims[1]], &(level, token, head));
            }
        }
    }
}

/// A plan says that scores are products of pairs where they are.
#[test]
fn the_plan_says_so() {
    let of = shape((1, 4, 1, 1, 100, 64, 64));
    let said = |text: String| text.contains("products of bf16 by AVX512_BF16");
    for level in levels_and_model() {
        let attn = options();
        let plan = Plan::new(&attn, of, level).unwrap();
        assert_eq!(said(plan.explain(Dtype::Bf16).to_string()), level.name().starts_with("avx512bf16"), "{level:?}");
        assert!(!said(plan.explain(Dtype::F32).to_string()), "{level:?}");
        let scaled = options().scale(1e15);
        assert!(!said(Plan::new(&scaled, of, level).unwrap().explain(Dtype::Bf16).to_string()), "{level:?}");
        let modified = options().score_mod(|s, _| s);
        assert!(!said(Plan::new(&modified, of, level).unwrap().explain(Dtype::Bf16).to_string()), "{level:?}");
    }
}

/// What a step over a cache gives.
fn step(level: Level, q: View<'_, bf16>, cache: CacheView<'_, bf16>, wide: usize) -> Vec<bf16> {
    let ([batch, heads, q_len, _], attn) = (q.sizes(), Attention::new());
    let mut out = vec![bf16::NAN; batch * heads * q_len * wide];
    let plan = DecodePlan::new(&attn, q.sizes(), Queries::All, cache, level).expect("accepted");
    let to = ViewMut::new(&mut out, Layout::Bhsd, [batch, heads, q_len, wide]).expect("output");
    plan.split(q, to).expect("accepted").run(Workspace::new().lines(plan.workspace_lines())).expect("enough scratch");
    out
}

/// In place or copied, in any pages: the bits of tensors. One head is no pairs, or all but one.
#[test]
fn no_layout_of_a_cache_changes_a_bit() {
    let (len, [dim, wide]) = (if cfg!(miri) { 20 } else { 136 }, [64, 16]);
    for heads in if cfg!(miri) { 3..=3 } else { 1..=12 } {
        let all = inputs(heads, len, [dim, wide], Memory::Bhsd, 9);
        let tensor = |x: &Tensor4<bf16>, memory, sizes: [usize; 4], at: &dyn Fn([usize; 4]) -> [usize; 4]| {
            Tensor4::<bf16>::new(sizes, memory, |place| f64::from(x.at(at(place)).to_f32()))
        };
        for odd in [vec![2], (1..heads).collect()] {
            let mut q = Tensor4::<bf16>::new([1, heads, 2, dim], Memory::Bhsd, |[_, h, s, d]| {
                f64::from(all.q.at([0, h, 0, d]).to_f32()) * (1.0 + s as f64)
            });
            q.each(|[_, h, _, d], x| *x = if odd.contains(&h) && d == 5 { bf16::from_bits(1) } else { *x });
            for level in levels_and_model() {
                let want = step(level, q.view(), CacheView::of_tensors(all.k.view(), all.v.view()).unwrap(), wide);
                let turned = |x: &Tensor4<bf16>| tensor(x, Memory::DimFirst, x.sizes, &|at| at);
                let (k, v) = (turned(&all.k), turned(&all.v));
                let got = step(level, q.view(), CacheView::of_tensors(k.view(), v.view()).unwrap(), wide);
                same_bits(&got, &want, &(level, heads, "strided"));
                for size in [4, 8] {
                    let pages = len / size;
                    let table: Vec<i32> = (0..pages).rev().map(|page| page as i32).collect();
                    let paged = |x: &Tensor4<bf16>| {
                        let sizes = [pages, 1, size, x.sizes[3]];
                        let at = |[page, h, slot, d]: [usize; 4]| [0, h, (pages - 1 - page) * size + slot, d];
                        tensor(x, Memory::Bhsd, sizes, &at)
                    };
                    let (k, v, lens) = (paged(&all.k), paged(&all.v), [len]);
                    let table = PageTable::padded(&table, &lens).unwrap();
                    let cache = CacheView::of_pages(k.view(), v.view(), table).unwrap();
                    same_bits(&step(level, q.view(), cache, wide), &want, &(level, heads, size));
                }
            }
        }
    }
}

/// Rows of several sequences share a pass over a prefix; some of them are no pairs.
#[test]
fn sequences_share_a_prefix() {
    let (heads, [before, own], [dim, wide]) = (5, if cfg!(miri) { [9, 4] } else { [70, 40] }, [64, 16]);
    let mut whole = Inputs::<bf16>::plain(shape((3, heads, 1, 1, before + own, dim, wide)), 12);
    for x in [&mut whole.k, &mut whole.v] {
        let first = x.clone();
        x.each(|[b, h, s, d], x| *x = first.at([if s < before { 0 } else { b }, h, s, d]));
    }
    whole.q.each(|[b, h, _, d], x| *x = if (b + h) % 4 == 1 && d == 9 { bf16::from_bits(2) } else { *x });
    let cut = |x: &Tensor4<bf16>, batch: usize, from: usize, len: usize| {
        let sizes = [batch, 1, len, x.sizes[3]];
        Tensor4::<bf16>::new(sizes, Memory::Bhsd, |[b, h, s, d]| f64::from(x.at([b, h, from + s, d]).to_f32()))
    };
    let prefix = [cut(&whole.k, 1, 0, before), cut(&whole.v, 1, 0, before)];
    let tokens = [cut(&whole.k, 3, before, own), cut(&whole.v, 3, before, own)];
    let (attn, oracle) = (Attention::new(), oracle(&Attention::new(), &whole));
    for level in levels_and_model() {
        let (mut out, mut lse) = (vec![bf16::NAN; 3 * heads * wide], vec![f32::NAN; 3 * heads]);
        let to = ViewMut::new(&mut out, Layout::Bhsd, [3, heads, 1, wide]).unwrap();
        let [prefix, tokens] =
            [&prefix, &tokens].map(|[k, v]| CacheView::of_tensors(k.view(), v.view()).expect("a cache"));
        let q = whole.q.view();
        let plan = DecodePlan::with_prefix(&attn, q.sizes(), Queries::All, prefix, tokens, level).expect("accepted");
        let call = plan.split(q, Outputs::new(to).lse(&mut lse)).expect("accepted");
        call.run(Workspace::new().lines(plan.workspace_lines())).expect("enough scratch");
        oracle.check(TWICE, &Answer { out, lse }, &level);
    }
}
