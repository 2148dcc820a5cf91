//! The decode kernel: chosen for few queries and under `reproducible`, right over chunks and row blocks, and the same
//! bits however a call is cut.

use attn_core::dropout::Dropout;
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{CacheView, Queries};
use attn_core::mask::Tree;
use attn_core::{Align, Attention, AttnError, AttnShape, Dtype, Layout, Mask, Outputs, View, ViewMut};
use attn_simd::decode::DecodePlan;
use attn_simd::{Kernel, Level, Line, Plan, Work, Workspace};
use attn_testing::cases::{Inputs, shape};
use attn_testing::laws::{self, Answer, attend, oracle, same_bits};
use attn_testing::tolerance::ETA;
use attn_testing::{Engine, Number, engine_calls};

use super::laws::Simd;

/// One order of accumulation for every number of queries.
pub(super) struct Pinned(pub(super) Level);

impl Engine for Pinned {
    fn name(&self) -> &'static str {
        "simd, reproducible"
    }
    fn level(&self) -> Option<&'static str> {
        Some(self.0.name())
    }
    fn supports_dtype(&self, dtype: Dtype) -> bool {
        dtype != Dtype::F64
    }
    engine_calls!(f32, f16, bf16; |this, call| {
        let attn = call.attn.by_ref().reproducible();
        attn_simd::forward_at(this.0, &attn, call.q, call.k, call.v, call.outputs, &mut Workspace::new())
    });
}

/// The laws that meet all of the kernel's branches, for any number of queries.
#[test]
fn laws_hold_for_every_number_of_queries() {
    for level in Level::available() {
        let engine = &Pinned(level);
        laws::accuracy::f32_stays_within_the_gate(engine);
        laws::accuracy::halves_are_rounded_once(engine);
        laws::accuracy::large_scores_and_late_maxima(engine);
        laws::determinism::a_row_does_not_depend_on_its_batch(engine);
        laws::determinism::future_tokens_never_change_past_rows(engine);
        laws::layouts::inputs_may_lie_anyhow(engine);
        laws::layouts::outputs_may_lie_anyhow(engine);
        laws::masks::every_term_hides_what_it_says(engine);
        laws::masks::mods_hide_and_change_scores(engine);
        laws::nan::hidden_nan_changes_no_bit(engine);
        laws::nan::a_visible_nan_marks_its_rows_only(engine);
        laws::nan::fully_masked_rows_are_zero(engine);
        laws::peers::every_head_dim(engine);
        laws::peers::infinite_and_huge_values(engine);
        laws::properties::weights_of_dropped_keys_vanish(engine);
        laws::random::random_calls_match_the_reference(engine);
    }
}

/// Chunks of keys are merged: lengths around their edges, numbers of rows around the blocks that are compiled.
#[test]
fn long_sequences_match_the_reference() {
    fn check<T: Number>(level: Level, dims: AttnShape) {
        let inputs = Inputs::<T>::plain(dims, 41);
        let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
        for attn in [Attention::new(), causal, causal.softcap(20.0).sinks(&[1.5, -2.0, 0.0, 3.0, 1.0, 0.5])] {
            if attn.get_sinks().is_none_or(|sinks| sinks.len() == dims.q_heads) {
                let answer = attend(&Simd(level), &attn, &inputs);
                oracle(&attn, &inputs).check(ETA, &answer, &(level, dims));
            }
        }
    }
    let lens = if cfg!(miri) { &[513][..] } else { &[511, 512, 513, 1024, 1535, 2100] };
    for level in Level::available() {
        for &kv_len in lens {
            check::<f32>(level, shape((1, 6, 2, 1, kv_len, 24, 20)));
        }
        for (q_heads, q_len) in [(1, 1), (2, 1), (3, 1), (5, 1), (7, 1), (8, 1), (9, 1), (12, 2), (16, 2), (2, 16)] {
            check::<f32>(level, shape((2, q_heads, 1, q_len, 70, 16, 16)));
        }
        check::<f16>(level, shape((1, 6, 2, 2, 700, 40, 72)));
        check::<bf16>(level, shape((1, 6, 6, 3, 700, 64, 48)));
    }
}

