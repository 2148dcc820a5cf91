//! Whatever C gets wrong, bad pointers aside, is a status and a text, and leaves every output as it was.

use attn::types::{ATTN_EXPLAIN_SIZE, ATTN_UNBOUNDED, AttnAlign, AttnDtype, AttnOptions, AttnStatus, AttnTensor};
use attn_simd::LevelError;

use crate::c::{self, Arguments, floats, options, tensor, tensor_mut};

const SHAPE: [usize; 4] = [2, 2, 3, 4];
const KV: [usize; 4] = [2, 1, 5, 4];

/// A call that is right until a test breaks it: two sequences, two query heads over one key head, 3 queries, 5 keys,
/// dim 4.
struct Case {
    options: AttnOptions,
    q: AttnTensor,
    k: AttnTensor,
    v: AttnTensor,
    out: AttnTensor,
    lse_len: usize,
}

/// Breaks a good call with `breaks` and says what came of it; the outputs must be as they were.
fn refused(breaks: impl FnOnce(&mut Case)) -> (AttnStatus, String) {
    let (q, kv) = (vec![0.5f32; 48], vec![0.25f32; 40]);
    let (mut out, mut lse) = (vec![7.0f32; 48], vec![7.0f32; 12]);
    let mut case = Case {
        options: options(),
        q: floats(&q, SHAPE),
        k: floats(&kv, KV),
        v: floats(&kv, KV),
        out: tensor_mut(&mut out, AttnDtype::F32, SHAPE),
        lse_len: 12,
    };
    breaks(&mut case);
    let arguments = Arguments {
        options: Some(&case.options),
        q: Some(&case.q),
        k: Some(&case.k),
        v: Some(&case.v),
        out: Some(&case.out),
        lse: (lse.as_mut_ptr(), case.lse_len),
    };
    let status = c::forward(arguments);
    if status != AttnStatus::Ok {
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "written in spite of {status:?}");
    }
    (status, c::last_error())
}

/// The call is refused with this status, and the text says these words.
fn refuses(status: AttnStatus, words: &[&str], breaks: impl FnOnce(&mut Case)) {
    let (found, text) = refused(breaks);
    assert_eq!(found, status, "{text}");
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
}

#[test]
fn the_call_that_these_tests_break_is_right() {
    assert_eq!(refused(|_| {}).0, AttnStatus::Ok);
}

#[test]
fn null_is_refused_wherever_something_is_needed() {
    for (what, status) in c::all_null() {
        assert_eq!(status, AttnStatus::NullPointer, "{what}");
    }
    refuses(AttnStatus::NullPointer, &["k is null"], |case| case.k.data = std::ptr::null_mut());
    refuses(AttnStatus::NullPointer, &["out is null"], |case| case.out.data = std::ptr::null_mut());
    refuses(AttnStatus::NullPointer, &["kv_lens is null"], |case| case.options.kv_lens_len = 2);
    refuses(AttnStatus::NullPointer, &["prefix_lens"], |case| case.options.prefix = AttnAlign::TopLeft as u32);
}

#[test]
fn lengths_bound_every_access() {
    refuses(AttnStatus::Bounds, &["q: 48 elements are needed", "47 were given"], |case| case.q.len = 47);
    refuses(AttnStatus::Bounds, &["v: 40 elements are needed", "39 were given"], |case| case.v.len = 39);
    refuses(AttnStatus::Bounds, &["out: 48 elements are needed", "0 were given"], |case| case.out.len = 0);
    refuses(AttnStatus::Bounds, &["k: 41 elements are needed"], |case| case.k.offset = 1);
    refuses(AttnStatus::Bounds, &["k", "below"], |case| case.k.strides[3] = -1);
    refuses(AttnStatus::Bounds, &["q: 49 elements are needed"], |case| case.q.strides[0] = 25);
    refuses(AttnStatus::Shape, &["lse", "12", "11"], |case| case.lse_len = 11);
}

