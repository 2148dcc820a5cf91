//! Structs of other versions of the header: what an older caller does not have is zero, what a newer one sets is
//! refused.

use attn::types::{AttnCache, AttnDtype, AttnOptions, AttnQueries, AttnShape, AttnStatus, AttnTensor};

use crate::c::{self, Arguments, floats, options, tensor_mut, words};

/// What structs are made of here.
const WORD: usize = size_of::<usize>();

/// Calls with options made of these words; the first one is the size.
fn call(words: &[usize]) -> (AttnStatus, [f32; 2]) {
    let (x, v, mut out) = ([1.0f32, -1.0], [3.0f32, 5.0], [0.0f32; 2]);
    let shape = [1, 1, 2, 1];
    let (x, v) = (floats(&x, shape), floats(&v, shape));
    let arguments = Arguments {
        options: None,
        q: Some(&x),
        k: Some(&x),
        v: Some(&v),
        out: Some(&tensor_mut(&mut out, AttnDtype::F32, shape)),
        lse: (std::ptr::null_mut(), 0),
    };
    (c::forward_with_options_of(words, arguments), out)
}

#[test]
fn an_older_caller_gets_the_defaults_for_what_it_does_not_know() {
    let mut causal = options();
    causal.causal = 1;
    let (status, want) = call(&words(&causal));
    assert_eq!((status, want[0]), (AttnStatus::Ok, 3.0)); // the first row sees the first value only
    // A header that ended behind `causal`.
    let known = (std::mem::offset_of!(AttnOptions, causal) + 4).next_multiple_of(WORD);
    let mut old = words(&causal);
    old.truncate(known / WORD);
    old[0] = known;
    assert_eq!(call(&old), (AttnStatus::Ok, want));
    // A header that ended before it, although something stands there in memory.
    old[0] = std::mem::offset_of!(AttnOptions, causal) / WORD * WORD;
    let (status, out) = call(&old);
    assert_eq!(status, AttnStatus::Ok);
    assert!(out[0] > 3.0, "causal was read from behind the end of the struct: {out:?}");
}

#[test]
fn a_newer_caller_must_not_use_what_this_version_does_not_know() {
    let mut newer = words(&options());
    newer.extend([0, 0]);
    newer[0] += 2 * WORD;
    assert_eq!(call(&newer).0, AttnStatus::Ok);
    *newer.last_mut().unwrap() = 1;
    let (status, out) = call(&newer);
    assert_eq!((status, out), (AttnStatus::StructSize, [0.0; 2]));
    assert!(c::last_error().contains("AttnOptions"), "{}", c::last_error());
}

#[test]
fn impossible_sizes_are_refused() {
    for size in [0, 1, 7, 1 << 20, usize::MAX] {
        assert_eq!(call(&[size, 0, 0]).0, AttnStatus::StructSize, "{size}");
    }
    // Sizes that end inside a field would make half a pointer of it.
    let whole = words(&options());
    for size in (WORD..WORD * whole.len()).filter(|size| size % align_of::<AttnOptions>() != 0) {
        let mut cut = whole.clone();
        cut[0] = size;
        assert_eq!(call(&cut).0, AttnStatus::StructSize, "{size}");
    }
}

/// A size that cannot be is said before anything else: no other field of such a struct means what it says.
#[test]
fn a_size_gone_wrong_is_said_before_other_mistakes() {
    let (x, mut out, mut lens) = ([1.0f32, -1.0], [0.0f32; 2], [2usize]);
    let shape = [1, 1, 2, 1];
    let right = floats(&x, shape);
    let wrong = AttnTensor { struct_size: 3, ..right };
    let to = tensor_mut(&mut out, AttnDtype::F32, shape);
    let mut options = options();
    options.level = c"sse9".as_ptr(); // an option is wrong too
    let said = |status| {
        assert_eq!(status, AttnStatus::StructSize, "{}", c::last_error());
        assert!(c::last_error().contains("struct_size is 3"), "{}", c::last_error());
    };
    let lse = (std::ptr::null_mut(), 0);
    let a =
        Arguments { options: Some(&options), q: Some(&right), k: Some(&right), v: Some(&right), out: Some(&to), lse };
    assert_eq!(c::forward(a), AttnStatus::Option);
    said(c::forward(Arguments { q: Some(&wrong), ..a }));
    said(c::forward(Arguments { v: Some(&wrong), ..a }));
    said(c::forward(Arguments { out: Some(&wrong), ..a }));
    let half = AttnTensor { dtype: 99, ..right };
    said(c::forward(Arguments { options: None, q: Some(&half), k: Some(&wrong), ..a }));

    let cache = c::cache(&right, &right, &mut lens);
    assert_eq!(c::decode(&cache, None, a), AttnStatus::Option);
    said(c::decode(&cache, None, Arguments { q: Some(&wrong), ..a }));
    said(c::decode(&AttnCache { struct_size: 3, ..cache }, None, a));
    said(c::decode(&AttnCache { k: &wrong, ..cache }, None, a));
    said(c::decode(&cache, Some(&AttnQueries { struct_size: 3, ..c::queries(&[], &[]) }), a));
    said(c::append(&AttnCache { reserved: 1, ..cache }, &right, &wrong, None));
    said(c::merge(&AttnTensor { struct_size: 3, ..to }, &mut [0.0; 2], &half, &[0.0; 2]));

    let sizes = c::sizes(shape, 2);
    said(c::explain(&options, &AttnShape { struct_size: 3, ..sizes }, 1, 8).0);
    let plan = c::Plan::new(&c::options(), &sizes).expect("right");
    said(plan.run(None, Arguments { q: Some(&half), k: Some(&wrong), ..a }));
    said(plan.state(None, 0, [&half, &right, &wrong], &mut [0.0; 6]));
}

#[test]
fn contiguous_tensors_have_the_strides_of_their_layout() {
    for (layout, strides) in [(0, [24, 12, 4, 1]), (1, [24, 4, 8, 1]), (2, [8, 4, 16, 1])] {
        let (status, tensor) = c::contiguous(AttnDtype::F16 as u32, layout, [2, 2, 3, 4]);
        assert_eq!((status, tensor.strides, tensor.len, tensor.offset), (AttnStatus::Ok, strides, 48, 0));
        assert_eq!((tensor.struct_size, tensor.dtype), (size_of_val(&tensor), 2));
    }
}
