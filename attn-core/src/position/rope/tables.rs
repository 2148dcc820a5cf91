//! Rotation by tables of cos and sin, of the caller's or of [`Rope::tables`](super::Rope::tables).

use super::{Between, InPlace, Pairing, Pairs, each_row};
use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::position::Positions;
use crate::row::Row;
use crate::shape::check_same;
use crate::view::{View, ViewMut};

/// Rotary embedding by tables of cos and sin.
///
/// A table has sizes `[batch or 1, heads or 1, rows, rotary_dim/2]`; token `s` of sequence `b` uses row
/// `positions.of(b, s)`. So ONNX `RotaryEmbedding` with `position_ids` is tables `[1, 1, max_position, r/2]` and
/// [`Positions::Each`], and without them tables `[batch, 1, seq, r/2]` and [`Positions::Offset(0)`](Positions::Offset).
/// Computes in [`Element::Compute`].
///
/// ```
/// use attn_core::position::Positions;
/// use attn_core::position::rope::{Pairing, Rope, RopeTables};
/// use attn_core::{View, ViewMut};
/// let rope = Rope::new(Pairing::Half).base(500_000.0);
/// let (mut cos, mut sin) = ([0.0f32; 8 * 2], [0.0f32; 8 * 2]); // 8 positions, 4 rotary dims
/// let (mut c, mut s) = (ViewMut::matrix(&mut cos, 8, 2)?, ViewMut::matrix(&mut sin, 8, 2)?);
/// rope.tables(4, Positions::Offset(0), &mut c, &mut s)?;
///
/// let tables = RopeTables::new(Pairing::Half, View::matrix(&cos, 8, 2)?, View::matrix(&sin, 8, 2)?)?;
/// let mut x = [1.0f32, 2.0, 3.0, 4.0];
/// tables.apply_in_place(&mut ViewMut::matrix(&mut x, 1, 4)?, Positions::Offset(5))?;
/// let mut same = [1.0f32, 2.0, 3.0, 4.0];
/// rope.apply_in_place(&mut ViewMut::matrix(&mut same, 1, 4)?, Positions::Offset(5))?;
/// assert!(x.iter().zip(same).all(|(a, b)| (a - b).abs() < 1e-6));
/// assert!(tables.apply_in_place(&mut ViewMut::matrix(&mut x, 1, 4)?, Positions::Offset(8)).is_err()); // no such row
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RopeTables<'a, C> {
    pairing: Pairing,
    cos: View<'a, C>,
    sin: View<'a, C>,
}

impl<'a, C: Element> RopeTables<'a, C> {
    /// Both tables have the same sizes.
    ///
    /// # Errors
    /// [`AttnError::Size`].
    pub fn new(pairing: Pairing, cos: View<'a, C>, sin: View<'a, C>) -> Result<Self> {
        check_same("sin table against cos table", cos.sizes(), sin.sizes())?;
        Ok(Self { pairing, cos, sin })
    }

    /// Sizes of each table: `[batch or 1, heads or 1, rows, rotary_dim/2]`.
    pub const fn sizes(&self) -> [usize; 4] {
        self.cos.sizes()
    }

    /// The same tables, of another type that `cast` finds its numbers to be.
    pub(crate) fn with<D: Element>(self, cast: impl Fn(&'a [C]) -> Option<&'a [D]>) -> Option<RopeTables<'a, D>> {
        let view = |t: View<'a, C>| View::strided(cast(t.data())?, t.sizes(), t.strides(), t.offset()).ok();
        Some(RopeTables { pairing: self.pairing, cos: view(self.cos)?, sin: view(self.sin)? })
    }

    /// Applies one row of the first table to numbers in place. Dims beyond its pairs stay. Does nothing if there is no
    /// such row.
    #[inline]
    pub fn apply_to_slice(&self, x: &mut [C::Compute], row: usize) {
        let ([.., pairs], cos, sin) = (self.sizes(), self.cos.row(0, 0, row), self.sin.row(0, 0, row));
        let angles = cos.iter().zip(sin.iter()).map(|(cos, sin)| (cos.widen(), sin.widen()));
        let apply = |(first, second): (&mut C::Compute, &mut C::Compute), (cos, sin)| {
            let (x1, x2) = (*first, *second);
            *first = x1 * cos - x2 * sin;
            *second = x2 * cos + x1 * sin;
        };
        match self.pairing {
            Pairing::Half => {
                let Some((low, high)) = x.split_at_mut_checked(pairs) else { return };
                low.iter_mut().zip(high).zip(angles).for_each(|(pair, by)| apply(pair, by));
            }
            Pairing::Interleaved => {
                let pairs = x.chunks_exact_mut(2).filter_map(|pair| match pair {
                    [first, second] => Some((first, second)),
                    _ => None,
                });
                pairs.zip(angles).for_each(|(pair, by)| apply(pair, by));
            }
        }
    }

