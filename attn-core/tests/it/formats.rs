//! Caches in packed formats: both engines against the oracle on the decoded numbers; appended, in rings and in pages.

use attn_core::formats::{Format, StoredCache, StoredRing, StoredRows, StoredRowsMut, StoredView, append_paged_stored};
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{CacheView, PageTable, Queries};
use attn_core::position::Positions;
use attn_core::position::rope::{Pairing, Rope, RopeTables};
use attn_core::{Align, Attention, AttnError, AttnShape, Element, Layout, Mask, Outputs, View, ViewMut};
use attn_core::{reference, streaming};
use attn_testing::Number;
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::laws::{Answer, oracle};
use attn_testing::stored::{ScaleOf, Stored};
use attn_testing::tolerance::ETA;

/// A step in which all of q are queries, by the streaming engine and by the reference; the outputs are wide.
fn steps<Q: Element<Compute = f32>>(
    attn: &Attention<'_>,
    q: View<'_, Q>,
    cache: StoredView<'_>,
) -> Result<[Answer<f32>; 2], AttnError> {
    let ([batch, heads, q_len, _], [_, value_dim]) = (q.sizes(), cache.dims());
    let rows = batch * heads * q_len;
    let mut answers = [0, 1].map(|_| Answer { out: vec![-7.0f32; rows * value_dim], lse: vec![-7.0f32; rows] });
    for (n, Answer { out, lse }) in answers.iter_mut().enumerate() {
        let outputs = Outputs::new(ViewMut::new(out, Layout::Bhsd, [batch, heads, q_len, value_dim])?).lse(lse);
        if n == 0 {
            let mut scratch = vec![f32::NAN; streaming::stored_scratch_len(&cache)];
            streaming::forward_stored(attn, q, Queries::All, cache, outputs, &mut scratch)?;
        } else {
            let mut scratch = vec![f64::NAN; reference::stored_scratch_len(&cache)];
            reference::forward_stored(attn, q, Queries::All, cache, outputs, &mut scratch)?;
        }
    }
    Ok(answers)
}

fn options() -> [Attention<'static>; 3] {
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
    [causal, causal.softcap(20.0), causal.mask(causal.get_mask().and(Mask::window(30, 0, Align::BottomRight)))]
}

#[test]
fn as_exact_as_on_the_decoded_numbers() {
    fn check<Q: Number + Element<Compute = f32>>(dims: AttnShape, formats: [Format; 2], of: ScaleOf) {
        let mut inputs = Inputs::<f32>::plain(dims, 81);
        inputs.q.each(|_, x| *x = <Q as Element>::from_f64(f64::from(*x)).widen());
        let q = Tensor4::<Q>::new(inputs.q.sizes, Memory::Bshd, |at| f64::from(inputs.q.at(at)));
        let stored = Stored::new(&inputs, formats, of);
        let meant = stored.decoded(&inputs);
        for attn in options() {
            for got in steps(&attn, q.view(), stored.view()).expect("accepted") {
                oracle(&attn, &meant).check(ETA, &got, &(formats, of, dims));
            }
        }
    }
    for format in Format::ALL {
        for of in ScaleOf::ALL {
            check::<f32>(shape((2, 4, 2, 3, 50, 64, 32)), [format; 2], of);
        }
        check::<f16>(shape((1, 4, 1, 2, 41, 32, 96)), [format, Format::Q8_0], ScaleOf::Head);
        check::<bf16>(shape((1, 2, 2, 1, 33, 32, 32)), [Format::Q4_0, format], ScaleOf::Token);
    }
    for format in [Format::E4m3, Format::E5m2, Format::Int8, Format::F16, Format::Bf16] {
        check::<f32>(shape((1, 4, 2, 3, 20, 23, 7)), [format; 2], ScaleOf::Token);
    }
}

