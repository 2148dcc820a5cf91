//! Bad input: a typed error, before anything is written.

use attn_core::dropout::Dropout;
use attn_core::mask::{BlockSparse, Documents, Tree};
use attn_core::position::alibi::Alibi;
use attn_core::score::At;
use attn_core::{Align, Attention, AttnError, Layout, Mask, Outputs, View, ViewMut};

use super::{attend, attend_views};
use crate::cases::{Inputs, shape, sizes};
use crate::engine::Engine;

/// Calls the engine with buffers that hold a mark, and checks that it refuses and leaves them alone.
#[track_caller]
fn refused<E: Engine>(
    engine: &E,
    attn: &Attention<'_>,
    [q, k, v, out]: [[usize; 4]; 4],
    lse_len: usize,
    what: &str,
) -> AttnError {
    let zeros = vec![0.5f32; 4096];
    let view = |sizes: [usize; 4]| View::new(&zeros, Layout::Bhsd, sizes).expect("inputs of this size exist");
    let (mut data, mut lse) = (vec![-777.0f32; 4096], vec![-777.0f32; lse_len]);
    let outputs = Outputs::new(ViewMut::new(&mut data, Layout::Bhsd, out).expect("output")).lse(&mut lse);
    let error = match engine.forward(attn, view(q), view(k), view(v), outputs) {
        Err(error) => error,
        Ok(()) => panic!("{} accepted {what}", engine.label()),
    };
    assert!(data.iter().chain(&lse).all(|&x| x == -777.0), "{} refused {what}, but wrote", engine.label());
    assert!(!error.to_string().is_empty());
    error
}

const Q: [usize; 4] = [2, 4, 5, 6];
const K: [usize; 4] = [2, 2, 7, 6];
const V: [usize; 4] = [2, 2, 7, 3];
const OUT: [usize; 4] = [2, 4, 5, 3];
const ROWS: usize = 40;

/// Sizes of q, k and v that do not fit each other.
pub fn sizes_that_disagree<E: Engine>(engine: &E) {
    let plain = Attention::new();
    let sized = |what: &'static str, q, k, v| {
        let error = refused(engine, &plain, [q, k, v, OUT], ROWS, what);
        assert!(matches!(error, AttnError::Size { .. }), "{}: {what} gave {error:?}", engine.label());
        // Both sizes are named.
        if let AttnError::Size { expected, found, .. } = error {
            let text = error.to_string();
            assert!(text.contains(&expected.to_string()) && text.contains(&found.to_string()), "{text}");
        }
    };
    sized("a k of another batch", Q, [1, 2, 7, 6], V);
    sized("a v of another batch", Q, K, [3, 2, 7, 3]);
    sized("a k of another head_dim", Q, [2, 2, 7, 5], V);
    sized("a v of other heads", Q, K, [2, 4, 7, 3]);
    sized("a v of another length", Q, K, [2, 2, 6, 3]);
    for heads in [3, 8, 0] {
        let error =
            refused(engine, &plain, [Q, [2, heads, 7, 6], [2, heads, 7, 3], OUT], ROWS, "heads that do not divide");
        assert!(matches!(error, AttnError::Heads { .. }), "{}: {error:?}", engine.label());
    }
}

