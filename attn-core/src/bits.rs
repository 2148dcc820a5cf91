//! Halves as `u16` bits, as NumPy and other crates for halves hold them, read as [`half`] types without copying.

use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};

use crate::element::Element;

/// A type of halves: `f16` or `bf16`.
pub trait Half: Element<Compute = f32> {
    /// These bits as halves.
    #[doc(hidden)]
    fn of(bits: &[u16]) -> &[Self];
    /// These bits as halves, to be written.
    #[doc(hidden)]
    fn of_mut(bits: &mut [u16]) -> &mut [Self];
}

macro_rules! half {
    ($($t:ty),*) => {$(
        impl Half for $t {
            fn of(bits: &[u16]) -> &[Self] {
                bits.reinterpret_cast()
            }
            fn of_mut(bits: &mut [u16]) -> &mut [Self] {
                bits.reinterpret_cast_mut()
            }
        }
    )*};
}

half!(f16, bf16);

/// The same memory as halves.
///
/// ```
/// use attn_core::half::bf16;
/// use attn_core::{Layout, View, bits};
/// let k: Vec<u16> = vec![0x3f80; 12]; // 1.0 in bfloat16
/// let k = View::new(bits::halves::<bf16>(&k), Layout::Bhsd, [1, 1, 3, 4])?;
/// assert_eq!(k.at(0, 0, 2, 3), bf16::ONE);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn halves<H: Half>(bits: &[u16]) -> &[H] {
    H::of(bits)
}

/// The same memory as halves, to be written.
///
/// ```
/// use attn_core::half::f16;
/// use attn_core::{ViewMut, bits};
/// let mut out = [0u16; 6];
/// ViewMut::matrix(bits::halves_mut::<f16>(&mut out), 2, 3)?.set(0, 0, 1, 2, f16::ONE);
/// assert_eq!(out, [0, 0, 0, 0, 0, 0x3c00]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn halves_mut<H: Half>(bits: &mut [u16]) -> &mut [H] {
    H::of_mut(bits)
}