    /// Pairs and their cos and sin in one row of the first table.
    fn row(&self, row: usize) -> impl Iterator<Item = ((usize, usize), (C::Compute, C::Compute))> + use<'a, C> {
        let ([.., pairs], pairing) = (self.sizes(), self.pairing);
        let angles = self.cos.row(0, 0, row).iter().zip(self.sin.row(0, 0, row).iter());
        angles.enumerate().map(move |(i, (cos, sin))| (pairing.dims(i, pairs), (cos.widen(), sin.widen())))
    }

    /// Applies one row of the first table to `x`.
    pub(crate) fn apply_to_row<T: Element<Compute = C::Compute>>(
        &self,
        x: Row<'_, T>,
        row: usize,
        out: &mut [C::Compute],
    ) {
        for (out, x) in out.iter_mut().zip(x.iter()) {
            *out = x.widen();
        }
        for ((first, second), (cos, sin)) in self.row(row) {
            let (x1, x2) = (x.get(first).widen(), x.get(second).widen());
            for (dim, value) in [(first, x1 * cos - x2 * sin), (second, x2 * cos + x1 * sin)] {
                if let Some(out) = out.get_mut(dim) {
                    *out = value;
                }
            }
        }
    }

    /// `q·k`; applies one row of the first table to `k` on the way. `q` has rope already.
    pub(crate) fn dot_with_rope<T: Element<Compute = C::Compute>>(
        &self,
        q: &[C::Compute],
        k: Row<'_, T>,
        row: usize,
    ) -> C::Compute {
        let q = |dim: usize| q.get(dim).copied().unwrap_or_default();
        let mut sum = C::Compute::ZERO;
        for ((first, second), (cos, sin)) in self.row(row) {
            let (k1, k2) = (k.get(first).widen(), k.get(second).widen());
            sum += q(first) * (k1 * cos - k2 * sin) + q(second) * (k2 * cos + k1 * sin);
        }
        let [.., pairs] = self.sizes();
        for dim in 2 * pairs..k.len() {
            sum += q(dim) * k.get(dim).widen();
        }
        sum
    }

    /// Applies rope to queries or keys in place, `x`: `[batch, heads, seq, head_dim]`, any strides.
    ///
    /// # Errors
    /// [`AttnError::Index`] if a position has no row in the table or the table more pairs than the head,
    /// [`AttnError::Broadcast`] or [`AttnError::Size`] if sizes do not fit. Nothing has been written then.
    pub fn apply_in_place<T: Element<Compute = C::Compute>>(
        &self,
        x: &mut ViewMut<'_, T>,
        rows: Positions<'_>,
    ) -> Result<()> {
        self.apply_to_pairs(x.sizes(), rows, &mut InPlace(x))
    }

    /// As [`apply_in_place`](Self::apply_in_place), from one tensor into another of the same sizes.
    ///
    /// # Errors
    /// As [`apply_in_place`](Self::apply_in_place).
    pub fn apply<T, O>(&self, x: View<'_, T>, out: &mut ViewMut<'_, O>, rows: Positions<'_>) -> Result<()>
    where
        T: Element<Compute = C::Compute>,
        O: Element<Compute = C::Compute>,
    {
        check_same("rope output against x", x.sizes(), out.sizes())?;
        self.apply_to_pairs(x.sizes(), rows, &mut Between { x, out })
    }

    fn apply_to_pairs(
        &self,
        sizes: [usize; 4],
        positions: Positions<'_>,
        x: &mut impl Pairs<C::Compute>,
    ) -> Result<()> {
        let ([batch, heads, seq, head_dim], [_, _, rows, pairs]) = (sizes, self.cos.sizes());
        self.cos.check_broadcast("rope tables", [batch, heads, rows, pairs])?;
        if pairs > head_dim / 2 {
            let limit = (head_dim / 2).saturating_add(1);
            return Err(AttnError::Index { what: "rope table pairs against head_dim/2", at: 0, value: pairs, limit });
        }
        positions.check_rows("rope positions", batch, seq, rows)?;
        for (b, h, s) in each_row(batch, heads, seq) {
            let row = usize::try_from(positions.of(b, s, seq)).unwrap_or(usize::MAX);
            let table = |t: &View<'a, C>| {
                let [tables, table_heads, ..] = t.sizes();
                t.row(if tables == 1 { 0 } else { b }, if table_heads == 1 { 0 } else { h }, row)
            };
            for (pair, (cos, sin)) in table(&self.cos).iter().zip(table(&self.sin).iter()).enumerate() {
                x.apply([b, h, s], self.pairing.dims(pair, pairs), cos.widen(), sin.widen());
            }
            for d in 2 * pairs..head_dim {
                x.pass([b, h, s, d]);
            }
        }
        Ok(())
    }
}
