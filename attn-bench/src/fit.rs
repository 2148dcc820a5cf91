//! How a cost grows: a power law fitted to measured points.

use serde::{Deserialize, Serialize};

/// `cost = factor · n^exponent`, fitted by least squares on the logarithms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PowerLaw {
    /// The exponent.
    pub exponent: f64,
    /// The cost at `n = 1` (meaningful only as a coefficient).
    pub factor: f64,
    /// Half the width of the 95 % confidence interval of the exponent, by Student's t over the scatter of the points
    /// about the line; `None` for two points, which are always on one.
    pub exponent_95: Option<f64>,
    /// Coefficient of determination on the logarithms; 1 if all points are on the line.
    pub r2: f64,
    /// The smallest n that took part.
    pub from_n: usize,
    /// The largest n that took part.
    pub to_n: usize,
    /// How many points took part.
    pub points: usize,
}

impl PowerLaw {
    /// Fits all points; `None` for fewer than two different n, or if a cost is not positive.
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
        let freedom = logs.len() - 2;
        let deviation = (freedom > 0).then(|| (residual / freedom as f64 / sxx).sqrt());
        Some(Self {
            exponent,
            exponent_95: deviation.map(|deviation| student_95(freedom) * deviation),
            factor: (mean_y - exponent * mean_x).exp(),
            r2: if syy <= f64::EPSILON { 1.0 } else { 1.0 - residual / syy },
            from_n: points.iter().map(|p| p.0).min()?,
            to_n: points.iter().map(|p| p.0).max()?,
            points: points.len(),
        })
    }

    /// Fits only the larger n, where the quadratic part rules: those from a sixteenth of the largest on, and never
    /// fewer than the four largest.
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

/// The 97.5 % quantile of Student's t: exact to three digits up to 30 degrees of freedom, then by the first two
/// corrections of the normal quantile (Abramowitz and Stegun 26.7.5), which agree with tables to as many.
fn student_95(freedom: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    ];
    const NORMAL: f64 = 1.959_964;
    let exact = freedom.checked_sub(1).and_then(|row| TABLE.get(row)).copied();
    let first = (NORMAL.powi(3) + NORMAL) / 4.0;
    let second = (5.0 * NORMAL.powi(5) + 16.0 * NORMAL.powi(3) + 3.0 * NORMAL) / 96.0;
    exact.unwrap_or(NORMAL + first / freedom as f64 + second / (freedom as f64).powi(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_that_of_the_textbook() {
        // y = e^1, e^2, e^2, e^3 at x = e^0..e^3: slope 0.6, residuals −0.1, 0.3, −0.3, 0.1, so its deviation is
        // √(0.2/2/5).
        let x = [1usize, 10, 100, 1000];
        let y = [1.0f64, 2.0, 2.0, 3.0].map(|y| (y * 10f64.ln()).exp());
        let law = PowerLaw::fit(&x.into_iter().zip(y).collect::<Vec<_>>()).unwrap();
        assert!((law.exponent - 0.6).abs() < 1e-12);
        assert!((law.exponent_95.unwrap() - 4.303 * (0.2f64 / 2.0 / 5.0).sqrt()).abs() < 1e-9, "{law:?}");
        assert_eq!(PowerLaw::fit(&[(2, 7.0), (4, 8.0)]).unwrap().exponent_95, None);
        assert!((student_95(31) - 2.0395).abs() < 5e-4 && (student_95(1000) - 1.962).abs() < 1e-3);
    }

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
