//! A block of 128 queries over its tiles of 64 keys.
//!
//! ```text
//! for each tile of keys that any query sees:
//!   pack its keys and values
//!   for each group of 32 queries:  S, dP of the next group  |  weights and gradients of this one, in parts
//!                                  dQ += K·dS
//!   dV += P·dY, dK += dS·Q, of all groups
//! ```

use super::super::buffers::{Buffers as OfVectors, Constants, Sums, Work};
use super::super::job::Job;
use super::super::scores::{OfScores, Tile};
use super::buffers::Buffers;
use super::layout::{GROUPS, HALVES};
use super::{odd, operands};
use crate::amx::model::Model;
use crate::amx::pack;
use crate::amx::product::{AmxUnit, Products, SIDE, square};
use crate::isa::Isa;
use crate::level::Level;
use crate::pack::{read_row, swapped};
use crate::prefill::mask::Ranges;
use crate::queue::Rows;
use crate::scoring::KV_TILE;

/// Adds a block to the sums of its part, on a level of AMX. `vectors`: the arrays that vectors have as well.
pub(crate) fn block<'w>(
    call: &Job<'_>,
    rows: Rows,
    sums: &mut Sums<'_>,
    buffers: &mut Buffers<'w>,
    vectors: &mut OfVectors<'w>,
) {
    let unit: &mut dyn AmxUnit = match call.level {
        #[cfg(target_arch = "x86_64")]
        Level::Amx(amx) => &mut amx.open(),
        Level::AmxModel(_) => &mut Model::new(),
        _ => unreachable!("a job has AMX where it has parts"),
    };
    // The unit is called through a pointer, so that the kernel is compiled once.
    match call.forward.level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(isa) => isa.vectorize(
            #[inline(always)]
            || Block::<2> { unit, call, rows, buffers, vectors }.run(isa, sums),
        ),
        Level::Portable(isa) => isa.vectorize(
            #[inline(always)]
            || Block::<8> { unit, call, rows, buffers, vectors }.run(isa, sums),
        ),
        _ => unreachable!("levels of AMX have these vectors"),
    }
}

/// A block: `NQ` vectors make 32 queries.
struct Block<'b, 'w, const NQ: usize> {
    unit: &'b mut dyn AmxUnit,
    call: &'b Job<'b>,
    rows: Rows,
    buffers: &'b mut Buffers<'w>,
    vectors: &'b mut OfVectors<'w>,
}

/// A group of 32 queries.
struct Group {
    rows: Rows,
    ranges: Ranges,
    constants: Constants,
    /// Rows of q and dy that parts cannot hold.
    odd: [u32; 2],
}

