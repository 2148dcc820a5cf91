//! Caches in packed formats: the accuracy of the decode kernel on the decoded numbers, at each level.

use attn_core::formats::{Format, StoredRows, StoredView};
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{CacheView, PageTable, Queries};
use attn_core::position::Positions;
use attn_core::position::rope::{Pairing, Rope, RopeTables};
use attn_core::{Align, Attention, AttnError, AttnShape, Layout, Mask, Outputs, Precision, View, ViewMut};
use attn_simd::decode::{DecodePlan, Source};
use attn_simd::{KernelElement, Level, Workspace};
use attn_testing::Number;
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::laws::{oracle, same_bits};
use attn_testing::stored::{ScaleOf, Stored};
use attn_testing::tolerance::{ETA, FAST_INT8_EVEN};

use crate::quantized::step;

fn options() -> [Attention<'static>; 3] {
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
    [causal, causal.softcap(20.0), causal.mask(causal.get_mask().and(Mask::window(300, 0, Align::BottomRight)))]
}

#[test]
fn as_exact_as_on_the_decoded_numbers() {
    fn check<Q: KernelElement + Number>(level: Level, dims: AttnShape, formats: [Format; 2], of: ScaleOf) {
        let mut inputs = Inputs::<f32>::plain(dims, 91);
        // What a narrow query holds.
        inputs.q.each(|_, x| *x = Q::from_f64(f64::from(*x)).widen());
        let q = Tensor4::<Q>::new(inputs.q.sizes, Memory::Bshd, |at| f64::from(inputs.q.at(at)));
        let stored = Stored::new(&inputs, formats, of);
        let meant = stored.decoded(&inputs);
        for attn in options() {
            let got = step(level, &attn, q.view(), stored.view(), dims.value_dim).expect("accepted");
            oracle(&attn, &meant).check(ETA, &got, &(level, dims, formats, of));
        }
    }
    for level in Level::available() {
        for (n, format) in Format::ALL.into_iter().enumerate() {
            let of = ScaleOf::ALL[n % 3];
            check::<f32>(level, shape((1, 6, 2, 1, 600, 64, 32)), [format; 2], of);
            check::<f16>(level, shape((2, 4, 1, 2, 70, 32, 96)), [format, Format::Q8_0], ScaleOf::Token);
            check::<bf16>(level, shape((1, 4, 2, 3, 63, 32, 32)), [Format::Q4_0, format], ScaleOf::Head);
        }
        // Odd numbers of vectors of 8 or 16 lanes, where two are widened together.
        for (dim, wide) in [(40, 24), (48, 80), (8, 16), (16, 8)] {
            check::<f32>(level, shape((1, 4, 2, 1, 70, dim, wide)), [Format::E4m3; 2], ScaleOf::Head);
            check::<f32>(level, shape((1, 2, 2, 1, 70, dim, wide)), [Format::E5m2; 2], ScaleOf::Token);
        }
        // Columns that fill no vector.
        check::<f32>(level, shape((1, 4, 2, 3, 130, 23, 7)), [Format::E4m3, Format::E5m2], ScaleOf::Token);
    }
}