/// A token that is decoded gets the bits that it gets when it is prefilled.
#[test]
fn decoding_and_prefilling_give_the_same_bits() {
    let len = 600;
    let inputs = Inputs::<f32>::plain(shape((1, 4, 2, len, len, 24, 17)), 43);
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight)).reproducible();
    let window = causal.mask(causal.get_mask().and(Mask::window(530, 0, Align::BottomRight)));
    for level in Level::available() {
        for attn in [causal, window, causal.softcap(4.0).sinks(&[0.0, 1.0, 2.0, -3.0])] {
            let whole = attend(&Simd(level), &attn, &inputs);
            for (first, count) in [(0, 1), (1, 1), (62, 3), (511, 1), (512, 2), (513, 1), (560, 40), (599, 1)] {
                let end = first + count;
                let mut part = Inputs::<f32>::plain(shape((1, 4, 2, count, end, 24, 17)), 0);
                part.q.each(|[b, h, s, d], x| *x = inputs.q.at([b, h, first + s, d]));
                part.k.each(|at, x| *x = inputs.k.at(at));
                part.v.each(|at, x| *x = inputs.v.at(at));
                let got = attend(&Simd(level), &attn, &part);
                for head in 0..4 {
                    let (here, there) = (head * count, head * len + first);
                    let what = (level, first, count, head);
                    same_bits(&got.out[here * 17..][..count * 17], &whole.out[there * 17..][..count * 17], &what);
                    same_bits(&got.lse[here..][..count], &whole.lse[there..][..count], &what);
                }
            }
        }
    }
}

fn in_parts(plan: &Plan<'_, '_>, inputs: &Inputs<f32>, threads: usize) -> Answer<f32> {
    let dims = inputs.shape;
    let mut answer = Answer { out: vec![f32::NAN; dims.rows() * dims.value_dim], lse: vec![f32::NAN; dims.rows()] };
    let view = ViewMut::new(&mut answer.out, Layout::Bhsd, dims.output()).expect("output");
    let outputs = Outputs::new(view).lse(&mut answer.lse);
    let work = plan.work(inputs.q.view(), inputs.k.view(), inputs.v.view(), outputs).expect("accepted");
    let Work::Split(mut call) = work else { panic!("few queries are decoded") };
    let round = call.cut(threads);
    let (mut states, mut lines) = (vec![f32::NAN; call.states_len(round)], vec![Line::ZERO; call.workspace_lines()]);
    // Backwards: no piece may count on another having been computed before.
    let mut rest = states.as_mut_slice();
    for piece in call.pieces(round).collect::<Vec<_>>().into_iter().rev() {
        let (later, state) = rest.split_at_mut(rest.len() - piece.state_len());
        call.compute(&piece, state, &mut lines).expect("the right sizes");
        rest = later;
    }
    assert!(rest.is_empty());
    call.finish(round, &mut states).expect("the right length");
    answer
}

/// However many pieces a call is cut into, the bits stay.
#[test]
fn the_cut_changes_no_bit() {
    let parents: Vec<Option<usize>> = vec![None, Some(0), Some(0), Some(1)];
    let tree = Mask::tree(Tree { parents: &parents });
    let inputs = Inputs::<f32>::plain(shape((2, 6, 2, 4, 2900, 20, 12)), 44);
    let base = Attention::new();
    for level in Level::available() {
        for attn in [
            base,
            base.mask(Mask::causal(Align::BottomRight)),
            base.mask(Mask::window(700, 0, Align::Offset(1900))),
            base.mask(tree.and(Mask::window(1200, 0, Align::BottomRight))),
            base.dropout(Dropout::Seeded { p: 0.3, seed: 7 }),
            base.mask(Mask::kv_lens(&[0, 1500])),
        ] {
            let plan = Plan::new(&attn, inputs.shape, level).expect("accepted");
            let whole = attend(&Simd(level), &attn, &inputs);
            for threads in [1, 2, 3, 7, 64, 10_000] {
                let got = in_parts(&plan, &inputs, threads);
                same_bits(&got.out, &whole.out, &(level, threads));
                same_bits(&got.lse, &whole.lse, &(level, threads));
            }
        }
    }
}

