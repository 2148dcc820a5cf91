//! Caches in packed dtypes from C: appended, decoded, and what is refused.

use std::ptr;

use attn::types::{AttnCache, AttnCacheKind, AttnDtype, AttnStatus, AttnTensor};
use attn_core::formats::Format;

use crate::c::{self, Arguments, cache, contiguous, floats, options, tensor_mut};

const HEADS: usize = 2;
const TOKENS: usize = 70;
const DIM: usize = 32;

fn paint(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|n| ((n * 31 + seed * 977) as f32 * 0.37).sin() * 2.0).collect()
}

/// A tensor of a dtype in a buffer of bytes.
fn bytes_of(bytes: &mut [u8], dtype: AttnDtype, rows: usize, slots: usize) -> AttnTensor {
    let (status, tensor) = contiguous(dtype as u32, 0, [rows, HEADS, slots, DIM]);
    assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
    AttnTensor { data: bytes.as_mut_ptr().cast(), ..tensor }
}

/// The last two tokens attend: out and lse.
fn decoded(cache: &AttnCache) -> Vec<f32> {
    let (q, mut out, mut lse) = (paint(4 * 2 * DIM, 3), vec![7.0f32; 4 * 2 * DIM], vec![7.0f32; 8]);
    let status = c::decode(
        cache,
        None,
        Arguments {
            options: Some(&options()),
            q: Some(&floats(&q, [1, 4, 2, DIM])),
            k: None,
            v: None,
            out: Some(&tensor_mut(&mut out, AttnDtype::F32, [1, 4, 2, DIM])),
            lse: (lse.as_mut_ptr(), lse.len()),
        },
    );
    assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
    out.extend(lse);
    out
}

/// Rows of `[HEADS, TOKENS]` in `format` after division by a scale, and the numbers that they stand for.
fn encoded(x: &[f32], format: Format, scale: f32) -> (Vec<u8>, Vec<f32>) {
    let row = format.row_bytes(DIM).unwrap();
    let (mut bytes, mut meant) = (vec![0u8; x.len() / DIM * row], vec![0.0f32; x.len()]);
    for ((x, bytes), meant) in x.chunks(DIM).zip(bytes.chunks_mut(row)).zip(meant.chunks_mut(DIM)) {
        let x: Vec<f32> = x.iter().map(|x| x / scale).collect();
        format.encode(&x, bytes).unwrap();
        format.decode(bytes, meant).unwrap();
        meant.iter_mut().for_each(|x| *x *= scale);
    }
    (bytes, meant)
}

const DTYPES: [(AttnDtype, Format); 7] = [
    (AttnDtype::Q8_0, Format::Q8_0),
    (AttnDtype::Q4_0, Format::Q4_0),
    (AttnDtype::I8, Format::Int8),
    (AttnDtype::F8e4m3, Format::E4m3),
    (AttnDtype::F8e5m2, Format::E5m2),
    (AttnDtype::F16, Format::F16),
    (AttnDtype::Bf16, Format::Bf16),
];

/// Appended in two calls, in slots and in pages: the bytes are the library's, and decoding gives the bits that a cache
/// of the decoded numbers gives (scales are a power of two, which rounds nothing).
#[test]
fn packed_caches_are_caches_of_what_they_decode_to() {
    let (k, v) = (paint(HEADS * TOKENS * DIM, 1), paint(HEADS * TOKENS * DIM, 2));
    for (n, (k_dtype, k_format)) in DTYPES.into_iter().enumerate() {
        let (v_dtype, v_format) = DTYPES[(n + 1) % 5];
        let scale = 1.0f32 / 32.0;
        let of = |format: Format| if format.is_scaled() { scale } else { 1.0 };
        let ((k_bytes, k_meant), (v_bytes, v_meant)) =
            (encoded(&k, k_format, of(k_format)), encoded(&v, v_format, of(v_format)));
        let mut lens = [TOKENS];
        let (tk, tv) = (floats(&k_meant, [1, HEADS, TOKENS, DIM]), floats(&v_meant, [1, HEADS, TOKENS, DIM]));
        let want = decoded(&cache(&tk, &tv, &mut lens));

        let scales = floats(&[scale], [1, 1, 1, 1]);
        let scales_of = |format: Format| if format.is_scaled() { &raw const scales } else { ptr::null() };
        for paged in [false, true] {
            // Ten pages of eight tokens are more than seventy tokens.
            let (rows, slots) = if paged { (10, 8) } else { (1, TOKENS) };
            let room = |format: Format| vec![0xffu8; rows * HEADS * slots * format.row_bytes(DIM).unwrap()];
            let (mut k_room, mut v_room) = (room(k_format), room(v_format));
            let (tk, tv) = (bytes_of(&mut k_room, k_dtype, rows, slots), bytes_of(&mut v_room, v_dtype, rows, slots));
            let mut lens = [0];
            let mut packed = AttnCache {
                k_scales: scales_of(k_format),
                v_scales: scales_of(v_format),
                ..cache(&tk, &tv, &mut lens)
            };
            let table: Vec<i32> = (0..10).rev().collect();
            if paged {
                packed.kind = AttnCacheKind::Paged as u32;
                (packed.block_table, packed.block_table_len) = (table.as_ptr(), table.len());
            }
            for (start, count) in [(0, 31), (31, 39)] {
                let part = |x: &[f32]| -> Vec<f32> {
                    x.chunks(TOKENS * DIM).flat_map(|x| x[start * DIM..][..count * DIM].to_vec()).collect()
                };
                let (k_new, v_new) = (part(&k), part(&v));
                let shape = [1, HEADS, count, DIM];
                let status = c::append(&packed, &floats(&k_new, shape), &floats(&v_new, shape), None);
                assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
            }
            let got = decoded(&packed);
            assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{k_dtype:?} {v_dtype:?} {paged}");
            assert!(paged || (k_room == k_bytes && v_room == v_bytes), "{k_dtype:?} {v_dtype:?}");
        }
    }
}

