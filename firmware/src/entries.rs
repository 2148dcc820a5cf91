//! One function for each use of the library in firmware, from raw buffers to the result. An image of it alone shows its
//! size.
//!
//! All options and sizes arrive behind references, so that no branch is known when compiling. Never inlined: a caller's
//! frame is not theirs.

use attn_core::fixed::FixedAttention;
use attn_core::int8::{self, Int8Attention, Int8RingCache, QuantizedRingCache, ScaledRows};
use attn_core::kv_cache::RingCache;
use attn_core::resume::{Cursor, Progress};
use attn_core::softmax::RowState;
use attn_core::{Align, Attention, Layout, Outputs, Result, View, ViewMut, streaming};
use attn_layers::module::{FixedSelfAttention, MultiHeadAttention, Sources, Streaming};

/// Sizes of q, k, v and the output.
pub type Sizes = [[usize; 4]; 4];

/// The streaming engine, every option, lse on request.
#[inline(never)]
pub fn streaming(
    attn: &Attention<'_>,
    [q, k, v]: [&[f32]; 3],
    [qs, ks, vs, os]: &Sizes,
    out: &mut [f32],
    lse: Option<&mut [f32]>,
    scratch: &mut [f32],
) -> Result<()> {
    let (q, k) = (View::new(q, Layout::Bshd, *qs)?, View::new(k, Layout::Bshd, *ks)?);
    let (v, out) = (View::new(v, Layout::Bshd, *vs)?, ViewMut::new(out, Layout::Bshd, *os)?);
    streaming::forward(attn, q, k, v, Outputs { out, lse, weights: None }, scratch)
}

/// The streaming engine in parts.
#[inline(never)]
pub fn resume(
    attn: &Attention<'_>,
    [q, k, v]: [&[f32]; 3],
    [qs, ks, vs, os]: &Sizes,
    out: &mut [f32],
    scratch: &mut [f32],
    cursor: &mut Cursor<RowState<f32>>,
    keys: usize,
) -> Result<Progress> {
    let view = |x, sizes: &[usize; 4]| View::new(x, Layout::Bshd, *sizes);
    let out = ViewMut::new(out, Layout::Bshd, *os)?;
    streaming::resume(attn, view(q, qs)?, view(k, ks)?, view(v, vs)?, out, scratch, cursor.budget(keys))
}

/// One step of a decoder over a ring cache.
#[inline(never)]
pub fn ring(
    attn: &Attention<'_>,
    [ck, cv]: [&mut [f32]; 2],
    ([cks, cvs], seen, [sinks, window]): (&[[usize; 4]; 2], &mut [usize], [usize; 2]),
    [q, k, v]: [&[f32]; 3],
    [qs, ks, vs, os]: &Sizes,
    out: &mut [f32],
    scratch: &mut [f32],
) -> Result<()> {
    let view = |x, sizes: &[usize; 4]| View::new(x, Layout::Bshd, *sizes);
    let (ck, cv) = (ViewMut::new(ck, Layout::Bshd, *cks)?, ViewMut::new(cv, Layout::Bshd, *cvs)?);
    let mut cache = RingCache::new(ck, cv, seen, sinks, window)?;
    let out = ViewMut::new(out, Layout::Bshd, *os)?;
    cache.advance(attn, view(q, qs)?, view(k, ks)?, view(v, vs)?, out, scratch)
}

/// Four query heads over two key/value heads of 16: sizes are constants.
pub type Fixed = FixedAttention<4, 2, 16>;

/// Fixed shapes; the number of cached tokens is known at run time.
#[inline(never)]
pub fn fixed(
    attn: &Fixed,
    q: &[[[f32; 16]; 4]],
    [k, v]: [&[[[f32; 16]; 2]]; 2],
    out: &mut [[[f32; 16]; 4]],
) -> Result<()> {
    attn.causal(Align::BottomRight).decode(q, k, v, out)
}