#[test]
fn sizes_that_wrap_are_refused() {
    const HUGE: usize = usize::MAX / 2;
    const LARGE: usize = 1 << (usize::BITS - 24);
    refuses(AttnStatus::Overflow, &["q"], |case| case.q.shape = [HUGE; 4]);
    refuses(AttnStatus::Overflow, &["q"], |case| (case.q.strides[3], case.q.shape[3]) = (isize::MAX, HUGE));
    refuses(AttnStatus::Bounds, &["q"], |case| case.q.strides[0] = isize::MAX);
    refuses(AttnStatus::Bounds, &["q"], |case| case.q.strides[0] = isize::MIN);
    refuses(AttnStatus::Overflow, &["k"], |case| (case.k.len, case.k.offset) = (usize::MAX, usize::MAX));
    refuses(AttnStatus::Overflow, &["k"], |case| case.k.len = usize::MAX / 4 + 1); // wraps in bytes
    refuses(AttnStatus::Overflow, &["lse"], |case| case.lse_len = usize::MAX);
    let one = [1.0f32];
    refuses(AttnStatus::Overflow, &["batch"], |case| {
        // Every size fits, their product does not; strides of 0 need one element only.
        let all = |shape| AttnTensor { strides: [0; 4], ..tensor(&one, AttnDtype::F32, shape) };
        (case.q, case.k, case.v) = (all([1, LARGE, 1 << 23, 1]), all([1, 1, 1, 1]), all([1, 1, 1, LARGE]));
    });
}

#[test]
#[cfg_attr(miri, ignore = "Miri has as much memory as it wants")]
#[cfg_attr(target_pointer_width = "32", ignore = "sizes wrap before memory ends")]
fn scratch_that_cannot_be_had_is_an_error_not_an_abort() {
    const LARGE: usize = 1 << (usize::BITS - 14);
    let one = [1.0f32];
    refuses(AttnStatus::OutOfMemory, &["workspace", "bytes"], |case| {
        let all = |shape| AttnTensor { strides: [0; 4], ..tensor(&one, AttnDtype::F32, shape) };
        (case.q, case.k, case.v) = (all([2, 2, 3, LARGE]), all([2, 1, 5, LARGE]), case.v);
    });
}

#[test]
fn misaligned_data_is_refused() {
    refuses(AttnStatus::Misaligned, &["q", "4 bytes"], |case| {
        case.q.data = case.q.data.wrapping_byte_add(2);
        case.q.shape[0] = 1;
    });
    refuses(AttnStatus::Misaligned, &["out"], |case| case.out.data = case.out.data.wrapping_byte_add(1));
    let lens = [1usize; 4];
    refuses(AttnStatus::Misaligned, &["kv_lens"], |case| {
        (case.options.kv_lens, case.options.kv_lens_len) = (lens.as_ptr().wrapping_byte_add(1), 2);
    });
}

#[test]
fn outputs_share_memory_with_nothing() {
    refuses(AttnStatus::Overlap, &["out", "q"], |case| case.out = case.q);
    refuses(AttnStatus::Overlap, &["out", "k"], |case| {
        let shared = AttnTensor { len: 48, ..case.k };
        (case.k, case.v) = (case.out, case.out);
        (case.k.shape, case.v.shape, case.k.strides, case.v.strides) = (KV, KV, shared.strides, shared.strides);
    });
    refuses(AttnStatus::Overlap, &["output"], |case| case.out.strides[2] = 0);
    // Sinks that lie in the lse.
    let mut lse = vec![7.0f32; 12];
    let (q, kv, mut out) = (vec![0.5f32; 48], vec![0.25f32; 40], vec![7.0f32; 48]);
    let mut options = options();
    (options.sinks, options.sinks_len) = (lse.as_ptr(), 2);
    let status = c::forward(Arguments {
        options: Some(&options),
        q: Some(&floats(&q, SHAPE)),
        k: Some(&floats(&kv, KV)),
        v: Some(&floats(&kv, KV)),
        out: Some(&tensor_mut(&mut out, AttnDtype::F32, SHAPE)),
        lse: (lse.as_mut_ptr(), 12),
    });
    assert_eq!((status, c::last_error().as_str()), (AttnStatus::Overlap, "lse shares memory with sinks"));
}

