//! Attention states: rows over a part of the keys, which are computed apart and merged afterwards.
//!
//! The state of a row over some of its keys is a maximum, a sum and an undivided output: `max = maxⱼ sⱼ`, `sum = Σⱼ
//! exp(sⱼ − max)`, `out = Σⱼ exp(sⱼ − max)·vⱼ`. [`RowState::merge`] makes one state of two over disjoint keys, in any
//! grouping. So threads, processes or machines can share one attention: each sends `2 + value_dim` numbers per row
//! (split-KV decoding; Milakov & Gimelshein 2018, arXiv 1805.02867). Grouping changes results by rounding only; the
//! same tree of merges gives the same bits.
//!
//! A row is stored as `max, sum, out…`, and rows one after the other, `[batch, q_heads, q_len]`. A buffer holds nothing
//! else, and may be sent as it is between machines of the same byte order.
//!
//! ```
//! use attn_core::state;
//! // One row over scores 0 and 1, and another over score 2; values of dim 1: 10, 20 and 30.
//! let mut left = [1.0f32, (-1.0f32).exp() + 1.0, 10.0 * (-1.0f32).exp() + 20.0];
//! let right = [2.0f32, 1.0, 30.0];
//! state::merge_states(&mut left, &right, 1)?;
//! let mut out = [0.0f32];
//! let lse = state::finish(&left, None, &mut out);
//! let sum: f32 = [0.0f32, 1.0, 2.0].iter().map(|s| s.exp()).sum();
//! let expected = (10.0 + 20.0 * 1f32.exp() + 30.0 * 2f32.exp()) / sum;
//! assert!((out[0] - expected).abs() < 1e-5 && (lse - sum.ln()).abs() < 1e-6);
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use crate::element::Real;
use crate::error::{AttnError, Result};
use crate::shape::AttnShape;
use crate::softmax::RowState;

/// Numbers of one row: maximum, sum, output.
///
/// # Errors
/// [`AttnError::Overflow`].
pub const fn row_len(value_dim: usize) -> Result<usize> {
    match value_dim.checked_add(2) {
        Some(n) => Ok(n),
        None => Err(AttnError::Overflow { what: "value_dim + 2" }),
    }
}

/// Numbers of all rows of a call.
///
/// # Errors
/// [`AttnError::Overflow`] if there are more than `usize` holds.
pub const fn len(shape: &AttnShape) -> Result<usize> {
    let row = match row_len(shape.value_dim) {
        Ok(row) => row,
        Err(e) => return Err(e),
    };
    match shape.rows().checked_mul(row) {
        Some(n) => Ok(n),
        None => Err(AttnError::Overflow { what: "rows · (value_dim + 2)" }),
    }
}

/// Makes every row one that has seen nothing: maximum −∞, sum and output 0.
pub fn clear<R: Real>(rows: &mut [R], value_dim: usize) {
    rows.fill(R::ZERO);
    if let Ok(row) = row_len(value_dim) {
        rows.chunks_exact_mut(row).filter_map(<[R]>::first_mut).for_each(|max| *max = R::NEG_INFINITY);
    }
}

/// Joins the rows of other keys to these, one by one.
///
/// A row that has seen nothing changes no bit of the other. Each merge rounds: hundreds of parts that join one after
/// the other add up their rounding; joined in pairs, and these in pairs, they hardly do.
///
/// # Errors
/// [`AttnError::Size`] if there are not as many of both, or not whole rows. Nothing has been written then.
pub fn merge_states<R: Real>(rows: &mut [R], others: &[R], value_dim: usize) -> Result<()> {
    let row = row_len(value_dim)?;
    AttnError::check_size("states to be merged", rows.len(), others.len())?;
    let whole = rows.len().checked_rem(row).unwrap_or(0);
    AttnError::check_size("states (a whole number of them)", rows.len() - whole, rows.len())?;
    for (row, other) in rows.chunks_exact_mut(row).zip(others.chunks_exact(row)) {
        if let ([max, sum, out @ ..], [other_max, other_sum, other_out @ ..]) = (row, other) {
            if *other_sum == R::ZERO {
                continue;
            }
            let nothing_yet = *sum == R::ZERO;
            let mut state = RowState { max: *max, sum: *sum };
            let (a, b) = state.merge(RowState { max: *other_max, sum: *other_sum });
            (*max, *sum) = (state.max, state.sum);
            for (x, &y) in out.iter_mut().zip(other_out) {
                *x = if nothing_yet { y } else { *x * a + y * b };
            }
        }
    }
    Ok(())
}