/// What is appended is what is encoded at once, wherever it lies; and a ring holds the last tokens.
#[test]
fn tokens_are_appended_to_slots_rings_and_pages() {
    let dims = shape((2, 4, 2, 1, 24, 64, 32));
    let inputs = Inputs::<f32>::plain(dims, 82);
    let attn = Attention::new();
    let formats = [Format::Q4_0, Format::E4m3];
    let stored = Stored::new(&inputs, formats, ScaleOf::Token);
    let want = steps(&attn, inputs.q.view(), stored.view()).expect("accepted");
    let span = |x: &Tensor4<f32>, start: usize, n: usize| {
        let [batch, heads, _, dim] = x.sizes;
        Tensor4::<f32>::new([batch, heads, n, dim], Memory::Bhsd, |[b, h, t, d]| f64::from(x.at([b, h, start + t, d])))
    };
    let cuts = [(0, 10), (10, 1), (11, 13)];

    // Memory for `rows` rows of slots: bytes of keys and of values, and scales of values.
    let memory = |rows: usize, slots: usize| (vec![9u8; rows * 2 * slots * 36], vec![9u8; rows * 2 * slots * 32]);
    fn both<'m>(
        [k, v]: [&'m mut Vec<u8>; 2],
        scales: &'m mut [f32],
        rows: usize,
        slots: usize,
    ) -> [StoredRowsMut<'m>; 2] {
        let view = |x, bytes| ViewMut::new(x, Layout::Bshd, [rows, 2, slots, bytes]).expect("bytes");
        let scales = ViewMut::new(scales, Layout::Bhsd, [rows, 2, slots, 1]).expect("scales");
        let k = StoredRowsMut::new(Format::Q4_0, view(k, 36)).expect("rows");
        [k, StoredRowsMut::with_scales_per_token(Format::E4m3, view(v, 32), scales).expect("rows")]
    }

    let ((mut k, mut v), mut scales, mut lens) = (memory(2, 30), vec![7.0; 120], [0, 0]);
    let [k_rows, v_rows] = both([&mut k, &mut v], &mut scales, 2, 30);
    let mut cache = StoredCache::new(k_rows, v_rows, &mut lens).expect("a cache");
    for (start, n) in cuts {
        cache.append(span(&inputs.k, start, n).view(), span(&inputs.v, start, n).view()).expect("room");
    }
    assert!(cache.append(inputs.k.view(), inputs.v.view()).is_err() && cache.lens() == [24, 24]);
    assert_eq!(steps(&attn, inputs.q.view(), cache.view().unwrap()).expect("accepted"), want);
    cache.truncate(1, 3).expect("shorter");
    assert_eq!((cache.lens(), cache.view().unwrap().bytes().len(1)), (&[24, 3][..], 3));

    let ((mut k, mut v), mut scales) = (memory(7, 8), vec![7.0; 112]);
    let [mut k_rows, mut v_rows] = both([&mut k, &mut v], &mut scales, 7, 8);
    let table = [5, 0, 2, 1, 6, 4];
    for (start, n) in cuts {
        let lens = [start + n; 2];
        let table = PageTable::padded(&table, &lens).expect("a table");
        let (k_new, v_new) = (span(&inputs.k, start, n), span(&inputs.v, start, n));
        append_paged_stored(&mut k_rows, &mut v_rows, table, k_new.view(), v_new.view(), None).expect("room");
    }
    let lens = [24; 2];
    let table = PageTable::padded(&table, &lens).expect("a table");
    let pages = StoredRowsMut::view_of_pages(&k_rows, &v_rows, table).expect("pages");
    assert_eq!(steps(&attn, inputs.q.view(), pages).expect("accepted"), want);

    let ((mut k, mut v), mut scales, mut seen) = (memory(2, 9), vec![7.0; 36], [0, 0]);
    let [k_rows, v_rows] = both([&mut k, &mut v], &mut scales, 2, 9);
    let mut ring = StoredRing::new(k_rows, v_rows, &mut seen, 2, 7).expect("a ring");
    for (start, n) in cuts {
        ring.insert(span(&inputs.k, start, n).view(), span(&inputs.v, start, n).view()).expect("taken");
    }
    assert_eq!(ring.seen(), [24, 24]);
    let got = steps(&attn, inputs.q.view(), ring.view().unwrap()).expect("accepted");
    let keep: Vec<bool> = (0..24).map(|j| !(2..17).contains(&j)).collect();
    let rule = attn.mask(Mask::keep(View::broadcast(&keep, &[1, 24]).unwrap()));
    for got in got {
        oracle(&rule, &stored.decoded(&inputs)).check(ETA, &got, &"ring");
    }
}

