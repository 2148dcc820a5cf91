//! What rows add that parts cannot hold: rows with NaN, infinities, numbers below 2⁻¹²⁶ or above 2⁶⁴. They are 0 in the
//! operands of the sums, and are added here in f32, to the sums of those that see them and of no other.

use crate::amx::product::SIDE;
use crate::dtype::Input;
use crate::isa::Isa;
use crate::pack;
use crate::scoring::TileAt;

/// Adds to `dq[channel][query]` what the keys marked in `odd` add, times the `gradients[key][query]`.
pub(super) fn of_keys<I: Isa>(
    isa: I,
    k: &Input<'_>,
    (tile, kv_head, dim): (TileAt, usize, usize),
    (odd, visible): (u64, Option<&[u64]>),
    gradients: &[f32],
    row: &mut [f32],
    dq: &mut [f32],
) {
    isa.vectorize(
        #[inline(always)]
        || {
            for key in (0..tile.keys).filter(|key| odd >> key & 1 == 1) {
                let (row, bits) = (&mut row[..dim], bits_of(visible, key, tile.rows));
                if bits == 0 {
                    continue;
                }
                pack::read_row(isa, k, [tile.batch, kv_head, tile.key + key], 0, row);
                for (&x, dq) in row.iter().zip(dq.chunks_exact_mut(SIDE)) {
                    for first in (0..SIDE).step_by(I::LANES) {
                        let (to, d) = (&mut dq[first..], isa.load(&gradients[key * SIDE + first..]));
                        let sum = isa.mul_add(d, isa.splat(x), isa.load(to));
                        isa.store(isa.select(isa.mask_from_bits(bits >> first), sum, isa.load(to)), to);
                    }
                }
            }
        },
    );
}

/// Adds to the rows of `sums`, `columns` apart, what the queries marked in `odd` add: their rows of `input` times the
/// `factors[key][query]`.
pub(super) fn of_queries<I: Isa>(
    isa: I,
    input: &Input<'_>,
    (tile, dim, columns): (TileAt, usize, usize),
    (odd, visible): (u32, Option<&[u64]>),
    factors: &[f32],
    row: &mut [f32],
    sums: &mut [f32],
) {
    isa.vectorize(
        #[inline(always)]
        || {
            for lane in (0..tile.rows).filter(|lane| odd >> lane & 1 == 1) {
                let row = &mut row[..dim];
                pack::read_row(isa, input, [tile.batch, tile.head, tile.query + lane], 0, row);
                for key in (0..tile.keys).filter(|&key| bits_of(visible, key, tile.rows) >> lane & 1 == 1) {
                    let factor = factors[key * SIDE + lane];
                    sums[key * columns..][..dim].iter_mut().zip(&*row).for_each(
                        #[inline(always)]
                        |(to, x)| *to += factor * x,
                    );
                }
            }
        },
    );
}

/// Which queries see a key.
fn bits_of(visible: Option<&[u64]>, key: usize, rows: usize) -> u64 {
    visible.map_or(u64::MAX >> (64 - rows), |bits| bits[key])
}
