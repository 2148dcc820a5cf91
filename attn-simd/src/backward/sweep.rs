//! A part of a backward call: its blocks of queries over their tiles of keys.
//!
//! Lanes are queries, as in the prefill kernel, for three of five products; in the sums of `dk` and `dv` they are
//! channels, because the weights of a tile are stored by key, and what is added up is a row of a key:
//!
//! ```text
//! S = K·Qᵀ   dP = V·dYᵀ   dQᵀ += Kᵀ·dS            lanes are queries
//! dV += P·dY   dK += dS·Q                          lanes are channels
//! ```

use super::buffers::{Buffers, Sums};
use super::job::Job;
use super::weights::{self, Kept};
use crate::gemm::{self, Panel, Reach};
use crate::isa::Isa;
use crate::isa::portable::Portable;
#[cfg(target_arch = "x86_64")]
use crate::isa::{avx2::Avx2, avx512::Avx512};
use crate::level::Level;
use crate::pack;
use crate::prefill::layout::MAX_Q_TILE;
use crate::prefill::mask::{self, Cover, Ranges};
use crate::prefill::{nonfinite, score};
use crate::queue::Rows;
use crate::scoring::{KV_TILE, TileAt};

/// Computes the sums of a part.
pub(super) fn part(call: &Job<'_>, part: usize, sums: &mut Sums<'_>, buffers: &mut Buffers<'_>) {
    sums.dk.fill(0.0);
    sums.dv.fill(0.0);
    let mut row = 0;
    for rows in call.layout.blocks(call.layout.place(part)) {
        let block = Block { call, rows, row };
        match call.forward.level {
            Level::Portable(isa) => block_portable(isa, block, sums, buffers),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(isa) => block_avx2(isa, block, sums, buffers),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(isa) => block_avx512(isa, block, sums, buffers),
            _ => unreachable!("a job has a level of vectors"),
        }
        row += rows.count;
    }
}

/// Names, per instruction set, the widths that are compiled: vectors of queries, and rows of accumulators of the
/// products of scores, of `dq`, and of `dk` and `dv` with their vectors of channels.
macro_rules! instances {
    ($name:ident, $isa:ty, $rows:tt, [$($vecs:literal),*]) => {
        fn $name(isa: $isa, block: Block<'_>, sums: &mut Sums<'_>, buffers: &mut Buffers<'_>) {
            match block.call.layout.vecs(block.rows.count) {
                $($vecs => instances!(@one $isa, $vecs, $rows, isa, block, sums, buffers),)*
                _ => unreachable!("a block has between one vector of rows and a full tile"),
            }
        }
    };
    (@one $isa:ty, $vecs:literal, [$ms:literal, $mv:literal, $nc:literal, $mc:literal],
        $t:ident, $b:ident, $s:ident, $u:ident) => {
        $t.vectorize(
            #[inline(always)]
            || $b.run::<$isa, $vecs, $ms, $mv, $nc, $mc>($t, $s, $u),
        )
    };
}

#[cfg(target_arch = "x86_64")]
instances!(block_avx512, Avx512, [8, 4, 4, 6], [1, 2, 3]);
#[cfg(target_arch = "x86_64")]
instances!(block_avx2, Avx2, [6, 6, 2, 6], [1, 2]);
#[cfg(target_arch = "aarch64")]
instances!(block_portable, Portable, [4, 4, 4, 4], [1, 2, 3, 4]);
#[cfg(not(target_arch = "aarch64"))]
instances!(block_portable, Portable, [4, 4, 2, 4], [1, 2]);

/// Factors of 1.
const ONES: [f32; MAX_Q_TILE] = [1.0; MAX_Q_TILE];

/// A block of queries.
struct Block<'b> {
    call: &'b Job<'b>,
    rows: Rows,
    /// Its first row in the part's `dq`.
    row: usize,
}

