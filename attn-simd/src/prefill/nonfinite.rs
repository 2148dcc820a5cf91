//! Values that are NaN or infinite behind a mask: 0·NaN is NaN, so a weight of 0 does not keep them out.
//!
//! A tile that every row sees needs no check: its values belong to all of them. If a mask hides some of it, or a bias
//! by entries of −∞, its values are looked at. A thread remembers which keys of its head have finite values, so that
//! other blocks need not look again. If some values are not finite, those are looked at that not every row of the block
//! sees. Only if one of these is not finite, the slow path runs: the product with such elements as 0, then each of them
//! by itself, for the rows that see it.

use core::ops::Range;

use super::job::Job;
use crate::gemm::{self, Panel, Reach};
use crate::isa::{Isa, MAX_LANES};
use crate::pack;
use crate::scoring::{KV_TILE, TileAt};

/// What a thread knows of the values of a head during one call: of keys that lie side by side.
#[derive(Debug, Default)]
pub(crate) struct Finite {
    /// Batch entry and key/value head.
    head: [usize; 2],
    /// Keys whose values are all finite.
    keys: Range<usize>,
    /// Tiles, each with a value that is not.
    others: Range<usize>,
}

impl Finite {
    /// Whether all values of a tile's keys are finite. They are looked at unless it is known. False for a part of a
    /// tile that is known to have others.
    #[inline(always)]
    pub(super) fn holds<I: Isa>(
        &mut self,
        isa: I,
        panel: Panel<'_>,
        (head, keys): ([usize; 2], Range<usize>),
        columns: usize,
    ) -> bool {
        if self.head != head {
            *self = Self { head, ..Self::default() };
        }
        let within = |known: &Range<usize>| known.start <= keys.start && keys.end <= known.end;
        if within(&self.others) {
            return false;
        }
        // Only keys behind those already known have to be looked at.
        let known = if self.keys.contains(&keys.start) { self.keys.end.min(keys.end) } else { keys.start };
        let left = &[0; KV_TILE][..keys.end - known];
        let is_finite = is_finite(isa, panel.skip(known - keys.start), left, columns);
        let same = if is_finite { &mut self.keys } else { &mut self.others };
        let apart = keys.end < same.start || same.end < keys.start;
        *same = if apart { keys } else { same.start.min(keys.start)..same.end.max(keys.end) };
        is_finite
    }
}

/// Whether all elements are finite in those rows of a panel that not every query sees. `bits` has a word of queries per
/// row, all set if all see it.
#[inline(always)]
pub(crate) fn is_finite<I: Isa>(isa: I, panel: Panel<'_>, bits: &[u64], columns: usize) -> bool {
    if columns == 0 {
        return true;
    }
    // Sums of x·0, which is 0 for finite x and NaN else, in four chains that need not wait for each other. A part of a
    // row has a vector for each, so that they stay in registers.
    let zero = isa.splat(0.0);
    let (mut sums, mut rest) = ([zero; 4], 0.0f32);
    for (row, _) in bits.iter().enumerate().filter(|(_, bits)| **bits != u64::MAX) {
        let start = panel.start.wrapping_add_signed(row as isize * panel.row_stride);
        let parts = panel.data[start..start + columns].chunks_exact(4 * I::LANES);
        let vectors = parts.remainder().chunks_exact(I::LANES);
        rest = vectors.remainder().iter().fold(rest, |sum, x| sum + x * 0.0);
        for part in parts {
            for n in 0..4 {
                sums[n] = isa.mul_add(isa.load(&part[n * I::LANES..]), zero, sums[n]);
            }
        }
        for x in vectors {
            sums[0] = isa.mul_add(isa.load(x), zero, sums[0]);
        }
    }
    let [a, b, c, d] = sums;
    let mut lanes = [0.0; MAX_LANES];
    isa.store(isa.add(isa.add(a, b), isa.add(c, d)), &mut lanes);
    rest == 0.0 && lanes.iter().all(|&x| x == 0.0)
}

