//! Attention over 8-bit integers, in integers from the stored numbers to the stored result: for processors without a
//! floating-point unit, and for caches that must be small.
//!
//! | what | stored | computed in |
//! |---|---|---|
//! | [`forward`], [`resume`] | q, k, v in int8; the result in i8, i16, i32 or f32 | integers |
//! | [`Int8RingCache`] | tokens and cache in int8 | integers |
//! | [`QuantizedRingCache`] | tokens in f32, the cache in int8 with a scale per token | f32 |
//! | [`QuantizedView`] | any cache in int8 with scales per token or channel, read by the kernels of `attn-simd` | f32 |
//!
//! Tensors follow TensorFlow Lite's conventions ([`Quant`]; Jacob et al. 2018, arXiv 1712.05877):
//! `real = scale·(stored − zero_point)`. Masks, grouped heads, strides and errors are those of the other engines;
//! soft-cap, biases, sinks and dropout are not offered in integers. Nothing of size n is stored: a row's state is an
//! exponent, a sum and one accumulator per value ([`IntState`] has the formulas).
//!
//! ```
//! use attn_core::int8::{self, Int8Attention, Quant};
//! use attn_core::{Align, Mask, View, ViewMut};
//! use attn_core::score::default_scale;
//! let quant = Quant::new(1.0 / 32.0, 0)?; // 1.0 is 32
//! let x = [32i8, 0, 0, 32, 32, 32].map(|x| x); // three tokens of dim 2: q = k = v
//! let attn = Int8Attention::new([quant; 4], default_scale(2))?.mask(Mask::causal(Align::TopLeft));
//! let (x, mut out) = (View::matrix(&x, 3, 2)?, [0i8; 6]);
//! int8::forward(&attn, x, x, x, ViewMut::matrix(&mut out, 3, 2)?, &mut [0; 2])?;
//! assert_eq!(out[..4], [32, 0, 11, 21]); // the second token sees the first with weight 0.33, itself with 0.67
//! # Ok::<(), attn_core::AttnError>(())
//! ```
//!
//! # How exact
//!
//! Against the formula in real numbers on the dequantised inputs, an output is off by at most
//! `255·s_v·(2⁻¹⁶ + S·2⁻³⁰ + n·2⁻²²)` before it is rounded to the output's type, where `n` is the number of keys that
//! the row sees and `S` the largest magnitude of its scores: scores are rounded to `2⁻¹⁷` in log2 units and their
//! factor to `2⁻³¹` of itself, exponentials are off by `6·10⁻⁷` and weights rounded to `2⁻²³` of the largest. That is a
//! hundredth of a step of v for a thousand keys; rounding to int8 costs half a step of the output. Dot products are
//! exact. Scores beyond ±11 356 are clipped there.

mod cache;
mod exp2;
mod forward;
mod options;
mod output;
mod quant;
mod quantized_ring;
mod rescale;
mod ring;
mod row;

pub use cache::{KeyScales, QuantizedView, channel_scales, quantize, quantize_by};
pub use forward::{forward, resume, scratch_len};
pub use options::{HeadScales, Int8Attention};
pub use output::Int8Output;
pub use quant::Quant;
pub use quantized_ring::{QuantizedRingCache, ScaledRows};
pub use rescale::Rescale;
pub use ring::Int8RingCache;
pub use row::{IntPush, IntState};