#[test]
fn sizes_that_disagree_are_refused() {
    refuses(AttnStatus::Shape, &["head_dim", "4", "3"], |case| case.k.shape[3] = 3);
    refuses(AttnStatus::Shape, &["q_heads is 2", "kv_heads = 0"], |case| {
        (case.k.shape[1], case.v.shape[1]) = (0, 0);
    });
    refuses(AttnStatus::Shape, &["output q_len", "3", "2"], |case| case.out.shape[2] = 2);
    let lens = [5usize; 3];
    refuses(AttnStatus::Shape, &["kv_lens", "2", "3"], |case| {
        (case.options.kv_lens, case.options.kv_lens_len) = (lens.as_ptr(), 3);
    });
}

#[test]
fn numbers_that_name_nothing_are_refused() {
    refuses(AttnStatus::Option, &["q: dtype is 99, must be an AttnDtype"], |case| case.q.dtype = 99);
    refuses(AttnStatus::Option, &["out: dtype is BOOL (5), must be F32, F16 or BF16"], |case| {
        case.out.dtype = AttnDtype::Bool as u32
    });
    refuses(AttnStatus::Option, &["q: dtype is F64 (4), must be F32"], |case| case.q.dtype = AttnDtype::F64 as u32);
    refuses(AttnStatus::Option, &["causal is 4"], |case| case.options.causal = 4);
    refuses(AttnStatus::Option, &["window is"], |case| case.options.window = u32::MAX);
    refuses(AttnStatus::Option, &["precision is 9"], |case| case.options.precision = 9);
    refuses(AttnStatus::Option, &["reserved is 1"], |case| case.options.reserved = 1);
    refuses(AttnStatus::Option, &["reserved is 2"], |case| case.v.reserved = 2);
    refuses(AttnStatus::Option, &["softcap"], |case| case.options.softcap = f64::NAN);
    refuses(AttnStatus::Option, &["temperature"], |case| case.options.temperature = -1.0);
    refuses(AttnStatus::Option, &["scale"], |case| (case.options.has_scale, case.options.scale) = (1, f64::INFINITY));
    refuses(AttnStatus::Option, &["dropout p"], |case| case.options.dropout_p = 1.0);
    refuses(AttnStatus::Option, &["level"], |case| case.options.level = c"sse9".as_ptr());
    refuses(AttnStatus::Option, &["level"], |case| case.options.level = c"\xff".as_ptr());
    let slopes = [1.0f32; 2];
    refuses(AttnStatus::Option, &["alibi"], |case| {
        (case.options.alibi_slopes, case.options.alibi_slopes_len) = (slopes.as_ptr(), 2);
    });
    refuses(AttnStatus::Unsupported, &["dtypes"], |case| case.k.dtype = AttnDtype::F16 as u32);
    assert_eq!(c::contiguous(1, 3, [1; 4]).0, AttnStatus::Option);
    assert_eq!(c::contiguous(0, 0, [1; 4]).0, AttnStatus::Option);
    assert_eq!(c::contiguous(1, 0, [usize::MAX, 2, 1, 1]).0, AttnStatus::Overflow);
}

#[test]
fn tables_with_impossible_entries_are_refused() {
    let (long, down, parents, below) = ([6usize, 5], [0usize, 2, 1], [-1isize, 1, 0], [-1isize, -2, 0]);
    refuses(AttnStatus::Table, &["kv_lens[0] is 6"], |case| {
        (case.options.kv_lens, case.options.kv_lens_len) = (long.as_ptr(), 2);
    });
    refuses(AttnStatus::Table, &["cu_q[2]"], |case| {
        (case.options.cu_q, case.options.cu_q_len) = (down.as_ptr(), 3);
        (case.options.cu_k, case.options.cu_k_len) = (down.as_ptr(), 3);
    });
    for table in [&parents, &below] {
        refuses(AttnStatus::Table, &["parents[1]"], |case| {
            (case.options.tree_parents, case.options.tree_len) = (table.as_ptr(), 3);
        });
    }
}

