//! Repeatable inputs, comparison and finite differences for the tests of layers and gradients.

pub use crate::tolerance::{DIFFERENCE, DIFFERENCE_F32, SUMS_F64 as EXACT};

/// A repeatable stream of numbers that look uniform in −1..1 (SplitMix64).
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    #[allow(clippy::should_implement_trait, reason = "it never ends: an Option would say nothing")]
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// The next `n` numbers.
    pub fn take(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// Fails unless both slices agree to `tolerance`, relative to the largest expected value or 1.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let size = want.iter().fold(1.0f64, |size, x| size.max(x.abs()));
    for (n, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * size,
            "{what}[{n}]: got {got:e}, want {want:e} (tolerance {tolerance:e})"
        );
    }
}

/// The gradient of `f` at `x` by central differences.
pub fn differences(x: &[f64], mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let h = 1e-5;
    let mut moved = x.to_vec();
    (0..x.len())
        .map(|n| {
            moved[n] = x[n] + h;
            let above = f(&moved);
            moved[n] = x[n] - h;
            let below = f(&moved);
            moved[n] = x[n];
            (above - below) / (2.0 * h)
        })
        .collect()
}

/// `Σ a·b`.
pub fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
