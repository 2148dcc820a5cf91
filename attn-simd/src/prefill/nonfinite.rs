//! Values that are NaN or infinite behind a mask: 0·NaN is NaN, so a weight of 0 does not keep them out.
//!
//! A tile that is fully visible needs no check: its values belong to every row. In a partial tile, and under a bias
//! (whose entries of −∞ hide as a mask does), each value is checked by one multiplication; the product has `q_tile` of
//! them. Only if one is not finite, the slow path runs: the product with such elements as 0, then each of them by
//! itself, for the rows that see it.

use super::job::Job;
use crate::gemm::{self, Panel, Reach};
use crate::isa::{Isa, MAX_LANES};
use crate::pack;
use crate::scoring::TileAt;

/// Whether all elements are finite in those rows of a panel that not every query sees. `bits` has a word of queries per
/// row, all set if all see it.
#[inline(always)]
pub(crate) fn is_finite<I: Isa>(isa: I, panel: Panel<'_>, bits: &[u64], columns: usize) -> bool {
    if columns == 0 {
        return true;
    }
    // Sums of x·0, which is 0 for finite x and NaN else, in four chains that need not wait for each other.
    let zero = isa.splat(0.0);
    let (mut sums, mut rest) = ([zero; 4], 0.0f32);
    for (row, _) in bits.iter().enumerate().filter(|(_, bits)| **bits != u64::MAX) {
        let start = panel.start.wrapping_add_signed(row as isize * panel.row_stride);
        let whole = panel.data[start..start + columns].chunks_exact(I::LANES);
        rest = whole.remainder().iter().fold(rest, |sum, x| sum + x * 0.0);
        for (n, x) in whole.enumerate() {
            sums[n % 4] = isa.mul_add(isa.load(x), zero, sums[n % 4]);
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
