//! Results: what C gets is what the reference engine gives for the same options.

use std::ffi::c_void;

use attn::types::{ATTN_UNBOUNDED, AttnAlign, AttnDtype, AttnOptions, AttnStatus, AttnTensor};
use attn_core::dropout::Dropout;
use attn_core::half::{bf16, f16};
use attn_core::mask::Term;
use attn_core::mask::{BlockSparse, Documents, Lengths, Tree, Window};
use attn_core::position::alibi::Alibi;
use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut, reference};

use crate::c::{self, Arguments, Plan, Workspace, floats, options, tensor, tensor_mut};

/// Two sequences, four query heads over two key heads, 7 queries, 9 keys.
const Q: [usize; 4] = [2, 4, 7, 8];
const KV: [usize; 4] = [2, 2, 9, 8];

/// Numbers in −2…2 without a pattern.
fn paint(len: usize, seed: u32) -> Vec<f32> {
    let mut x = seed;
    (0..len)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / (1 << 22) as f32 - 2.0
        })
        .collect()
}

/// `attn_forward` with these options equals the reference with those, output and lse; so do a plan and a workspace, bit
/// for bit.
fn agree<M: Mods + Sync>(name: &str, options: &AttnOptions, attn: &Attention<'_, M>) {
    let (q, k, v) = (paint(448, 1), paint(288, 2), paint(288, 3));
    let (mut want, mut want_lse) = (vec![0.0f64; 448], vec![0.0f64; 56]);
    let wide = |x: &[f32]| x.iter().copied().map(f64::from).collect::<Vec<_>>();
    let (q64, k64, v64) = (wide(&q), wide(&k), wide(&v));
    let view = |x, shape| View::new(x, Layout::Bhsd, shape).unwrap();
    let to = ViewMut::new(&mut want, Layout::Bhsd, Q).unwrap();
    let outputs = Outputs::new(to).lse(&mut want_lse);
    let mut row = vec![0.0f64; 64];
    reference::forward(attn, view(&q64, Q), view(&k64, KV), view(&v64, KV), outputs, &mut row).unwrap();

    let (q, k, v) = (floats(&q, Q), floats(&k, KV), floats(&v, KV));
    let run = |call: &dyn Fn(Arguments<'_>) -> AttnStatus| {
        let (mut out, mut lse) = (vec![f32::NAN; 448], vec![f32::NAN; 56]);
        let status = call(Arguments {
            options: Some(options),
            q: Some(&q),
            k: Some(&k),
            v: Some(&v),
            out: Some(&tensor_mut(&mut out, AttnDtype::F32, Q)),
            lse: (lse.as_mut_ptr(), lse.len()),
        });
        assert_eq!(status, AttnStatus::Ok, "{name}: {}", c::last_error());
        (out, lse)
    };
    let (out, lse) = run(&c::forward);
    for (n, (found, want)) in out.iter().zip(&want).chain(lse.iter().zip(&want_lse)).enumerate() {
        let near = (f64::from(*found) - want).abs() < 1e-5 || f64::from(*found) == *want;
        assert!(near, "{name}: element {n} is {found}, the reference says {want}");
    }
    let shape = attn::types::AttnShape { kv_heads: 2, ..c::sizes(Q, 9) };
    let plan = Plan::new(options, &shape).unwrap();
    let workspace = Workspace::new(Some(&plan), 1).unwrap();
    let bits = |x: &(Vec<f32>, Vec<f32>)| x.0.iter().chain(&x.1).map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&run(&|a| plan.run(None, a))), bits(&(out.clone(), lse.clone())), "{name}: plan");
    assert_eq!(bits(&run(&|a| plan.run(Some(&workspace), a))), bits(&(out, lse)), "{name}: workspace");
}

/// The defaults with something set.
fn with(set: impl FnOnce(&mut AttnOptions)) -> AttnOptions {
    let mut o = options();
    set(&mut o);
    o
}