#[test]
fn a_byte_above_one_is_no_bool() {
    let mut bytes = [1u8; 15];
    bytes[11] = 2;
    let mask = tensor(&bytes, AttnDtype::Bool, [1, 1, 3, 5]);
    refuses(AttnStatus::Table, &["keep", "byte 11 is 2"], |case| case.options.keep = &mask);
    bytes[11] = 255;
    let mask = AttnTensor { offset: 3, shape: [1, 1, 1, 1], ..tensor(&bytes, AttnDtype::Bool, [1, 1, 3, 5]) };
    // What the tensor does not reach is not looked at.
    assert_eq!(refused(|case| case.options.drop = &mask).0, AttnStatus::Ok);
    refuses(AttnStatus::Option, &["keep", "BOOL"], |case| case.options.keep = &case.q);
    refuses(AttnStatus::Option, &["bias", "F64"], |case| case.options.bias = &mask);
}

#[test]
fn what_lies_between_the_elements_of_a_mask_is_not_looked_at() {
    // Every second byte is an element; a head axis of stride 0.
    let result = |mask: Option<&AttnTensor>| {
        let (x, mut out) = ((0..48).map(|n| n as f32 * 0.1).collect::<Vec<_>>(), vec![7.0f32; 48]);
        let mut options = options();
        options.keep = mask.map_or(std::ptr::null(), std::ptr::from_ref);
        let status = c::forward(Arguments {
            options: Some(&options),
            q: Some(&floats(&x, SHAPE)),
            k: Some(&floats(&x, KV)),
            v: Some(&floats(&x, KV)),
            out: Some(&tensor_mut(&mut out, AttnDtype::F32, SHAPE)),
            lse: (std::ptr::null_mut(), 0),
        });
        (status, out)
    };
    let bits = [1u8, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 1];
    let packed = result(Some(&tensor(&bits, AttnDtype::Bool, [1, 1, 3, 5])));
    assert_ne!(packed, result(None));
    let mut gaps: Vec<u8> = bits.iter().flat_map(|&bit| [bit, 0xEE]).collect();
    let wide = |gaps: &[u8]| AttnTensor {
        shape: [1, 2, 3, 5],
        strides: [0, 0, 10, 2],
        ..tensor(gaps, AttnDtype::Bool, [1, 1, 3, 10])
    };
    assert_eq!(result(Some(&wide(&gaps))), packed);
    gaps[22] = 2; // an element
    let (status, out) = result(Some(&wide(&gaps)));
    assert_eq!((status, out[0]), (AttnStatus::Table, 7.0));
    assert!(c::last_error().contains("byte 22 is 2"), "{}", c::last_error());
}

#[test]
fn a_panic_in_a_callers_function_is_a_status() {
    extern "C-unwind" fn panics(_: f64, _: usize, _: usize, _: usize, key: usize, _: *mut std::ffi::c_void) -> f64 {
        assert!(key < 2, "this message belongs to a test");
        0.0
    }
    for threads in [0, 1] {
        let (status, text) = refused(|case| {
            case.options.score_mod = Some(panics);
            case.options.threads = threads;
        });
        assert_eq!((status, text.starts_with("internal error")), (AttnStatus::Internal, true));
    }
    assert_eq!(refused(|_| {}).0, AttnStatus::Ok, "the library works on");
}

#[test]
fn too_many_masks_are_refused() {
    let (lens, cu_q, cu_k, parents) = ([5usize; 2], [0usize, 3], [0usize, 5], [-1isize; 3]);
    let blocks = tensor(&[1u8], AttnDtype::Bool, [1, 1, 1, 1]);
    refuses(AttnStatus::Option, &["at most 8"], |case| {
        let o = &mut case.options;
        (o.causal, o.window, o.prefix) = (1, 1, 1);
        (o.window_left, o.window_right) = (ATTN_UNBOUNDED, 0);
        (o.prefix_lens, o.prefix_lens_len) = (lens.as_ptr(), 2);
        (o.kv_lens, o.kv_lens_len, o.kv_starts, o.kv_starts_len) = (lens.as_ptr(), 2, lens.as_ptr(), 2);
        (o.q_lens, o.q_lens_len) = (lens.as_ptr(), 1);
        (o.cu_q, o.cu_q_len, o.cu_k, o.cu_k_len) = (cu_q.as_ptr(), 2, cu_k.as_ptr(), 2);
        (o.tree_parents, o.tree_len) = (parents.as_ptr(), 3);
        (o.blocks, o.block_q, o.block_k) = (&blocks, 3, 5);
    });
}

