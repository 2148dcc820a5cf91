//! When two tensors agree.

use super::case::Tolerance;

/// Compares two tensors as doubles. `Ok` is the worst difference as a share of the allowed one.
///
/// They agree when the shapes are identical, neither holds a NaN, infinities are in the same places with the same
/// sign, and elsewhere `|got − want| ≤ atol + rtol·|want|`. A NaN never agrees with anything, not even with a NaN.
///
/// # Errors
/// The first difference in words.
///
/// ```
/// use attn_testing::conformance::{Tolerance, compare::compare};
/// let tol = Tolerance { atol: 0.1, rtol: 0.0 };
/// assert!(compare((&[2], &[1.0, 2.0]), (&[2], &[1.05, 2.0]), tol).is_ok());
/// assert!(compare((&[1], &[f64::NAN]), (&[1], &[f64::NAN]), tol).is_err());
/// ```
pub fn compare(got: (&[usize], &[f64]), want: (&[usize], &[f64]), tol: Tolerance) -> Result<f64, String> {
    if got.0 != want.0 {
        return Err(format!("shape {:?}, expected {:?}", got.0, want.0));
    }
    if got.1.len() != want.1.len() {
        return Err(format!("{} elements, expected {}", got.1.len(), want.1.len()));
    }
    let (mut worst, mut wrong, mut first) = (0.0f64, 0usize, None);
    for (at, (&got, &want)) in got.1.iter().zip(want.1).enumerate() {
        let share = share(got, want, tol);
        if share <= 1.0 {
            worst = worst.max(share);
        } else {
            wrong += 1;
            first.get_or_insert((at, got, want));
        }
    }
    match first {
        None => Ok(worst),
        Some((at, got, expected)) => {
            let index = unravel(at, want.0);
            Err(format!(
                "{wrong} of {} elements differ, first at {index:?}: {got:e}, expected {expected:e}",
                want.1.len()
            ))
        }
    }
}

/// The difference as a share of the allowed one; 0 if both are the same infinity, infinite if they cannot agree.
fn share(got: f64, want: f64, tol: Tolerance) -> f64 {
    if got.is_nan() || want.is_nan() {
        return f64::INFINITY;
    }
    if got.is_infinite() || want.is_infinite() {
        return if got == want { 0.0 } else { f64::INFINITY };
    }
    let (difference, allowed) = ((got - want).abs(), tol.atol + tol.rtol * want.abs());
    if difference == 0.0 {
        0.0
    } else if difference <= allowed {
        difference / allowed
    } else {
        f64::INFINITY
    }
}

/// The position of an element of a row-major tensor.
fn unravel(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (slot, &size) in index.iter_mut().zip(shape).rev() {
        *slot = at % size.max(1);
        at /= size.max(1);
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOL: Tolerance = Tolerance { atol: 1e-3, rtol: 1e-2 };

    fn one(got: f64, want: f64) -> bool {
        compare((&[1], &[got]), (&[1], &[want]), TOL).is_ok()
    }

    #[test]
    fn a_nan_on_either_side_or_both_is_a_failure() {
        assert!(!one(f64::NAN, 0.0) && !one(0.0, f64::NAN) && !one(f64::NAN, f64::NAN));
    }

    #[test]
    fn infinities_agree_only_with_themselves() {
        let inf = f64::INFINITY;
        assert!(one(inf, inf) && one(-inf, -inf));
        assert!(!one(inf, -inf) && !one(inf, 1e300) && !one(1e300, inf) && !one(0.0, -inf));
    }

    #[test]
    fn the_tolerance_is_absolute_plus_relative_to_the_expectation() {
        assert!(one(1.0109, 1.0) && !one(1.0111, 1.0));
        assert!(one(0.0009, 0.0) && !one(0.0011, 0.0));
        let exact = Tolerance { atol: 0.0, rtol: 0.0 };
        assert!(compare((&[1], &[3.0]), (&[1], &[3.0]), exact).is_ok());
        assert!(compare((&[1], &[3.0]), (&[1], &[3.0000001]), exact).is_err());
    }

    #[test]
    fn shapes_are_compared_not_only_counts() {
        assert!(compare((&[2, 3], &[0.0; 6]), (&[3, 2], &[0.0; 6]), TOL).is_err());
        assert!(compare((&[0, 3], &[]), (&[0, 3], &[]), TOL).is_ok());
    }

    #[test]
    fn the_message_names_the_first_place() {
        let message = compare((&[2, 2], &[0.0, 0.0, 5.0, 0.0]), (&[2, 2], &[0.0; 4]), TOL).unwrap_err();
        assert!(message.contains("[1, 0]") && message.contains("1 of 4"), "{message}");
    }
}