/// `gemm::values` for a partial tile with values that are not finite. `bits[key]` says which rows see a key. A function
/// of its own, because it is rarely called.
#[inline(never)]
pub(crate) fn values<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    job: &Job<'_>,
    tile: TileAt,
    visible: (&[u64], &Reach<NQ>),
    weights: (&[f32], Option<&[f32]>),
    out: &mut [f32],
    scratch: &mut [f32],
) {
    isa.vectorize(
        #[inline(always)]
        || values_inlined::<I, NQ, M>(isa, job, tile, visible, weights, out, scratch),
    );
}

#[inline(always)]
fn values_inlined<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    job: &Job<'_>,
    tile: TileAt,
    (bits, reach): (&[u64], &Reach<NQ>),
    (p, factor): (&[f32], Option<&[f32]>),
    out: &mut [f32],
    scratch: &mut [f32],
) {
    let (columns, width, keys) = (job.shape.value_dim, NQ * I::LANES, tile.keys);
    let row = [tile.batch, job.shape.kv_head(tile.head), tile.key];
    pack::copied(isa, &job.v, row, keys, columns, scratch);
    for x in &mut scratch[..keys * columns] {
        if !x.is_finite() {
            *x = 0.0;
        }
    }
    let (panel, phase) = (Panel::packed(scratch, columns), tile.key % job.tiles.kv_tile);
    gemm::values::<I, NQ, M>(isa, panel, (keys, columns), (phase, reach), (p, factor), out, &mut gemm::nothing);
    for (key, &visible) in bits.iter().enumerate().take(keys) {
        for channel in 0..columns {
            let value = job.v.at([row[0], row[1], tile.key + key, channel]);
            if !value.is_finite() {
                for lane in (0..tile.rows).filter(|lane| visible >> lane & 1 == 1) {
                    out[channel * width + lane] += p[key * width + lane] * value;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::portable::Portable;

    const COLUMNS: usize = 3;

    /// Whether the values of some keys are finite, if those of one are not: by what is known of a head.
    fn holds(finite: &mut Finite, head: usize, keys: Range<usize>, odd: Option<usize>) -> bool {
        let mut data = [1.0; KV_TILE * COLUMNS];
        if let Some(odd) = odd {
            data[(odd - keys.start) * COLUMNS + 2] = f32::NAN;
        }
        finite.holds(<Portable>::PROVEN, Panel::packed(&data, COLUMNS), ([0, head], keys), COLUMNS)
    }

    #[test]
    fn values_are_looked_at_once_for_each_head() {
        let finite = &mut Finite::default();
        assert!(holds(finite, 0, 0..48, None));
        assert!(holds(finite, 0, 0..48, Some(7)), "known");
        assert!(holds(finite, 0, 20..30, Some(20)), "known");
        assert!(holds(finite, 0, 0..64, Some(47)), "only the last ones are new");
        assert!(holds(finite, 0, 0..64, Some(63)), "known since");
        assert!(!holds(finite, 0, 60..100, Some(70)), "the last ones are new");
        assert!(!holds(finite, 0, 60..100, None), "known not to be");
        assert!(!holds(finite, 0, 70..90, None), "a part of them");
        assert!(holds(finite, 0, 128..192, None));
        assert!(!holds(finite, 0, 90..128, Some(100)), "between two that are known");
        assert!(holds(finite, 0, 130..192, Some(150)), "the last ones are still known");
        assert!(!holds(finite, 0, 0..60, Some(3)), "the first ones are forgotten");
        assert!(!holds(finite, 1, 130..192, Some(150)), "another head");
        assert!(holds(finite, 1, 64..128, None), "what another head has is no matter");
    }

    #[test]
    fn hidden_rows_and_all_columns_are_looked_at() {
        for columns in [1, 3, 4, 16, 17, 64, 70] {
            for at in [0, columns / 2, columns - 1] {
                let mut data = [1.0; 4 * 70];
                data[2 * columns + at] = if columns % 2 == 0 { f32::NEG_INFINITY } else { -f32::NAN };
                let panel = Panel::packed(&data[..4 * columns], columns);
                let check = |bits: [u64; 4]| is_finite(<Portable>::PROVEN, panel, &bits, columns);
                assert!(!check([0; 4]) && !check([u64::MAX, u64::MAX, 1, u64::MAX]), "{columns} columns, {at}");
                assert!(check([0, 0, u64::MAX, 0]), "every query sees it");
            }
        }
    }
}