#[test]
fn a_text_that_does_not_fit_is_cut_and_said_so() {
    let shape = c::sizes([1, 1, 10, 64], 10);
    let (status, whole) = c::explain(&options(), &shape, 1, ATTN_EXPLAIN_SIZE);
    assert_eq!(status, AttnStatus::Ok);
    assert!(whole.contains("f32"), "{whole}");
    let (status, cut) = c::explain(&options(), &shape, 1, 6);
    assert_eq!((status, cut.as_str()), (AttnStatus::Bounds, &whole[..5]));
    let needed = |found| format!("text needs {} bytes, text_size is {found}", whole.len() + 1);
    assert_eq!(c::last_error(), needed(6));
    assert_eq!(c::explain(&options(), &shape, 1, 0), (AttnStatus::Bounds, String::new()));
    assert_eq!(c::last_error(), needed(0));
    assert_eq!(c::explain(&options(), &shape, 1, whole.len()).1, whole[..whole.len() - 1]);
    assert_eq!(c::explain(&options(), &shape, 1, whole.len() + 1), (AttnStatus::Ok, whole));
    assert_eq!(c::explain(&options(), &shape, AttnDtype::F64 as u32, ATTN_EXPLAIN_SIZE).0, AttnStatus::Option);
}

/// The size that attn.h names holds the longest text, whatever level, type and options.
#[test]
fn every_explanation_fits_the_size_of_the_header() {
    // Gradients of more rows do not fit the addresses of 32 bits.
    let rows = 1 << if cfg!(target_pointer_width = "64") { 20 } else { 16 };
    let shape = c::sizes([1, 1, rows, 256], rows);
    let (mut longest, levels) =
        (0, [c"portable", c"dotprod", c"avx2", c"avx512", c"avx512bf16", c"amx", c"avx512bf16-model", c"amx-model"]);
    for level in levels {
        for (dtype, precision, reproducible) in
            [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0), (2, 1, 1), (3, 1, 1)]
        {
            let mut options = options();
            (options.level, options.precision, options.reproducible) = (level.as_ptr(), precision, reproducible);
            match c::explain(&options, &shape, dtype, ATTN_EXPLAIN_SIZE) {
                (AttnStatus::Ok, text) => {
                    // What stands in the way of tiles may be said in more words elsewhere; calls of few queries do not
                    // say it.
                    let more = if text.contains("-decode-") { 0 } else { LevelError::Refused.to_string().len() };
                    longest = longest.max(text.len() + more);
                }
                (status, _) => assert_eq!(status, AttnStatus::Unsupported, "{level:?}: {}", c::last_error()),
            }
            for gradients in 1..=3 {
                match c::explain_backward(&options, &shape, [dtype, gradients]) {
                    (AttnStatus::Ok, text) => {
                        assert!(text.contains("backward") && text.contains("KiB of scratch"), "{text}");
                        longest = longest.max(text.len());
                    }
                    (status, _) => assert_eq!(status, AttnStatus::Unsupported, "{level:?}: {}", c::last_error()),
                }
            }
        }
    }
    assert!(longest > 200 && longest < ATTN_EXPLAIN_SIZE - 32, "{longest}");
}