/// Halves in bytes give the bits of halves, in slots and in pages.
#[test]
fn halves_in_bytes_are_halves() {
    let dims = shape((1, 4, 2, 1, 150, 64, 64));
    let inputs = Inputs::<f32>::plain(dims, 92);
    let [k, v] = [&inputs.k, &inputs.v].map(|x| Tensor4::<f16>::new(x.sizes, Memory::Bhsd, |at| f64::from(x.at(at))));
    let stored = Stored::new(&inputs, [Format::F16; 2], ScaleOf::Tensor);
    for level in Level::available() {
        let plain = CacheView::of_tensors(k.view(), v.view()).expect("a cache");
        let want = step(level, &Attention::new(), inputs.q.view(), plain, 64).expect("accepted");
        let got = step(level, &Attention::new(), inputs.q.view(), stored.view(), 64).expect("accepted");
        same_bits(&got.out, &want.out, &level);
        same_bits(&got.lse, &want.lse, &level);

        // Pages of 10 tokens, in the order of the tensor's memory: [pages, heads, 10].
        let bytes = stored.view().bytes().k();
        let [_, _, tokens, row] = bytes.sizes();
        let page = |x: View<'_, u8>| {
            let mut pages = vec![0u8; x.data().len()];
            for token in 0..tokens {
                for head in 0..2 {
                    let from = x.row(0, head, token).as_slice().expect("bytes");
                    // Pages in reverse order.
                    let at = (((tokens / 10 - 1 - token / 10) * 2 + head) * 10 + token % 10) * row;
                    pages[at..][..row].copy_from_slice(from);
                }
            }
            pages
        };
        let (k_pages, v_pages) = (page(bytes), page(stored.view().bytes().v()));
        let view = |x| View::new(x, Layout::Bhsd, [tokens / 10, 2, 10, row]).expect("pages");
        let (table, lens): (Vec<i32>, _) = ((0..tokens as i32 / 10).rev().collect(), [tokens]);
        let table = PageTable::padded(&table, &lens).expect("a table");
        let rows = StoredRows::new(Format::F16, None).expect("rows");
        let pages = CacheView::of_pages(view(&k_pages), view(&v_pages), table).expect("a cache");
        let pages = StoredView::new(pages, rows, rows).expect("fits");
        let got = step(level, &Attention::new(), inputs.q.view(), pages, 64).expect("accepted");
        same_bits(&got.out, &want.out, &level);
    }
}

/// Tokens that nobody sees may hold anything; one that is seen makes the rows of its head NaN.
#[test]
fn hidden_tokens_change_no_bit() {
    let dims = shape((1, 4, 2, 1, 200, 32, 32));
    let inputs = Inputs::<f32>::plain(dims, 93);
    let window = Attention::new().mask(Mask::window(90, 0, Align::BottomRight));
    for level in Level::available() {
        let precisions = [Precision::Exact, Precision::Fast];
        for (format, precision) in Format::ALL.into_iter().flat_map(|format| precisions.map(|x| (format, x))) {
            let attn = window.precision(precision);
            let mut stored = Stored::new(&inputs, [format; 2], ScaleOf::Token);
            let want = step(level, &attn, inputs.q.view(), stored.view(), 32).expect("accepted");
            let row = format.row_bytes(32).expect("whole blocks");
            for which in 0..2 {
                for head in 0..2 {
                    stored.bytes_mut(which)[head * 200 * row..][..109 * row].fill(0xff);
                    if format.is_scaled() {
                        stored.scales_mut(which)[head * 200..][..109].fill(f32::NAN);
                    }
                }
            }
            let got = step(level, &attn, inputs.q.view(), stored.view(), 32).expect("accepted");
            assert_eq!(got, want, "{level:?} {format:?}");
            stored.bytes_mut(1)[109 * row..][..row].fill(0xff); // the oldest that is seen
            if format == Format::Int8 {
                stored.scales_mut(1)[109] = f32::NAN;
            }
            let got = step(level, &attn, inputs.q.view(), stored.view(), 32).expect("accepted");
            assert!(got.out[..64].iter().all(|x| x.is_nan()), "{level:?} {format:?}");
            assert_eq!(got.out[64..], want.out[64..], "{level:?} {format:?}");
        }
    }
}