#[test]
fn numbers_of_the_options() {
    agree("defaults", &options(), &Attention::new());
    agree("scale", &with(|o| (o.has_scale, o.scale) = (1, 0.7)), &Attention::new().scale(0.7));
    agree("a scale of 0", &with(|o| o.has_scale = 1), &Attention::new().scale(0.0));
    agree("softcap", &with(|o| o.softcap = 1.5), &Attention::new().softcap(1.5));
    agree("temperature", &with(|o| o.temperature = 2.5), &Attention::new().temperature(2.5));
    let dropout = Attention::new().dropout(Dropout::Seeded { p: 0.3, seed: 99 });
    agree("dropout", &with(|o| (o.dropout_p, o.dropout_seed) = (0.3, 99)), &dropout);
    agree("one thread", &with(|o| o.threads = 1), &Attention::new());
    agree("level", &with(|o| o.level = c"portable".as_ptr()), &Attention::new());
}

#[test]
fn masks_by_numbers() {
    let all = [(1, Align::TopLeft), (2, Align::BottomRight), (3, Align::Offset(-2))];
    for (number, align) in all {
        let offset = if number == 3 { -2 } else { 0 };
        let causal = with(|o| (o.causal, o.causal_offset) = (number, offset));
        agree("causal", &causal, &Attention::new().mask(Mask::causal(align)));
        let near = with(|o| (o.window, o.window_offset, o.window_left, o.window_right) = (number, offset, 2, 1));
        agree("window", &near, &Attention::new().mask(Mask::window(2, 1, align)));
    }
    let open = with(|o| (o.window, o.window_left, o.window_right) = (1, ATTN_UNBOUNDED, 3));
    let window = Term::Window(Window { left: None, right: Some(3), align: Align::TopLeft });
    agree("a window without a left bound", &open, &Attention::new().mask(Mask::term(window)));
}

#[test]
fn masks_by_tables() {
    let (lens, starts, one) = ([9usize, 4], [2usize, 0], [3usize]);
    let mask = |mask| Attention::new().mask(mask);
    agree("kv_lens", &with(|o| (o.kv_lens, o.kv_lens_len) = (lens.as_ptr(), 2)), &mask(Mask::kv_lens(&lens)));
    let all = Mask::term(Term::KvLens(Lengths::All(3)));
    agree("one length", &with(|o| (o.kv_lens, o.kv_lens_len) = (one.as_ptr(), 1)), &mask(all));
    agree(
        "kv_starts",
        &with(|o| (o.kv_starts, o.kv_starts_len) = (starts.as_ptr(), 2)),
        &mask(Mask::kv_starts(&starts)),
    );
    let q_lens = [7usize, 2];
    agree("q_lens", &with(|o| (o.q_lens, o.q_lens_len) = (q_lens.as_ptr(), 2)), &mask(Mask::q_lens(&q_lens)));
    let prefix = with(|o| (o.prefix, o.prefix_lens, o.prefix_lens_len) = (1, starts.as_ptr(), 2));
    agree("prefix", &prefix, &mask(Mask::prefix_lm(Lengths::PerBatch(&starts), Align::TopLeft)));
    let parents = [-1isize, 0, 0, 1, -1, 4, 2];
    let nodes = parents.map(|parent| usize::try_from(parent).ok());
    let tree = with(|o| (o.tree_parents, o.tree_len) = (parents.as_ptr(), 7));
    agree("tree", &tree, &mask(Mask::tree(Tree { parents: &nodes })));
    let (cu_q, cu_k) = ([0usize, 3, 7], [0usize, 5, 9]);
    let packed = |causal, window| {
        with(|o| {
            (o.cu_q, o.cu_q_len, o.cu_k, o.cu_k_len) = (cu_q.as_ptr(), 3, cu_k.as_ptr(), 3);
            (o.document_causal, o.document_window) = (causal, window);
            (o.document_window_left, o.document_window_right) = if window == 0 { (0, 0) } else { (1, 0) };
        })
    };
    let documents = Documents::new(&cu_q, &cu_k);
    agree("documents", &packed(0, 0), &mask(Mask::documents(documents)));
    agree("causal documents", &packed(2, 0), &mask(Mask::documents(documents.causal(Align::BottomRight))));
    let window = Window { left: Some(1), right: Some(0), align: Align::TopLeft };
    agree("windowed documents", &packed(0, 1), &mask(Mask::documents(documents.window(window))));
}

