//! Blocks of query rows over all of their keys: the loop over tiles.
//!
//! A call is five loops, the outermost first:
//!
//! ```text
//! 5  strips of queries   call.rs starts threads on it, queue.rs hands out each strip once; `work` takes them
//! 4  tiles of keys       `tiles`: up to 64 keys, in order, because maxima and sums of a row depend on earlier keys
//! 3  blocks of a strip   `tiles`: they pass over a tile before the next one comes, so it is packed once and stays near
//! 2  groups of rows      gemm.rs: M keys (scores) or M channels (values), against the NQ vectors of a block
//! 1  the sum             gemm.rs `steps`: over channels (scores) or keys (values), M × NQ accumulators in registers
//! ```
//! Only loop 5 runs in parallel. Loops 2 and 1 run twice in each turn of loop 3 (`Visit::run`): once for the scores,
//! once for the values; mask, score and softmax come between them.
//!
//! A strip is one block or several. The first of them may be narrower: it takes what is left over of full blocks. A
//! block's arithmetic does not depend on its strip.

use core::ops::Range;

use super::buffers::Buffers;
use super::job::Job;
use super::layout::{GROUPS, STRIP, Scratch};
use super::mask::{self, Cover, Ranges};
use super::prefetch::{Lines, NextTile, Prefetch};
use super::softmax::State;
use super::total::{Part, Total};
use super::{finish, nonfinite, score};
use crate::gemm::{self, Reach};
use crate::isa::portable::Portable;
use crate::isa::{Isa, hint};
#[cfg(target_arch = "x86_64")]
use crate::isa::{avx2::Avx2, avx512::Avx512};
use crate::level::Level;
use crate::pack;
use crate::queue::{Claim, Queue, Rows};
use crate::scoring::{KV_TILE, TileAt};
use crate::workspace::Line;

/// Works on strips of the queue until none is left. `lines` holds as many as the plan said.
pub(crate) fn work(job: &Job<'_>, queue: &Queue<'_>, lines: &mut [Line], sizes: Scratch) {
    let mut buffers = Buffers::new(lines, sizes);
    while let Some(mut claim) = queue.claim()
        && !job.is_stopped()
    {
        rows(job, &mut claim, &mut buffers);
    }
}

/// Computes the rows of a claim, a strip at a time.
pub(crate) fn rows(job: &Job<'_>, claim: &mut Claim<'_, '_>, buffers: &mut Buffers<'_>) {
    let (count, most) = (claim.rows().count, buffers.strip * job.tiles.q_tile());
    for from in (0..count).step_by(most) {
        let part = claim.part(from, (count - from).min(most));
        match job.level {
            Level::Portable(isa) => strip(isa, job, part, buffers, visit_portable),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(isa) => strip(isa, job, part, buffers, visit_avx2),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(isa) => strip(isa, job, part, buffers, visit_avx512),
            _ => unreachable!("a job has a level of vectors"),
        }
    }
}