/// A token that only the second of two queries sees: the first has the bits of a call without it, whatever it holds.
#[test]
fn a_token_of_a_later_query_changes_no_bit() {
    let (heads, dim) = (8, 64);
    let inputs = Inputs::<f32>::plain(shape((1, heads, 2, 2, 75, dim, dim)), 97);
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
    for level in Level::available() {
        let precisions = [Precision::Exact, Precision::Fast];
        for (format, precision) in
            [Format::Q8_0, Format::Int8, Format::Q4_0].into_iter().flat_map(|format| precisions.map(|x| (format, x)))
        {
            let attn = causal.precision(precision);
            let mut stored = Stored::new(&inputs, [format; 2], ScaleOf::Token);
            let first = |stored: &Stored| -> Vec<f32> {
                let all = step(level, &attn, inputs.q.view(), stored.view(), dim).expect("accepted");
                all.out.chunks(dim).step_by(2).flatten().copied().collect()
            };
            let want = first(&stored);
            let row = format.row_bytes(dim).expect("whole blocks");
            for head in 0..2 {
                // A value of the last token: NaN in blocks, −1 or NaN times it in int8.
                stored.bytes_mut(1)[(head * 75 + 74) * row..][..row].fill(0xff);
                if format.is_scaled() {
                    stored.scales_mut(1)[head * 75 + 74] = f32::NAN;
                }
            }
            assert!(want.iter().all(|x| x.is_finite()), "{level:?} {format:?}");
            same_bits(&first(&stored), &want, &(level, format, precision));
        }
    }
}

/// Blocks of keys whose scale is infinite, with codes of one sign and of both, and 0: every level has the NaN of
/// floats.
#[test]
fn infinite_scales_of_keys_are_what_floats_make_of_them() {
    let inputs = Inputs::<f32>::plain(shape((1, 8, 2, 1, 130, 64, 32)), 98);
    let row = Format::Q8_0.row_bytes(64).expect("whole blocks");
    let mut plain = Vec::new();
    for level in [Level::portable()].into_iter().chain(Level::available()) {
        for (n, codes) in [[1u8, 0xff], [1, 1], [0xff, 0xff], [0, 1]].into_iter().enumerate() {
            for scale in [0x7c00u16, 0xfc00, 0x7e00] {
                let mut stored = Stored::new(&inputs, [Format::Q8_0; 2], ScaleOf::Token);
                let key = &mut stored.bytes_mut(0)[70 * row..][..row];
                key[..2].copy_from_slice(&scale.to_le_bytes());
                key[2..34].iter_mut().enumerate().for_each(|(n, x)| *x = codes[n % 2]);
                let got = step(level, &Attention::new(), inputs.q.view(), stored.view(), 32).expect("accepted");
                let at = (n, scale);
                match plain.iter().find(|(other, _)| *other == at) {
                    None => plain.push((at, got.out)),
                    Some((_, want)) => {
                        for (got, want) in got.out.iter().zip(want) {
                            assert!(got.is_nan() == want.is_nan(), "{level:?} {at:?}: {got} {want}");
                            assert!(got.is_nan() || (got - want).abs() < 2e-6, "{level:?} {at:?}: {got} {want}");
                        }
                    }
                }
            }
        }
    }
}

/// A block of small values beside one of large ones: under `Precision::Fast` each errs beside its own.
#[test]
fn fast_blocks_err_beside_their_own_values() {
    let mut inputs = Inputs::<f32>::plain(shape((1, 8, 2, 1, 203, 64, 96)), 99);
    inputs.q.each(|_, x| *x /= 8.0);
    inputs.v.each(|[.., c], x| *x *= [1e2, 1e-2, 1.0][c / 32]);
    let stored = Stored::new(&inputs, [Format::Q8_0; 2], ScaleOf::Token);
    let want = oracle(&Attention::new(), &stored.decoded(&inputs));
    for level in Level::available() {
        let fast = Attention::new().precision(Precision::Fast);
        let got = step(level, &fast, inputs.q.view(), stored.view(), 96).expect("accepted");
        for (n, (got, want)) in got.out.iter().zip(&want.out).enumerate() {
            let size = 4.0 * [1e2, 1e-2, 1.0][n % 96 / 32];
            assert!((f64::from(*got) - want).abs() < 3.0 * FAST_INT8_EVEN * size, "{level:?} {n}: {got} {want}");
        }
    }
}