impl Block<'_> {
    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MS: usize, const MV: usize, const NC: usize, const MC: usize>(
        self,
        isa: I,
        sums: &mut Sums<'_>,
        buffers: &mut Buffers<'_>,
    ) {
        let (job, rows, width) = (&self.call.forward, self.rows, NQ * I::LANES);
        self.start(isa, width, buffers);
        let ranges = Ranges::of(job, rows);
        let (mut from, mut held) = (ranges.any.start, false);
        while from < ranges.any.end {
            // Tiles start at multiples of their size.
            let to = (from - from % job.tiles.kv_tile + job.tiles.kv_tile).min(ranges.any.end);
            held |= self.tile::<I, NQ, MS, MV, NC, MC>(isa, &ranges, (from, to - from), held, sums, buffers);
            from = to;
        }
        let dim = job.shape.head_dim;
        for (lane, dq) in sums.dq[self.row * dim..].chunks_exact_mut(dim.max(1)).take(rows.count).enumerate() {
            for (channel, to) in dq.iter_mut().enumerate() {
                *to = if held { buffers.dq[channel * width + lane] } else { 0.0 };
            }
        }
    }

    /// Reads queries and gradients of outputs, and computes `δ`.
    #[inline(always)]
    fn start<I: Isa>(&self, isa: I, width: usize, buffers: &mut Buffers<'_>) {
        let (call, job, rows) = (self.call, &self.call.forward, self.rows);
        let at = [rows.batch, rows.head, rows.first];
        let dims = [job.shape.head_dim, job.shape.value_dim];
        for (n, input) in [&job.q, &call.dy].into_iter().enumerate() {
            let columns = call.layout.columns[n];
            pack::transposed(isa, input, at, rows.count, 0..dims[n], width, buffers.transposed[n]);
            let packed = &mut buffers.rows[n][..rows.count * columns];
            for (row, to) in packed.chunks_exact_mut(columns.max(1)).enumerate() {
                let (there, rest) = to.split_at_mut(dims[n]);
                pack::read_row(isa, input, [rows.batch, rows.head, rows.first + row], 0, there);
                rest.fill(0.0);
            }
        }
        let first = job.shape.row(rows.batch, rows.head, rows.first);
        (buffers.lse, buffers.delta) = ([0.0; MAX_Q_TILE], [0.0; MAX_Q_TILE]);
        for lane in 0..rows.count {
            let lse = call.lse[first + lane];
            // A row that sees nothing: its scores are −∞, and so their weights 0.
            buffers.lse[lane] =
                if lse == f32::NEG_INFINITY { 0.0 } else { (f64::from(lse) * core::f64::consts::LOG2_E) as f32 };
            let dy = &buffers.rows[1][lane * call.layout.columns[1]..][..dims[1]];
            buffers.delta[lane] = call.delta(isa, [rows.batch, rows.head, rows.first + lane], dy, buffers.v) as f32;
        }
        for (n, packed) in buffers.rows.iter_mut().enumerate() {
            let packed = &mut packed[..rows.count * call.layout.columns[n]];
            buffers.finite[n] = packed.iter().fold(0.0, |sum, x| sum + x * 0.0) == 0.0;
            if !buffers.finite[n] {
                packed.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
            }
        }
        if job.q_sign != 1.0 {
            buffers.transposed[0].iter_mut().for_each(|x| *x *= job.q_sign);
        }
    }

    /// One tile of keys. Says whether any row sees any of it; `held`: whether `dq` holds a sum.
    #[inline(always)]
    fn tile<I: Isa, const NQ: usize, const MS: usize, const MV: usize, const NC: usize, const MC: usize>(
        &self,
        isa: I,
        ranges: &Ranges,
        (key, keys): (usize, usize),
        held: bool,
        sums: &mut Sums<'_>,
        buffers: &mut Buffers<'_>,
    ) -> bool {
        let (call, job, rows, width) = (self.call, &self.call.forward, self.rows, NQ * I::LANES);
        let shape = &job.shape;
        let tile = TileAt { batch: rows.batch, head: rows.head, query: rows.first, rows: rows.count, key, keys };
        let mut bits = [0; KV_TILE];
        let mut cover = ranges.cover(isa, job, tile, &mut bits);
        if cover == Cover::Empty {
            return false;
        }
        let reach: Reach<NQ> = if cover == Cover::Full { Reach::all(keys) } else { ranges.reach(tile, I::LANES) };
        let first = [tile.batch, shape.kv_head(tile.head), key];
        let Buffers { transposed, rows: packed, finite, scores, slopes, dots, dq, lse, delta, k, clean, v, bias } =
            buffers;
        let k = pack::panel(isa, &job.k, first, keys, shape.head_dim, k, &mut false);
        let v = pack::panel(isa, &job.v, first, keys, shape.value_dim, v, &mut false);
        gemm::scores::<I, NQ, MS>(isa, k, (keys, shape.head_dim), &reach, transposed[0], scores, || {});
        gemm::scores::<I, NQ, MS>(isa, v, (keys, shape.value_dim), &reach, transposed[1], dots, || {});
        let (scores, dots) = (&mut scores[..keys * width], &mut dots[..keys * width]);
        if let Some((_, in_caps)) = job.softcap {
            weights::cap_slopes(isa, in_caps, scores, slopes);
        }
        if let Some(scale) = job.score_scale {
            score::finish::<I, NQ>(isa, job, scale, tile, scores, bias);
        }
        if job.bias.is_some() {
            mask::hide_by_bias(tile, cover, width, bias, &mut bits);
            cover = Cover::Partial;
        }
        let visible = (cover == Cover::Partial).then_some(&bits[..keys]);
        if visible.is_some() {
            mask::replace_hidden::<I, NQ>(isa, scores, &bits, f32::NEG_INFINITY);
        }
        let mut drawn = [u64::MAX; KV_TILE];
        let kept = (!job.dropout.is_none()).then(|| {
            mask::kept(job, tile, &mut drawn);
            Kept { bits: &drawn[..], factor: job.dropout.factor() as f32 }
        });
        weights::gradients::<I, NQ>(isa, job.log2_scale(), (&*lse, &*delta), (&mut *scores, &mut *dots), visible, kept);
        if job.softcap.is_some() {
            weights::multiply(isa, dots, slopes);
            if visible.is_some() {
                mask::replace_hidden::<I, NQ>(isa, dots, &bits, 0.0);
            }
        }
        let factor = held.then_some(&ONES[..width]);
        let phase = key % job.tiles.kv_tile;
        // A hidden NaN times 0 would be NaN.
        let sound = visible.is_none_or(|bits| nonfinite::is_finite(isa, k, bits, shape.head_dim));
        let panel = if sound {
            k
        } else {
            pack::copied(isa, &job.k, first, keys, shape.head_dim, clean);
            clean[..keys * shape.head_dim].iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
            Panel::packed(clean, shape.head_dim)
        };
        gemm::values::<I, NQ, MV>(isa, panel, (keys, shape.head_dim), (phase, &reach), (dots, factor), dq, || {});
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
        for (of, input, factors, columns, packed, finite, to) in [
            (shape.value_dim, &call.dy, &*scores, vc, &packed[1], finite[1], dv),
            (shape.head_dim, &job.q, &*dots, qc, &packed[0], finite[0], dk),
        ] {
            gemm::added::<I, NC, MC>(isa, Panel::packed(factors, width), (keys, rows.count), packed, columns, to);
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