/// A scale for each token is chosen and written, in a ring as well.
#[test]
fn scales_of_tokens_are_written() {
    let x = paint(HEADS * TOKENS * DIM, 4);
    let slots = 12;
    let (mut k, mut v) = (vec![0u8; HEADS * slots * DIM], vec![0u8; HEADS * slots * DIM]);
    let (mut k_scales, mut v_scales) = (vec![f32::NAN; HEADS * slots], vec![f32::NAN; HEADS * slots]);
    let (tk, tv) = (bytes_of(&mut k, AttnDtype::I8, 1, slots), bytes_of(&mut v, AttnDtype::F8e4m3, 1, slots));
    let scales = |x: &mut [f32]| tensor_mut(x, AttnDtype::F32, [1, HEADS, slots, 1]);
    let (sk, sv) = (scales(&mut k_scales), scales(&mut v_scales));
    let mut seen = [0];
    let ring = AttnCache {
        kind: AttnCacheKind::Ring as u32,
        sinks: 2,
        window: 10,
        k_scales: &raw const sk,
        v_scales: &raw const sv,
        ..cache(&tk, &tv, &mut seen)
    };
    let new = floats(&x, [1, HEADS, TOKENS, DIM]);
    assert_eq!(c::append(&ring, &new, &new, None), AttnStatus::Ok, "{}", c::last_error());
    assert_eq!(seen, [TOKENS]);
    // The first sink.
    let largest = x[..DIM].iter().fold(0.0f32, |m, x| m.max(x.abs()));
    assert_eq!((k_scales[0], v_scales[0]), (largest / 127.0, largest / 448.0));
    assert!(k_scales.iter().chain(&v_scales).all(|x| x.is_finite()));
}

#[test]
fn what_does_not_fit_is_refused() {
    let (mut bytes, mut scales, x) = (vec![0u8; 4096], [1.0f32; 3], paint(HEADS * 4 * DIM, 5));
    let q8 = bytes_of(&mut bytes, AttnDtype::Q8_0, 1, 4);
    let i8s = bytes_of(&mut bytes, AttnDtype::I8, 1, 4);
    let new = floats(&x, [1, HEADS, 4, DIM]);
    let mut lens = [0];
    let mut try_append = |k: &AttnTensor, v: &AttnTensor, k_scales: *const AttnTensor| {
        let packed = AttnCache { k_scales, v_scales: k_scales, ..cache(k, v, &mut lens) };
        (c::append(&packed, &new, &new, None), c::last_error())
    };
    // The same bytes as keys and as values.
    let (status, text) = try_append(&q8, &q8, ptr::null());
    assert_eq!((status, text.as_str()), (AttnStatus::Overlap, "cache v shares memory with cache k"));
    let (status, text) = try_append(&i8s, &q8, ptr::null());
    assert_eq!(
        (status, text.as_str()),
        (AttnStatus::Shape, "tensors of scales of fp8 or int8 rows: expected 1, found 0")
    );
    let odd = AttnTensor { shape: [1, HEADS, 4, 40], ..q8 };
    let (status, text) = try_append(&odd, &q8, ptr::null());
    let whole = "numbers of a stored row (a whole number of blocks): expected 32, found 40";
    assert_eq!((status, text.as_str()), (AttnStatus::Shape, whole));
    let three = tensor_mut(&mut scales, AttnDtype::F32, [1, 1, 3, 1]);
    let (status, text) = try_append(&i8s, &i8s, &raw const three);
    let axis = "scales of stored rows: axis 2 has size 3, which does not broadcast to 4";
    assert_eq!((status, text.as_str()), (AttnStatus::Shape, axis));
    // Scales that nothing reads, a dtype that is none of a cache in bytes, one that is none of a plain call.
    let (status, text) = try_append(&new, &new, &raw const three);
    let idle = "AttnCache.k_scales is set without effect: k and v must have dtypes for caches";
    assert_eq!((status, text.as_str()), (AttnStatus::Option, idle));
    let (status, text) = try_append(&new, &q8, ptr::null());
    assert_eq!(status, AttnStatus::Option, "{text}");
    let mut out = vec![0.0f32; HEADS * 4 * DIM];
    let status = c::forward(Arguments {
        options: None,
        q: Some(&new),
        k: Some(&q8),
        v: Some(&q8),
        out: Some(&tensor_mut(&mut out, AttnDtype::F32, [1, HEADS, 4, DIM])),
        lse: (ptr::null_mut(), 0),
    });
    assert_eq!(c::last_error(), "k: dtype is Q8_0 (9), must be F32, F16 or BF16", "{status:?}");
    assert_eq!(contiguous(AttnDtype::Q4_0 as u32, 0, [1, 2, 3, 40]).0, AttnStatus::Shape);
}
