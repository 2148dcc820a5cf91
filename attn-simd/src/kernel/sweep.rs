//! Blocks of query rows over all of their keys: the loop over tiles.
//!
//! A strip is one block, or several that meet each tile of keys one after the other, so that the tile is widened or gathered once.
//! A block's arithmetic does not depend on its strip.

use core::ops::Range;

use super::ahead::Ahead;
use super::softmax::State;
use super::visible::{self, Cover, Ranges, Tile};
use super::{finish, pack, poison, score};
use crate::isa::Isa;
use crate::isa::portable::Portable;
use crate::isa::product::{self, Reach};
#[cfg(target_arch = "x86_64")]
use crate::isa::{avx2::Avx2, avx512::Avx512};
use crate::job::Job;
use crate::level::Level;
use crate::output::{Claim, Queue, Rows};
use crate::tiles::{KV_TILE, STRIP, Scratch};
use crate::workspace::{Cutter, Line};

/// Scratch of a thread.
pub(crate) struct Buffers<'w> {
    q: Each<'w>,
    out: Each<'w>,
    max: Each<'w>,
    sum: Each<'w>,
    factor: &'w mut [f32],
    scores: &'w mut [f32],
    k: &'w mut [f32],
    v: &'w mut [f32],
    bias: &'w mut [f32],
}

/// An array for each block of a strip.
struct Each<'w> {
    all: &'w mut [f32],
    /// Floats of one.
    len: usize,
}

impl<'w> Each<'w> {
    fn new(cutter: &mut Cutter<'w>, len: usize, count: usize) -> Self {
        Self { all: cutter.floats(len * count), len }
    }

    /// The array of a block.
    #[inline(always)]
    fn of(&mut self, block: usize) -> &mut [f32] {
        &mut self.all[block * self.len..][..self.len]
    }
}

impl<'w> Buffers<'w> {
    pub(crate) fn new(lines: &'w mut [Line], sizes: Scratch) -> Self {
        let (mut cutter, strip) = (Cutter::new(lines), sizes.strip);
        Self {
            q: Each::new(&mut cutter, sizes.q, strip),
            scores: cutter.floats(sizes.scores),
            out: Each::new(&mut cutter, sizes.out, strip),
            max: Each::new(&mut cutter, sizes.row, strip),
            sum: Each::new(&mut cutter, sizes.row, strip),
            factor: cutter.floats(sizes.row),
            k: cutter.floats(sizes.k),
            v: cutter.floats(sizes.v),
            bias: cutter.floats(sizes.bias),
        }
    }
}

/// Works on strips of the queue until none is left. `lines` holds as many as the plan said.
pub(crate) fn work(job: &Job<'_>, queue: &Queue<'_>, lines: &mut [Line], sizes: Scratch) {
    let mut buffers = Buffers::new(lines, sizes);
    while let Some(claim) = queue.claim() {
        strip(job, claim, &mut buffers);
    }
}

/// Computes the rows of a claim, at most a strip of them. What is left over of full blocks comes first, as a block of its own.
pub(crate) fn strip(job: &Job<'_>, mut claim: Claim<'_, '_>, buffers: &mut Buffers<'_>) {
    let (count, q_tile) = (claim.rows().count, job.tiles.q_tile());
    let few = count % q_tile;
    if few != 0 {
        blocks(job, claim.part(0, few), buffers);
    }
    if count != few {
        blocks(job, claim.part(few, count - few), buffers);
    }
}

/// Computes the rows of a claim: one block, or several full ones.
pub(crate) fn blocks(job: &Job<'_>, claim: Claim<'_, '_>, buffers: &mut Buffers<'_>) {
    match job.level {
        Level::Portable(isa) => run_portable(isa, job, claim, buffers),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(isa) => run_avx2(isa, job, claim, buffers),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(isa) => run_avx512(isa, job, claim, buffers),
        _ => unreachable!("a job has a level of vectors"),
    }
}