#[test]
fn the_plan_says_which_kernel_runs() {
    let plan = |q_len: usize, q_heads: usize, attn: &Attention<'_>| {
        let shape = AttnShape::new([1, q_heads, q_len, 64], [1, 2, 999, 64], [1, 2, 999, 64]).expect("a shape");
        let plan = Plan::new(attn, shape, Level::detect()).expect("accepted");
        (plan.kernel(), plan.explain(Dtype::Bf16).to_string())
    };
    let (kernel, text) = plan(1, 8, &Attention::new());
    assert!(kernel == Kernel::Decode && text.contains("bf16-decode") && text.contains("share one pass"), "{text}");
    assert!(text.ends_with(&attn_simd::Prefetch::detect().to_string()), "{text}");
    assert_eq!(plan(8, 8, &Attention::new()).0, Kernel::Decode);
    assert_eq!(plan(9, 8, &Attention::new()).0, Kernel::Prefill);
    assert_eq!(plan(17, 2, &Attention::new()).0, Kernel::Prefill);
    // Up to 16 queries are decoded, if a group of heads has at most 32 rows.
    assert_eq!(plan(16, 2, &Attention::new()).0, Kernel::Decode);
    assert_eq!(plan(16, 4, &Attention::new()).0, Kernel::Decode);
    assert_eq!(plan(16, 6, &Attention::new()).0, Kernel::Prefill);
    let (kernel, text) = plan(500, 2, &Attention::new().reproducible());
    assert!(kernel == Kernel::Decode && text.contains("one order of accumulation"), "{text}");
}

#[test]
fn parts_of_the_wrong_size_are_refused() {
    let inputs = Inputs::<f32>::plain(shape((1, 2, 1, 1, 1200, 16, 8)), 45);
    let attn = Attention::new();
    let plan = Plan::new(&attn, inputs.shape, Level::detect()).expect("accepted");
    let mut out = [7.0f32; 16];
    let view = ViewMut::new(&mut out, Layout::Bhsd, [1, 2, 1, 8]).expect("output");
    let (q, k, v): (View<'_, f32>, _, _) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let Work::Split(mut call) = plan.work(q, k, v, view).expect("accepted") else { panic!("one query is decoded") };
    let round = call.cut(4);
    let piece = call.pieces(round).next().expect("some piece");
    let mut lines = vec![Line::ZERO; call.workspace_lines()];
    assert!(call.compute(&piece, &mut [0.0; 19], &mut lines).is_err());
    let short = call.workspace_lines() - 1;
    assert!(call.compute(&piece, &mut [0.0; 20], &mut lines[..short]).is_err());
    let len = call.states_len(round);
    assert!(call.finish(round, &mut vec![0.0; len + 1]).is_err());
    assert_eq!(out, [7.0; 16]);
}

/// Pieces of one call are refused by another that has not their rows.
#[test]
fn pieces_of_another_call_are_refused() {
    let (x, attn, level) = (vec![0.5f32; 3 * 40 * 8], Attention::new(), Level::detect());
    let cache = |sequences| CacheView::of_tensors(kv(&x, sequences), kv(&x, sequences)).unwrap();
    fn kv(x: &[f32], sequences: usize) -> View<'_, f32> {
        View::new(x, Layout::Bhsd, [sequences, 1, 40, 8]).unwrap()
    }
    let plan = |sequences, queries| {
        DecodePlan::new(&attn, [sequences, 1, queries, 8], Queries::All, cache(sequences), level).unwrap()
    };
    let (mut out, mut small_out) = (vec![0.0f32; 3 * 5 * 8], vec![0.0f32; 8]);
    let (large, small) = (plan(3, 5), plan(1, 1));
    let q = |sequences, queries| View::new(&x, Layout::Bhsd, [sequences, 1, queries, 8]).unwrap();
    let to = ViewMut::new(&mut out, Layout::Bhsd, [3, 1, 5, 8]).unwrap();
    let large = large.split(q(3, 5), to).unwrap();
    let to = ViewMut::new(&mut small_out, Layout::Bhsd, [1, 1, 1, 8]).unwrap();
    let small = small.split(q(1, 1), to).unwrap();
    let mut lines = vec![Line::ZERO; large.workspace_lines().max(small.workspace_lines())];
    for piece in large.pieces(large.cut(4)) {
        let mut state = vec![9.0; piece.state_len()];
        let refused = small.compute(&piece, &mut state, &mut lines);
        assert!(matches!(refused, Err(AttnError::Unsupported { .. })) && state.iter().all(|&x| x == 9.0));
        assert!(large.compute(&piece, &mut state, &mut lines).is_ok());
    }
}

