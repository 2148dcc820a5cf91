//! How a cost grows: a power law fitted to measured points.

use serde::{Deserialize, Serialize};

/// `cost = factor · n^exponent`, fitted by least squares on the logarithms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PowerLaw {
    /// The exponent.
    pub exponent: f64,
    /// The cost at `n = 1` (meaningful only as a coefficient).
    pub factor: f64,
    /// Coefficient of determination on the logarithms; 1 where all points lie on the line.
    pub r2: f64,
    /// The smallest n that took part.
    pub from_n: usize,
    /// The largest n that took part.
    pub to_n: usize,
    /// How many points took part.
    pub points: usize,
}

impl PowerLaw {
    /// Fits all points; `None` for fewer than two different n, or where a cost is not positive.
    ///
    /// ```
    /// use attn_bench::fit::PowerLaw;
    /// let law = PowerLaw::fit(&[(10, 300.0), (20, 1200.0), (40, 4800.0)]).unwrap();
    /// assert!((law.exponent - 2.0).abs() < 1e-12 && (law.factor - 3.0).abs() < 1e-9 && law.r2 > 0.999_999);
    /// ```
    pub fn fit(points: &[(usize, f64)]) -> Option<Self> {
        if points.iter().any(|&(n, cost)| n == 0 || !(cost.is_finite() && cost > 0.0)) {
            return None;
        }
        let logs: Vec<(f64, f64)> = points.iter().map(|&(n, cost)| ((n as f64).ln(), cost.ln())).collect();
        let count = logs.len() as f64;
        let mean_x = logs.iter().map(|p| p.0).sum::<f64>() / count;
        let mean_y = logs.iter().map(|p| p.1).sum::<f64>() / count;
        let sxx: f64 = logs.iter().map(|p| (p.0 - mean_x).powi(2)).sum();
        let syy: f64 = logs.iter().map(|p| (p.1 - mean_y).powi(2)).sum();
        let sxy: f64 = logs.iter().map(|p| (p.0 - mean_x) * (p.1 - mean_y)).sum();
        if logs.len() < 2 || sxx <= f64::EPSILON {
            return None;
        }
        let exponent = sxy / sxx;
        let residual: f64 = logs.iter().map(|p| (p.1 - mean_y - exponent * (p.0 - mean_x)).powi(2)).sum();
        Some(Self {
            exponent,
            factor: (mean_y - exponent * mean_x).exp(),
            r2: if syy <= f64::EPSILON { 1.0 } else { 1.0 - residual / syy },
            from_n: points.iter().map(|p| p.0).min()?,
            to_n: points.iter().map(|p| p.0).max()?,
            points: points.len(),
        })
    }

    /// Fits only the larger n, where the quadratic part rules: those from a sixteenth of the largest on, and never fewer
    /// than the four largest.
    pub fn fit_large(points: &[(usize, f64)]) -> Option<Self> {
        let mut sorted = points.to_vec();
        sorted.sort_unstable_by_key(|p| p.0);
        let largest = sorted.last()?.0;
        let first = sorted.iter().position(|p| p.0 >= largest / 16).unwrap_or(0);
        Self::fit(&sorted[first.min(sorted.len().saturating_sub(4))..])
    }

    /// The cost at `n`.
    pub fn at(&self, n: f64) -> f64 {
        self.factor * n.powf(self.exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_lowers_r2_and_a_flat_cost_has_exponent_zero() {
        let exact: Vec<_> = (1..8).map(|i| (1 << i, 5.0 * f64::from(1 << i).powf(1.5))).collect();
        let law = PowerLaw::fit(&exact).unwrap();
        assert!((law.exponent - 1.5).abs() < 1e-12 && (law.r2 - 1.0).abs() < 1e-12);
        let noisy: Vec<_> = exact.iter().enumerate().map(|(i, &(n, c))| (n, c * [1.0, 2.0][i % 2])).collect();
        let law = PowerLaw::fit(&noisy).unwrap();
        assert!(law.r2 < 0.999 && (law.exponent - 1.5).abs() < 0.2, "{law:?}");
        let flat = PowerLaw::fit(&[(2, 7.0), (4, 7.0), (8, 7.0)]).unwrap();
        assert_eq!((flat.exponent, flat.r2), (0.0, 1.0));
        assert!((law.at(2.0) / law.factor).log2() - law.exponent < 1e-12);
    }

    #[test]
    fn what_cannot_be_fitted_is_none() {
        assert_eq!(PowerLaw::fit(&[]), None);
        assert_eq!(PowerLaw::fit(&[(4, 1.0)]), None);
        assert_eq!(PowerLaw::fit(&[(4, 1.0), (4, 2.0)]), None);
        assert_eq!(PowerLaw::fit(&[(4, 1.0), (8, 0.0)]), None);
        assert_eq!(PowerLaw::fit(&[(0, 1.0), (8, 1.0)]), None);
        assert_eq!(PowerLaw::fit(&[(1, 1.0), (8, f64::NAN)]), None);
        assert_eq!(PowerLaw::fit_large(&[]), None);
    }

    #[test]
    fn only_the_larger_lengths_count() {
        // A constant part that rules at small n, as call overhead does.
        let points: Vec<_> = (0..12).map(|i| 1usize << i).map(|n| (n, 1e4 + (n * n) as f64)).collect();
        let law = PowerLaw::fit_large(&points).unwrap();
        assert_eq!((law.from_n, law.to_n, law.points), (128, 2048, 5));
        assert!(law.exponent > PowerLaw::fit(&points).unwrap().exponent);
        let few = PowerLaw::fit_large(&[(1, 1.0), (100, 1e4), (200, 4e4)]).unwrap();
        assert_eq!(few.points, 3);
    }
}
