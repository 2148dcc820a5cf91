//! The first half of a tile: two products, then weights and gradients of scores. Both sweeps begin with it.

use super::buffers::{Buffers, Constants, Work};
use super::job::Job;
use super::weights::{self, Kept};
use super::words;
use crate::dtype::Input;
use crate::gemm::{self, Panel, Reach};
use crate::isa::Isa;
use crate::pack;
use crate::prefill::mask::{self, Cover, Ranges};
use crate::prefill::score;
use crate::queue::Rows;
use crate::scoring::{KV_TILE, TileAt};

/// A tile of keys that a block of queries sees something of.
pub(super) struct Tile<const NQ: usize> {
    pub(super) at: TileAt,
    /// Which keys each vector of queries needs.
    pub(super) reach: Reach<NQ>,
    /// A bit for each query that sees a key, a word for each key; of use where the tile is partial.
    bits: [u64; KV_TILE],
    cover: Cover,
}

/// Arrays of the scores of a tile: those of [`Work`], without operands and constants.
pub(super) struct OfScores<'w> {
    pub(super) scores: &'w mut [f32],
    pub(super) slopes: &'w mut [f32],
    pub(super) dots: &'w mut [f32],
    pub(super) bias: &'w mut [f32],
    pub(super) mod_slopes: &'w mut [f32],
    pub(super) known: &'w mut bool,
}

impl<const NQ: usize> Tile<NQ> {
    /// `None` where no query sees any of the keys.
    #[inline(always)]
    pub(super) fn of<I: Isa>(
        isa: I,
        call: &Job<'_>,
        rows: Rows,
        ranges: &Ranges,
        (key, keys): (usize, usize),
    ) -> Option<Self> {
        let at = TileAt { batch: rows.batch, head: rows.head, query: rows.first, rows: rows.count, key, keys };
        let mut bits = [0; KV_TILE];
        let cover = ranges.cover(isa, &call.forward, at, &mut bits);
        if cover == Cover::Empty {
            return None;
        }
        let reach = if cover == Cover::Full {
            Reach::all(keys)
        } else {
            if rows.count < NQ * I::LANES {
                // Lanes without a row see nothing: reach leaves them out.
                bits[..keys].iter_mut().for_each(|bits| *bits &= u64::MAX >> (64 - rows.count));
            }
            ranges.reach::<I, NQ>(at)
        };
        Some(Self { at, reach, bits, cover })
    }

    /// The bits, where not every query sees every key.
    #[inline(always)]
    pub(super) fn visible(&self) -> Option<&[u64]> {
        (self.cover == Cover::Partial).then_some(&self.bits[..self.at.keys])
    }

    /// Hides every key from lanes without a row, so that their weights are 0.
    #[inline(always)]
    pub(super) fn hide_missing_rows(&mut self) {
        let all = u64::MAX >> (64 - self.at.rows);
        if self.cover == Cover::Full {
            (self.bits, self.cover) = ([all; KV_TILE], Cover::Partial);
        } else {
            self.bits.iter_mut().for_each(|bits| *bits &= all);
        }
    }

    /// Batch entry and key/value head, and the first key.
    #[inline(always)]
    pub(super) fn first(&self, call: &Job<'_>) -> [usize; 3] {
        [self.at.batch, call.forward.shape.kv_head(self.at.head), self.at.key]
    }