#[test]
fn masks_and_biases_by_tensors() {
    let bools: Vec<bool> = (0..2 * 7 * 9).map(|n| n * 7 % 5 != 0).collect();
    let bytes: Vec<u8> = bools.iter().map(|&b| b.into()).collect();
    let view = View::broadcast(&bools, &[2, 1, 7, 9]).unwrap();
    let given = tensor(&bytes, AttnDtype::Bool, [2, 1, 7, 9]);
    agree("keep", &with(|o| o.keep = &given), &Attention::new().mask(Mask::keep(view)));
    agree("drop", &with(|o| o.drop = &given), &Attention::new().mask(Mask::drop(view)));
    let dropout = Attention::new().dropout(Dropout::Keep { mask: view, p: 0.25 });
    agree("dropout_keep", &with(|o| (o.dropout_keep, o.dropout_p) = (&given, 0.25)), &dropout);
    let both = Attention::new().mask(Mask::keep(view).and(Mask::causal(Align::TopLeft)));
    agree("keep and causal", &with(|o| (o.keep, o.causal) = (&given, AttnAlign::TopLeft as u32)), &both);

    let (grid, bytes) = ([true, false, true, false, true, true], [1u8, 0, 1, 0, 1, 1]);
    let given = tensor(&bytes, AttnDtype::Bool, [1, 1, 2, 3]);
    let blocks = BlockSparse { blocks: View::broadcast(&grid, &[2, 3]).unwrap(), block_q: 4, block_k: 3 };
    let sparse = with(|o| (o.blocks, o.block_q, o.block_k) = (&given, 4, 3));
    agree("blocks", &sparse, &Attention::new().mask(Mask::block_sparse(blocks)));

    let bias = paint(63, 4);
    let given = floats(&bias, [1, 1, 7, 9]);
    let want = Attention::new().bias(View::broadcast(&bias, &[7, 9]).unwrap());
    agree("bias", &with(|o| o.bias = &given), &want);
    let doubles: Vec<f64> = bias.iter().copied().map(f64::from).collect();
    let given = tensor(&doubles, AttnDtype::F64, [1, 1, 7, 9]);
    agree("a bias of doubles", &with(|o| o.bias = &given), &want);
    let rounded: Vec<f16> = bias.iter().map(|&x| f16::from_f32(x)).collect();
    let given = tensor(&rounded, AttnDtype::F16, [1, 1, 7, 9]);
    agree(
        "a bias of halves",
        &with(|o| o.bias = &given),
        &Attention::new().bias(View::broadcast(&rounded, &[7, 9]).unwrap()),
    );
}

#[test]
fn heads_of_their_own() {
    let table = [0.5f32, -1.0, f32::NEG_INFINITY, 3.0];
    agree("sinks", &with(|o| (o.sinks, o.sinks_len) = (table.as_ptr(), 4)), &Attention::new().sinks(&table));
    let slopes = [0.5f32, 0.25, 0.125, 0.0];
    let alibi = Attention::new().alibi(Alibi { slopes: &slopes, align: Align::Offset(1) });
    let given = with(|o| {
        (o.alibi_slopes, o.alibi_slopes_len, o.alibi, o.alibi_offset) =
            (slopes.as_ptr(), 4, AttnAlign::Offset as u32, 1);
    });
    agree("alibi", &given, &alibi);
}

