//! Differential attention: the difference of two softmax maps.
//!
//! ```text
//! y = (softmax(q₁·k₁ᵀ·scale) − λ·softmax(q₂·k₂ᵀ·scale))·v
//! λ = exp(λq₁·λk₁) − exp(λq₂·λk₂) + λ_init,   λ_init = 0.8 − 0.6·exp(−0.3·layer)
//! ```
//!
//! Keys that both maps attend to cancel, as noise does in a differential amplifier (Ye et al. 2024, arXiv 2410.05258).
//! Each head's output is then normalised by itself and multiplied by `1 − λ_init` ([`HeadNorm`]).

use attn_core::element::Real;
use attn_core::engine::{attend_row, dot};
use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Element, Result, View, ViewMut};

/// `0.8 − 0.6·exp(−0.3·layer)`, the first layer being 0.
pub fn lambda_init(layer: usize) -> f64 {
    0.8 - 0.6 * libm::exp(-0.3 * layer as f64)
}

/// λ from its four learned vectors: `exp(q1·k1) − exp(q2·k2) + init`.
///
/// # Errors
/// [`AttnError::Size`] if the vectors of a pair are not of one length.
///
/// ```
/// use attn_layers::variants::differential::lambda;
/// let zero = [0.0f32; 4];
/// assert_eq!(lambda([&zero, &zero], [&zero, &zero], 0.2)?, 0.2); // e⁰ − e⁰ + 0.2
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn lambda<T: Element>([q1, q2]: [&[T]; 2], [k1, k2]: [&[T]; 2], init: f64) -> Result<f64> {
    let term = |q: &[T], k: &[T]| {
        AttnError::check_size("lambda_k against lambda_q", q.len(), k.len())?;
        Ok(libm::exp(q.iter().zip(k).map(|(q, k)| q.to_f64() * k.to_f64()).sum()))
    };
    Ok(term(q1, k1)? - term(q2, k2)? + init)
}

/// The norm of each head's output: `y/√(mean(y²) + eps)·(1 − lambda_init)`, times a weight per dim if given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNorm<'a> {
    /// Added to the mean square; finite and not negative.
    pub eps: f64,
    /// λ_init of this layer.
    pub lambda_init: f64,
    /// One weight per value dim, shared by the heads. `[value_dim]`.
    pub weight: Option<&'a [f32]>,
}

impl HeadNorm<'_> {
    fn check(&self, value_dim: usize) -> Result<()> {
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            return Err(AttnError::Option { name: "norm eps", must: "finite and not negative" });
        }
        if !self.lambda_init.is_finite() {
            return Err(AttnError::Option { name: "lambda_init", must: "finite" });
        }
        self.weight.map_or(Ok(()), |w| AttnError::check_size("norm weight against value_dim", value_dim, w.len()))
    }

    fn apply<R: Real>(&self, y: &mut [R]) {
        let mut squares = R::ZERO;
        for &y in y.iter() {
            squares += y * y;
        }
        let root = (squares / R::of(y.len() as f64) + R::of(self.eps)).sqrt();
        // A row of zeros stays one, also without eps.
        let factor = if root == R::ZERO { R::ZERO } else { R::of(1.0 - self.lambda_init) / root };
        for (d, y) in y.iter_mut().enumerate() {
            let weight = self.weight.and_then(|w| w.get(d)).map_or(R::ONE, |&w| R::of(f64::from(w)));
            *y = *y * factor * weight;
        }
    }
}

/// What differential attention has beyond the options of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Differential<'a> {
    /// λ of each query head, or one for all. `[q_heads]` or `[1]`.
    pub lambda: &'a [f64],
    /// The norm behind it, if any.
    pub norm: Option<HeadNorm<'a>>,
}

impl<'a> Differential<'a> {
    /// Without norm.
    pub const fn new(lambda: &'a [f64]) -> Self {
        Self { lambda, norm: None }
    }

    /// With norm.
    pub const fn norm(mut self, norm: HeadNorm<'a>) -> Self {
        self.norm = Some(norm);
        self
    }

    /// Elements of scratch that [`forward`](Self::forward) needs: one output row of each map.
    pub const fn scratch_len(shape: &AttnShape) -> usize {
        shape.value_dim.saturating_mul(2)
    }

