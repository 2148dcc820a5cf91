//! One block of query rows over all of its keys: the loop over tiles.

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
use crate::tiles::{KV_TILE, Scratch};
use crate::workspace::{Cutter, Line};

/// Scratch of one block.
pub(crate) struct Buffers<'w> {
    q: &'w mut [f32],
    scores: &'w mut [f32],
    out: &'w mut [f32],
    state: State<'w>,
    k: &'w mut [f32],
    v: &'w mut [f32],
    bias: &'w mut [f32],
}

impl<'w> Buffers<'w> {
    pub(crate) fn new(lines: &'w mut [Line], sizes: Scratch) -> Self {
        let mut cutter = Cutter::new(lines);
        Self {
            q: cutter.floats(sizes.q),
            scores: cutter.floats(sizes.scores),
            out: cutter.floats(sizes.out),
            state: State {
                max: cutter.floats(sizes.row),
                sum: cutter.floats(sizes.row),
                factor: cutter.floats(sizes.row),
            },
            k: cutter.floats(sizes.k),
            v: cutter.floats(sizes.v),
            bias: cutter.floats(sizes.bias),
        }
    }
}

/// Works on blocks of the queue until none is left. `lines` holds as many as the plan said.
pub(crate) fn work(job: &Job<'_>, queue: &Queue<'_>, lines: &mut [Line], sizes: Scratch) {
    let mut buffers = Buffers::new(lines, sizes);
    while let Some(claim) = queue.claim() {
        block(job, claim, &mut buffers);
    }
}

/// Computes the rows of a claim, at most one block of them.
pub(crate) fn block(job: &Job<'_>, claim: Claim<'_, '_>, buffers: &mut Buffers<'_>) {
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
            match job.tiles.vecs_for(claim.rows().count) {
                $($vecs => isa.vectorize(
                    #[inline(always)]
                    || Block::<$vecs, $score_rows, $value_rows> { job, claim, buffers }.run(isa),
                ),)*
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

/// One block of `NQ` vectors of rows.
struct Block<'b, 'w, 'q, 'o, const NQ: usize, const MS: usize, const MV: usize> {
    job: &'b Job<'b>,
    claim: Claim<'q, 'o>,
    buffers: &'b mut Buffers<'w>,
}

impl<const NQ: usize, const MS: usize, const MV: usize> Block<'_, '_, '_, '_, NQ, MS, MV> {
    /// Computes the block and writes it.
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { job, mut claim, buffers } = self;
        let shape = &job.shape;
        let rows = claim.rows();
        let Rows { batch, head, first, count } = rows;
        let width = NQ * I::LANES;
        let to_log2 = job.log2_scale();
        let kv_head = shape.kv_head(head);

        let q = &mut buffers.q[..shape.head_dim.next_multiple_of(I::LANES) * width];
        pack::transposed(isa, &job.q, [batch, head, first], count, 0..shape.head_dim, width, q);
        if job.q_factor != 1.0 {
            q.iter_mut().for_each(|x| *x *= job.q_factor);
        }
        buffers.out.fill(0.0);
        buffers.state.reset();

        let ranges = Ranges::of(job, rows);
        let mut bits = [0; KV_TILE];
        let mut ahead = Ahead::nothing();
        let mut key = ranges.any.start;
        while key < ranges.any.end {
            // Tiles lie at multiples of their size, whatever a block may skip: a row meets its keys in the same groups in
            // whichever block it stands.
            let kv_tile = job.tiles.kv_tile;
            let keys = (kv_tile - key % kv_tile).min(ranges.any.end - key);
            let tile = Tile { batch, head, query: first, rows: count, key, keys };
            let left = ranges.any.end - key;
            if left <= Ahead::TILES * kv_tile && ahead.is_nothing() {
                let groups = left.div_ceil(MS) + left.div_ceil(kv_tile) * shape.value_dim.div_ceil(MV);
                ahead = Ahead::of(job, &claim, groups);
            }
            let mut cover = ranges.cover(isa, job, tile, &mut bits);
            if cover != Cover::Empty {
                let reach = if cover == Cover::Full { Reach::all(keys) } else { ranges.reach(tile, I::LANES) };
                let k = pack::panel(isa, &job.k, [batch, kv_head, key], keys, shape.head_dim, buffers.k);
                product::scores::<I, NQ, MS>(
                    isa,
                    k,
                    (keys, shape.head_dim),
                    &reach,
                    q,
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
                buffers.state.push::<I, NQ>(isa, to_log2, &reach, scores);
                if !job.dropout.is_none() {
                    let mut kept = [0; KV_TILE];
                    visible::kept(job, tile, &mut kept);
                    visible::replace_hidden::<I, NQ>(isa, scores, &kept, 0.0);
                }
                let (factor, out) = (&*buffers.state.factor, &mut *buffers.out);
                let v = pack::panel(isa, &job.v, [batch, kv_head, key], keys, shape.value_dim, buffers.v);
                let guarded = cover == Cover::Partial || job.bias.is_some();
                // Under a bias any key may be hidden from any row.
                let seen = if job.bias.is_some() { &[0; KV_TILE] } else { &bits };
                if guarded && !poison::is_finite(isa, v, &seen[..keys], shape.value_dim) {
                    if job.bias.is_some() {
                        visible::hide_by_bias(tile, cover, width, buffers.bias, &mut bits);
                    }
                    poison::values::<I, NQ, MV>(isa, job, tile, (&bits, &reach), (scores, factor), out, buffers.v);
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
            key += keys;
        }
        finish::write(isa, job, &buffers.state, buffers.out, width, &mut claim);
    }
}