/// Names, per instruction set, the widths and tile rows that are compiled, for it and no other; `Tiles::of` states the same.
macro_rules! instances {
    ($name:ident, $isa:ty, $score_rows:literal, $value_rows:literal, [$($vecs:literal),*]) => {
        fn $name(isa: $isa, job: &Job<'_>, claim: Claim<'_, '_>, buffers: &mut Buffers<'_>) {
            debug_assert_eq!((job.tiles.score_rows, job.tiles.value_rows), ($score_rows, $value_rows));
            match job.tiles.vecs_for(claim.rows().count).min(job.tiles.q_vecs) {
                $($vecs => Strip::<$vecs, $score_rows, $value_rows> { job, claim, buffers }.run(isa),)*
                _ => unreachable!("a block has between one vector of rows and a full tile"),
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
instances!(run_avx512, Avx512, 8, 8, [1, 2, 3]);
#[cfg(target_arch = "x86_64")]
instances!(run_avx2, Avx2, 6, 6, [1, 2]);
#[cfg(target_arch = "aarch64")]
instances!(run_portable, Portable, 4, 4, [1, 2, 3, 4]);
#[cfg(not(target_arch = "aarch64"))]
instances!(run_portable, Portable, 4, 4, [1, 2]);

/// Blocks of `NQ` vectors of rows each: one, or several that are full.
struct Strip<'b, 'w, 'q, 'o, const NQ: usize, const MS: usize, const MV: usize> {
    job: &'b Job<'b>,
    claim: Claim<'q, 'o>,
    buffers: &'b mut Buffers<'w>,
}

impl<const NQ: usize, const MS: usize, const MV: usize> Strip<'_, '_, '_, '_, NQ, MS, MV> {
    fn run<I: Isa>(self, isa: I) {
        isa.vectorize(
            #[inline(always)]
            || {
                let (rows, width) = (self.claim.rows(), NQ * I::LANES);
                let (one, several);
                let blocks: &[(Rows, Ranges)] = if rows.count <= width {
                    one = [(rows, Ranges::of(self.job, rows))];
                    &one
                } else {
                    let count = rows.count / width;
                    several = core::array::from_fn::<_, STRIP, _>(|n| {
                        let block = Rows { first: rows.first + n * width, count: width, ..rows };
                        (block, if n < count { Ranges::of(self.job, block) } else { Ranges::NOTHING })
                    });
                    &several[..count]
                };
                self.vectorized(isa, blocks);
            },
        );
    }

    /// Computes the blocks and writes them.
    #[inline(always)]
    fn vectorized<I: Isa>(self, isa: I, blocks: &[(Rows, Ranges)]) {
        let Self { job, mut claim, buffers } = self;
        let shape = &job.shape;
        let Rows { batch, head, first: top, .. } = claim.rows();
        let width = NQ * I::LANES;
        let to_log2 = job.log2_scale();
        let kv_head = shape.kv_head(head);
        let kv_tile = job.tiles.kv_tile;

        let mut any = Range { start: usize::MAX, end: 0 };
        for (n, (rows, ranges)) in blocks.iter().enumerate() {
            let q = &mut buffers.q.of(n)[..shape.head_dim.next_multiple_of(I::LANES) * width];
            pack::transposed(isa, &job.q, [batch, head, rows.first], rows.count, 0..shape.head_dim, width, q);
            if job.q_factor != 1.0 {
                q.iter_mut().for_each(|x| *x *= job.q_factor);
            }
            State { max: buffers.max.of(n), sum: buffers.sum.of(n), factor: &mut [] }.reset();
            if !ranges.any.is_empty() {
                any = any.start.min(ranges.any.start)..any.end.max(ranges.any.end);
            }
        }

        let mut bits = [0; KV_TILE];
        // Blocks whose outputs hold nothing yet, not even zeros.
        let mut fresh = [true; STRIP];
        let mut ahead = Ahead::nothing();
        let mut from = any.start;
        while from < any.end {
            // Tiles lie at multiples of their size, whatever a block may skip: a row meets its keys in the same groups in
            // whichever block it stands.
            let to = (from - from % kv_tile + kv_tile).min(any.end);
            let left = any.end - from;
            if left <= Ahead::TILES * kv_tile && ahead.is_nothing() {
                let groups = left.div_ceil(MS) + left.div_ceil(kv_tile) * shape.value_dim.div_ceil(MV);
                ahead = Ahead::of(job, &claim, groups * blocks.len());
            }
            let (mut k_there, mut v_there) = (false, false);
            for (n, (rows, ranges)) in blocks.iter().enumerate() {
                let key = from.max(ranges.any.start);
                let keys = to.min(ranges.any.end).saturating_sub(key);
                if keys == 0 {
                    continue;
                }
                let tile = Tile { batch, head, query: rows.first, rows: rows.count, key, keys };
                let mut cover = ranges.cover(isa, job, tile, &mut bits);
                if cover == Cover::Empty {
                    continue;
                }
                let reach = if cover == Cover::Full { Reach::all(keys) } else { ranges.reach(tile, I::LANES) };
                let all = [batch, kv_head, from];
                let k = pack::panel(isa, &job.k, all, to - from, shape.head_dim, buffers.k, &mut k_there);
                product::scores::<I, NQ, MS>(
                    isa,
                    k.skip(key - from),
                    (keys, shape.head_dim),
                    &reach,
                    buffers.q.of(n),
                    buffers.scores,
                    #[inline(always)]
                    || ahead.step(isa),
                );
                let scores = &mut buffers.scores[..keys * width];
                if let Some(scale) = job.mod_scale {
                    score::finish::<I, NQ>(isa, job, scale, tile, scores, buffers.bias);
                    if job.closures.has_score() {
                        // What a bias hides stays hidden, whatever the closure makes of −∞.
                        if job.bias.is_some() {
                            visible::hide_by_bias(tile, cover, width, buffers.bias, &mut bits);
                            cover = Cover::Partial;
                        }
                        let shown = (cover == Cover::Partial).then_some(&bits);
                        job.closures.score(job.level, tile, width, shown, scores);
                    }
                }
                if cover == Cover::Partial {
                    visible::replace_hidden::<I, NQ>(isa, scores, &bits, f32::NEG_INFINITY);
                }
                let mut state = State { max: buffers.max.of(n), sum: buffers.sum.of(n), factor: buffers.factor };
                state.push::<I, NQ>(isa, to_log2, &reach, scores);
                if !job.dropout.is_none() {
                    let mut kept = [0; KV_TILE];
                    visible::kept(job, tile, &mut kept);
                    visible::replace_hidden::<I, NQ>(isa, scores, &kept, 0.0);
                }
                let (factor, out) = ((!core::mem::take(&mut fresh[n])).then_some(&*buffers.factor), buffers.out.of(n));
                let v = pack::panel(isa, &job.v, all, to - from, shape.value_dim, buffers.v, &mut v_there);
                let v = v.skip(key - from);
                let guarded = cover == Cover::Partial || job.bias.is_some();
                // Under a bias any key may be hidden from any row.
                let seen = if job.bias.is_some() { &[0; KV_TILE] } else { &bits };
                if guarded && !poison::is_finite(isa, v, &seen[..keys], shape.value_dim) {
                    if job.bias.is_some() {
                        visible::hide_by_bias(tile, cover, width, buffers.bias, &mut bits);
                    }
                    poison::values::<I, NQ, MV>(isa, job, tile, (&bits, &reach), (scores, factor), out, buffers.v);
                    v_there = false; // its cleaned copy took the place
                } else {
                    product::values::<I, NQ, MV>(
                        isa,
                        v,
                        (keys, shape.value_dim),
                        &reach,
                        (scores, factor),
                        out,
                        #[inline(always)]
                        || ahead.step(isa),
                    );
                }
            }
            from = to;
        }
        for (n, (rows, _)) in blocks.iter().enumerate() {
            let (out, mut part) = (buffers.out.of(n), claim.part(rows.first - top, rows.count));
            if fresh[n] {
                out.fill(0.0);
            }
            finish::write(isa, job, (buffers.max.of(n), buffers.sum.of(n)), out, width, &mut part);
        }
    }
}
