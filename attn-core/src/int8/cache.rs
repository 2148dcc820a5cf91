//! A cache in int8 with scales, for any engine: numbers in any layout, and the scales that multiply them.
//!
//! Keys have a scale per token, or one per channel: their outliers are in a few channels, which per-channel scales keep
//! from the others (KIVI, Liu et al. 2024, arXiv 2402.02750). Values have a scale per token. A token's scale multiplies
//! its score or its weight and a channel's the query, so that nothing is widened in memory and reading costs a quarter
//! of `f32`. Zero points are 0.
//!
//! All of it is `#[inline]`. Without generics it would be compiled here, with all that it calls, and that changes the
//! code that firmware at `opt-level = "s"` shares (32 bytes of stack in calls that use none of this).

use crate::error::{AttnError, Result};
use crate::kv_cache::{CacheView, TokenRun};
use crate::view::View;

/// What the numbers of int8 keys are multiplied by.
#[derive(Clone, Copy, Debug)]
pub enum KeyScales<'c> {
    /// One for each token, `[batch or pages, kv_heads, slots, 1]` as the keys lie.
    PerToken(View<'c, f32>),
    /// One for each channel, `[1, kv_heads, 1, head_dim]`.
    PerChannel(View<'c, f32>),
}

/// Keys and values in int8 with their scales, wherever they lie: a key is `number · scale`, in per-channel scales
/// channel by channel, a value `number · scale`.
///
/// # How exact
///
/// Engines compute what they would on the dequantised numbers in `f32`, to the same accuracy. The kernels on AVX-512
/// and on Arm with SDOT multiply keys of up to 256 channels as integers, and round a query to 24 bits beside its
/// largest number: in the bound of [`Precision`](crate::Precision), `S` then counts each `|q|`, times its channel's
/// scale, as at least half of the largest of its row.
///
/// Under [`Precision::Fast`](crate::Precision) they, and those on AVX2, round queries to 16 bits, and weights to 16
/// bits beside the largest of their 64 keys, if heads share keys (one head alone waits for memory). A score, and so the
/// lse, is then off by at most `δ = |scale|·max_c |q_c|·maxⱼ Σ_c |k_jc| / 32639`; if channels have scales, `q_c` is
/// multiplied by its channel's here, and `k` are the integers. An output is off by at most `(e^2δ − 1)·Σⱼ pⱼ|vⱼ| +
/// e^2δ·0.0005·Σⱼ pⱼ·128·sⱼ`, `sⱼ` the scale of a value or of its block. The second part is an eighth of what storing
/// values in int8 costs; where many keys have weight, a hundredth.
///
/// Against the numbers before they were [quantised](quantize), a score is off by at most
/// `δ = scale·½·maxⱼ Σ_c |q_c|·s_jc`, `s_jc` the scale of a key's element, as each element is off by half a scale. An
/// output is then off by at most `(e^2δ − 1)·Σⱼ pⱼ|vⱼ| + e^2δ·½·Σⱼ pⱼsⱼ`, `sⱼ` the scale of a value. (Soft-caps only
/// lessen that.)
///
/// ```
/// use attn_core::int8::{KeyScales, QuantizedView, quantize};
/// use attn_core::kv_cache::CacheView;
/// use attn_core::{Layout, View};
/// // Two tokens of dim 4, values as the keys.
/// let (tokens, mut numbers, mut scales) = ([1.0f32, -0.5, 0.25, 0.1, 8.0, 4.0, -2.0, 1.0], [0i8; 8], [0.0f32; 2]);
/// for ((x, numbers), scale) in tokens.chunks(4).zip(numbers.chunks_mut(4)).zip(&mut scales) {
///     *scale = quantize(x, numbers);
/// }
/// assert_eq!((numbers[0], scales[1]), (127, 8.0 / 127.0));
/// let numbers = View::new(&numbers, Layout::Bhsd, [1, 1, 2, 4])?;
/// let scales = View::new(&scales, Layout::Bhsd, [1, 1, 2, 1])?;
/// let cache = QuantizedView::new(CacheView::of_tensors(numbers, numbers)?, KeyScales::PerToken(scales), scales)?;
/// assert_eq!(cache.numbers().len(0), 2);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct QuantizedView<'c> {
    numbers: CacheView<'c, i8>,
    keys: KeyScales<'c>,
    values: View<'c, f32>,
}

impl<'c> QuantizedView<'c> {
    /// Pairs numbers and scales. `values`: `[batch or pages, kv_heads, slots, 1]` as the values lie.
    ///
    /// # Errors
    /// [`AttnError::Size`] if scales have other sizes.
    #[inline]
    pub fn new(numbers: CacheView<'c, i8>, keys: KeyScales<'c>, values: View<'c, f32>) -> Result<Self> {
        let ([rows, heads, slots, head_dim], [_, _, v_slots, _]) = (numbers.k().sizes(), numbers.v().sizes());
        let (what, wanted, found) = match keys {
            KeyScales::PerToken(scales) => ("int8 key scales per token", [rows, heads, slots, 1], scales.sizes()),
            KeyScales::PerChannel(scales) => ("int8 key scales per channel", [1, heads, 1, head_dim], scales.sizes()),
        };
        check_sizes(what, wanted, found)?;
        check_sizes("int8 value scales per token", [rows, heads, v_slots, 1], values.sizes())?;
        Ok(Self { numbers, keys, values })
    }

