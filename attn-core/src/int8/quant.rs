//! Scale and zero point: from an 8-bit number to its value and back.

use crate::error::{AttnError, Result};

/// The affine map between stored 8-bit integers and real numbers: `real = scale · (stored − zero_point)`.
///
/// The convention of TensorFlow Lite's int8 tensors (Jacob et al. 2018, arXiv 1712.05877, eq. 1): activations fill
/// `−128..=127` with any zero point; symmetric tensors have zero point 0.
///
/// ```
/// use attn_core::int8::Quant;
/// let quant = Quant::new(0.5, -3)?;
/// assert_eq!((quant.quantize(2.0), quant.dequantize(1)), (1, 2.0));
/// assert_eq!((quant.quantize(1e9), quant.quantize(-1e9)), (127, -128)); // saturates
/// assert!(Quant::new(0.0, 0).is_err());
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct Quant {
    scale: f32,
    zero_point: i8,
}

impl Quant {
    /// From the scale, finite and above 0, and the integer that means 0.
    ///
    /// # Errors
    /// [`AttnError::Option`] for a scale without meaning.
    pub const fn new(scale: f32, zero_point: i8) -> Result<Self> {
        if scale.is_finite() && scale > 0.0 {
            Ok(Self { scale, zero_point })
        } else {
            Err(AttnError::Option { name: "quantisation scale", must: "finite and above 0" })
        }
    }

    /// The map whose 256 numbers cover the values given and 0, which is met exactly. NaN and ±∞ are passed over; where
    /// nothing is left, the scale is 1.
    ///
    /// ```
    /// use attn_core::int8::Quant;
    /// let quant = Quant::covering(&[0.0, 2.55, 1.0]);
    /// assert_eq!((quant.quantize(0.0), quant.quantize(2.55)), (-128, 127));
    /// ```
    pub fn covering(values: &[f32]) -> Self {
        let (mut low, mut high) = (0.0f32, 0.0f32);
        for &x in values.iter().filter(|x| x.is_finite()) {
            low = low.min(x);
            high = high.max(x);
        }
        // Halved first, so that the span of the largest numbers does not overflow.
        let scale = (high / 2.0 - low / 2.0) / 127.5;
        if scale < f32::MIN_POSITIVE {
            return Self { scale: 1.0, zero_point: 0 };
        }
        let zero_point = libm::roundf(-128.0 - low / scale) as i8; // saturates
        Self { scale, zero_point }
    }

    /// The step between two neighbours.
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// The integer that means 0.
    pub const fn zero_point(&self) -> i8 {
        self.zero_point
    }

    /// The real number that a stored one means.
    #[inline]
    pub fn dequantize(&self, stored: i8) -> f32 {
        self.scale * (i32::from(stored) - i32::from(self.zero_point)) as f32
    }

    /// The nearest stored number, saturated; a NaN becomes the zero point.
    #[inline]
    pub fn quantize(&self, real: f32) -> i8 {
        let steps = libm::roundf(real / self.scale);
        // Saturates at the ends, and a NaN becomes 0.
        (steps as i32).saturating_add(i32::from(self.zero_point)).clamp(-128, 127) as i8
    }
}