/// A field that nothing reads is refused: what was meant is not what would run.
#[test]
fn an_option_that_nothing_heeds_is_refused() {
    type Set = fn(&mut AttnOptions);
    let cases: [(&str, &str, Set); 16] = [
        ("scale is", "has_scale must be 1", |o| o.scale = 0.5),
        ("causal_offset is", "causal must be ATTN_ALIGN_OFFSET", |o| o.causal_offset = 1),
        ("window_offset is", "window must be ATTN_ALIGN_OFFSET", |o| o.window_offset = 1),
        ("prefix_offset is", "prefix must be ATTN_ALIGN_OFFSET", |o| o.prefix_offset = 1),
        ("alibi_offset is", "alibi must be ATTN_ALIGN_OFFSET", |o| o.alibi_offset = 1),
        ("document_causal_offset is", "document_causal must be", |o| o.document_causal_offset = 1),
        ("document_window_offset is", "document_window must be", |o| o.document_window_offset = 1),
        ("window_left", "window must be", |o| o.window_left = 2),
        ("document_window_right", "document_window must be", |o| o.document_window_right = 2),
        ("document_causal is", "cu_q and cu_k", |o| o.document_causal = AttnAlign::BottomRight as u32),
        ("document_window is", "cu_q and cu_k", |o| o.document_window = AttnAlign::TopLeft as u32),
        ("alibi is", "alibi_slopes", |o| o.alibi = AttnAlign::BottomRight as u32),
        ("block_q is", "blocks must be given", |o| o.block_q = 3),
        ("block_k is", "blocks must be given", |o| o.block_k = 3),
        ("dropout_seed is", "dropout_p must be above 0", |o| o.dropout_seed = 5),
        ("user_data is", "score_mod or mask_mod", |o| o.user_data = std::ptr::without_provenance_mut(8)),
    ];
    for (what, needs, set) in cases {
        refuses(AttnStatus::Option, &[what, needs, "without effect"], |case| set(&mut case.options));
    }
    // No bounds are what a window without bounds has.
    let open =
        |case: &mut Case| (case.options.window_left, case.options.window_right) = (ATTN_UNBOUNDED, ATTN_UNBOUNDED);
    assert_eq!(refused(open).0, AttnStatus::Ok);
    let keep = tensor(&[1u8], AttnDtype::Bool, [1; 4]);
    refuses(AttnStatus::Option, &["dropout_seed is", "dropout_keep must be null"], |case| {
        (case.options.dropout_p, case.options.dropout_seed, case.options.dropout_keep) = (0.5, 5, &keep);
    });
    let lens = [1usize; 2];
    refuses(AttnStatus::Option, &["prefix_lens is", "prefix must be an AttnAlign"], |case| {
        (case.options.prefix_lens, case.options.prefix_lens_len) = (lens.as_ptr(), 2);
    });
}

/// The likeliest slip of all: an offset beside an alignment that has a place of its own. Beside ATTN_ALIGN_OFFSET it
/// counts.
#[test]
fn an_offset_beside_another_alignment_is_refused() {
    let (slopes, lens, cu_q, cu_k) = ([0.5f32, 0.25], [1usize, 2], [0usize, 3], [0usize, 5]);
    type Set = fn(&mut AttnOptions, u32, isize);
    let cases: [(&str, Set); 6] = [
        ("causal", |o, align, offset| (o.causal, o.causal_offset) = (align, offset)),
        ("window", |o, align, offset| (o.window, o.window_offset, o.window_left) = (align, offset, 1)),
        ("prefix", |o, align, offset| (o.prefix, o.prefix_offset) = (align, offset)),
        ("document_causal", |o, align, offset| (o.document_causal, o.document_causal_offset) = (align, offset)),
        ("document_window", |o, align, offset| (o.document_window, o.document_window_offset) = (align, offset)),
        ("alibi", |o, align, offset| (o.alibi, o.alibi_offset) = (align, offset)),
    ];
    for (field, set) in cases {
        let call = |align: AttnAlign, offset: isize| {
            refused(|case| {
                let o = &mut case.options;
                match field {
                    "prefix" => (o.prefix_lens, o.prefix_lens_len) = (lens.as_ptr(), 2),
                    "alibi" => (o.alibi_slopes, o.alibi_slopes_len) = (slopes.as_ptr(), 2),
                    _ if field.starts_with("document") => {
                        (o.cu_q, o.cu_q_len, o.cu_k, o.cu_k_len) = (cu_q.as_ptr(), 2, cu_k.as_ptr(), 2);
                    }
                    _ => {}
                }
                set(o, align as u32, offset);
            })
        };
        for align in [AttnAlign::TopLeft, AttnAlign::BottomRight] {
            assert_eq!(call(align, 0).0, AttnStatus::Ok, "{field}");
            for offset in [-1, 3] {
                let (status, text) = call(align, offset);
                let want = format!("{field}_offset is set without effect: {field} must be ATTN_ALIGN_OFFSET");
                assert_eq!((status, text), (AttnStatus::Option, want));
            }
        }
        assert_eq!(call(AttnAlign::Offset, 0).0, AttnStatus::Ok, "{field}");
        assert_eq!(call(AttnAlign::Offset, 1).0, AttnStatus::Ok, "{field}");
    }
}