    /// Computes both maps by streaming and their difference, rounding once.
    ///
    /// `q`: the two queries, each `[batch, q_heads, q_len, head_dim]`; `k`: the two keys, each
    /// `[batch, kv_heads, kv_len, head_dim]`; `v`: `[batch, kv_heads, kv_len, value_dim]`; `out`:
    /// `[batch, q_heads, q_len, value_dim]`. The options hold for both maps.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written.
    ///
    /// ```
    /// use attn_layers::variants::differential::Differential;
    /// use attn_core::{Attention, View, ViewMut};
    /// let (q, k) = ([1.0f32, 2.0], [3.0f32, 4.0, 5.0]);
    /// let (q, k) = (View::matrix(&q, 2, 1)?, View::matrix(&k, 3, 1)?);
    /// let mut out = [9.0f32; 2];
    /// let mut view = ViewMut::matrix(&mut out, 2, 1)?;
    /// // Two equal maps and λ = 1 cancel.
    /// Differential::new(&[1.0]).forward(&Attention::new(), [q, q], [k, k], k, &mut view, &mut [0.0; 2])?;
    /// assert_eq!(out, [0.0; 2]);
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn forward<T: Element, O: Element<Compute = T::Compute>, M: Mods>(
        &self,
        attn: &Attention<'_, M>,
        q: [View<'_, T>; 2],
        k: [View<'_, T>; 2],
        v: View<'_, T>,
        out: &mut ViewMut<'_, O>,
        scratch: &mut [T::Compute],
    ) -> Result<()> {
        let ([q1, q2], [k1, k2]) = (q, k);
        let problem = Problem::new(attn, q1.sizes(), k1.sizes(), v.sizes())?;
        let shape = *problem.shape();
        for (expected, found) in q1.sizes().into_iter().zip(q2.sizes()) {
            AttnError::check_size("q2 against q1", expected, found)?;
        }
        for (expected, found) in k1.sizes().into_iter().zip(k2.sizes()) {
            AttnError::check_size("k2 against k1", expected, found)?;
        }
        shape.check_output(out.sizes())?;
        if self.lambda.len() != 1 {
            AttnError::check_size("lambda against q_heads", shape.q_heads, self.lambda.len())?;
        }
        if self.lambda.iter().any(|lambda| !lambda.is_finite()) {
            return Err(AttnError::Option { name: "lambda", must: "finite" });
        }
        if let Some(norm) = &self.norm {
            norm.check(shape.value_dim)?;
        }
        AttnError::check_len("differential scratch", Self::scratch_len(&shape), scratch.len())?;
        let Some((first, rest)) = scratch.split_at_mut_checked(shape.value_dim) else {
            return Ok(());
        };
        let second = rest.get_mut(..shape.value_dim).unwrap_or_default();
        for batch in 0..shape.batch {
            for head in 0..shape.q_heads {
                let lambda = self.lambda.get(head).or(self.lambda.first()).copied().unwrap_or(0.0);
                let kv_head = shape.kv_head(head);
                for query in 0..shape.q_len {
                    for (q, k, acc) in [(q1, k1, &mut *first), (q2, k2, &mut *second)] {
                        let q_row = q.row(batch, head, query);
                        let dot = |key| dot(q_row, k.row(batch, kv_head, key));
                        attend_row(&problem, (batch, head, query), dot, |key| v.row(batch, kv_head, key), acc);
                    }
                    for (y, other) in first.iter_mut().zip(second.iter()) {
                        *y += -(T::Compute::of(lambda) * *other);
                    }
                    if let Some(norm) = &self.norm {
                        norm.apply(first);
                    }
                    for (d, &y) in first.iter().enumerate() {
                        out.set(batch, head, query, d, O::narrow(y));
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::dropout::Dropout;
    use attn_core::{Align, Layout, Mask, reference};
    use std::vec;
    use std::vec::Vec;

    fn numbers(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| libm::sin(seed + i as f64 * 1.7)).collect()
    }

    #[test]
    fn it_is_the_difference_of_two_references() {
        let (q1, q2) = (numbers(2 * 4 * 3 * 5, 0.1), numbers(2 * 4 * 3 * 5, 0.4));
        let (k1, k2, v) = (numbers(2 * 2 * 6 * 5, 0.2), numbers(2 * 2 * 6 * 5, 0.5), numbers(2 * 2 * 6 * 3, 0.3));
        let q = [&q1, &q2].map(|q| View::new(q, Layout::Bshd, [2, 4, 3, 5]).unwrap());
        let k = [&k1, &k2].map(|k| View::new(k, Layout::Bhsd, [2, 2, 6, 5]).unwrap());
        let v = View::new(&v, Layout::Bhsd, [2, 2, 6, 3]).unwrap();
        let attn = Attention::new()
            .mask(Mask::causal(Align::Offset(-1))) // the first row sees nothing
            .dropout(Dropout::Seeded { p: 0.25, seed: 5 });
        let maps = [0, 1].map(|n| {
            let mut out = vec![0.0f64; 72];
            let view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, 3, 3]).unwrap();
            reference::forward(&attn, q[n], k[n], v, view, &mut [0.0; 6]).unwrap();
            out
        });
        let lambda = [0.5, 0.25, -1.0, 0.0];
        let weight = [1.0f32, 2.0, 0.5];
        let norm = HeadNorm { eps: 1e-5, lambda_init: 0.2, weight: Some(&weight) };
        for differential in [Differential::new(&lambda), Differential::new(&lambda).norm(norm)] {
            let mut out = vec![9.0f64; 72];
            let mut view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, 3, 3]).unwrap();
            differential.forward(&attn, q, k, v, &mut view, &mut [0.0; 6]).unwrap();
            for (row, got) in out.chunks(3).enumerate() {
                let lambda = lambda[row / 3 % 4];
                let mut want = [0, 1, 2].map(|d| maps[0][row * 3 + d] - lambda * maps[1][row * 3 + d]);
                if differential.norm.is_some() {
                    let root = libm::sqrt(want.iter().map(|y| y * y).sum::<f64>() / 3.0 + 1e-5);
                    want = [0, 1, 2].map(|d| want[d] / root * 0.8 * f64::from(weight[d]));
                }
                for (got, want) in got.iter().zip(want) {
                    assert!((got - want).abs() < 1e-13, "row {row}: {got} {want}");
                }
            }
            assert_eq!(out[..3], [0.0; 3]);
        }
    }

    #[test]
    fn lambda_follows_the_paper() {
        assert!((lambda_init(0) - 0.2).abs() < 1e-15 && (lambda_init(3) - 0.556_058_204_155_640_6).abs() < 1e-15);
        let l = lambda([&[1.0f32, 2.0], &[0.5]], [&[0.5, 0.25], &[2.0]], 0.1).unwrap();
        assert!((l - (libm::exp(1.0) - libm::exp(1.0) + 0.1)).abs() < 1e-15);
        let l = lambda([&[1.0f64], &[0.0]], [&[2.0], &[1.0]], 0.0).unwrap();
        assert!((l - (libm::exp(2.0) - 1.0)).abs() < 1e-14);
        assert!(lambda([&[1.0f64], &[0.0]], [&[2.0, 1.0], &[1.0]], 0.0).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused_before_writing() {
        let x = [1.0f32; 4];
        let (x, y) = (View::matrix(&x, 2, 2).unwrap(), View::matrix(&x, 4, 1).unwrap());
        let mut out = [7.0f32; 4];
        let mut refused = |d: Differential<'_>, q2: View<'_, f32>, k2: View<'_, f32>, scratch: &mut [f32]| {
            let mut out = ViewMut::matrix(&mut out, 2, 2).unwrap();
            d.forward(&Attention::new(), [x, q2], [x, k2], x, &mut out, scratch).is_err()
        };
        let d = Differential::new(&[0.5]);
        assert!(refused(d, y, x, &mut [0.0; 4]) && refused(d, x, y, &mut [0.0; 4]) && refused(d, x, x, &mut [0.0; 3]));
        assert!(refused(Differential::new(&[]), x, x, &mut [0.0; 4]));
        assert!(refused(Differential::new(&[0.5, 0.5]), x, x, &mut [0.0; 4]));
        assert!(refused(Differential::new(&[f64::NAN]), x, x, &mut [0.0; 4]));
        let norm = HeadNorm { eps: -1.0, lambda_init: 0.2, weight: None };
        assert!(refused(d.norm(norm), x, x, &mut [0.0; 4]));
        assert!(refused(d.norm(HeadNorm { eps: 0.0, weight: Some(&[1.0]), ..norm }), x, x, &mut [0.0; 4]));
        assert_eq!(out, [7.0; 4]);
    }
}
