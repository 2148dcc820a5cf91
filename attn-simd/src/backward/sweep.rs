//! Blocks of queries over their tiles of keys: for the sums of a part of a backward call, and for those of a bias.
//!
//! In three of five products lanes are queries, as in the prefill kernel. In the sums of `dk` and `dv` they are
//! channels, because the weights of a tile are stored by key, and each sum is a row of a key:
//!
//! ```text
//! S = K·Qᵀ   dP = V·dYᵀ   dQᵀ += Kᵀ·dS            lanes are queries
//! dV += P·dY   dK += dS·Q                          lanes are channels
//! ```
//!
//! Two sweeps, one for `dq` and one for `dk` and `dv`, would share no sums between parts, and take seven products.
//! Counted as five they could reach 5/7 of the peak, 71 %; one sweep runs at 86 to 89 % of it on a Zen 4
//! (docs/figures.md).

use super::amx;
use super::bias::{Piece, Pieces};
use super::buffers::{Buffers, Sums};
use super::job::Job;
use super::prefetch::Prefetch;
use super::scores::{Tile, operand, start};
use super::words;
use crate::gemm::{self, Panel};
use crate::isa::Isa;
use crate::isa::pairs::{PairModel, Pairs};
use crate::isa::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::isa::{avx2::Avx2, avx512::Avx512, avx512bf16::Avx512Bf16};
use crate::level::Level;
use crate::pack;
use crate::prefill::layout::MAX_Q_TILE;
use crate::prefill::mask::Ranges;
use crate::prefill::nonfinite;
use crate::queue::Rows;

/// Computes the sums of a part. If the caller stops the call, they are incomplete.
pub(super) fn part(call: &Job<'_>, part: usize, sums: &mut Sums<'_>, buffers: &mut Buffers<'_>) {
    // Only the first part of a head has sums that count for all keys: those of the others are added to it.
    let whole = part.is_multiple_of(call.layout.parts);
    let (keys, [qc, vc]) = (if whole { 0..call.forward.shape.kv_len } else { call.keys(part) }, call.layout.columns);
    sums.dk[keys.start * qc..keys.end * qc].fill(0.0);
    sums.dv[keys.start * vc..keys.end * vc].fill(0.0);
    // The first block of the next part is the likeliest one after the last block of this one.
    let after = (part + 1 < call.layout.count()).then(|| call.blocks(part + 1).next()).flatten();
    let mut blocks = call.blocks(part).peekable();
    while let Some(rows) = blocks.next() {
        if call.forward.is_stopped() {
            break;
        }
        if let Some(mut own) = buffers.amx.take() {
            amx::block(call, rows, sums, &mut own, buffers);
            buffers.amx = Some(own);
        } else {
            Block { call, rows, next: blocks.peek().copied().or(after) }.run(To::Sums(sums), buffers);
        }
    }
}

/// Computes the sums of a piece of the gradient of a bias. If the caller stops the call, they are incomplete.
pub(super) fn piece(pieces: &Pieces<'_, '_>, piece: &Piece, buffers: &mut Buffers<'_>) {
    buffers.bias_sums.fill(0.0);
    for rows in pieces.blocks(piece) {
        if pieces.call.forward.is_stopped() {
            break;
        }
        Block { call: pieces.call, rows, next: None }.run(To::Bias(piece), buffers);
    }
}

/// Names, per instruction set, the widths that are compiled: vectors of queries, rows of accumulators of the
/// products of scores and of `dq`, and vectors of channels and rows of those of `dk` and `dv`.
macro_rules! instances {
    ($name:ident, $isa:ty, $rows:tt, [$($vecs:literal),*]) => {
        fn $name(isa: $isa, block: Block<'_>, to: To<'_, '_>, buffers: &mut Buffers<'_>) {
            match block.call.layout.vecs(block.rows.count) {
                $($vecs => instances!(@one $isa, $vecs, $rows, isa, block, to, buffers),)*
                _ => unreachable!("a block has between one vector of rows and a full tile"),
            }
        }
    };
    (@one $isa:ty, $vecs:literal, [$m:literal, $nc:literal, $mc:literal],
        $t:ident, $b:ident, $to:ident, $u:ident) => {
        $t.vectorize(
            #[inline(always)]
            || match $to {
                To::Sums(sums) => $b.sums::<$isa, $vecs, $m, $nc, $mc>($t, sums, $u),
                To::Bias(piece) => $b.bias::<$isa, $vecs, $m>($t, piece, $u),
            },
        )
    };
}

#[cfg(target_arch = "x86_64")]
instances!(block_avx512, Avx512, [4, 4, 4], [1, 2, 3]);
#[cfg(target_arch = "x86_64")]
instances!(block_avx512bf16, Pairs<Avx512Bf16>, [4, 4, 6], [1, 2, 3]);
#[cfg(target_arch = "x86_64")]
instances!(block_avx2, Avx2, [6, 2, 6], [1, 2]);
#[cfg(target_arch = "aarch64")]
instances!(block_portable, Portable, [4, 4, 4], [1, 2, 3, 4]);
#[cfg(target_arch = "aarch64")]
instances!(block_model, Pairs<PairModel<Portable>>, [4, 4, 4], [1, 2, 3, 4]);
#[cfg(not(target_arch = "aarch64"))]
instances!(block_portable, Portable, [4, 2, 4], [1, 2]);
#[cfg(not(target_arch = "aarch64"))]
instances!(block_model, Pairs<PairModel<Portable>>, [4, 2, 4], [1, 2]);

