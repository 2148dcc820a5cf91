//! The calls of firmware: int8 attention and its caches, arrays of fixed size, attention in parts.

use attn_core::fixed::FixedAttention;
use attn_core::int8::{
    self, HeadScales, Int8Attention, Int8RingCache, IntState, Quant, QuantizedRingCache, ScaledRows,
};
use attn_core::mask::Window;
use attn_core::resume::{Cursor, Progress};
use attn_core::softmax::RowState;
use attn_core::{Align, Attention, Outputs, View, ViewMut, streaming};

macro_rules! int8_outputs {
    ($($t:ty => $forward:ident),*) => {$(
        #[unsafe(no_mangle)]
        pub fn $forward(
            attn: &Int8Attention<'_>,
            qkv: &[View<'_, i8>; 3],
            out: ViewMut<'_, $t>,
            scratch: &mut [i32],
        ) -> bool {
            let [q, k, v] = *qkv;
            int8::forward(attn, q, k, v, out, scratch).is_ok()
        }
    )*};
}

int8_outputs!(
    i8 => attn_entry_int8_i8,
    i16 => attn_entry_int8_i16,
    i32 => attn_entry_int8_i32,
    f32 => attn_entry_int8_f32
);

#[unsafe(no_mangle)]
pub fn attn_entry_int8_resume(
    attn: &Int8Attention<'_>,
    qkv: &[View<'_, i8>; 3],
    out: ViewMut<'_, i8>,
    scratch: &mut [i32],
    cursor: &mut Cursor<IntState>,
    keys: usize,
) -> bool {
    let [q, k, v] = *qkv;
    int8::resume(attn, q, k, v, out, scratch, cursor.budget(keys)) == Ok(Progress::Done)
}

#[unsafe(no_mangle)]
pub fn attn_entry_streaming_resume(
    attn: &Attention<'_>,
    qkv: &[View<'_, f32>; 3],
    out: Outputs<'_, f32>,
    scratch: &mut [f32],
    cursor: &mut Cursor<RowState<f32>>,
    keys: usize,
) -> bool {
    let [q, k, v] = *qkv;
    streaming::resume(attn, q, k, v, out, scratch, cursor.budget(keys)) == Ok(Progress::Done)
}

#[unsafe(no_mangle)]
pub fn attn_entry_int8_ring<'c>(
    kv: (ViewMut<'c, i8>, ViewMut<'c, i8>),
    seen: &'c mut [usize],
    sinks_and_window: [usize; 2],
    attn: &Int8Attention<'_>,
    qkv: &[View<'_, i8>; 3],
    out: ViewMut<'_, i8>,
    scratch: &mut [i32],
) -> bool {
    let [q, k, v] = *qkv;
    let [sinks, window] = sinks_and_window;
    let Ok(mut cache) = Int8RingCache::new(kv.0, kv.1, seen, sinks, window) else { return false };
    cache.advance(attn, q, k, v, out, scratch).is_ok() & cache.is_empty(window)
}

#[unsafe(no_mangle)]
pub fn attn_entry_quantized_ring<'c>(
    numbers: (ViewMut<'c, i8>, ViewMut<'c, i8>),
    scales: (ViewMut<'c, f32>, ViewMut<'c, f32>),
    seen: &'c mut [usize],
    sinks_and_window: [usize; 2],
    attn: &Attention<'_>,
    qkv: &[View<'_, f32>; 3],
    out: Outputs<'_, f32>,
    scratch: &mut [f32],
) -> bool {
    let [q, k, v] = *qkv;
    let [sinks, window] = sinks_and_window;
    let (Ok(keys), Ok(values)) = (ScaledRows::new(numbers.0, scales.0), ScaledRows::new(numbers.1, scales.1)) else {
        return false;
    };
    let Ok(mut cache) = QuantizedRingCache::new(keys, values, seen, sinks, window) else { return false };
    cache.advance(attn, q, k, v, out, scratch).is_ok() & cache.is_empty(window)
}

#[unsafe(no_mangle)]
pub fn attn_entry_int8_options<'a>(
    scales: [f32; 4],
    zero_points: [i8; 4],
    x: &mut [f32],
    heads: &'a [HeadScales],
    out: &mut Int8Attention<'a>,
) -> bool {
    let [q, k, v, o] = scales;
    let covering = Quant::covering(x);
    for x in x {
        *x = covering.dequantize(covering.quantize(*x));
    }
    let quant = |n: usize, scale| Quant::new(scale, zero_points.get(n).copied().unwrap_or(0));
    let (Ok(q), Ok(k), Ok(v), Ok(o)) = (quant(0, q), quant(1, k), quant(2, v), quant(3, o)) else { return false };
    let Ok(attn) = Int8Attention::new([q, k, v, o], f64::from(covering.scale())) else { return false };
    *out = attn.per_head(heads);
    true
}

/// A number of heads that is no power of two, and a dim that is not one of fours.
#[unsafe(no_mangle)]
pub fn attn_entry_fixed(
    attn: &FixedAttention<6, 3, 10>,
    q: &[[[f32; 10]; 6]],
    kv: &[[[f32; 10]; 3]; 20],
    len: usize,
    align: Align,
    window: Window,
    out: &mut [[[f32; 10]; 6]],
) -> bool {
    let seen = kv.get(..len).unwrap_or_default();
    let done = attn.decode(q, seen, kv, out).is_ok();
    if let (Some(q), Some(out)) = (q.first_chunk::<7>(), out.first_chunk_mut::<7>()) {
        attn.causal(align).window(window).forward(q, kv, kv, out);
    }
    done
}