    /// From parts that are known to fit.
    #[inline]
    pub(super) const fn of_checked(numbers: CacheView<'c, i8>, keys: KeyScales<'c>, values: View<'c, f32>) -> Self {
        Self { numbers, keys, values }
    }

    /// The numbers.
    #[inline]
    pub const fn numbers(&self) -> &CacheView<'c, i8> {
        &self.numbers
    }

    /// Scales of the keys.
    #[inline]
    pub const fn key_scales(&self) -> KeyScales<'c> {
        self.keys
    }

    /// Scales of the values.
    #[inline]
    pub const fn value_scales(&self) -> View<'c, f32> {
        self.values
    }

    /// [`CacheView::after`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn after(self, before: usize) -> Result<Self> {
        Ok(Self { numbers: self.numbers.after(before)?, ..self })
    }

    /// Writes the key of a token in real numbers. Nothing if there is no such token.
    #[inline]
    pub fn key(&self, sequence: usize, kv_head: usize, token: usize, out: &mut [f32]) {
        let Some(TokenRun { row, slot, .. }) = self.numbers.run(sequence, token) else { return };
        let scale = |channel| match self.keys {
            KeyScales::PerToken(scales) => scales.at(row, kv_head, slot, 0),
            KeyScales::PerChannel(scales) => scales.at(0, kv_head, 0, channel),
        };
        let numbers = self.numbers.k().row(row, kv_head, slot);
        out.iter_mut().zip(numbers.iter()).enumerate().for_each(|(c, (out, n))| *out = f32::from(n) * scale(c));
    }

    /// Writes the value of a token in real numbers. Nothing if there is no such token.
    #[inline]
    pub fn value(&self, sequence: usize, kv_head: usize, token: usize, out: &mut [f32]) {
        let Some(TokenRun { row, slot, .. }) = self.numbers.run(sequence, token) else { return };
        let scale = self.values.at(row, kv_head, slot, 0);
        let numbers = self.numbers.v().row(row, kv_head, slot);
        out.iter_mut().zip(numbers.iter()).for_each(|(out, n)| *out = f32::from(n) * scale);
    }
}

#[inline]
fn check_sizes(what: &'static str, wanted: [usize; 4], found: [usize; 4]) -> Result<()> {
    wanted.into_iter().zip(found).try_for_each(|(wanted, found)| AttnError::check_size(what, wanted, found))
}

/// Writes the nearest numbers of a token and returns their scale: its largest magnitude divided by 127, so that each
/// element is off by at most half a scale. A NaN or ±∞ gives the scale NaN: the whole token becomes NaN.
#[inline]
pub fn quantize(x: &[f32], numbers: &mut [i8]) -> f32 {
    let scale = scale_of(x.iter().copied());
    numbers.iter_mut().zip(x).for_each(|(n, &x)| *n = nearest(x, scale));
    scale
}

/// Writes the nearest numbers of a token, channel by channel, in scales that were [chosen](channel_scales) before. What
/// exceeds 127 scales becomes the largest number: scales of earlier tokens do not hold for all later ones.
///
/// ```
/// use attn_core::int8::{channel_scales, quantize_by};
/// use attn_core::View;
/// let keys = [100.0f32, 0.1, 50.0, -0.2]; // two tokens whose first channel is large
/// let (mut scales, mut numbers) = ([0.0f32; 2], [0i8; 2]);
/// channel_scales(View::matrix(&keys, 2, 2)?, 0, 0, &mut scales);
/// quantize_by(&scales, &keys[2..], &mut numbers);
/// assert_eq!(numbers, [64, -127]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[inline]
pub fn quantize_by(scales: &[f32], x: &[f32], numbers: &mut [i8]) {
    numbers.iter_mut().zip(x.iter().zip(scales)).for_each(|(n, (&x, &scale))| *n = nearest(x, scale));
}

/// The scale of each channel of one head's keys, `k` being `[batch, kv_heads, tokens, head_dim]`: the largest magnitude
/// divided by
/// 127. NaN if one is NaN or ±∞.
#[inline]
pub fn channel_scales(k: View<'_, f32>, sequence: usize, kv_head: usize, scales: &mut [f32]) {
    let [_, _, tokens, _] = k.sizes();
    for (channel, scale) in scales.iter_mut().enumerate() {
        *scale = scale_of((0..tokens).map(|token| k.at(sequence, kv_head, token, channel)));
    }
}

/// The largest magnitude divided by 127; NaN if one is not finite.
#[inline]
pub(super) fn scale_of(x: impl Iterator<Item = f32>) -> f32 {
    // A NaN anywhere wins.
    let largest = x.fold(0.0f32, |m, x| if x.is_nan() || m.is_nan() { f32::NAN } else { m.max(x.abs()) });
    if largest < f32::INFINITY { largest / 127.0 } else { f32::NAN }
}

/// The nearest number.
#[inline]
pub(super) fn nearest(x: f32, scale: f32) -> i8 {
    // Zeros have the scale 0; `as` turns 0/0 into 0, and saturates.
    libm::roundf(x / scale).clamp(-127.0, 127.0) as i8
}