/// Factors of 1.
const ONES: [f32; MAX_Q_TILE] = [1.0; MAX_Q_TILE];

/// What a block is computed for.
enum To<'t, 'w> {
    /// The sums of a part.
    Sums(&'t mut Sums<'w>),
    /// A piece of the gradient of a bias.
    Bias(&'t Piece),
}

/// A block of queries.
struct Block<'b> {
    call: &'b Job<'b>,
    rows: Rows,
    /// The block that this thread probably computes next.
    next: Option<Rows>,
}

impl Block<'_> {
    fn run(self, to: To<'_, '_>, buffers: &mut Buffers<'_>) {
        match self.call.level {
            Level::Portable(isa) => block_portable(isa, self, to, buffers),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(isa) => block_avx2(isa, self, to, buffers),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(isa) => block_avx512(isa, self, to, buffers),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16(unit) => block_avx512bf16(Pairs(unit), self, to, buffers),
            Level::Avx512Bf16Model(_) => block_model(Pairs(PairModel(<Portable>::PROVEN)), self, to, buffers),
            _ => unreachable!("a job has a level of vectors or pairs"),
        }
    }

    /// Calls `f` with the first key and the keys of each tile between two keys, unless the caller stops the call. Tiles
    /// start at multiples of their size.
    #[inline(always)]
    fn tiles(&self, keys: core::ops::Range<usize>, mut f: impl FnMut((usize, usize))) {
        let kv_tile = self.call.forward.tiles.kv_tile;
        let mut from = keys.start;
        while from < keys.end && !self.call.forward.is_stopped() {
            let to = (from - from % kv_tile + kv_tile).min(keys.end);
            f((from, to - from));
            from = to;
        }
    }

    /// Adds the block to the sums of its part.
    #[inline(always)]
    fn sums<I: Isa, const NQ: usize, const M: usize, const NC: usize, const MC: usize>(
        self,
        isa: I,
        sums: &mut Sums<'_>,
        buffers: &mut Buffers<'_>,
    ) {
        let (job, rows, width) = (&self.call.forward, self.rows, NQ * I::LANES);
        start(isa, self.call, rows, width, buffers);
        let ranges = Ranges::of(job, rows);
        let (mut held, mut prefetch) = (false, None);
        self.tiles(
            self.call.keys_of(&ranges),
            #[inline(always)]
            |keys| {
                let left = (ranges.any.end - keys.0).div_ceil(job.tiles.kv_tile);
                if prefetch.is_none() && Prefetch::is_time(left) {
                    let steps = 2 * left * job.tiles.kv_tile.div_ceil(M);
                    prefetch = Some(Prefetch::of(self.call, rows, self.next, steps));
                }
                held |= self.tile::<I, NQ, M, NC, MC>(isa, &ranges, keys, (held, &mut prefetch), sums, buffers);
            },
        );
        if job.is_stopped() {
            return;
        }
        let columns = self.call.layout.columns[0];
        let by_row = &mut *buffers.rows[0]; // the rows of q, which are no longer needed
        if held {
            pack::swapped(isa, buffers.dq, (columns, width), by_row);
        } else {
            by_row.fill(0.0);
        }
        (sums.dq)(rows, &by_row[..rows.count * columns]);
    }

    /// Adds the block to a piece of the gradient of a bias.
    #[inline(always)]
    fn bias<I: Isa, const NQ: usize, const M: usize>(self, isa: I, piece: &Piece, buffers: &mut Buffers<'_>) {
        let (call, job, rows, width) = (self.call, &self.call.forward, self.rows, NQ * I::LANES);
        let ranges = Ranges::of(job, rows);
        let keys = piece.keys(ranges.any.clone());
        if keys.is_empty() {
            return;
        }
        start(isa, call, rows, width, buffers);
        self.tiles(
            keys,
            #[inline(always)]
            |keys| {
                let Some(mut tile) = Tile::<NQ>::of(isa, call, rows, &ranges, keys) else { return };
                let (shape, first) = (&job.shape, tile.first(call));
                let Buffers { work, k, v, words, .. } = &mut *buffers;
                let [of_k, of_v] = words.channels.each_mut();
                let k = operand(isa, &job.k, first, (tile.at.keys, shape.head_dim), k, of_k);
                let v = operand(isa, &job.v, first, (tile.at.keys, shape.value_dim), v, of_v);
                tile.weigh::<I, M>(isa, call, [k, v], work, &mut gemm::nothing);
                piece.add(buffers.bias_sums, tile.at, width, buffers.work.dots);
            },
        );
    }

    /// One tile of keys. Says whether any row sees any of it; `held`: whether `dq` holds a sum.
    #[inline(always)]
    fn tile<I: Isa, const NQ: usize, const M: usize, const NC: usize, const MC: usize>(
        &self,
        isa: I,
        ranges: &Ranges,
        keys: (usize, usize),
        (held, prefetch): (bool, &mut Option<Prefetch>),
        sums: &mut Sums<'_>,
        buffers: &mut Buffers<'_>,
    ) -> bool {
        let (call, job, rows, width) = (self.call, &self.call.forward, self.rows, NQ * I::LANES);
        let Some(mut tile) = Tile::<NQ>::of(isa, call, rows, ranges, keys) else { return false };
        let ((key, keys), shape, first) = (keys, &job.shape, tile.first(call));
        let Buffers { work, rows: packed, finite, dq, k, clean, v, words, .. } = buffers;
        let [of_k, of_v] = words.channels.each_mut();
        let k = operand(isa, &job.k, first, (keys, shape.head_dim), k, of_k);
        let v = operand(isa, &job.v, first, (keys, shape.value_dim), v, of_v);
        tile.weigh::<I, M>(isa, call, [k, v], work, &mut || {
            if let Some(prefetch) = prefetch.as_mut() {
                prefetch.step(isa);
            }
        });
        let (scores, dots) = (&mut work.scores[..keys * width], &mut work.dots[..keys * width]);
        tile.through_cap(isa, call, dots, work.slopes);
        let visible = tile.visible();
        let factor = held.then_some(&ONES[..width]);
        let phase = key % job.tiles.kv_tile;
        // A hidden NaN times 0 would be NaN.
        let sound = visible.is_none_or(|bits| match I::WORD {
            1 => nonfinite::is_finite(isa.floats(), k, bits, shape.head_dim),
            _ => words::is_finite(k.data, shape.head_dim.div_ceil(2), bits),
        });
        let (floats, fast, sizes) = (isa.floats(), I::WORD == 2 && call.fast, (keys, shape.head_dim));
        let in_words = fast && sound && words::rows_of(isa, &job.k, first, sizes, words.keys);
        let panel = if in_words || I::WORD == 1 && sound {
            k
        } else {
            pack::copied(floats, &job.k, first, keys, shape.head_dim, clean);
            if !sound {
                clean[..keys * shape.head_dim].iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
            }
            Panel::packed(clean, shape.head_dim)
        };
        if fast {
            if !in_words {
                words::rows(isa, panel.data, sizes, words.keys);
            }
            words.of_tile(isa, (scores, dots), (keys, rows.count, width));
            let (panel, sizes) = (Panel::packed(words.keys, shape.head_dim), (keys.div_ceil(2), shape.head_dim));
            let (place, factors) = ((phase / 2, &tile.reach.halved()), (&*words.gradients, factor));
            gemm::values::<I, NQ, M>(isa, panel, sizes, place, factors, dq, &mut gemm::nothing);
        } else {
            let place = (phase, &tile.reach);
            gemm::values::<I::Floats, NQ, M>(floats, panel, sizes, place, (dots, factor), dq, &mut gemm::nothing);
        }
        let seen = |n: usize, lane: usize| visible.is_none_or(|bits| bits[n] >> lane & 1 == 1);
        if !sound {
            for n in 0..keys {
                for channel in 0..shape.head_dim {
                    let x = job.k.at([first[0], first[1], key + n, channel]);
                    for lane in (0..rows.count).filter(|&lane| !x.is_finite() && seen(n, lane)) {
                        dq[channel * width + lane] += dots[n * width + lane] * x;
                    }
                }
            }
        }
        let [qc, vc] = call.layout.columns;
        let (dk, dv) = (&mut sums.dk[key * qc..][..keys * qc], &mut sums.dv[key * vc..][..keys * vc]);
        let [of_weights, of_gradients] = words.queries.each_ref();
        for (of, input, factors, words, columns, packed, finite, to) in [
            (shape.value_dim, &call.dy, &*scores, of_weights, vc, &packed[1], finite[1], dv),
            (shape.head_dim, &job.q, &*dots, of_gradients, qc, &packed[0], finite[0], dk),
        ] {
            if fast {
                let (words, sizes) = (Panel::packed(words, width / 2), (keys, rows.count.div_ceil(2)));
                gemm::added::<I, NC, MC>(isa, words, sizes, packed, columns, to);
            } else {
                let factors = Panel::packed(factors, width);
                gemm::added::<I::Floats, NC, MC>(floats, factors, (keys, rows.count), packed, columns, to);
            }
            if !finite {
                for lane in 0..rows.count {
                    for channel in 0..of {
                        let x = input.at([rows.batch, rows.head, rows.first + lane, channel]);
                        for n in (0..keys).filter(|&n| !x.is_finite() && seen(n, lane)) {
                            to[n * columns + channel] += factors[n * width + lane] * x;
                        }
                    }
                }
            }
        }
        true
    }
}