impl<const NQ: usize> Block<'_, '_, NQ> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I, sums: &mut Sums<'_>) {
        let (call, all) = (self.call, self.rows);
        let groups: [Option<Group>; GROUPS] = core::array::from_fn(
            #[inline(always)]
            |n| {
                let from = n * SIDE;
                let count = all.count.saturating_sub(from).min(SIDE);
                (count > 0).then(|| self.start(isa, n, Rows { first: all.first + from, count, ..all }))
            },
        );
        self.buffers.dq.fill(0.0);
        let seen = || groups.iter().flatten().map(|group| &group.ranges.any).filter(|keys| !keys.is_empty());
        let first = seen().map(|keys| keys.start).min().unwrap_or(0);
        let end = seen().map(|keys| keys.end).max().unwrap_or(0);
        let mut key = first / KV_TILE * KV_TILE;
        while key < end && !call.forward.is_stopped() {
            self.tile(isa, &groups, key, first..end, sums);
            key += KV_TILE;
        }
        if call.forward.is_stopped() {
            return;
        }
        let columns = call.layout.columns[0];
        let (amx, by_row) = (&mut *self.buffers, &mut *self.vectors.rows[0]);
        let floats = amx.dq.len() / GROUPS;
        for (group, dq) in groups.iter().flatten().zip(amx.dq.chunks_exact(floats.max(1))) {
            swapped(isa, dq, (columns, SIDE), by_row);
            (sums.dq)(group.rows, &by_row[..group.rows.count * columns]);
        }
    }

    /// Packs the rows of a group.
    #[inline(never)]
    fn start<I: Isa>(&mut self, isa: I, group: usize, rows: Rows) -> Group {
        isa.vectorize(
            #[inline(always)]
            || self.start_inlined(isa, group, rows),
        )
    }

    #[inline(always)]
    fn start_inlined<I: Isa>(&mut self, isa: I, group: usize, rows: Rows) -> Group {
        let (call, job) = (self.call, &self.call.forward);
        let (amx, OfVectors { rows: [_, row], v: values, .. }) = (&mut *self.buffers, &mut *self.vectors);
        let Rows { batch, head, first, count } = rows;
        let of = pack::Rows { batch, head, first, count };
        let mut odd = [0; 2];
        let dims = [job.shape.head_dim, job.shape.value_dim];
        for (n, (input, sign)) in [(&job.q, job.q_sign), (&call.dy, 1.0)].into_iter().enumerate() {
            let squares = dims[n].div_ceil(SIDE);
            let across = &mut amx.across[n][group * squares * 2..][..squares * 2];
            let numbers = (1, sign, pack::Sizes::ANY);
            pack::along_channels::<I, true>(isa, input, of, dims[n], numbers, amx.stage, across);
            let place = |square: usize| (square * GROUPS + group) * 2;
            odd[n] = pack::by_rows(isa, input, of, dims[n], amx.stage, amx.rows[n], place);
        }
        let (mut constants, row) = (Constants::default(), &mut row[..dims[1]]);
        for lane in 0..count {
            let at = [batch, head, first + lane];
            read_row(isa, &call.dy, at, 0, row);
            constants.set(isa, call, at, lane, row, values);
        }
        Group { rows, ranges: Ranges::of(job, rows), constants, odd }
    }

    /// One tile of keys, of which `within` are seen by any query of the block.
    #[inline(always)]
    fn tile<I: Isa>(
        &mut self,
        isa: I,
        groups: &[Option<Group>; GROUPS],
        key: usize,
        within: core::ops::Range<usize>,
        sums: &mut Sums<'_>,
    ) {
        let call = self.call;
        let mut tiles: [Option<Tile<NQ>>; GROUPS] = core::array::from_fn(
            #[inline(always)]
            |n| {
                let group = groups[n].as_ref()?;
                let keys = group.ranges.any.end.saturating_sub(key).min(KV_TILE);
                let mut tile =
                    (keys > 0).then(|| Tile::of(isa, call, group.rows, &group.ranges, (key, keys))).flatten()?;
                if group.rows.count < SIDE {
                    tile.hide_missing_rows();
                }
                Some(tile)
            },
        );
        refresh(self.unit, call);
        let there = |n: usize| tiles[n].is_some();
        let Some(first) = (0..GROUPS).find(|&n| there(n)) else { return };
        // The one after each, if there is any.
        let after: [Option<usize>; GROUPS] = core::array::from_fn(|n| (n + 1..GROUPS).find(|&n| there(n)));
        let odd_keys = self.pack(isa, key, (within.end - key).min(KV_TILE));
        let keys_of: [usize; GROUPS] = core::array::from_fn(|n| tiles[n].as_ref().map_or(0, |tile| tile.at.keys));
        self.scores(first, keys_of[first]);
        let mut now = Some(first);
        while let Some(n) = now {
            let (Some(group), Some(tile)) = (&groups[n], &mut tiles[n]) else { break };
            self.take_next();
            now = after[n];
            if let Some(next) = now {
                self.scores(next, keys_of[next]);
            }
            self.group(isa, (n, group), tile, odd_keys, sums);
        }
        self.sums(isa, key, within, keys_of, sums);
    }

    /// Packs the keys and values of a tile. Returns a bit for each key that parts cannot hold.
    #[inline(never)]
    fn pack<I: Isa>(&mut self, isa: I, key: usize, keys: usize) -> u64 {
        let (job, amx) = (&self.call.forward, &mut *self.buffers);
        let dims = [job.shape.head_dim, job.shape.value_dim];
        let mut odd = 0;
        for half in 0..keys.div_ceil(SIDE) {
            let rows = pack::Rows {
                batch: self.rows.batch,
                head: job.shape.kv_head(self.rows.head),
                first: key + half * SIDE,
                count: (keys - half * SIDE).min(SIDE),
            };
            for (n, input) in [&job.k, &job.v].into_iter().enumerate() {
                let squares = dims[n].div_ceil(SIDE);
                let to = &mut amx.keys[n][half * squares * 2..][..squares * 2];
                pack::along_channels::<I, false>(isa, input, rows, dims[n], (1, 1.0, pack::Sizes::ANY), amx.stage, to);
            }
            let place = |square: usize| (square * HALVES + half) * 2;
            let bits = pack::along_rows(isa, &job.k, rows, (dims[0], 1), amx.stage, amx.k_across, place);
            odd |= u64::from(bits) << (half * SIDE);
        }
        odd
    }

    /// Multiplies the scores and `dy·v` of a group.
    #[inline(always)]
    fn scores(&mut self, group: usize, keys: usize) {
        let amx = &mut *self.buffers;
        for (n, to) in amx.next.iter_mut().enumerate() {
            let steps = amx.across[n].len() / (2 * GROUPS);
            let b = &amx.across[n][group * steps * 2..];
            for half in 0..keys.div_ceil(SIDE) {
                let a = &amx.keys[n][half * steps * 2..];
                self.unit.block(Products::One, a, b, steps, true, square(to, half));
            }
        }
    }

    /// Makes the scores of the next group those of this one.
    #[inline(always)]
    fn take_next(&mut self) {
        let (amx, work) = (&mut *self.buffers, &mut self.vectors.work);
        core::mem::swap(&mut work.scores, &mut amx.next[0]);
        core::mem::swap(&mut work.dots, &mut amx.next[1]);
    }

    /// What one group makes of its scores.
    #[inline(always)]
    fn group<I: Isa>(
        &mut self,
        isa: I,
        (n, group): (usize, &Group),
        tile: &mut Tile<NQ>,
        odd_keys: u64,
        sums: &mut Sums<'_>,
    ) {
        let (call, job, at) = (self.call, &self.call.forward, tile.at);
        let (amx, OfVectors { work, rows: [_, row], .. }) = (&mut *self.buffers, &mut *self.vectors);
        let Work { scores, slopes, dots, bias, mod_slopes, known, .. } = work;
        tile.finish(isa, call, &group.constants, OfScores { scores, slopes, dots, bias, mod_slopes, known });
        let (halves, parts) = (at.keys.div_ceil(SIDE), call.parts);
        let (scores, dots) = (&mut scores[..halves * SIDE * SIDE], &mut dots[..halves * SIDE * SIDE]);
        tile.through_cap(isa, call, &mut dots[..at.keys * SIDE], slopes);
        scores[at.keys * SIDE..].fill(0.0);
        dots[at.keys * SIDE..].fill(0.0);
        for half in 0..halves {
            let here = half * SIDE * SIDE..(half + 1) * SIDE * SIDE;
            let [weights, gradients] = amx.weights.each_mut().map(
                #[inline(always)]
                |all| &mut all[(half * GROUPS + n) * parts * 2..][..parts * 2],
            );
            operands::split::<I, NQ>(isa, parts, &scores[here.clone()], weights, None);
            let across = &mut amx.gradients[half * parts * 2..][..parts * 2];
            operands::split::<I, NQ>(isa, parts, &dots[here], gradients, Some(across));
        }
        refresh(self.unit, call);
        let [by_parts, _] = products(parts);
        let floats = amx.dq.len() / GROUPS;
        let dq = &mut amx.dq[n * floats..][..floats];
        let (sum, _) = amx.sum.as_chunks_mut();
        for (nth, dq) in dq.chunks_exact_mut(SIDE * SIDE).enumerate() {
            let k = &amx.k_across[nth * HALVES * 2..];
            self.unit.block(by_parts, k, amx.gradients, halves, true, &mut sum[0]);
            add(isa, &sum[0], dq);
        }
        let visible = tile.visible();
        if odd_keys != 0 {
            let of = (at, job.shape.kv_head(at.head), job.shape.head_dim);
            odd::of_keys(isa, &job.k, of, (odd_keys, visible), dots, amx.stage, dq);
        }
        let [qc, vc] = call.layout.columns;
        if group.odd[0] != 0 {
            let (of, to) = ((at, job.shape.head_dim, qc), &mut sums.dk[at.key * qc..]);
            odd::of_queries(isa, &job.q, of, (group.odd[0], visible), dots, row, to);
        }
        if group.odd[1] != 0 {
            let (of, to) = ((at, job.shape.value_dim, vc), &mut sums.dv[at.key * vc..]);
            odd::of_queries(isa, &call.dy, of, (group.odd[1], visible), scores, row, to);
        }
    }

    /// Adds `P·dY` to `dv` and `dS·Q` to `dk`, of all groups that see a tile, for the keys `within`.
    #[inline(always)]
    fn sums<I: Isa>(
        &mut self,
        isa: I,
        key: usize,
        within: core::ops::Range<usize>,
        keys_of: [usize; GROUPS],
        sums: &mut Sums<'_>,
    ) {
        let (call, amx) = (self.call, &mut *self.buffers);
        let ([_, by_parts], parts) = (products(call.parts), call.parts);
        let (sum, _) = amx.sum.as_chunks_mut();
        for (n, to) in [(0, &mut *sums.dk), (1, &mut *sums.dv)] {
            let columns = call.layout.columns[n];
            for half in 0..HALVES {
                let from = key + half * SIDE;
                let rows = within.start.max(from)..within.end.min(from + SIDE);
                let of = 1 - n; // weights first
                for nth in 0..amx.rows[n].len() / (2 * GROUPS) {
                    let mut fresh = true;
                    let mut group = 0;
                    while group < GROUPS {
                        // Groups that see any key of the half, next to each other.
                        let steps = keys_of[group..].iter().take_while(|&&keys| keys > half * SIDE).count();
                        if steps > 0 {
                            let a = &amx.weights[of][(half * GROUPS + group) * parts * 2..];
                            let b = &amx.rows[n][(nth * GROUPS + group) * 2..];
                            self.unit.block(by_parts, a, b, steps, fresh, &mut sum[0]);
                            fresh = false;
                        }
                        group += steps.max(1);
                    }
                    if fresh {
                        break;
                    }
                    let column = nth * SIDE;
                    let count = (columns - column).min(SIDE);
                    for row in rows.clone() {
                        let to = &mut to[row * columns + column..][..count];
                        add(isa, &sum[0][(row - from) * SIDE..][..count], to);
                    }
                }
            }
        }
    }
}

/// Makes the unit ready again after the caller's mods.
#[inline(always)]
fn refresh(unit: &mut dyn AmxUnit, call: &Job<'_>) {
    if call.forward.mods.has_score_mod() || call.forward.mods.has_mask_mod() {
        unit.refresh();
    }
}

/// Products with parts of B, and of A.
fn products(parts: usize) -> [Products; 2] {
    match parts {
        1 => [Products::One, Products::One],
        2 => [Products::OneByTwo, Products::TwoByOne],
        _ => [Products::OneByThree, Products::ThreeByOne],
    }
}

/// `to += from`, of whole vectors.
#[inline(always)]
fn add<I: Isa>(isa: I, from: &[f32], to: &mut [f32]) {
    for (from, to) in from.chunks_exact(I::LANES).zip(to.chunks_exact_mut(I::LANES)) {
        isa.store(isa.add(isa.load(to), isa.load(from)), to);
    }
}