/// Outputs of another shape, an lse of another length, weights of another length.
pub fn outputs_that_do_not_fit<E: Engine>(engine: &E) {
    let plain = Attention::new();
    for out in [[1, 4, 5, 3], [2, 2, 5, 3], [2, 4, 6, 3], [2, 4, 4, 3], [2, 4, 5, 2]] {
        let error = refused(engine, &plain, [Q, K, V, out], ROWS, "an output of another shape");
        assert!(matches!(error, AttnError::Size { .. }), "{}: {error:?}", engine.label());
    }
    for lse_len in [0, ROWS - 1, ROWS + 1] {
        let error = refused(engine, &plain, [Q, K, V, OUT], lse_len, "an lse of another length");
        assert!(matches!(error, AttnError::Size { .. }), "{}: {error:?}", engine.label());
    }
    // Weights of a wrong length, or from an engine that has none.
    let inputs = Inputs::<f32>::plain(shape((2, 4, 2, 5, 7, 6, 3)), 61);
    let (mut out, mut weights) = (vec![-777.0f32; 120], vec![-777.0f32; ROWS * 7 - 1]);
    let view = ViewMut::new(&mut out, Layout::Bhsd, OUT).expect("output");
    let outputs = Outputs::new(view).weights(&mut weights);
    let error = engine.forward(&plain, inputs.q.view(), inputs.k.view(), inputs.v.view(), outputs);
    assert!(matches!(error, Err(AttnError::Size { .. } | AttnError::Unsupported { .. })), "{error:?}");
    assert!(out.iter().chain(&weights).all(|&x| x == -777.0));
}

/// NaN, infinite, zero and negative numbers where they mean nothing.
pub fn options_without_meaning<E: Engine>(engine: &E) {
    let option = |attn: Attention<'_>, what: &str| {
        let error = refused(engine, &attn, [Q, K, V, OUT], ROWS, what);
        assert!(matches!(error, AttnError::Option { .. }), "{}: {what} gave {error:?}", engine.label());
    };
    let plain = Attention::new();
    for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        option(plain.scale(x), "a scale that is not finite");
        option(plain.softcap(x), "a soft-cap that is not finite");
        option(plain.temperature(x), "a temperature that is not finite");
    }
    for x in [0.0, -1.0, -0.0] {
        option(plain.softcap(x), "a soft-cap that is not positive");
        option(plain.temperature(x), "a temperature that is not positive");
    }
    for x in [5e37, 1e38, -1e38, 1e300, LARGEST_FACTOR.next_up(), -LARGEST_FACTOR.next_up()] {
        option(plain.scale(x), "a scale whose scores are beyond f32");
        option(plain.scale(x).bias(View::broadcast(&[0.5f32], &[]).expect("a scalar")), "such a scale beside a bias");
    }
    for t in [1e-38, 1e-300, (1.0 / LARGEST_FACTOR).next_down()] {
        option(plain.temperature(t), "a temperature whose scores are beyond f32");
    }
    option(plain.scale(1e10).temperature(1e-10), "a scale that is too large once it is divided by the temperature");
    option(plain.sinks(&[0.0, f32::NAN, 0.0, 0.0]), "a NaN sink");
    for x in [f32::NAN, f32::INFINITY] {
        option(plain.alibi(Alibi { slopes: &[0.5, 0.5, x, 0.5], align: Align::TopLeft }), "a slope that is not finite");
    }
    for p in [1.0, -0.1, 1.5, f32::NAN] {
        option(plain.dropout(Dropout::Seeded { p, seed: 1 }), "a dropout probability outside 0..1");
    }
    let blocks = [true; 64];
    for (block_q, block_k) in [(0, 4), (4, 0)] {
        let blocks = View::broadcast(&blocks, &[1, 1, 2, 2]).expect("blocks");
        option(plain.mask(Mask::block_sparse(BlockSparse { blocks, block_q, block_k })), "a block of size 0");
    }
}

