//! ALiBi: each head prefers near keys, each by its own measure.
//!
//! Head `h` adds `−slope[h]·distance` to its scores (Press et al. 2022, "Train Short, Test Long", arXiv 2108.12409).
//! For a power of two `n` of heads the slopes are `2^(−8(h+1)/n)`. For other counts the authors' code takes the slopes
//! of the largest power of two below, `m`, for the first `m` heads, and every second slope of `2m` heads for the
//! others.
//!
//! Distances count to where [`Align`] puts a query, padding included. Align to the keys that are there: scores as large
//! as slope times a distance over padding are known to fewer digits ([`Precision`](crate::Precision)).
//!
//! [`Attention::alibi`](crate::Attention::alibi) uses the slopes without storing anything; [`bias`] writes the whole
//! matrix for those who want to look at it.
//!
//! ```
//! use attn_core::position::alibi;
//! use attn_core::{Align, Attention};
//! use attn_core::position::alibi::Alibi;
//! let mut slopes = [0.0f32; 8];
//! alibi::slopes(&mut slopes);
//! assert_eq!(slopes[..3], [0.5, 0.25, 0.125]);
//! let attn = Attention::new().alibi(Alibi { slopes: &slopes, align: Align::BottomRight });
//! # let _ = attn;
//! ```

use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::mask::Align;
use crate::shape::{At, AttnShape};
use crate::view::ViewMut;

/// The slope of one head out of `heads`; 0 if there is no such head.
pub fn slope(head: usize, heads: usize) -> f64 {
    if head >= heads {
        return 0.0;
    }
    // The largest power of two that is not above `heads`.
    let m = 1usize << (usize::BITS - 1 - heads.leading_zeros());
    // −8(h+1)/m, or −8(2i+1)/(2m) = −8(i + ½)/m for the heads beyond.
    let steps = if head < m { (head + 1) as f64 } else { (head - m) as f64 + 0.5 };
    libm::exp2(-8.0 * steps / m as f64)
}

/// Fills `slopes`, one per head, with the published slopes for that many heads.
pub fn slopes<T: Element>(slopes: &mut [T]) {
    let heads = slopes.len();
    for (head, out) in slopes.iter_mut().enumerate() {
        *out = T::from_f64(slope(head, heads));
    }
}

/// The bias as a matrix, `−slope[h]·|i + offset − j|`; with `causal`, −∞ where key `j` is after the query.
///
/// `slopes`: `[heads]`; `out`: `[batch, heads, q_len, kv_len]`.
///
/// # Errors
/// [`AttnError::Size`] if there is not one slope per head.
///
/// ```
/// use attn_core::{Align, ViewMut, position::alibi};
/// let mut bias = [0.0f32; 6];
/// alibi::bias(&[0.5f32], Align::BottomRight, true, &mut ViewMut::matrix(&mut bias, 2, 3)?)?;
/// assert_eq!(bias, [-0.5, 0.0, f32::NEG_INFINITY, -1.0, -0.5, 0.0]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn bias<S: Element, T: Element>(slopes: &[S], align: Align, causal: bool, out: &mut ViewMut<'_, T>) -> Result<()> {
    let [batch, heads, q_len, kv_len] = out.sizes();
    AttnError::check_size("alibi slopes against heads", heads, slopes.len())?;
    for b in 0..batch {
        for (h, slope) in slopes.iter().map(|s| s.to_f64()).enumerate() {
            for i in 0..q_len {
                let position = align.position(i, q_len, kv_len);
                for j in 0..kv_len {
                    let key = j as isize; // an index into memory is at most isize::MAX
                    let distance = position.abs_diff(key) as f64;
                    let value = if causal && key > position { f64::NEG_INFINITY } else { -slope * distance };
                    out.set(b, h, i, j, T::from_f64(value));
                }
            }
        }
    }
    Ok(())
}

/// Attention with linear biases (Press et al. 2022, arXiv 2108.12409): adds `−slope[head]·|i + offset − j|`.
///
/// The published slopes for any number of heads come from [`slopes`].
#[derive(Clone, Copy, Debug)]
pub struct Alibi<'a> {
    /// One slope per query head, `[q_heads]`.
    pub slopes: &'a [f32],
    /// The key position of query 0.
    pub align: Align,
}

impl Alibi<'_> {
    pub(crate) fn check(&self, shape: &AttnShape) -> Result<()> {
        AttnError::check_size("alibi slopes against q_heads", shape.q_heads, self.slopes.len())?;
        if self.slopes.iter().any(|s| !s.is_finite()) {
            return Err(AttnError::Option { name: "alibi slopes", must: "finite" });
        }
        Ok(())
    }

    /// The bias of one score.
    #[inline]
    pub fn at(&self, shape: &AttnShape, at: At) -> f64 {
        self.at_in(shape, at)
    }

    /// As [`at`](Self::at) in the type that an engine computes in, saturated. In `f32` it is the product rounded once,
    /// for distances up to 2²⁴.
    #[inline]
    pub(crate) fn at_in<R: Real>(&self, shape: &AttnShape, at: At) -> R {
        let slope = self.slopes.get(at.head).copied().unwrap_or(0.0);
        let position = self.align.position(at.query, shape.q_len, shape.kv_len);
        let x = -R::of(f64::from(slope)) * R::of(position.abs_diff(at.key as isize) as f64);
        if x > R::MAX {
            R::MAX
        } else if x < -R::MAX {
            -R::MAX
        } else {
            x
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_beyond_a_power_of_two_take_every_second_slope_of_twice_as_many() {
        let mut six = [0.0f64; 6];
        slopes(&mut six);
        // Four heads: 2^-2, 2^-4, 2^-6, 2^-8. Of eight: 2^-1, (2^-2), 2^-3.
        assert_eq!(six, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
        let mut twelve = [0.0f64; 12];
        slopes(&mut twelve);
        for (n, &s) in twelve.iter().skip(8).enumerate() {
            assert_eq!(s, slope(2 * n, 16));
        }
        assert_eq!((slope(0, 1), slope(1, 1), slope(0, 0)), (1.0 / 256.0, 0.0, 0.0));
    }

    #[test]
    fn the_matrix_is_what_the_option_adds() {
        let shape = AttnShape::new([1, 3, 2, 4], [1, 3, 5, 4], [1, 3, 5, 4]).unwrap();
        let mut s = [0.0f32; 3];
        slopes(&mut s);
        for align in [Align::TopLeft, Align::BottomRight, Align::Offset(-3)] {
            let mut out = [0.0f64; 30];
            let mut out = ViewMut::new(&mut out, crate::Layout::Bhsd, [1, 3, 2, 5]).unwrap();
            bias(&s, align, false, &mut out).unwrap();
            for (head, query, key) in (0..30).map(|n| (n / 10, n / 5 % 2, n % 5)) {
                let at = At { batch: 0, head, query, key };
                assert_eq!(out.as_view().at(0, head, query, key), Alibi { slopes: &s, align }.at(&shape, at));
            }
        }
        let mut out = [7.0f32; 4];
        assert!(bias(&s, Align::TopLeft, true, &mut ViewMut::matrix(&mut out, 2, 2).unwrap()).is_err());
        assert_eq!(out, [7.0; 4]);
    }
}