/// int8 attention, int8 results.
#[inline(never)]
pub fn int8(
    attn: &Int8Attention<'_>,
    [q, k, v]: [&[i8]; 3],
    [qs, ks, vs, os]: &Sizes,
    out: &mut [i8],
    scratch: &mut [i32],
) -> Result<()> {
    let view = |x, sizes: &[usize; 4]| View::new(x, Layout::Bshd, *sizes);
    let out = ViewMut::new(out, Layout::Bshd, *os)?;
    int8::forward(attn, view(q, qs)?, view(k, ks)?, view(v, vs)?, out, scratch)
}

/// One step of a decoder over an int8 ring cache.
#[inline(never)]
pub fn int8_ring(
    attn: &Int8Attention<'_>,
    [ck, cv]: [&mut [i8]; 2],
    ([cks, cvs], seen, [sinks, window]): (&[[usize; 4]; 2], &mut [usize], [usize; 2]),
    [q, k, v]: [&[i8]; 3],
    [qs, ks, vs, os]: &Sizes,
    out: &mut [i8],
    scratch: &mut [i32],
) -> Result<()> {
    let view = |x, sizes: &[usize; 4]| View::new(x, Layout::Bshd, *sizes);
    let (ck, cv) = (ViewMut::new(ck, Layout::Bshd, *cks)?, ViewMut::new(cv, Layout::Bshd, *cvs)?);
    let mut cache = Int8RingCache::new(ck, cv, seen, sinks, window)?;
    let out = ViewMut::new(out, Layout::Bshd, *os)?;
    cache.advance(attn, view(q, qs)?, view(k, ks)?, view(v, vs)?, out, scratch)
}

/// One step of a decoder in f32 over a cache in int8.
#[inline(never)]
pub fn quantized_ring(
    attn: &Attention<'_>,
    [ck, cv]: [&mut [i8]; 2],
    [k_scales, v_scales]: [&mut [f32]; 2],
    ([cks, cvs], seen, [sinks, window]): (&[[usize; 4]; 2], &mut [usize], [usize; 2]),
    [q, k, v]: [&[f32]; 3],
    [qs, ks, vs, os]: &Sizes,
    out: &mut [f32],
    scratch: &mut [f32],
) -> Result<()> {
    let view = |x, sizes: &[usize; 4]| View::new(x, Layout::Bshd, *sizes);
    let [batch, heads, slots, _] = *cks;
    let scales = |x| ViewMut::new(x, Layout::Bshd, [batch, heads, slots, 1]);
    let keys = ScaledRows::new(ViewMut::new(ck, Layout::Bshd, *cks)?, scales(k_scales)?)?;
    let values = ScaledRows::new(ViewMut::new(cv, Layout::Bshd, *cvs)?, scales(v_scales)?)?;
    let mut cache = QuantizedRingCache::new(keys, values, seen, sinks, window)?;
    let out = ViewMut::new(out, Layout::Bshd, *os)?;
    cache.advance(attn, view(q, qs)?, view(k, ks)?, view(v, vs)?, out, scratch)
}

/// A layer of 16 features and two heads, on twelve tokens: sizes are constants.
pub type FixedLayer<'a> = FixedSelfAttention<'a, 16, 2, 2, 8>;

/// Projections, attention and output projection, with fixed shapes.
#[inline(never)]
pub fn fixed_layer(layer: &FixedLayer<'_>, x: &[[f32; 16]; 12], y: &mut [[f32; 16]; 12]) {
    layer.forward(x, y);
}

/// The same with sizes and options that are known at run time only.
#[inline(never)]
pub fn layer(
    layer: &MultiHeadAttention<'_, f32>,
    attn: &Attention<'_>,
    (x, sizes): (&[f32], &[usize; 4]),
    y: &mut [f32],
    scratch: &mut [f32],
) -> Result<()> {
    let (x, y) = (View::new(x, Layout::Bshd, *sizes)?, ViewMut::new(y, Layout::Bshd, *sizes)?);
    layer.forward(&mut Streaming, attn, Sources::same(x), y, scratch)
}