/// Rope by index in the cache gives what a cache of the decoded numbers gives.
#[test]
fn rope_is_applied_to_decoded_keys() {
    let dims = shape((1, 4, 2, 2, 20, 32, 32));
    let inputs = Inputs::<f32>::plain(dims, 83);
    let stored = Stored::new(&inputs, [Format::Q8_0, Format::Int8], ScaleOf::Head);
    let meant = stored.decoded(&inputs);
    let rope = Rope::new(Pairing::Half);
    let (mut cos, mut sin) = (vec![0.0f32; 20 * 16], vec![0.0f32; 20 * 16]);
    let sizes = [1, 1, 20, 16];
    let view = |x| ViewMut::new(x, Layout::Bhsd, sizes).unwrap();
    rope.tables(32, Positions::Offset(0), &mut view(&mut cos), &mut view(&mut sin)).expect("tables");
    let view = |x| View::new(x, Layout::Bhsd, sizes).unwrap();
    let tables = RopeTables::new(Pairing::Half, view(&cos), view(&sin)).expect("tables");
    let short = RopeTables::new(
        Pairing::Half,
        View::new(&cos[..16], Layout::Bhsd, [1, 1, 1, 16]).unwrap(),
        View::new(&sin[..16], Layout::Bhsd, [1, 1, 1, 16]).unwrap(),
    )
    .expect("tables");
    assert!(matches!(stored.view().cache_relative(short), Err(AttnError::TooShort { needed: 20, found: 1, .. })));

    let attn = Attention::new();
    let run = |stored: bool, cache: StoredView<'_>| {
        let mut out = vec![-7.0f32; 4 * 2 * 32];
        let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 4, 2, 32]).unwrap();
        if stored {
            let mut scratch = vec![f32::NAN; streaming::stored_scratch_len(&cache)];
            streaming::forward_stored(&attn, inputs.q.view(), Queries::All, cache, to, &mut scratch).expect("accepted");
        } else {
            let plain = CacheView::of_tensors(meant.k.view(), meant.v.view()).unwrap();
            let plain = plain.cache_relative(tables).expect("fits");
            let mut scratch = vec![f32::NAN; streaming::cache_scratch_len(&plain)];
            streaming::forward_cache(&attn, inputs.q.view(), Queries::All, plain, to, &mut scratch).expect("accepted");
        }
        out.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
    };
    let cache = stored.view().cache_relative(tables).expect("fits");
    attn_testing::numbers::assert_close("rope", &run(true, cache), &run(false, cache), 1e-6);
    assert!(
        reference::forward_stored(
            &attn,
            inputs.q.view(),
            Queries::All,
            cache,
            ViewMut::new(&mut [0.0f32; 256], Layout::Bhsd, [1, 4, 2, 32]).unwrap(),
            &mut [0.0; 64]
        )
        .is_err()
    );
}

