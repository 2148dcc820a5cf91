//! Deterministic inputs: numbers much like N(0, 1), bools, and nonfinite numbers.
//!
//! An element's value depends on the seed and its logical place `[batch, head, seq, dim]` alone, never on the layout or
//! the sizes of its tensor. So the same tensor can be laid out in any way, and a shorter one is a prefix of a longer
//! one.

use attn_core::Element;

/// A small generator (SplitMix64, Steele et al. 2014): the same numbers on every machine.
#[derive(Clone, Copy, Debug)]
pub struct Paint(u64);

impl Paint {
    /// From a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`; 0 for `n = 0`.
    pub const fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform() < p
    }

    /// One of a list, which must not be empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Mean 0, variance 1, within ±6: the sum of twelve uniforms less 6, which needs no elementary function.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| (self.next() >> 40) as f64 / (1u64 << 24) as f64).sum::<f64>() - 6.0
    }
}

/// The finalizer of SplitMix64.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A number for a place: mean 0, variance 1.
pub fn normal_at(seed: u64, place: [usize; 4]) -> f64 {
    let mut state = mix(seed);
    for at in place {
        state = mix(state ^ (at as u64).wrapping_add(0x9e37_79b9_7f4a_7c15));
    }
    Paint::new(state).normal()
}

/// `n` numbers, mean 0 and standard deviation `sigma`.
pub fn normals<T: Element>(seed: u64, n: usize, sigma: f64) -> Vec<T> {
    let mut paint = Paint::new(seed);
    (0..n).map(|_| T::from_f64(sigma * paint.normal())).collect()
}

/// `n` bools, true with probability `p`.
pub fn bools(seed: u64, n: usize, p: f64) -> Vec<bool> {
    let mut paint = Paint::new(seed);
    (0..n).map(|_| paint.chance(p)).collect()
}

/// The `n`-th number of memory that must not be read: NaN and both infinities, in turn.
pub fn nonfinite<T: Element>(n: usize) -> T {
    T::from_f64([f64::NAN, f64::INFINITY, f64::NEG_INFINITY][n % 3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_mean_0_and_variance_1() {
        let all: Vec<f64> = (0..40_000).map(|n| normal_at(3, [n / 10_000, n / 1000 % 10, n % 1000, 7])).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let variance = all.iter().map(|x| x * x).sum::<f64>() / all.len() as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "mean {mean}, variance {variance}");
    }

    #[test]
    fn every_coordinate_counts() {
        let base = normal_at(1, [0, 0, 0, 0]);
        for place in [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]] {
            assert!(normal_at(1, place) != base);
        }
        assert!(normal_at(2, [0; 4]) != base);
    }
}