/// Names, per instruction set, the widths and tile rows that are compiled, for it and no other; `Tiles::of` states the
/// same.
macro_rules! instances {
    ($name:ident, $isa:ty, $rows:literal, [$($vecs:literal),*]) => {
        fn $name(isa: $isa, visit: Visit<'_, '_>) {
            debug_assert_eq!(visit.job.tiles.acc_rows, $rows);
            match visit.block.vecs {
                $($vecs => isa.vectorize(
                    #[inline(always)]
                    || visit.run::<$isa, $vecs, $rows>(isa),
                ),)*
                _ => unreachable!("a block has between one vector of rows and a full tile"),
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
instances!(visit_avx512, Avx512, 4, [1, 2, 3]);
#[cfg(target_arch = "x86_64")]
instances!(visit_avx2, Avx2, 6, [1, 2]);
#[cfg(target_arch = "aarch64")]
instances!(visit_portable, Portable, 4, [1, 2, 3, 4]);
#[cfg(not(target_arch = "aarch64"))]
instances!(visit_portable, Portable, 4, [1, 2]);

/// A block of a strip.
struct Block {
    rows: Rows,
    ranges: Ranges,
    /// Vectors of rows.
    vecs: usize,
}

impl Block {
    const NOTHING: Self =
        Self { rows: Rows { batch: 0, head: 0, first: 0, count: 0 }, ranges: Ranges::NOTHING, vecs: 0 };

    fn of(job: &Job<'_>, rows: Rows) -> Self {
        Self { rows, ranges: Ranges::of(job, rows), vecs: job.tiles.vecs_for(rows.count) }
    }
}

/// Computes the blocks of a strip and writes them.
fn strip<I: Isa>(
    isa: I,
    job: &Job<'_>,
    mut claim: Claim<'_, '_>,
    buffers: &mut Buffers<'_>,
    visit: fn(I, Visit<'_, '_>),
) {
    isa.vectorize(
        #[inline(always)]
        || {
            let (all, q_tile) = (claim.rows(), job.tiles.q_tile());
            // What is left over of full blocks comes first.
            let few = all.count % q_tile;
            let (one, several);
            let blocks: &[Block] = if all.count <= q_tile {
                one = [Block::of(job, all)];
                &one
            } else {
                let (front, count) = (usize::from(few != 0), all.count.div_ceil(q_tile));
                several = core::array::from_fn::<_, STRIP, _>(|n| match n {
                    0 if front == 1 => Block::of(job, Rows { count: few, ..all }),
                    n if n < count => {
                        let first = all.first + few + (n - front) * q_tile;
                        Block::of(job, Rows { first, count: q_tile, ..all })
                    }
                    _ => Block::NOTHING,
                });
                &several[..count]
            };
            for (n, block) in blocks.iter().enumerate() {
                start(isa, job, block, n, buffers);
            }
            let held = tiles(isa, job, &claim, blocks, buffers, visit);
            if job.is_stopped() {
                return; // tiles may be missing
            }
            for (n, (block, mut held)) in blocks.iter().zip(held).enumerate() {
                let Block { rows, vecs, .. } = *block;
                let mut part = claim.part(rows.first - all.first, rows.count);
                held.end_group(job, block, n, buffers);
                if held.total || held.waiting.count_ones() > 1 {
                    held.join(isa, job, block, n, buffers);
                }
                let width = vecs * I::LANES;
                let Buffers { groups, max, totals: [total_out, rest_out, total_sum, rest_sum, _], .. } = &mut *buffers;
                let (state, out) = if held.total {
                    let state = finish::State { max: max.of(n), sum: total_sum.of(n), rest: Some(rest_sum.of(n)) };
                    (state, (total_out.of(n), Some(&*rest_out.of(n))))
                } else {
                    let [out, sum, _] = &mut groups[held.waiting.trailing_zeros() as usize % GROUPS];
                    if held.waiting == 0 {
                        out.of(n).fill(0.0);
                        sum.of(n).fill(0.0);
                    }
                    (finish::State { max: max.of(n), sum: sum.of(n), rest: None }, (out.of(n), None))
                };
                finish::write(isa, job, state, out, (1.0, 1.0), width, &mut part);
            }
        },
    );
}

/// Packs the queries of a block and clears its state.
#[inline(always)]
fn start<I: Isa>(isa: I, job: &Job<'_>, block: &Block, n: usize, buffers: &mut Buffers<'_>) {
    let (Rows { batch, head, first, count }, width) = (block.rows, block.vecs * I::LANES);
    let q = &mut buffers.q.of(n)[..job.shape.head_dim.next_multiple_of(I::LANES) * width];
    pack::transposed(isa, &job.q, [batch, head, first], count, 0..job.shape.head_dim, width, q);
    if job.q_sign != 1.0 {
        q.iter_mut().for_each(|x| *x *= job.q_sign);
    }
    State { max: buffers.max.of(n), sum: buffers.sum.of(n), factor: &mut [] }.reset();
}

/// What a block's arrays hold.
#[derive(Clone, Copy)]
struct Held {
    /// The group that its outputs are sums over.
    group: usize,
    /// Whether there are any: if not, the array holds nothing, not even zeros.
    out: bool,
    /// Groups that wait, a bit each.
    waiting: u8,
    /// A total of the groups before.
    total: bool,
}

impl Held {
    const NOTHING: Self = Self { group: 0, out: false, waiting: 0, total: false };

    /// Ends the group of a block: its sums wait to join the total.
    #[inline(always)]
    fn end_group(&mut self, job: &Job<'_>, block: &Block, n: usize, buffers: &mut Buffers<'_>) {
        if self.out {
            let [_, group_sum, group_max] = &mut buffers.groups[self.group];
            let width = block.vecs * job.tiles.lanes;
            group_max.of(n)[..width].copy_from_slice(&buffers.max.of(n)[..width]);
            group_sum.of(n)[..width].copy_from_slice(&buffers.sum.of(n)[..width]);
            buffers.sum.of(n).fill(0.0);
            (self.out, self.waiting) = (false, self.waiting | 1 << self.group);
        }
    }

    /// Adds the groups that wait to the total.
    #[inline(always)]
    fn join<I: Isa>(&mut self, isa: I, job: &Job<'_>, block: &Block, n: usize, buffers: &mut Buffers<'_>) {
        let Buffers { groups, totals: [total_out, rest_out, total_sum, rest_sum, total_max], .. } = buffers;
        let mut total = Total {
            out: [total_out.of(n), rest_out.of(n)],
            sum: [total_sum.of(n), rest_sum.of(n)],
            max: total_max.of(n),
        };
        let width = block.vecs * I::LANES;
        let (mut parts, mut count) = ([Part { out: &[], sum: &[], max: &[] }; GROUPS], 0);
        for (group, [out, sum, max]) in groups.iter_mut().enumerate() {
            if self.waiting & 1 << group != 0 {
                let out = &out.of(n)[..job.shape.value_dim * width];
                parts[count] = Part { out, sum: &sum.of(n)[..width], max: max.of(n) };
                count += 1;
            }
        }
        if count > 0 {
            total.join(isa, job.log2_scale(), &parts[..count], width, !self.total);
            (self.waiting, self.total) = (0, true);
        }
    }
}

/// Visits each tile of keys with every block that sees any of it, unless the caller stops it. Returns what their arrays
/// hold then.
#[inline(always)]
fn tiles<I: Isa>(
    isa: I,
    job: &Job<'_>,
    claim: &Claim<'_, '_>,
    blocks: &[Block],
    buffers: &mut Buffers<'_>,
    visit: fn(I, Visit<'_, '_>),
) -> [Held; STRIP] {
    let mut any = Range { start: usize::MAX, end: 0 };
    for Block { ranges, .. } in blocks.iter().filter(|block| !block.ranges.any.is_empty()) {
        any = any.start.min(ranges.any.start)..any.end.max(ranges.any.end);
    }
    let (kv_tile, mut from) = (job.tiles.kv_tile, any.start);
    let (mut bits, mut prefetch, mut held) = ([0; KV_TILE], Prefetch::nothing(), [Held::NOTHING; STRIP]);
    while from < any.end && !job.is_stopped() {
        // Tiles lie at multiples of their size, whatever a block may skip: the groups of a row's keys do not depend on
        // its block.
        let to = (from - from % kv_tile + kv_tile).min(any.end);
        let left = any.end - from;
        if left <= Prefetch::TILES * kv_tile && prefetch.is_nothing() {
            let rows = job.tiles.acc_rows;
            let groups = left.div_ceil(rows) + left.div_ceil(kv_tile) * job.shape.value_dim.div_ceil(rows);
            prefetch = Prefetch::of(job, claim, groups * blocks.len());
        }
        let Rows { batch, head, .. } = blocks[0].rows;
        let next = [batch, job.shape.kv_head(head), to];
        let mut next = NextTile::of(job, next, kv_tile.min(any.end - to), blocks.len());
        let mut there = [false; 2];
        let group = from / job.tiles.group() % GROUPS;
        for (n, block) in blocks.iter().enumerate() {
            next.request(isa);
            let (bits, prefetch, there, held) = (&mut bits, &mut prefetch, &mut there, &mut held[n]);
            held.group = group;
            visit(isa, Visit { job, block, n, keys: from..to, buffers: &mut *buffers, bits, prefetch, there, held });
        }
        from = to;
        if from < any.end && from.is_multiple_of(job.tiles.group()) {
            let all = group + 1 == GROUPS;
            for (n, (block, held)) in blocks.iter().zip(&mut held).enumerate() {
                held.end_group(job, block, n, buffers);
                if all {
                    held.join(isa, job, block, n, buffers);
                }
            }
        }
    }
    held
}

/// A block against a tile of keys.
struct Visit<'v, 'w> {
    job: &'v Job<'v>,
    block: &'v Block,
    /// Its number in the strip.
    n: usize,
    /// Keys of the tile that any block of the strip sees.
    keys: Range<usize>,
    buffers: &'v mut Buffers<'w>,
    bits: &'v mut [u64; KV_TILE],
    prefetch: &'v mut Prefetch,
    /// Whether the tile's keys, and its values, have been brought into form.
    there: &'v mut [bool; 2],
    held: &'v mut Held,
}

impl Visit<'_, '_> {
    /// Scores, weights, values.
    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const M: usize>(self, isa: I) {
        let Self { job, block: Block { rows, ranges, .. }, n, keys: Range { start: from, end: to }, .. } = self;
        let Self { buffers, bits, prefetch, there: [k_there, v_there], held, .. } = self;
        let (shape, width) = (&job.shape, NQ * I::LANES);
        let key = from.max(ranges.any.start);
        let keys = to.min(ranges.any.end).saturating_sub(key);
        if keys == 0 {
            return;
        }
        let tile = TileAt { batch: rows.batch, head: rows.head, query: rows.first, rows: rows.count, key, keys };
        let mut cover = ranges.cover(isa, job, tile, bits);
        if cover == Cover::Empty {
            return;
        }
        let reach = if cover == Cover::Full { Reach::all(keys) } else { ranges.reach::<I, NQ>(tile) };
        let all = [tile.batch, shape.kv_head(tile.head), from];
        let k = pack::panel(isa, &job.k, all, to - from, shape.head_dim, buffers.k, k_there);
        let mut bias = Lines::of_bias(job, tile);
        let lines = bias.left().div_ceil(keys.div_ceil(M));
        gemm::scores::<I, NQ, M>(
            isa,
            k.skip(key - from),
            (keys, shape.head_dim),
            &reach,
            buffers.q.of(n),
            buffers.scores,
            &mut || {
                prefetch.step(isa);
                bias.prefetch::<I, { hint::SECOND }>(isa, lines);
            },
        );
        let scores = &mut buffers.scores[..keys * width];
        let mut bias_hides = false;
        if let Some(scale) = job.score_scale {
            bias_hides = score::finish::<I, NQ>(isa, job, scale, tile, scores, buffers.bias);
            if job.mods.has_score_mod() {
                // What a bias hides stays hidden, whatever score_mod makes of −∞.
                if bias_hides {
                    mask::hide_by_bias(tile, cover, width, buffers.bias, bits);
                    cover = Cover::Partial;
                }
                let visible = (cover == Cover::Partial).then_some(&*bits);
                job.mods.score_mod(job.level, tile, width, visible, scores);
            }
        }
        if cover == Cover::Partial {
            mask::replace_hidden::<I, NQ>(isa, scores, bits, f32::NEG_INFINITY);
        }
        let mut state = State { max: buffers.max.of(n), sum: buffers.sum.of(n), factor: buffers.factor };
        state.push::<I, NQ>(isa, job.log2_scale(), (key % job.tiles.kv_tile, &reach), scores);
        if !job.dropout.is_none() {
            let mut kept = [0; KV_TILE];
            mask::kept(isa, job, tile, &mut kept);
            mask::replace_hidden::<I, NQ>(isa, scores, &kept, 0.0);
        }
        let factor = core::mem::replace(&mut held.out, true).then_some(&*buffers.factor);
        let out = buffers.groups[held.group][0].of(n);
        let v = pack::panel(isa, &job.v, all, to - from, shape.value_dim, buffers.v, v_there);
        // A bias may hide any key from any row.
        let any = &[0; KV_TILE];
        let sound = (cover == Cover::Full && !bias_hides)
            || buffers.finite.holds(isa, v, ([all[0], all[1]], from..to), shape.value_dim);
        let v = v.skip(key - from);
        let visible = if bias_hides { any } else { &*bits };
        if !sound && !nonfinite::is_finite(isa, v, &visible[..keys], shape.value_dim) {
            if bias_hides {
                mask::hide_by_bias(tile, cover, width, buffers.bias, bits);
            }
            nonfinite::values::<I, NQ, M>(isa, job, tile, (bits, &reach), (scores, factor), out, buffers.v);
            *v_there = false; // a cleaned copy has replaced it
        } else {
            gemm::values::<I, NQ, M>(
                isa,
                v,
                (keys, shape.value_dim),
                (key % job.tiles.kv_tile, &reach),
                (scores, factor),
                out,
                &mut || prefetch.step(isa),
            );
        }
    }
}
