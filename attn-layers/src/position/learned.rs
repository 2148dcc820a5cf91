//! Learned positions: one trained row per position, looked up and added to the embeddings.
//!
//! GPT-2 and BERT use them (the alternative of arXiv 1706.03762, §3.5). A position beyond the table has no row: it is
//! an error, never a wrong row.

use attn_core::position::Positions;
use attn_core::{AttnError, Element, Result, View, ViewMut};

/// Writes `table[position]` for every token: `out`, `[batch, heads, seq, d_model]`. The table is the matrix
/// `[1, 1, rows, d_model]` ([`View::matrix`]).
///
/// # Errors
/// [`AttnError::Index`] if a position is not a row of the table; [`AttnError::Size`] if sizes disagree. Nothing
/// has been written then.
///
/// ```
/// use attn_core::position::Positions;
/// use attn_layers::position::learned;
/// use attn_core::{View, ViewMut};
/// let table = [0.0f32, 0.0, 1.0, 10.0, 2.0, 20.0]; // three positions of dim 2
/// let table = View::matrix(&table, 3, 2)?;
/// let mut x = [0.5f32; 4];
/// learned::add(table, &mut ViewMut::matrix(&mut x, 2, 2)?, Positions::Offset(1))?;
/// assert_eq!(x, [1.5, 10.5, 2.5, 20.5]);
/// assert!(learned::add(table, &mut ViewMut::matrix(&mut x, 2, 2)?, Positions::Offset(2)).is_err());
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub fn lookup<T: Element, O: Element>(
    table: View<'_, T>,
    out: &mut ViewMut<'_, O>,
    positions: Positions<'_>,
) -> Result<()> {
    each(table, out, positions, |_, row| row)
}

/// Adds `table[position]` to every token of `x`, `[batch, heads, seq, d_model]`, rounding once.
///
/// # Errors
/// As [`lookup`].
pub fn add<T: Element, O: Element>(table: View<'_, T>, x: &mut ViewMut<'_, O>, positions: Positions<'_>) -> Result<()> {
    each(table, x, positions, |x, row| x + row)
}

fn each<T: Element, O: Element>(
    table: View<'_, T>,
    x: &mut ViewMut<'_, O>,
    positions: Positions<'_>,
    f: impl Fn(f64, f64) -> f64,
) -> Result<()> {
    let ([one, single, rows, width], [batch, heads, seq, d_model]) = (table.sizes(), x.sizes());
    AttnError::check_size("position table batch", 1, one)?;
    AttnError::check_size("position table heads", 1, single)?;
    AttnError::check_size("position table d_model against x", d_model, width)?;
    positions.check_rows("positions", batch, seq, rows)?;
    for b in 0..batch {
        for s in 0..seq {
            let row = table.row(0, 0, usize::try_from(positions.of(b, s, seq)).unwrap_or(usize::MAX));
            for h in 0..heads {
                for (d, value) in row.iter().enumerate() {
                    let old = x.as_view().at(b, h, s, d).to_f64();
                    x.set(b, h, s, d, O::from_f64(f(old, value.to_f64())));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::Layout;

    #[test]
    fn every_sequence_looks_up_its_own_rows() {
        let table = [10.0f32, 11.0, 12.0, 13.0];
        let table = View::matrix(&table, 4, 1).unwrap();
        let mut out = [0.0f64; 4];
        let mut view = ViewMut::new(&mut out, Layout::Sbhd, [2, 1, 2, 1]).unwrap();
        lookup(table, &mut view, Positions::Each(&[3, 0, 1, 1])).unwrap();
        assert_eq!(out, [13.0, 11.0, 10.0, 11.0]); // memory holds position first, then sequence
    }

    #[test]
    fn no_row_no_write() {
        let table = [1.0f32; 4];
        let table = View::matrix(&table, 4, 1).unwrap();
        let mut x = [7.0f32; 2];
        let mut add = |positions| add(table, &mut ViewMut::matrix(&mut x, 2, 1).unwrap(), positions).unwrap_err();
        assert_eq!(add(Positions::Shared(&[0, 4])), AttnError::Index { what: "positions", at: 1, value: 4, limit: 4 });
        assert!(matches!(add(Positions::Offset(-1)), AttnError::Index { .. }));
        assert!(matches!(add(Positions::Shared(&[0])), AttnError::Size { .. }));
        assert_eq!(x, [7.0; 2]);
    }
}