    /// Leaves weights in `scores`, and in `dots` the gradients of what the soft-cap gives; in `slopes` the derivatives
    /// of a soft-cap. The [operands](operand) are those of k and v. `between` is called before each group of keys of
    /// either product.
    #[inline(always)]
    pub(super) fn weigh<I: Isa, const M: usize>(
        &mut self,
        isa: I,
        call: &Job<'_>,
        [k, v]: [Panel<'_>; 2],
        work: &mut Work<'_>,
        between: &mut dyn FnMut(),
    ) {
        let (keys, shape) = (self.at.keys, &call.forward.shape);
        let Work { transposed, scores, slopes, dots, constants, bias, mod_slopes, known } = work;
        let [qk, dyv] = [shape.head_dim, shape.value_dim].map(|dim| dim.div_ceil(I::WORD));
        gemm::scores::<I, NQ, M>(isa, k, (keys, qk), &self.reach, transposed[0], scores, between);
        gemm::scores::<I, NQ, M>(isa, v, (keys, dyv), &self.reach, transposed[1], dots, between);
        let of_scores = OfScores { scores, slopes, dots, bias, mod_slopes, known };
        self.finish(isa.floats(), call, constants, of_scores);
    }

    /// The same from the products in `scores` and `dots` on.
    #[inline(always)]
    pub(super) fn finish<I: Isa>(
        &mut self,
        isa: I,
        call: &Job<'_>,
        constants: &Constants,
        OfScores { scores, slopes, dots, bias, mod_slopes, known }: OfScores<'_>,
    ) {
        let (job, tile, width) = (&call.forward, self.at, NQ * I::LANES);
        let keys = tile.keys;
        let (scores, dots) = (&mut scores[..keys * width], &mut dots[..keys * width]);
        if let Some((_, in_caps)) = job.softcap {
            weights::cap_slopes(isa, in_caps, scores, slopes);
        }
        if let Some(scale) = job.score_scale
            && score::finish::<I, NQ>(isa, job, scale, tile, scores, bias)
        {
            mask::hide_by_bias(tile, self.cover, width, bias, &mut self.bits);
            self.cover = Cover::Partial;
        }
        if call.score_mod {
            let visible = (self.cover == Cover::Partial).then_some(&self.bits);
            *known &= job.mods.derivatives(job.level, tile, width, visible, (&*scores, &mut *mod_slopes));
            job.mods.score_mod(job.level, tile, width, visible, scores);
        }
        if self.cover == Cover::Partial {
            mask::replace_hidden::<I, NQ>(isa, scores, &self.bits, f32::NEG_INFINITY);
        }
        let mut drawn = [u64::MAX; KV_TILE];
        let kept = (!job.dropout.is_none()).then(|| {
            mask::kept(isa, job, tile, &mut drawn);
            Kept { bits: &drawn[..], factor: job.dropout.factor() as f32 }
        });
        weights::gradients::<I, NQ>(isa, job.log2_scale(), constants, (scores, dots), self.visible(), kept);
        if call.score_mod {
            weights::multiply(isa, dots, mod_slopes);
        }
    }

    /// What gradients of capped scores, in `dots`, become by the products before the cap.
    #[inline(always)]
    pub(super) fn through_cap<I: Isa>(&self, isa: I, call: &Job<'_>, dots: &mut [f32], slopes: &[f32]) {
        if call.forward.softcap.is_some() {
            weights::multiply(isa, dots, slopes);
            if self.visible().is_some() {
                mask::replace_hidden::<I, NQ>(isa, dots, &self.bits, 0.0);
            }
        }
    }
}

/// The rows of k or v of a tile as a product of scores reads them: floats or words, in place if they can be.
#[inline(always)]
pub(super) fn operand<'a, I: Isa>(
    isa: I,
    input: &Input<'a>,
    first: [usize; 3],
    (keys, dim): (usize, usize),
    scratch: &'a mut [f32],
    words: &'a mut [f32],
) -> Panel<'a> {
    if I::WORD == 1 {
        return pack::panel(isa, input, first, keys, dim, scratch, &mut false);
    }
    let words = &mut words[..keys * dim.div_ceil(2)];
    if !words::neighbours_of(input, first, dim, words) {
        let rows = pack::copied(isa.floats(), input, first, keys, dim, scratch);
        words::neighbours(isa, rows.data, (keys, dim), words);
    }
    Panel::packed(words, dim.div_ceil(2))
}