/// A step's output: `counts` queries of each sequence, `heads` for one key/value head of 16 channels.
fn step(level: Level, attn: &Attention<'_>, (heads, counts): (usize, &[usize]), kv: &[f32], len: usize) -> Vec<f32> {
    let (batch, most) = (counts.len(), counts.iter().max().copied().unwrap_or(0));
    // Each sequence has the queries of the first one.
    let one = heads * most * 16;
    let q: Vec<f32> = (0..batch * one).map(|n| ((n % one) as f32 * 0.37).sin()).collect();
    let kv = View::new(kv, Layout::Bhsd, [batch, 1, len, 16]).expect("keys");
    let (cache, q_sizes) = (CacheView::of_tensors(kv, kv).expect("a cache"), [batch, heads, most, 16]);
    let plan = DecodePlan::new(attn, q_sizes, Queries::First(counts), cache, level).expect("accepted");
    let mut out = vec![0.0; q.len()];
    let to = ViewMut::new(&mut out, Layout::Bhsd, q_sizes).expect("output");
    let call = plan.split(View::new(&q, Layout::Bhsd, q_sizes).expect("queries"), to).expect("accepted");
    call.run(Workspace::new().lines(plan.workspace_lines())).expect("enough scratch");
    out
}

/// Groups of rows share the scratch of the largest, though smaller ones may score more tiles before their values.
#[test]
fn sequences_of_any_numbers_of_queries_share_scratch() {
    let len = if cfg!(miri) { 70 } else { 700 };
    let kv: Vec<f32> = (0..len * 16).map(|n| (n as f32 * 0.71).cos()).collect();
    let twice = [&kv[..], &kv[..]].concat();
    for level in Level::available() {
        for most in if cfg!(miri) { 5..6 } else { 1..34 } {
            for count in [1, 3, 4, 8, 11].into_iter().filter(|&count| count < most && (count < 2 || !cfg!(miri))) {
                let both = step(level, &Attention::new(), (1, &[most, count]), &twice, len);
                let equal = step(level, &Attention::new(), (1, &[most, most]), &twice, len);
                assert_eq!(both[..most * 16], equal[..most * 16], "{level:?}, {most} and {count}");
                let swapped = step(level, &Attention::new(), (1, &[count, most]), &twice, len);
                assert_eq!(both[most * 16..][..count * 16], swapped[..count * 16], "{level:?}, {most} and {count}");
            }
        }
    }
}

/// An infinite value that a window hides changes no bit, whatever number of heads shares its tile.
#[test]
fn a_hidden_infinity_in_groups_of_any_size() {
    let (len, attn) = (130, Attention::new().mask(Mask::window(100, 0, Align::BottomRight)));
    let kv: Vec<f32> = (0..len * 16).map(|n| (n as f32 * 0.71).cos()).collect();
    let mut infinite = kv.clone();
    infinite[5 * 16..6 * 16].fill(f32::INFINITY);
    for level in Level::available() {
        for heads in if cfg!(miri) { 3..=3 } else { 1..=12 } {
            let [got, want] = [&infinite, &kv].map(|kv| step(level, &attn, (heads, &[1]), kv, len));
            assert_eq!(got, want, "{level:?}, {heads} heads");
        }
    }
}
