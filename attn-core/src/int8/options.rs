//! The options of an int8 call, and the factors that follow from the scales of the tensors.

use super::quant::Quant;
use super::rescale::Rescale;
use crate::error::{AttnError, Result};
use crate::mask::Mask;
use crate::options::is_factor;
use crate::shape::AttnShape;

/// The factors of one head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadScales {
    /// `scale·s_q·s_k·log2(e)·2¹⁶`: from a dot product to a score.
    pub(super) score: Rescale,
    /// `s_v/s_out`: from a mean of values to the output.
    pub(super) output: Rescale,
    /// `s_v`, for outputs in f32.
    pub(super) value: f32,
}

impl HeadScales {
    /// From the scales of q, k, v and the output, each above 0, and the scale of the scores (`1/√head_dim` is
    /// [`default_scale`](crate::score::default_scale)).
    ///
    /// # Errors
    /// [`AttnError::Option`] for a scale without meaning, or that [`Attention::scale`](crate::Attention::scale)
    /// refuses.
    pub const fn new(q: f32, k: f32, v: f32, out: f32, scale: f64) -> Result<Self> {
        match (Quant::new(q, 0), Quant::new(k, 0), Quant::new(v, 0), Quant::new(out, 0)) {
            (Ok(_), Ok(_), Ok(_), Ok(_)) => {}
            (Err(e), ..) | (_, Err(e), ..) | (_, _, Err(e), _) | (.., Err(e)) => return Err(e),
        }
        if !is_factor(scale) {
            return Err(AttnError::Option { name: "scale", must: "finite and at most 2^64 in size" });
        }
        let score = scale * q as f64 * k as f64 * (core::f64::consts::LOG2_E * 65536.0);
        match (Rescale::new(score), Rescale::new(v as f64 / out as f64)) {
            (Ok(score), Ok(output)) => Ok(Self { score, output, value: v }),
            (Err(e), _) | (_, Err(e)) => Err(e),
        }
    }
}

/// Attention over int8 tensors: the scales and zero points of q, k, v and the output, the scale of the scores, and a
/// mask.
///
/// Everything is `const`: made in a constant, nothing of it is computed on the target, and no floating-point
/// instruction is left in the image.
///
/// ```
/// use attn_core::int8::{Int8Attention, Quant};
/// use attn_core::{Align, Mask};
/// use attn_core::score::default_scale;
/// const fn quant(scale: f32, zero_point: i8) -> Quant {
///     match Quant::new(scale, zero_point) {
///         Ok(quant) => quant,
///         Err(_) => panic!("a scale of the model is not above 0"), // when compiling
///     }
/// }
/// const ATTN: Int8Attention = match Int8Attention::new(
///     [quant(0.05, 3), quant(0.04, 0), quant(0.1, -7), quant(0.1, -7)], // q, k, v, output
///     default_scale(16),
/// ) {
///     Ok(attn) => attn.mask(Mask::causal(Align::BottomRight)),
///     Err(_) => panic!("a scale of the model has no meaning"),
/// };
/// # let _ = ATTN;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Int8Attention<'a> {
    pub(super) mask: Mask<'a>,
    pub(super) scales: HeadScales,
    pub(super) per_head: Option<&'a [HeadScales]>,
    /// Of q, k, v and the output.
    pub(super) zero_points: [i8; 4],
}

impl<'a> Int8Attention<'a> {
    /// From the maps of q, k, v and the output, and the scale of the scores; nothing masked.
    ///
    /// # Errors
    /// [`AttnError::Option`] for a scale that [`Attention::scale`](crate::Attention::scale) refuses.
    pub const fn new([q, k, v, out]: [Quant; 4], scale: f64) -> Result<Self> {
        match HeadScales::new(q.scale(), k.scale(), v.scale(), out.scale(), scale) {
            Ok(scales) => {
                let zero_points = [q.zero_point(), k.zero_point(), v.zero_point(), out.zero_point()];
                Ok(Self { mask: Mask::none(), scales, per_head: None, zero_points })
            }
            Err(e) => Err(e),
        }
    }

    /// Which keys a query sees. Replaces an earlier mask; combine with [`Mask::and`].
    pub const fn mask(mut self, mask: Mask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Scales of their own for each query head, `[q_heads]`, in place of those of the tensors: quantisation along the
    /// axis of the heads. The zero points stay (TensorFlow Lite wants them 0 where scales differ along an axis).
    pub const fn per_head(mut self, scales: &'a [HeadScales]) -> Self {
        self.per_head = Some(scales);
        self
    }

    /// The mask.
    pub const fn get_mask(&self) -> &Mask<'a> {
        &self.mask
    }

    /// Checks the mask and tables against the sizes of a call.
    ///
    /// # Errors
    /// The table that does not fit; [`AttnError::Unsupported`] for a head so large that a score could overflow.
    pub fn check(&self, shape: &AttnShape) -> Result<()> {
        // |q − z_q|·|k − z_k| ≤ 255², times 2¹⁵ is below 2³¹.
        if shape.head_dim > 1 << 15 {
            return Err(AttnError::Unsupported { what: "an int8 head_dim above 32768" });
        }
        if let Some(scales) = self.per_head {
            AttnError::check_size("int8 scales against q_heads", shape.q_heads, scales.len())?;
        }
        self.mask.check(shape)
    }

    /// The factors of one head.
    #[inline]
    pub(super) fn of_head(&self, head: usize) -> &HeadScales {
        self.per_head.and_then(|scales| scales.get(head)).unwrap_or(&self.scales)
    }
}
