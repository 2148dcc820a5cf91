//! Joins results over disjoint keys, each an output and its lse: `out = Σ exp(lse − max)·out / Σ exp(lse − max)`.

use attn_core::softmax::RowState;
use attn_core::{AttnError, View, ViewMut};

use crate::error::Result;

/// What a row's lse says of its keys: all of their weight at one score.
fn state(lse: f32) -> RowState<f32> {
    if lse == f32::NEG_INFINITY { RowState::new() } else { RowState { max: lse, sum: 1.0 } }
}

/// Joins `other` to `out`, row by row; a row that saw nothing changes no bit of the other.
pub(crate) fn merge(
    out: &mut ViewMut<'_, f32>,
    lse: &mut [f32],
    other: View<'_, f32>,
    other_lse: &[f32],
) -> Result<()> {
    let [batch, heads, seq, dim] = out.sizes();
    let names =
        ["other batch against out", "other heads against out", "other seq against out", "other dim against out"];
    for (what, (want, found)) in names.into_iter().zip(out.sizes().into_iter().zip(other.sizes())) {
        AttnError::check_size(what, want, found)?;
    }
    let rows = [batch, heads, seq].into_iter().try_fold(1usize, usize::checked_mul);
    let rows = rows.ok_or(AttnError::Overflow { what: "batch · heads · seq" })?;
    AttnError::check_size("lse (batch · heads · seq)", rows, lse.len())?;
    AttnError::check_size("other_lse (batch · heads · seq)", rows, other_lse.len())?;
    for (row, (lse, &other_lse)) in lse.iter_mut().zip(other_lse).enumerate() {
        let (b, h, s) = (row / (heads * seq), row / seq % heads, row % seq); // there is a row, so that no size is 0
        let (mut joined, others) = (state(*lse), state(other_lse));
        if others.sum == 0.0 {
            continue;
        }
        let alone = joined.sum == 0.0;
        let (ours, theirs) = joined.merge(others);
        for d in 0..dim {
            let (x, y) = (out.as_view().at(b, h, s, d), other.at(b, h, s, d));
            out.set(b, h, s, d, if alone { y } else { (x * ours + y * theirs) * joined.finish() });
        }
        *lse = joined.lse();
    }
    Ok(())
}
