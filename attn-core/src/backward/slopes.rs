//! The score again, with its derivatives by the dot product and by the bias.

use crate::element::Real;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::At;

/// A finished score and how it moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slopes {
    pub(super) score: f64,
    /// `∂score/∂(q·k)`, the scale included.
    pub(super) by_dot: f64,
    /// `∂score/∂bias`.
    pub(super) by_bias: f64,
}

/// Follows [`Problem::score`] step by step; `None` where `score_mod` does not know its derivative.
#[inline]
pub(super) fn of<M: Mods>(problem: &Problem<'_, '_, M>, dot: f64, at: At) -> Option<Slopes> {
    let attn = problem.attn();
    let (mut by_dot, mut by_bias) = (problem.scale(), 1.0);
    if let Some(cap) = attn.get_softcap() {
        by_dot *= cap_slope(dot * problem.scale(), cap);
    }
    if M::SCORE_MOD {
        // score_mod sees the score before it and before the temperature.
        let slope = attn.get_mods().derivative(problem.before_mods(&problem.factors(), dot, at), at)?;
        by_dot *= slope;
        by_bias *= slope;
    }
    if let Some(t) = attn.get_temperature() {
        by_dot /= t;
        by_bias /= t;
    }
    Some(Slopes { score: problem.score(dot, at), by_dot, by_bias })
}

/// `∂s/∂(q·k)` of a key that no bias and no score_mod touches.
pub(super) fn by_dot<M: Mods>(problem: &Problem<'_, '_, M>, dot: f64) -> f64 {
    let attn = problem.attn();
    let capped = attn.get_softcap().map_or(1.0, |cap| cap_slope(dot * problem.scale(), cap));
    problem.scale() * capped / attn.get_temperature().unwrap_or(1.0)
}

/// The derivative of `c·tanh(s/c)`: `1 − tanh²(s/c)`, written as `4e/(1 + e)²` with `e = exp(−2|s/c|)`, which keeps its
/// digits where the cap saturates.
#[inline]
pub(super) fn cap_slope(s: f64, cap: f64) -> f64 {
    let e = Real::exp(-2.0 * (s / cap).abs());
    4.0 * e / ((1.0 + e) * (1.0 + e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_of_the_cap_keeps_its_digits() {
        for s in [0.0f64, 0.1, 1.0, -3.0, 10.0] {
            let t = (s / 2.0).tanh();
            assert!((cap_slope(s, 2.0) - (1.0 - t * t)).abs() < 1e-15);
        }
        let far = 4.0 * (-80.0f64).exp(); // 1 − tanh² would be 0
        assert!((cap_slope(-80.0, 2.0) / far - 1.0).abs() < 1e-14);
        assert_eq!(cap_slope(f64::INFINITY, 2.0), 0.0);
    }
}