/// The largest factors that are accepted give the largest score the whole weight, whatever else is done to scores; the
/// smallest give every key the same. A NaN never comes of finite inputs.
pub fn options_at_their_limits<E: Engine>(engine: &E) {
    const KEYS: usize = 70;
    let value = |key: usize| key as f32 - 20.0;
    let half = [0.5f32];
    let half = View::broadcast(&half, &[]).expect("a scalar");
    for q_len in [1, 20] {
        let mut inputs = Inputs::<f32>::plain(shape((1, 2, 1, q_len, KEYS, 4, 3)), 63);
        // Products of −1 … −70, each once, the largest in the middle; the value of a key is its number.
        inputs.q.each(|[_, _, _, d], x| *x = (d + 1) as f32);
        inputs.k.each(|[_, _, j, d], x| *x = if d == 0 { -((j * 29 + 31) as f32 % KEYS as f32) - 1.0 } else { 0.0 });
        inputs.v.each(|[_, _, j, _], x| *x = value(j));
        let place = |product: f32| (0..KEYS).find(|&j| inputs.k.at([0, 0, j, 0]) == product).expect("each once");
        let (largest, smallest) = (value(place(-1.0)), value(place(-70.0)));
        let root = LARGEST_FACTOR.sqrt();
        let plain = Attention::new();
        for (what, attn, want) in [
            ("scale", plain.scale(LARGEST_FACTOR), largest),
            ("negative scale", plain.scale(-LARGEST_FACTOR), smallest),
            ("temperature", plain.scale(1.0).temperature(1.0 / LARGEST_FACTOR), largest),
            ("both", plain.scale(-root).temperature(1.0 / root), smallest),
        ] {
            let cold = |s: f64, _: At| s * 2.0;
            for (beside, answer) in [
                ("nothing", attend(engine, &attn, &inputs)),
                ("a bias", attend(engine, &attn.bias(half), &inputs)),
                ("a mask", attend(engine, &attn.mask(Mask::causal(Align::Offset(KEYS as isize))), &inputs)),
                ("ALiBi", attend(engine, &attn.alibi(Alibi { slopes: &[0.0; 2], align: Align::TopLeft }), &inputs)),
                ("a large soft-cap", attend(engine, &attn.softcap(1e300), &inputs)),
                ("a closure", attend(engine, &attn.score_mod(cold), &inputs)),
                ("one order", attend(engine, &attn.reproducible(), &inputs)),
            ] {
                let what = (engine.label(), what, beside, q_len);
                assert!(answer.out.iter().all(|&x| x == want), "{what:?}: {:?}, not {want} throughout", answer.out);
                assert!(answer.lse.iter().all(|x| x.is_finite()), "{what:?}: lse {:?}", answer.lse);
            }
        }
        // A score of −∞ stays −∞, however small the factor: the mean of the others.
        inputs.k.each(|[_, _, j, d], x| {
            if (j, d) == (3, 0) {
                *x = f32::NEG_INFINITY;
            }
        });
        let mean = ((0..KEYS).map(value).sum::<f32>() - value(3)) / (KEYS - 1) as f32;
        for (what, attn) in [
            ("temperature", plain.temperature(1e300)),
            ("scale", plain.scale(1e-300)),
            ("scale beside a bias", plain.scale(f64::from_bits(1)).bias(half)),
            ("temperature beside a bias", plain.temperature(f64::MAX).bias(half)),
            ("temperature and a mask", plain.temperature(1e40).mask(Mask::causal(Align::Offset(KEYS as isize)))),
        ] {
            let answer = attend(engine, &attn, &inputs);
            let near = |&x: &f32| (x - mean).abs() < 1e-4;
            assert!(answer.out.iter().all(near), "{} {what}: {:?}, not {mean}", engine.label(), answer.out);
        }
    }
}

/// What scale, the inverse of the temperature and their product may be in size.
const LARGEST_FACTOR: f64 = (1u128 << 64) as f64;