/// Tokens that nobody sees may hold anything: NaN codes, NaN scales of blocks and of tokens.
#[test]
fn hidden_tokens_change_no_bit() {
    let dims = shape((1, 4, 2, 1, 60, 32, 32));
    let inputs = Inputs::<f32>::plain(dims, 84);
    let attn = Attention::new().mask(Mask::window(19, 0, Align::BottomRight));
    for format in Format::ALL {
        let mut stored = Stored::new(&inputs, [format; 2], ScaleOf::Token);
        let want = steps(&attn, inputs.q.view(), stored.view()).expect("accepted");
        let row = format.row_bytes(32).unwrap();
        for which in 0..2 {
            for head in 0..2 {
                stored.bytes_mut(which)[head * 60 * row..][..40 * row].fill(0xff);
                if format.is_scaled() {
                    stored.scales_mut(which)[head * 60..][..40].fill(f32::NAN);
                }
            }
        }
        assert_eq!(steps(&attn, inputs.q.view(), stored.view()).expect("accepted"), want, "{format:?}");
        // The oldest that is seen, of the first head.
        stored.bytes_mut(1)[40 * row..][..row].fill(0xff);
        if format == Format::Int8 {
            stored.scales_mut(1)[40] = f32::NAN;
        }
        for got in steps(&attn, inputs.q.view(), stored.view()).expect("accepted") {
            assert!(
                got.out[..64].iter().all(|x| x.is_nan()) && got.out[64..].iter().all(|x| x.is_finite()),
                "{format:?}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_named_before_anything_is_written() {
    let text = |error: AttnError| error.to_string();
    let bytes = [0u8; 2 * 37];
    let odd = View::matrix(&bytes, 2, 37).unwrap();
    let even = View::matrix(&bytes, 2, 34).unwrap();
    let one = [1.0f32; 3];
    let q8 = StoredRows::new(Format::Q8_0, None).unwrap();
    let view = |k, v, rows| CacheView::of_tensors(k, v).and_then(|bytes| StoredView::new(bytes, rows, rows));
    assert_eq!(
        text(view(odd, even, q8).unwrap_err()),
        "bytes of a stored row (a whole number of blocks): expected 34, found 37"
    );
    assert_eq!(
        text(StoredRows::new(Format::E5m2, None).unwrap_err()),
        "tensors of scales of fp8 or int8 rows: expected 1, found 0"
    );
    let three = StoredRows::new(Format::E5m2, Some(View::matrix(&one, 3, 1).unwrap())).unwrap();
    assert_eq!(
        text(view(even, even, three).unwrap_err()),
        "scales of stored rows: axis 2 has size 3, which does not broadcast to 2"
    );
    let apart = View::strided(&bytes, [1, 1, 1, 34], [0, 0, 0, 2], 0).unwrap();
    assert!(matches!(view(apart, apart, q8), Err(AttnError::Unsupported { .. })));

    let cache = view(even, even, q8).unwrap();
    let mut out = [-7.0f32; 32];
    let mut run = |q_dim: usize, scratch: usize| {
        let (q, mut scratch) = (vec![0.0f32; q_dim], vec![0.0; scratch]);
        let to = ViewMut::matrix(&mut out, 1, 32).unwrap();
        let q = View::matrix(&q, 1, q_dim).unwrap();
        streaming::forward_stored(&Attention::new(), q, Queries::All, cache, to, &mut scratch)
    };
    assert_eq!(text(run(34, 32).unwrap_err()), "k head_dim against q head_dim: expected 34, found 32");
    assert_eq!(text(run(32, 31).unwrap_err()), "kv cache scratch: 32 elements are needed, 31 were given");
    assert_eq!(out, [-7.0; 32]);

    let (mut k, mut v, mut lens) = ([0u8; 34], [0u8; 34], [0]);
    let rows = |x| StoredRowsMut::new(Format::Q8_0, ViewMut::matrix(x, 1, 34).unwrap()).unwrap();
    let mut cache = StoredCache::new(rows(&mut k), rows(&mut v), &mut lens).unwrap();
    let wide = [1.0f32; 34];
    let wide = View::matrix(&wide, 1, 34).unwrap();
    assert_eq!(
        text(cache.append(wide, wide).unwrap_err()),
        "new k head_dim against the cache's: expected 32, found 34"
    );
    assert_eq!((lens, k), ([0], [0; 34]));
}

/// Numbers that are written are what the formats say, beside caches of numbers that are copied.
#[test]
fn scales_of_tokens_are_the_largest_of_their_rows() {
    let x = [3.0f32, -6.0, 0.0, f32::INFINITY, 1.0, 2.0, 0.0, 0.0, 0.0];
    let (mut bytes, mut scales) = ([0u8; 9], [7.0f32; 3]);
    let scales_view = ViewMut::matrix(&mut scales, 3, 1).unwrap();
    let view = ViewMut::matrix(&mut bytes, 3, 3).unwrap();
    let mut rows = StoredRowsMut::with_scales_per_token(Format::Int8, view, scales_view).unwrap();
    rows.encode(View::matrix(&x, 3, 3).unwrap()).unwrap();
    assert_eq!(bytes[..3], [64, 129, 0]);
    assert_eq!(bytes[6..], [0; 3]);
    assert!(scales[0] == 6.0 / 127.0 && scales[1].is_nan() && scales[2] == 0.0);
    // Fixed scales saturate.
    let one = [0.5f32];
    let mut rows = StoredRowsMut::with_scales(
        Format::E4m3,
        ViewMut::matrix(&mut bytes, 1, 3).unwrap(),
        View::broadcast(&one, &[]).unwrap(),
    )
    .unwrap();
    rows.encode(View::matrix(&[0.5f32, 1e6, -0.25], 1, 3).unwrap()).unwrap();
    assert_eq!(bytes[..3], [0x38, 0x7e, 0xb0]);
}

/// A row of one byte lies side by side whatever the last stride says: it is written and read.
#[test]
fn rows_of_one_byte_may_have_any_last_stride() {
    for unit in [0, 1, 7] {
        let (mut k, mut scales) = ([0u8; 8], [0f32; 4]);
        let bytes = ViewMut::strided(&mut k, [1, 1, 4, 1], [8, 8, 2, unit], 0).unwrap();
        let to = ViewMut::matrix(&mut scales, 4, 1).unwrap();
        let mut rows = StoredRowsMut::with_scales_per_token(Format::Int8, bytes, to).unwrap();
        rows.encode(View::matrix(&[1.0f32, -2.0, 3.0, 4.0], 4, 1).unwrap()).unwrap();
        assert_eq!([k[0], k[2], k[4], k[6]].map(|x| x as i8), [127, -127, 127, 127], "last stride {unit}");

        let bytes = View::strided(&k, [1, 1, 4, 1], [8, 8, 2, unit], 0).unwrap();
        let rows = StoredRows::new(Format::Int8, Some(View::matrix(&scales, 4, 1).unwrap())).unwrap();
        let cache = StoredView::new(CacheView::of_tensors(bytes, bytes).unwrap(), rows, rows).unwrap();
        let (q, mut out) = ([9.0f32], [f32::NAN]);
        let (q, to) = (View::matrix(&q, 1, 1).unwrap(), ViewMut::matrix(&mut out, 1, 1).unwrap());
        reference::forward_stored(&Attention::new(), q, Queries::All, cache, to, &mut [0.0; 16]).unwrap();
        assert!((out[0] - 4.0).abs() < 0.1, "last stride {unit}: {out:?}"); // the largest key has the value 4
    }
}
