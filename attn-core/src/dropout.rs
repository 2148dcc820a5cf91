//! Dropout on the attention weights, the same in every engine and for every thread count.
//!
//! A kept weight is multiplied by `1/(1 − p)` (inverted scaling, Srivastava et al. 2014), so that nothing changes at
//! inference. The kept weights are either a tensor of the caller's, or drawn by a counter-based generator: the draw is
//! a hash of seed, batch, head, query and key, so that it needs no state and no order.

use crate::element::Real;
use crate::error::{AttnError, Result};
use crate::shape::{At, AttnShape};
use crate::view::View;

/// Which weights to drop after the softmax.
#[derive(Clone, Copy, Debug, Default)]
pub enum Dropout<'a> {
    /// None.
    #[default]
    None,
    /// Each with probability `p`, drawn from the seed.
    Seeded {
        /// Probability of dropping a weight, `0 ≤ p < 1`.
        p: f32,
        /// Seed of the generator.
        seed: u64,
    },
    /// Those at which a tensor is false. It broadcasts to `[batch, q_heads, q_len, kv_len]`.
    Keep {
        /// `true` keeps the weight.
        mask: View<'a, bool>,
        /// The probability that the tensor was drawn with, `0 ≤ p < 1`: kept weights are multiplied by `1/(1 − p)`.
        p: f32,
    },
}

impl Dropout<'_> {
    /// Whether weights can be dropped or scaled at all.
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    #[doc(hidden)]
    pub fn check(&self, shape: &AttnShape) -> Result<()> {
        let p = match self {
            Self::None => return Ok(()),
            Self::Seeded { p, .. } | Self::Keep { p, .. } => *p,
        };
        if !(0.0..1.0).contains(&p) {
            return Err(AttnError::Option { name: "dropout p", must: "at least 0 and below 1" });
        }
        if let Self::Keep { mask, .. } = self {
            mask.check_broadcast("dropout mask", [shape.batch, shape.q_heads, shape.q_len, shape.kv_len])?;
        }
        Ok(())
    }

    /// The factor on kept weights, `1/(1 − p)`.
    pub fn factor(&self) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Seeded { p, .. } | Self::Keep { p, .. } => 1.0 / (1.0 - f64::from(*p)),
        }
    }

    /// As [`factor`](Self::factor) in the type that an engine computes in, without double precision for `f32`.
    #[inline]
    pub(crate) fn factor_in<R: Real>(&self) -> R {
        match self {
            Self::None => R::ONE,
            Self::Seeded { p, .. } | Self::Keep { p, .. } => R::ONE / (R::ONE - R::of(f64::from(*p))),
        }
    }

    /// Whether one weight is kept.
    #[inline]
    pub fn keeps(&self, at: At) -> bool {
        match self {
            Self::None => true,
            Self::Seeded { p, seed } => RowDraws::new(*seed, at.batch, at.head, at.query).keeps(at.key, threshold(*p)),
            Self::Keep { mask, .. } => mask.at_broadcast(at.batch, at.head, at.query, at.key),
        }
    }

    /// Bit `n` says whether the row keeps the weight of key `start + n`, for `n < 64`. Bits of keys from `kv_len` on
    /// have no meaning.
    #[inline(always)]
    pub fn row_bits(&self, shape: &AttnShape, batch: usize, head: usize, query: usize, start: usize) -> u64 {
        self.row_bits_by(shape, [batch, head, query, start], crate::mask::bits::pack_bools)
    }

    /// As [`row_bits`](Self::row_bits) of `[batch, head, query, start]`, with a function that packs bools into bits,
    /// the first in the lowest.
    #[doc(hidden)]
    #[inline(always)]
    pub fn row_bits_by(
        &self,
        shape: &AttnShape,
        [batch, head, query, start]: [usize; 4],
        pack: impl Fn(&[bool; 64]) -> u64,
    ) -> u64 {
        match self {
            Self::None => u64::MAX,
            Self::Seeded { p, seed } => pack(&RowDraws::new(*seed, batch, head, query).keep(start, threshold(*p))),
            Self::Keep { mask, .. } => {
                crate::mask::DenseMask { mask: *mask, keep: true }.row_bits(batch, head, query, start, shape.kv_len)
            }
        }
    }
}

