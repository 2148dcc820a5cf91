//! The sinusoidal table of the original Transformer: each pair of dims rotates at a speed of its own.
//!
//! `pe[pos, 2i] = sin(pos/base^(2i/d_model))`, `pe[pos, 2i+1] = cos(same)`, base 10 000 (Vaswani et al. 2017, arXiv
//! 1706.03762, §3.5). Nothing is learned, and any position has a row.

use attn_core::position::Positions;
use attn_core::{AttnError, Element, Result, ViewMut};

/// The table's one parameter. Any `d_model` will do; an odd one ends with a sine.
///
/// ```
/// use attn_core::position::{Positions, };
/// use attn_layers::position::sinusoidal::Sinusoidal;
/// use attn_core::ViewMut;
/// let mut table = [0.0f32; 3 * 4];
/// Sinusoidal::new().fill(&mut ViewMut::matrix(&mut table, 3, 4)?, Positions::Offset(0))?;
/// assert_eq!(table[..4], [0.0, 1.0, 0.0, 1.0]); // position 0
/// assert_eq!(table[4..8], [1f64.sin(), 1f64.cos(), 0.01f64.sin(), 0.01f64.cos()].map(|x| x as f32));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sinusoidal {
    /// The slowest hand's wavelength is `2π·base`. Finite and above 0.
    pub base: f64,
}

impl Sinusoidal {
    /// Base 10 000.
    pub const fn new() -> Self {
        Self { base: 10_000.0 }
    }

    /// One entry of the table.
    pub fn value(&self, position: isize, dim: usize, d_model: usize) -> f64 {
        let angle = position as f64 * self.frequency(dim, d_model);
        if dim.is_multiple_of(2) { libm::sin(angle) } else { libm::cos(angle) }
    }

    fn frequency(&self, dim: usize, d_model: usize) -> f64 {
        let pair = dim - dim % 2;
        1.0 / libm::pow(self.base, pair as f64 / d_model as f64)
    }

    /// Writes the rows of the given positions, `out`: `[batch, heads, seq, d_model]` (a table is a matrix:
    /// [`ViewMut::matrix`]; every head gets the same).
    ///
    /// # Errors
    /// [`AttnError::Option`] for a base without meaning, [`AttnError::Size`] if the positions do not fit.
    pub fn fill<T: Element>(&self, out: &mut ViewMut<'_, T>, positions: Positions<'_>) -> Result<()> {
        self.each(out, positions, |_, pe| pe)
    }

    /// Adds the rows of the given positions to embeddings, `x`: `[batch, heads, seq, d_model]`, rounding once.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn add<T: Element>(&self, x: &mut ViewMut<'_, T>, positions: Positions<'_>) -> Result<()> {
        self.each(x, positions, |x, pe| x + pe)
    }

    fn each<T: Element>(
        &self,
        x: &mut ViewMut<'_, T>,
        positions: Positions<'_>,
        f: impl Fn(f64, f64) -> f64,
    ) -> Result<()> {
        if !(self.base.is_finite() && self.base > 0.0) {
            return Err(AttnError::Option { name: "sinusoidal base", must: "finite and above 0" });
        }
        let [batch, heads, seq, d_model] = x.sizes();
        positions.check(batch, seq)?;
        for b in 0..batch {
            for s in 0..seq {
                let position = positions.of(b, s, seq);
                for d in 0..d_model {
                    let pe = self.value(position, d, d_model);
                    for h in 0..heads {
                        let old = x.as_view().at(b, h, s, d).to_f64();
                        x.set(b, h, s, d, T::from_f64(f(old, pe)));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Default for Sinusoidal {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_is_a_rotation_of_every_pair() {
        // sin and cos of (p + k)·f from those of p and k: the property that the paper chose the waves for.
        let (table, d_model) = (Sinusoidal { base: 500.0 }, 12);
        for (p, k) in [(3, 9), (100, -40), (7, 0)] {
            for d in (0..d_model).step_by(2) {
                let of = |position| (table.value(position, d, d_model), table.value(position, d + 1, d_model));
                let ((sp, cp), (sk, ck), (s, c)) = (of(p), of(k), of(p + k));
                assert!((s - (sp * ck + cp * sk)).abs() < 1e-14 && (c - (cp * ck - sp * sk)).abs() < 1e-14);
            }
        }
        assert!((table.value(1, 10, 12) - libm::sin(libm::pow(500.0, -10.0 / 12.0))).abs() < 1e-16);
    }

    #[test]
    fn adding_is_filling_onto_embeddings() {
        let (mut table, mut x) = ([0.0f64; 10], [1.0f64; 10]);
        let positions = Positions::Shared(&[4, 2]);
        Sinusoidal::new().fill(&mut ViewMut::matrix(&mut table, 2, 5).unwrap(), positions).unwrap();
        Sinusoidal::new().add(&mut ViewMut::matrix(&mut x, 2, 5).unwrap(), positions).unwrap();
        for (x, pe) in x.iter().zip(table) {
            assert_eq!(*x, 1.0 + pe);
        }
        assert_eq!(table[5], libm::sin(2.0));
        let mut out = [7.0f64; 4];
        let bad = Sinusoidal { base: 0.0 };
        assert!(bad.fill(&mut ViewMut::matrix(&mut out, 2, 2).unwrap(), Positions::Offset(0)).is_err());
        assert_eq!(out, [7.0; 4]);
    }
}