/// Tables and tensors whose sizes or entries do not fit the call.
pub fn tables_that_do_not_fit<E: Engine>(engine: &E) {
    let plain = Attention::new();
    let all = |attn: Attention<'_>, what: &str| refused(engine, &attn, [Q, K, V, OUT], ROWS, what);
    let (bools, floats) = ([true; 1024], [0.0f32; 1024]);
    for sizes in [[2, 4, 5, 6], [2, 4, 4, 7], [2, 3, 5, 7], [3, 4, 5, 7], [1, 2, 1, 1], [1, 1, 1, 0]] {
        let bools = View::broadcast(&bools, &sizes).expect("bools");
        let error = all(plain.mask(Mask::keep(bools)), "a mask that does not broadcast");
        assert!(matches!(error, AttnError::Broadcast { .. }), "{}: {sizes:?} gave {error:?}", engine.label());
        all(plain.mask(Mask::drop(bools)), "a mask that does not broadcast");
        all(plain.dropout(Dropout::Keep { mask: bools, p: 0.5 }), "a dropout mask that does not broadcast");
        let error =
            all(plain.bias(View::broadcast(&floats, &sizes).expect("floats")), "a bias that does not broadcast");
        assert!(matches!(error, AttnError::Broadcast { .. }), "{}: {sizes:?} gave {error:?}", engine.label());
    }
    all(plain.sinks(&[0.0; 3]), "too few sinks");
    all(plain.sinks(&[0.0; 5]), "too many sinks");
    all(plain.alibi(Alibi { slopes: &[0.5; 3], align: Align::TopLeft }), "too few slopes");
    all(plain.mask(Mask::kv_lens(&[7])), "too few lengths");
    all(plain.mask(Mask::kv_lens(&[7, 8])), "a length beyond the keys");
    all(plain.mask(Mask::kv_lens(&[usize::MAX, 7])), "a length beyond everything");
    all(plain.mask(Mask::kv_starts(&[0, 8])), "a start beyond the keys");
    all(plain.mask(Mask::q_lens(&[6, 5])), "a length beyond the queries");
    for (cu_q, cu_k) in [
        (&[0, 3, 2, 5][..], &[0, 3, 5, 7][..]),
        (&[0, 3, 5], &[0, 5, 3]),
        (&[0, 3, 6], &[0, 3, 7]),
        (&[0, 3, 5], &[0, 3, 8]),
        (&[0, 5], &[0, 3, 7]),
        (&[], &[]),
    ] {
        all(plain.mask(Mask::documents(Documents::new(cu_q, cu_k))), "bounds of documents that do not fit");
    }
    for parents in [&[None, Some(1), None, None, None][..], &[None; 4], &[None, None, Some(9), None, None]] {
        all(plain.mask(Mask::tree(Tree { parents })), "a tree that is none");
    }
    let blocks = View::broadcast(&bools, &[1, 1, 2, 2]).expect("blocks");
    all(plain.mask(Mask::block_sparse(BlockSparse { blocks, block_q: 2, block_k: 4 })), "too few blocks");
    let nine = (0..9).fold(Mask::none(), |mask, _| mask.and(Mask::causal(Align::TopLeft)));
    assert!(matches!(all(plain.mask(nine), "nine mask terms"), AttnError::MaskTerms { .. }));
    // A tree with fewer keys than queries.
    let (q, k, v, out) = ([1, 1, 5, 6], [1, 1, 4, 6], [1, 1, 4, 3], [1, 1, 5, 3]);
    refused(
        engine,
        &plain.mask(Mask::tree(Tree { parents: &[None; 5] })),
        [q, k, v, out],
        5,
        "a tree without its keys",
    );
}

/// Sizes whose product does not fit in `usize`, by views that repeat one element.
pub fn products_that_overflow<E: Engine>(engine: &E) {
    let one = [1.0f32];
    let view = |sizes| View::strided(&one, sizes, [0; 4], 0);
    let half = 1usize << (usize::BITS / 2);
    // The tensors themselves.
    assert!(matches!(view([half, half, 2, 1]), Err(AttnError::Overflow { .. })));
    assert!(matches!(view([usize::MAX, 2, 1, 1]), Err(AttnError::Overflow { .. })));
    assert!(View::<f32>::new(&one, Layout::Bhsd, [half, half, half, half]).is_err());
    // Each tensor exists, but the output would not: rows · value_dim.
    let (q, k, v) = (view([half, 1, half / 2, 1]), view([half, 1, 1, 1]), view([half, 1, 1, 4]));
    let (q, k, v) = (q.expect("q"), k.expect("k"), v.expect("v"));
    let mut out = [-777.0f32; 4];
    let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, [1, 1, 1, 4]).expect("output"));
    let error = engine.forward(&Attention::new(), q, k, v, outputs);
    assert!(matches!(error, Err(AttnError::Overflow { .. })), "{}: {error:?}", engine.label());
    assert_eq!(out, [-777.0; 4]);
}