impl Constants {
    /// Sets those of a row, from its gradient of the output. `scratch` holds a row of values.
    #[inline(always)]
    pub(super) fn set<I: Isa>(
        &mut self,
        isa: I,
        call: &Job<'_>,
        row: [usize; 3],
        lane: usize,
        dy: &[f32],
        scratch: &mut [f32],
    ) {
        let [batch, head, query] = row;
        let lse = f64::from(call.lse[call.forward.shape.row(batch, head, query)]) * core::f64::consts::LOG2_E;
        // A row that sees nothing: its scores are −∞, and so their weights 0.
        if lse != f64::NEG_INFINITY {
            let rounded = lse as f32;
            self.lse[0][lane] = rounded;
            self.lse[1][lane] = if rounded.is_finite() { (lse - f64::from(rounded)) as f32 } else { 0.0 };
        }
        self.delta[lane] = call.delta(isa, row, dy, scratch) as f32;
    }
}

/// Reads the queries and the gradients of the outputs of a block, and computes `δ`. A function of its own, so that it
/// is compiled once per instruction set.
#[inline(never)]
pub(super) fn start<I: Isa>(isa: I, call: &Job<'_>, rows: Rows, width: usize, buffers: &mut Buffers<'_>) {
    isa.vectorize(
        #[inline(always)]
        || start_inlined(isa, call, rows, width, buffers),
    );
}

#[inline(always)]
fn start_inlined<I: Isa>(isa: I, call: &Job<'_>, rows: Rows, width: usize, buffers: &mut Buffers<'_>) {
    let (job, Buffers { work, rows: packed_rows, finite, v, .. }) = (&call.forward, buffers);
    let dims = [job.shape.head_dim, job.shape.value_dim];
    for (n, input) in [&job.q, &call.dy].into_iter().enumerate() {
        // First whole rows, one after the other, as memory delivers them fastest.
        let columns = call.layout.columns[n];
        let packed = &mut packed_rows[n][..width * columns];
        for (row, to) in packed.chunks_exact_mut(columns.max(1)).enumerate() {
            if row < rows.count {
                let (there, rest) = to.split_at_mut(dims[n]);
                pack::read_row(isa, input, [rows.batch, rows.head, rows.first + row], 0, there);
                rest.fill(0.0);
            } else {
                to.fill(0.0);
            }
        }
        pack::swapped(isa, packed, (width, columns), work.transposed[n]);
    }
    work.constants = Constants::default();
    for lane in 0..rows.count {
        let dy = &packed_rows[1][lane * call.layout.columns[1]..][..dims[1]];
        work.constants.set(isa, call, [rows.batch, rows.head, rows.first + lane], lane, dy, v);
    }
    for (n, packed) in packed_rows.iter_mut().enumerate() {
        let packed = &mut packed[..rows.count * call.layout.columns[n]];
        finite[n] = all_finite(packed);
        if !finite[n] {
            packed.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
        }
    }
    if job.q_sign != 1.0 {
        let own = &mut work.transposed[0][..width * call.layout.columns[0]];
        own.iter_mut().for_each(|x| *x *= job.q_sign);
    }
    if I::WORD == 2 {
        for n in 0..2 {
            words::rows_in_place(isa, work.transposed[n], (dims[n], width));
            if call.fast {
                words::rows_in_place(isa, packed_rows[n], (rows.count, call.layout.columns[n]));
            }
        }
    }
}

/// Whether no number is NaN or infinite: their exponents are all ones, and adding one carries into the sign.
#[inline(always)]
fn all_finite(numbers: &[f32]) -> bool {
    numbers.iter().fold(0, |any, x| any | ((x.to_bits() & 0x7fff_ffff) + 0x0080_0000)) >> 31 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_found() {
        let finite = [0.0, -0.0, 1.0, -1.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, f32::from_bits(1)];
        assert!(all_finite(&finite) && all_finite(&[]));
        for other in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)] {
            for place in 0..finite.len() {
                let mut numbers = finite;
                numbers[place] = other;
                assert!(!all_finite(&numbers), "{other} at {place}");
            }
        }
    }
}