/// Divides one row: writes its output and returns its lse. A sink takes part in the sum. A row that has seen nothing is
/// 0, its lse −∞ or the sink.
pub fn finish<R: Real>(row: &[R], sink: Option<f32>, out: &mut [R]) -> R {
    let [max, sum, values @ ..] = row else {
        out.fill(R::ZERO);
        return R::NEG_INFINITY;
    };
    let mut state = RowState { max: *max, sum: *sum };
    let seen_nothing = state.sum == R::ZERO;
    let rescale = sink.map_or(R::ONE, |sink| state.push(R::of(f64::from(sink))).rescale);
    let factor = rescale * state.finish();
    for (out, &value) in out.iter_mut().zip(values) {
        // Beside a sink that outweighs everything a visible NaN stays one.
        *out = if seen_nothing { R::ZERO } else { value * factor };
    }
    state.lse()
}

/// A finished output and its lse as one row: results of other engines can be merged too.
pub fn from_output<R: Real>(out: &[R], lse: R, row: &mut [R]) {
    if let [max, sum, values @ ..] = row {
        let seen = lse != R::NEG_INFINITY;
        (*max, *sum) = (lse, if seen { R::ONE } else { R::ZERO });
        for (value, &x) in values.iter_mut().zip(out) {
            *value = if seen { x } else { R::ZERO };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    /// The row over some scores, whose values are `10·score + 1`.
    fn row(scores: &[f64]) -> Vec<f64> {
        let (mut state, mut out) = (RowState::new(), 0.0);
        for &s in scores {
            let step = state.push(s);
            out = out * step.rescale + step.weight * (10.0 * s + 1.0);
        }
        vec![state.max, state.sum, out]
    }

    #[test]
    fn any_cut_gives_the_same_result() {
        let scores: Vec<f64> = (0..9).map(|n| libm::sin(f64::from(n) * 1.7) * 5.0).collect();
        let mut want = [0.0];
        let want_lse = finish(&row(&scores), Some(0.5), &mut want);
        for cut in 0..=9 {
            let (mut left, right) = (row(&scores[..cut]), row(&scores[cut..]));
            merge_states(&mut left, &right, 1).unwrap();
            let mut got = [0.0];
            let lse = finish(&left, Some(0.5), &mut got);
            assert!((got[0] - want[0]).abs() < 1e-12 && (lse - want_lse).abs() < 1e-12, "{cut}");
        }
    }

    #[test]
    fn rows_that_have_seen_nothing_change_no_bit() {
        let seen = [0.3f32, 1.7, -0.0, 5.0];
        let mut nothing = [7.0f32; 4];
        clear(&mut nothing, 2);
        let (mut a, mut b) = (seen, nothing);
        merge_states(&mut a, &nothing, 2).unwrap();
        merge_states(&mut b, &seen, 2).unwrap();
        for got in [a, b] {
            assert!(got.iter().zip(seen).all(|(x, y)| x.to_bits() == y.to_bits()));
        }
        let mut out = [9.0f32; 2];
        assert_eq!(finish(&nothing, None, &mut out), f32::NEG_INFINITY);
        assert_eq!((finish(&nothing, Some(2.5), &mut out), out), (2.5, [0.0; 2]));
    }

    #[test]
    fn a_sink_that_outweighs_everything_hides_no_nan() {
        let mut out = [9.0f32; 3];
        let lse = finish(&[0.0, 1.0, f32::NAN, 5.0, f32::INFINITY], Some(1e4), &mut out);
        assert!(out[0].is_nan() && out[1] == 0.0 && out[2].is_nan() && lse == 1e4, "{out:?} {lse}");
    }

    #[test]
    fn finished_outputs_can_be_merged() {
        let scores = [0.5, 2.0, -1.0, 3.0];
        let mut parts = [[0.0; 3]; 2];
        for (part, scores) in parts.iter_mut().zip(scores.chunks(2)) {
            let mut out = [0.0];
            let lse = finish(&row(scores), None, &mut out);
            from_output(&out, lse, part);
        }
        let [mut left, right] = parts;
        merge_states(&mut left, &right, 1).unwrap();
        let (mut got, mut want) = ([0.0], [0.0]);
        let lse = finish(&left, None, &mut got);
        assert!((lse - finish(&row(&scores), None, &mut want)).abs() < 1e-12 && (got[0] - want[0]).abs() < 1e-12);
    }

    #[test]
    fn sizes_are_checked() {
        assert!(merge_states(&mut [0.0f32; 6], &[0.0; 3], 1).is_err());
        assert!(merge_states(&mut [0.0f32; 4], &[0.0; 4], 1).is_err());
        let shape = AttnShape::new([2, 3, 5, 1], [2, 3, 0, 1], [2, 3, 0, 7]).unwrap();
        assert_eq!(len(&shape), Ok(30 * 9));
        assert!(row_len(usize::MAX).is_err());
    }
}