/// Strides that leave the buffer, share memory, or have too many axes: refused when the view is made.
pub fn views_that_cannot_be<E: Engine>(_: &E) {
    let data = [0.0f32; 24];
    let sizes = [1, 2, 3, 4];
    assert!(matches!(View::new(&data, Layout::Bhsd, [1, 2, 3, 5]), Err(AttnError::TooShort { .. })));
    assert!(matches!(View::strided(&data, sizes, [24, 12, 4, 1], 1), Err(AttnError::TooShort { .. })));
    assert!(matches!(View::strided(&data, sizes, [0, 12, -4, 1], 7), Err(AttnError::Underflow { .. })));
    assert!(matches!(
        View::strided(&data, sizes, [0, isize::MAX, 4, 1], 0),
        Err(AttnError::Overflow { .. } | AttnError::TooShort { .. })
    ));
    assert!(View::strided(&data, sizes, [0, isize::MIN, isize::MIN, isize::MIN], usize::MAX).is_err());
    assert!(matches!(View::broadcast(&data, &[1, 1, 2, 3, 4]), Err(AttnError::Rank { .. })));
    let mut out = [0.0f32; 24];
    for strides in [[0, 0, 4, 1], [24, 12, 4, 0], [24, 4, 4, 1], [24, 12, 3, 1], [24, 8, 4, 2], [24, 12, -3, 1]] {
        let error = ViewMut::strided(&mut out, sizes, strides, 6).err();
        assert!(
            matches!(error, Some(AttnError::Overlap { .. } | AttnError::TooShort { .. } | AttnError::Underflow { .. })),
            "{strides:?} gave {error:?}"
        );
    }
    assert!(matches!(ViewMut::strided(&mut out, [1, 2, 3, 2], [0, 6, 1, 1], 0).err(), Some(AttnError::Overlap { .. })));
}

/// Every axis 0 in turn: shapes are kept, rows without keys are 0, an empty head scores 0 throughout.
pub fn empty_sizes_are_valid<E: Engine>(engine: &E) {
    for axis in 0..7 {
        let mut n = [2, 4, 2, 5, 7, 6, 3];
        n[axis] = 0;
        if axis == 2 {
            n[1] = 0; // no kv heads for no query heads
        }
        let dims = shape((n[0], n[1], n[2], n[3], n[4], n[5], n[6]));
        let inputs = Inputs::<f32>::plain(dims, 62);
        let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
        for attn in [Attention::new(), causal] {
            let answer = attend(engine, &attn, &inputs);
            if dims.kv_len == 0 {
                assert!(
                    answer.out.iter().all(|x| x.to_bits() == 0),
                    "{}: no keys gave {:?}",
                    engine.label(),
                    answer.out
                );
                assert!(answer.lse.iter().all(|&x| x == f32::NEG_INFINITY));
            } else {
                assert!(answer.out.iter().all(|&x| x != -12345.0), "{}: axis {axis} left rows out", engine.label());
                assert!(answer.lse.iter().all(|&x| x != -12345.0), "{}: axis {axis} left lse out", engine.label());
            }
        }
        if dims.head_dim == 0 {
            // Every score is 0: the mean of the values.
            let answer = attend(engine, &Attention::new(), &inputs);
            let mean: f32 = (0..7).map(|j| inputs.v.at([0, 0, j, 0])).sum::<f32>() / 7.0;
            assert!((answer.out[0] - mean).abs() < 1e-5, "{}: {} for the mean {mean}", engine.label(), answer.out[0]);
        }
        // With no query heads the kv heads may stay.
        let [q, k, v] = sizes(&shape((2, 0, 3, 5, 7, 6, 3)));
        let none: [f32; 1024] = [0.0; 1024];
        let view = |sizes| View::new(&none, Layout::Bhsd, sizes).expect("inputs");
        attend_views(engine, &Attention::new(), view(q), view(k), view(v)).expect("no query heads");
    }
}