/// A draw below this drops the weight: `p·2³²`, rounded.
#[inline]
pub(crate) fn threshold(p: f32) -> u32 {
    (p * 4_294_967_296.0) as u32 // exact: a power of two
}

/// The draws of one row: a hash of (seed, batch, head, query), then per key a 32-bit mix that vectorises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowDraws {
    a: u32,
    b: u32,
}

impl RowDraws {
    #[inline(always)]
    pub(crate) fn new(seed: u64, batch: usize, head: usize, query: usize) -> Self {
        let mut x = seed;
        for part in [batch, head, query] {
            x = mix64(x ^ (part as u64).wrapping_add(0x9e37_79b9_7f4a_7c15));
        }
        Self { a: x as u32, b: (x >> 32) as u32 }
    }

    /// One uniform 32-bit draw.
    #[inline(always)]
    fn draw(self, key: u32) -> u32 {
        // "Prospecting for hash functions" constants (Wellons' lowbias32 family), keyed before and after.
        let mut x = key.wrapping_mul(0x9e37_79b9) ^ self.a;
        x ^= x >> 16;
        x = x.wrapping_mul(0x21f0_aaad);
        x ^= x >> 15;
        x = x.wrapping_mul(0x735a_2d97).wrapping_add(self.b);
        x ^= x >> 15;
        x = x.wrapping_mul(0x846c_a68b);
        x ^ (x >> 16)
    }

    #[inline]
    pub(crate) fn keeps(self, key: usize, threshold: u32) -> bool {
        self.draw(key as u32) >= threshold
    }

    /// 64 draws at once; written so that a compiler turns the loop into lanes.
    #[inline(always)]
    fn keep(self, start: usize, threshold: u32) -> [bool; 64] {
        core::array::from_fn(|n| self.draw((start as u32).wrapping_add(n as u32)) >= threshold)
    }
}

/// The finalizer of SplitMix64 (Steele et al. 2014).
#[inline]
fn mix64(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_the_single_draws() {
        let row = RowDraws::new(7, 1, 2, 3);
        for start in [0, 5, 64, 1000] {
            let keep = row.keep(start, threshold(0.3));
            for n in 0..64 {
                assert_eq!(keep[n], row.keeps(start + n, threshold(0.3)));
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "statistics over many draws; nothing that Miri looks for")]
    fn the_share_kept_is_one_minus_p() {
        for p in [0.0, 0.1, 0.5, 0.9] {
            let mut kept = 0;
            for query in 0..200 {
                for start in (0..512).step_by(64) {
                    kept +=
                        RowDraws::new(42, 0, 1, query).keep(start, threshold(p)).iter().filter(|keep| **keep).count();
                }
            }
            let share = kept as f64 / (200.0 * 512.0);
            // Six standard deviations of a binomial share: a wrong threshold or a biased hash is far outside.
            let bound = 6.0 * (f64::from(p) * f64::from(1.0 - p) / (200.0 * 512.0)).sqrt();
            assert!((share - f64::from(1.0 - p)).abs() <= bound, "p = {p}: kept {share}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "statistics over many draws; nothing that Miri looks for")]
    fn neighbouring_rows_and_keys_are_not_alike() {
        // Pairs of draws that agree: half of them for a fair coin, whichever coordinate is moved by one.
        let draw = |b, h, q, k| RowDraws::new(1, b, h, q).keeps(k, threshold(0.5));
        for moved in 0..4 {
            let mut alike = 0;
            for n in 0..4096usize {
                let (b, h, q, k) = (n % 4, n / 4 % 4, n / 16 % 16, n / 256);
                let other = match moved {
                    0 => draw(b + 1, h, q, k),
                    1 => draw(b, h + 1, q, k),
                    2 => draw(b, h, q + 1, k),
                    _ => draw(b, h, q, k + 1),
                };
                alike += usize::from(draw(b, h, q, k) == other);
            }
            assert!((1856..=2240).contains(&alike), "coordinate {moved}: {alike} of 4096 alike"); // 2048 ± 6 σ
        }
    }
}
