//! The dot product of a query and a key.

use crate::element::{Element, Real};
use crate::row::Row;

/// `q·k`, accumulated in `R`, in four interleaved chains: an error that grows with a quarter of the length costs
/// nothing.
#[inline]
pub fn dot<R: Real, T: Element<Compute = R>>(q: Row<'_, T>, k: Row<'_, T>) -> R {
    if let (Some(q), Some(k)) = (q.as_slice(), k.as_slice()) {
        return dot_slices(q, k);
    }
    let mut sums = [R::ZERO; 4];
    for (i, (q, k)) in q.iter().zip(k.iter()).enumerate() {
        if let Some(sum) = sums.get_mut(i % 4) {
            *sum += q.widen() * k.widen();
        }
    }
    add_up(sums)
}

/// As [`dot`], of slices.
#[inline]
pub fn dot_slices<R: Real, T: Element<Compute = R>>(q: &[T], k: &[T]) -> R {
    let mut sums = [R::ZERO; 4];
    let ((q4, q_rest), (k4, k_rest)) = (q.as_chunks::<4>(), k.as_chunks::<4>());
    for (q, k) in q4.iter().zip(k4) {
        for ((sum, q), k) in sums.iter_mut().zip(q).zip(k) {
            *sum += q.widen() * k.widen();
        }
    }
    for ((sum, q), k) in sums.iter_mut().zip(q_rest).zip(k_rest) {
        *sum += q.widen() * k.widen();
    }
    add_up(sums)
}

fn add_up<R: Real>([a, b, c, d]: [R; 4]) -> R {
    (a + b) + (c + d)
}