/// Rope by index in the cache, and a prefix of another type that all sequences share.
#[test]
fn rope_and_shared_prefixes() {
    let dims = shape((2, 4, 2, 2, 100, 32, 32));
    let inputs = Inputs::<f32>::plain(dims, 94);
    let stored = Stored::new(&inputs, [Format::Q8_0, Format::E4m3], ScaleOf::Token);
    let meant = stored.decoded(&inputs);
    let (mut cos, mut sin) = (vec![0.0f32; 160 * 16], vec![0.0f32; 160 * 16]);
    let sizes = [1, 1, 160, 16];
    let out = |x| ViewMut::new(x, Layout::Bhsd, sizes).expect("tables");
    Rope::new(Pairing::Half).tables(32, Positions::Offset(0), &mut out(&mut cos), &mut out(&mut sin)).expect("tables");
    let view = |x| View::new(x, Layout::Bhsd, sizes).expect("tables");
    let tables = RopeTables::new(Pairing::Half, view(&cos), view(&sin)).expect("tables");
    let plain = CacheView::of_tensors(meant.k.view(), meant.v.view()).expect("a cache");

    let shared = Inputs::<f32>::plain(shape((1, 4, 2, 1, 60, 32, 32)), 95);
    let prefix = Stored::new(&shared, [Format::Q4_0, Format::Int8], ScaleOf::Head);
    let prefix_meant = prefix.decoded(&shared);
    let prefix_plain = CacheView::of_tensors(prefix_meant.k.view(), prefix_meant.v.view()).expect("a cache");
    let attn = Attention::new();
    for level in Level::available() {
        let close = |got: &[f32], want: &[f32]| {
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 2e-6), "{level:?}");
        };
        let want =
            step(level, &attn, inputs.q.view(), plain.cache_relative(tables).expect("fits"), 32).expect("accepted");
        let got = stored.view().cache_relative(tables).expect("fits");
        close(&step(level, &attn, inputs.q.view(), got, 32).expect("accepted").out, &want.out);

        let behind = |prefix: Source<'_>, cache: Source<'_>| {
            let plan =
                DecodePlan::with_prefix(&attn, inputs.q.sizes, Queries::All, prefix, cache, level).expect("fits");
            let (mut out, mut lse) = (vec![-7.0f32; 2 * 4 * 2 * 32], vec![0.0f32; 16]);
            let to = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, 2, 32]).expect("output");
            let call = plan.split(inputs.q.view(), Outputs::new(to).lse(&mut lse)).expect("fits");
            call.run(Workspace::new().lines(plan.workspace_lines())).expect("accepted");
            out
        };
        let want = behind(prefix_plain.into(), plain.into());
        close(&behind(prefix.view().into(), stored.view().into()), &want);
        let roped = behind(
            prefix_plain.cache_relative(tables).expect("fits").into(),
            plain.cache_relative(tables).expect("fits").into(),
        );
        let got = behind(
            prefix.view().cache_relative(tables).expect("fits").into(),
            stored.view().cache_relative(tables).expect("fits").into(),
        );
        close(&got, &roped);
        let one = DecodePlan::with_prefix(
            &attn,
            inputs.q.sizes,
            Queries::All,
            prefix.view().cache_relative(tables).expect("fits"),
            stored.view(),
            level,
        );
        assert!(matches!(one, Err(AttnError::Unsupported { .. })));
    }
}

#[test]
fn bytes_of_a_token_are_counted() {
    let inputs = Inputs::<f32>::plain(shape((1, 2, 1, 1, 10, 64, 32)), 96);
    for (formats, of, bytes) in [
        ([Format::Q8_0, Format::Q4_0], ScaleOf::Token, 68 + 18),
        ([Format::E4m3, Format::Int8], ScaleOf::Head, 64 + 32),
        ([Format::E4m3, Format::Q8_0], ScaleOf::Token, 64 + 4 + 34),
        ([Format::F16, Format::Int8], ScaleOf::Token, 128 + 32 + 4),
    ] {
        let stored = Stored::new(&inputs, formats, of);
        assert_eq!(Source::from(stored.view()).token_bytes(), bytes);
    }
}