extern "C-unwind" fn lower_far_keys(
    score: f64,
    _: usize,
    _: usize,
    query: usize,
    key: usize,
    factor: *mut c_void,
) -> f64 {
    score - factor.addr() as f64 * 0.1 * query.abs_diff(key) as f64
}

extern "C-unwind" fn only_even(_: usize, head: usize, _: usize, key: usize, _: *mut c_void) -> i32 {
    i32::from((head + key).is_multiple_of(2)) * 4
}

#[test]
fn functions_of_the_caller() {
    let user_data = std::ptr::without_provenance_mut(3);
    let map = |score: f64, at: At| score - 0.3 * at.query.abs_diff(at.key) as f64;
    let even = |at: At| (at.head + at.key).is_multiple_of(2);
    let set = |score: bool, visible: bool| {
        with(|o| {
            o.score_mod = score.then_some(lower_far_keys);
            o.mask_mod = visible.then_some(only_even);
            o.user_data = user_data;
        })
    };
    agree("score_mod", &set(true, false), &Attention::new().score_mod(map));
    agree("mask_mod", &set(false, true), &Attention::new().mask_mod(even));
    agree("both", &set(true, true), &Attention::new().score_mod(map).mask_mod(even));
}

#[test]
fn halves_in_and_out() {
    let (q, kv) = (paint(448, 1), paint(288, 2));
    let run = |q: &AttnTensor, kv: &AttnTensor, out: &AttnTensor| {
        let lse = (std::ptr::null_mut(), 0);
        let status = c::forward(Arguments { options: None, q: Some(q), k: Some(kv), v: Some(kv), out: Some(out), lse });
        assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
    };
    let mut want = vec![0.0f32; 448];
    run(&floats(&q, Q), &floats(&kv, KV), &tensor_mut(&mut want, AttnDtype::F32, Q));
    macro_rules! half {
        ($t:ty, $dtype:expr, $bound:expr) => {
            let narrow = |x: &[f32]| x.iter().map(|&x| <$t>::from_f32(x).to_bits()).collect::<Vec<u16>>();
            let (q, kv) = (narrow(&q), narrow(&kv));
            let (q, kv) = (tensor(&q, $dtype, Q), tensor(&kv, $dtype, KV));
            let (mut wide, mut same) = (vec![0.0f32; 448], vec![0u16; 448]);
            run(&q, &kv, &tensor_mut(&mut wide, AttnDtype::F32, Q));
            run(&q, &kv, &tensor_mut(&mut same, $dtype, Q));
            for ((wide, same), want) in wide.iter().zip(&same).zip(&want) {
                assert!((wide - want).abs() < $bound, "{wide} against {want}");
                assert_eq!(<$t>::from_f32(*wide).to_bits(), *same);
            }
        };
    }
    half!(f16, AttnDtype::F16, 4e-3);
    half!(bf16, AttnDtype::Bf16, 3e-2);
}

#[test]
fn any_strides() {
    // The same numbers stored as [batch, seq, heads, dim], and backwards along the sequence.
    let (bhsd, kv) = (paint(448, 1), paint(288, 2));
    let at = |n: usize| (n / 224, n / 56 % 4, n / 8 % 7, n % 8);
    let (mut bshd, mut backwards) = (vec![0.0f32; 448], vec![0.0f32; 448]);
    for n in 0..448 {
        let (b, h, s, d) = at(n);
        bshd[((b * 7 + s) * 4 + h) * 8 + d] = bhsd[n];
        backwards[((b * 4 + h) * 7 + (6 - s)) * 8 + d] = bhsd[n];
    }
    let straight = floats(&bhsd, Q);
    let (mut want, mut out, mut turned) = (vec![0.0f32; 448], vec![0.0f32; 448], vec![0.0f32; 448]);
    let run = |q: &AttnTensor, out: &AttnTensor| {
        let (kv, lse) = (floats(&kv, KV), (std::ptr::null_mut(), 0));
        let status =
            c::forward(Arguments { options: None, q: Some(q), k: Some(&kv), v: Some(&kv), out: Some(out), lse });
        assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
    };
    run(&straight, &tensor_mut(&mut want, AttnDtype::F32, Q));
    let (_, layout) = c::contiguous(1, 1, Q);
    run(&AttnTensor { strides: layout.strides, ..floats(&bshd, Q) }, &tensor_mut(&mut out, AttnDtype::F32, Q));
    assert_eq!(out, want);
    let reversed = |tensor: AttnTensor| AttnTensor { strides: [224, 56, -8, 1], offset: 48, ..tensor };
    run(&reversed(floats(&backwards, Q)), &reversed(tensor_mut(&mut turned, AttnDtype::F32, Q)));
    for n in 0..448 {
        let (b, h, s, d) = at(n);
        assert_eq!(turned[((b * 4 + h) * 7 + (6 - s)) * 8 + d], want[n]);
    }
}

