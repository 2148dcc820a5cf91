//! Hadamard rotations of rows, in place: they spread the large numbers of a few channels over all channels, so that few
//! bits hold a row better (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456).
//!
//! The matrix is orthonormal and symmetric: `H₁ = [1]`, `H₂ₙ = [[Hₙ, Hₙ], [Hₙ, −Hₙ]]/√2`. It is its own inverse and
//! preserves dot products: if q and k are both rotated, scores do not change. If v is rotated, so is the output, and
//! the same call rotates it back.
//!
//! ```
//! use attn_core::hadamard::rotate;
//! let (mut q, mut k) = ([8.0f32, 0.0, 0.0, 1.0], [1.0f32, 2.0, 3.0, 4.0]); // q·k = 12
//! rotate(&mut q, 4)?;
//! rotate(&mut k, 4)?;
//! assert_eq!(q, [4.5, 3.5, 3.5, 4.5]);
//! assert_eq!(q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>(), 12.0);
//! rotate(&mut q, 4)?;
//! assert_eq!(q, [8.0, 0.0, 0.0, 1.0]);
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use crate::element::Real;
use crate::error::{AttnError, Result};
use crate::view::ViewMut;

/// Rotates each piece of `block` numbers, one after the other. `block` is a power of two, 1 changes nothing; numbers up
/// to `MAX/√block` do not overflow.
///
/// # Errors
/// [`AttnError::Option`] if `block` is no power of two, [`AttnError::Size`] if the numbers are no whole number of
/// blocks. Nothing has been written then.
#[inline]
pub fn rotate<R: Real>(x: &mut [R], block: usize) -> Result<()> {
    check(x.len(), block)?;
    let factor = R::ONE / R::of(block as f64).sqrt();
    for piece in x.chunks_exact_mut(block.max(1)) {
        if block > 1 {
            piece.iter_mut().for_each(|x| *x *= factor);
        }
        let mut half = 1;
        while half < block {
            for pair in piece.chunks_exact_mut(half.saturating_mul(2)) {
                let (low, high) = pair.split_at_mut_checked(half).unwrap_or_default();
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half = half.saturating_mul(2);
        }
    }
    Ok(())
}

/// Rotates every row of a tensor, in pieces of `block` channels; rows are contiguous.
///
/// ```
/// use attn_core::hadamard::rotate_rows;
/// use attn_core::{Layout, ViewMut};
/// let mut x = [1.0f32, 1.0, 3.0, 1.0]; // one row of two pieces
/// rotate_rows(&mut ViewMut::new(&mut x, Layout::Bhsd, [1, 1, 1, 4])?, 2)?;
/// assert!((x[0] - 2f32.sqrt()).abs() < 1e-6 && x[1] == 0.0);
/// assert!(rotate_rows(&mut ViewMut::new(&mut x, Layout::Bhsd, [1, 1, 1, 4])?, 3).is_err());
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// # Errors
/// As [`rotate`]; [`AttnError::Unsupported`] for rows that are not contiguous.
#[inline]
pub fn rotate_rows<R: Real>(x: &mut ViewMut<'_, R>, block: usize) -> Result<()> {
    let ([batch, heads, seq, dim], [.., unit]) = (x.sizes(), x.strides());
    check(dim, block)?;
    if unit != 1 && dim > 1 {
        return Err(AttnError::Unsupported { what: "a Hadamard rotation of rows that are not contiguous" });
    }
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..seq {
                if let Some(row) = x.row_mut(b, h, s) {
                    rotate(row, block)?;
                }
            }
        }
    }
    Ok(())
}

#[inline]
const fn check(len: usize, block: usize) -> Result<()> {
    if !block.is_power_of_two() {
        return Err(AttnError::Option { name: "block of a Hadamard rotation", must: "a power of two" });
    }
    let whole = len & !(block - 1);
    AttnError::check_size("numbers of a row (a whole number of Hadamard blocks)", whole, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;
    use std::vec::Vec;

    #[test]
    fn a_rotation_is_the_matrix() {
        for block in [1usize, 2, 8, 32, 128] {
            if cfg!(miri) && block > 32 {
                break; // Miri takes hundreds of times as long, and looks for something else.
            }
            let x: Vec<f64> = (0..2 * block).map(|n| libm::sin(n as f64 * 1.3)).collect();
            let mut got = x.clone();
            rotate(&mut got, block).unwrap();
            for (n, got) in got.iter().enumerate() {
                let (piece, row) = (n / block * block, n % block);
                // Sylvester's matrix: the sign is the parity of the bits that both indices have.
                let sign = |column: usize| if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let want: f64 = (0..block).map(|c| sign(c) * x[piece + c]).sum::<f64>() / libm::sqrt(block as f64);
                assert!((got - want).abs() < 1e-12, "{block} {n}");
            }
            rotate(&mut got, block).unwrap();
            assert!(got.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-12), "its own inverse");
        }
    }

    #[test]
    fn blocks_that_do_not_fit_are_named() {
        let text = |len: usize, block| rotate(&mut std::vec![0.0f32; len], block).unwrap_err().to_string();
        assert_eq!(text(12, 3), "block of a Hadamard rotation must be a power of two");
        assert_eq!(text(12, 0), "block of a Hadamard rotation must be a power of two");
        assert_eq!(text(12, 8), "numbers of a row (a whole number of Hadamard blocks): expected 8, found 12");
    }
}
