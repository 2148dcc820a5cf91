//! From which length on attention costs more than the parts of a layer that grow only linearly in n.
//!
//! With `d = heads · head_dim`, one layer of a transformer needs
//!
//! - attention: `4·n²·d` FLOPs (scores and weighted values),
//! - projections q, k, v and output: `8·n·d²`,
//!
//! and a plain recurrent (Elman) layer `4·n·d²` (input and recurrent matrix). At one and the same rate attention meets
//! the projections at `n = 2d` and the recurrent layer at `n = d` (compare Vaswani et al. 2017, arXiv 1706.03762, table
//! 1; [`attn_layers::cost`] has the closed forms).
//!
//! The times given here are partly measured: attention by its fitted curve, scaled from the measured head dims to `d`;
//! the other two by the FLOP counts above at the rate that the SIMD engine reached, as if a matrix product ran at that
//! rate. That favours the recurrent layer, whose steps depend on each other and cannot be blocked.

use attn_layers::cost::{Model, rnn_flops};
use serde::{Deserialize, Serialize};

use crate::fit::PowerLaw;

/// Where attention meets the linear parts, for one model width.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crossover {
    /// Model width `d`.
    pub width: usize,
    /// Length from which attention takes longer than the four projections.
    pub projections: Option<f64>,
    /// Length from which attention takes longer than a recurrent layer.
    pub recurrent: Option<f64>,
}

/// Model widths that the report shows: a small encoder, BERT/GPT-2 base, a 1B and an 8B decoder.
pub const WIDTHS: [usize; 4] = [384, 768, 2048, 4096];

/// The model that the crossovers are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    /// Fitted seconds of attention, for `measured_width` = heads · head_dim.
    pub attention: PowerLaw,
    /// Width that the attention was measured at.
    pub measured_width: usize,
    /// FLOP/s that the linear parts are assumed to run at.
    pub rate: f64,
}

impl Linear {
    /// Seconds of attention at `n` and `width`.
    pub fn attention_seconds(&self, n: f64, width: usize) -> f64 {
        self.attention.at(n) * width as f64 / self.measured_width.max(1) as f64
    }

    /// Seconds of the four projections.
    pub fn projection_seconds(&self, n: f64, width: usize) -> f64 {
        n * Model::multi_head(width, 1, 1).projection_flops(1) as f64 / self.rate
    }

    /// Seconds of a recurrent layer.
    pub fn recurrent_seconds(&self, n: f64, width: usize) -> f64 {
        n * rnn_flops(1, width) as f64 / self.rate
    }

    /// Both crossings at one width.
    pub fn crossover(&self, width: usize) -> Crossover {
        // a·n^e = b·n has one solution above 0 where e ≠ 1; attention is the larger from there on where e > 1.
        let meet = |linear_per_token: f64| {
            let per_token = self.attention_seconds(1.0, width);
            let n = (linear_per_token / per_token).powf(1.0 / (self.attention.exponent - 1.0));
            (self.attention.exponent > 1.0 && n.is_finite()).then_some(n)
        };
        Crossover {
            width,
            projections: meet(self.projection_seconds(1.0, width)),
            recurrent: meet(self.recurrent_seconds(1.0, width)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_one_rate_the_closed_forms_come_out() {
        let (rate, width) = (1e11, 64usize);
        let attention: Vec<_> = [256usize, 512, 1024].map(|n| (n, 4.0 * (n * n * width) as f64 / rate)).to_vec();
        let linear = Linear { attention: PowerLaw::fit(&attention).unwrap(), measured_width: width, rate };
        for d in WIDTHS {
            let c = linear.crossover(d);
            assert!((c.projections.unwrap() / (2.0 * d as f64) - 1.0).abs() < 1e-6, "{c:?}");
            assert!((c.recurrent.unwrap() / d as f64 - 1.0).abs() < 1e-6, "{c:?}");
            let n = c.projections.unwrap();
            assert!((linear.attention_seconds(n, d) / linear.projection_seconds(n, d) - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn a_curve_that_is_not_steeper_never_crosses() {
        let flat = PowerLaw { exponent: 1.0, exponent_95: None, factor: 1.0, r2: 1.0, from_n: 1, to_n: 2, points: 2 };
        let linear = Linear { attention: flat, measured_width: 64, rate: 1e9 };
        assert_eq!(linear.crossover(64).projections, None);
    }
}