#[test]
fn a_plan_keeps_tables_and_reads_tensors_anew() {
    let x = paint(64, 5);
    let shape = [1, 1, 8, 8];
    let x = floats(&x, shape);
    let mut bytes = vec![1u8; 8];
    let mut lens = [5usize];
    let run = |plan: &Plan| {
        let mut out = vec![0.0f32; 64];
        let to = tensor_mut(&mut out, AttnDtype::F32, shape);
        let lse = (std::ptr::null_mut(), 0);
        let a = Arguments { options: None, q: Some(&x), k: Some(&x), v: Some(&x), out: Some(&to), lse };
        let status = plan.run(None, a);
        (status, out)
    };
    let plan = {
        let keep = tensor_mut(&mut bytes, AttnDtype::Bool, [1, 1, 1, 8]);
        let o = with(|o| (o.kv_lens, o.kv_lens_len, o.keep) = (lens.as_ptr(), 1, &keep));
        Plan::new(&o, &c::sizes(shape, 8)).unwrap()
    };
    let (status, first) = run(&plan);
    assert_eq!(status, AttnStatus::Ok);
    lens[0] = 1;
    assert_eq!(run(&plan).1, first, "the table was copied");
    assert_eq!(lens, [1]);
    assert!(plan.workspace_bytes() > 0 && plan.explain().contains("f32"));
}

#[test]
fn a_plan_refuses_other_sizes_and_a_workspace_grows() {
    let plan = Plan::new(&options(), &c::sizes([1, 1, 8, 8], 8)).unwrap();
    let workspace = Workspace::new(None, 1).unwrap();
    assert_eq!(workspace.bytes(), 0);
    let (x, mut out) = (paint(72, 6), vec![7.0f32; 64]);
    let (x, long) = (floats(&x, [1, 1, 8, 8]), floats(&x, [1, 1, 9, 8]));
    let to = tensor_mut(&mut out, AttnDtype::F32, [1, 1, 8, 8]);
    let lse = (std::ptr::null_mut(), 0);
    let a = Arguments { options: None, q: Some(&x), k: Some(&long), v: Some(&long), out: Some(&to), lse };
    assert_eq!(plan.run(Some(&workspace), a), AttnStatus::Shape);
    assert!(out.iter().all(|&x| x == 7.0) && c::last_error().contains("kv_len against the plan"));
    let to = tensor_mut(&mut out, AttnDtype::F32, [1, 1, 8, 8]);
    assert_eq!(plan.run(Some(&workspace), Arguments { k: Some(&x), v: Some(&x), out: Some(&to), ..a }), AttnStatus::Ok);
    assert!(workspace.bytes() >= plan.workspace_bytes());
}

#[test]
fn what_the_library_says_of_itself() {
    assert_eq!(c::text(attn::abi::attn_version()), env!("CARGO_PKG_VERSION"));
    let levels = c::text(attn::abi::attn_levels());
    assert!(levels.split(' ').eq(attn_simd::Level::available().map(|level| level.name())), "{levels}");
}
