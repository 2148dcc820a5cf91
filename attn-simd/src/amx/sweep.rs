//! A work item on AMX: some blocks of 32 queries of one head over all of their keys, a super-block of packed keys at a
//! time.
//!
//! Within a block the work on neighbouring tiles of 32 keys overlaps: while AMX multiplies the keys of the next tile
//! and the values of the last group, the vector units turn the scores of this one into weights.
//!
//! ```text
//! for each super-block:  pack its keys and values
//!   for each block:      s(first) = k·q
//!     for each tile:    finish s: mask, bias, …; largest scores
//!                        if they outgrow the base: it follows, multiply o
//!                        s(next) = k·q   |
//!                        o += v·p(last)  |  p = weights of s, split into parts
//! for each block:        o / sums, transpose, round, write
//! rows that meet numbers that parts cannot hold: the prefill kernel
//! ```

use super::buffers::Buffers;
use super::dot::DotModel;
use super::layout::{GROUP, Layout, MAX_BLOCKS, MAX_TILES};
use super::model::Model;
use super::pack;
use super::product::{AmxUnit, SIDE, square};
use super::softmax::{Weigher, dropout, multiply, rescale, threshold};
use super::values::Values;
use crate::isa::Isa;
use crate::level::Level;
use crate::math::RAISE;
use crate::prefill::buffers::Buffers as PrefillBuffers;
use crate::prefill::job::Job;
use crate::prefill::layout::Scratch;
use crate::prefill::mask::{self, Cover, Ranges};
use crate::prefill::softmax::State;
use crate::prefill::total::{Part, Total};
use crate::prefill::{finish, score, sweep};
use crate::queue::{Claim, Queue, Rows};
use crate::scoring::{KV_TILE, TileAt};
use crate::workspace::Line;

/// Works on items of the queue until none is left. `lines` is the scratch of the layout, `vector_lines` that of the
/// prefill kernel.
pub(crate) fn work(
    level: Level,
    job: &Job<'_>,
    layout: &Layout,
    queue: &Queue<'_>,
    lines: &mut [Line],
    (vector_lines, sizes): (&mut [Line], Scratch),
) {
    let mut vector = PrefillBuffers::new(vector_lines, sizes);
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Amx(amx) => items(&mut amx.open(), job, layout, queue, lines, &mut vector),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Bf16(mut unit) => items(&mut unit, job, layout, queue, lines, &mut vector),
        Level::AmxModel(_) => items(&mut Model::new(), job, layout, queue, lines, &mut vector),
        Level::Avx512Bf16Model(_) => items(&mut DotModel, job, layout, queue, lines, &mut vector),
        _ => unreachable!("a plan sends only levels with a bf16 unit here"),
    }
}

/// Calls the unit through a pointer, so that the kernel is compiled once. A call costs little beside the products of a
/// square.
fn items(
    unit: &mut dyn AmxUnit,
    job: &Job<'_>,
    layout: &Layout,
    queue: &Queue<'_>,
    lines: &mut [Line],
    vector: &mut PrefillBuffers<'_>,
) {
    let mut buffers = Buffers::new(lines, layout);
    while let Some(mut claim) = queue.claim()
        && !job.is_stopped()
    {
        // The vectors are those of AVX-512, or of the build under the model: each is compiled for its own width only.
        let odd = match job.level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(isa) => isa.vectorize(
                #[inline(always)]
                || Item::<2> { unit, job, layout, claim: &mut claim, buffers: &mut buffers }.run(isa),
            ),
            Level::Portable(isa) => isa.vectorize(
                #[inline(always)]
                || Item::<8> { unit, job, layout, claim: &mut claim, buffers: &mut buffers }.run(isa),
            ),
            _ => unreachable!("levels with a bf16 unit have these vectors"),
        };
        // Rows that parts cannot hold. A row's bits do not depend on its neighbours', so that neighbours share a block.
        for (block, rows) in odd.into_iter().enumerate() {
            let (mut lane, mut rest) = (0, rows);
            while rest != 0 {
                lane += rest.trailing_zeros() as usize;
                let count = (rows >> lane).trailing_ones() as usize;
                sweep::rows(job, &mut claim.part(block * SIDE + lane, count), vector);
                lane += count;
                rest = rows.checked_shr(lane as u32).unwrap_or(0);
            }
        }
        unit.refresh(); // mods have run
    }
}

/// One item: `NQ` vectors make 32 queries.
struct Item<'i, 'q, 'o, 'w, const NQ: usize> {
    unit: &'i mut dyn AmxUnit,
    job: &'i Job<'i>,
    layout: &'i Layout,
    claim: &'i mut Claim<'q, 'o>,
    buffers: &'i mut Buffers<'w>,
}

impl<const NQ: usize> Item<'_, '_, '_, '_, NQ> {
    /// Runs it; returns for each block the rows that are still to be computed.
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) -> [u32; MAX_BLOCKS] {
        let (job, layout, all) = (self.job, self.layout, self.claim.rows());
        let blocks = all.count.div_ceil(SIDE);
        let rows_of = |block: usize| {
            let from = block * SIDE;
            Rows { first: all.first + from, count: (all.count - from).min(SIDE), ..all }
        };
        let mut odd = [0; MAX_BLOCKS];
        for (block, odd) in odd.iter_mut().enumerate().take(blocks) {
            *odd = self.start(isa, block, rows_of(block));
        }
        let ranges: [Option<Ranges<SIDE>>; MAX_BLOCKS] =
            core::array::from_fn(|block| (block < blocks).then(|| Ranges::of(job, rows_of(block))));
        let any = |pick: fn(&Ranges<SIDE>) -> usize| ranges.iter().flatten().filter(|r| !r.any.is_empty()).map(pick);
        let (first, end) = (any(|r| r.any.start).min().unwrap_or(0), any(|r| r.any.end).max().unwrap_or(0));

        // Tiles and super-blocks lie at multiples of their sizes, so that a row meets its keys in the same groups
        // whatever its neighbours see.
        let mut held = [Held { group: None, total: false }; MAX_BLOCKS];
        let mut tile = first / SIDE;
        while tile * SIDE < end && !job.is_stopped() {
            let base = tile / layout.tiles * layout.tiles;
            let last = (base + layout.tiles).min(end.div_ceil(SIDE));
            let odd_keys = self.pack(isa, tile..last, base);
            for (block, ((ranges, odd), held)) in ranges.iter().flatten().zip(&mut odd).zip(&mut held).enumerate() {
                if *odd != u32::MAX >> (SIDE - rows_of(block).count) {
                    *odd |= self.visit(isa, (block, rows_of(block)), (ranges, held), tile..last, base, &odd_keys);
                }
            }
            tile = last;
        }
        if job.is_stopped() {
            return [0; MAX_BLOCKS]; // keys may be missing
        }
        for block in 0..blocks {
            let (rows, at) = (rows_of(block), block * SIDE);
            let smaller = (1.0 / RAISE, 1.0 / RAISE / pack::value_factor(job.v.dtype()));
            let mut part = self.claim.part(at, rows.count);
            let Buffers { out, max, sum, totals, .. } = &mut *self.buffers;
            let (floats, max) = (layout.out_floats(), &max[at..at + SIDE]);
            let (out, sum) = (&mut out[block * floats..][..floats], &mut sum[at..at + SIDE]);
            let (state, out, rest) = if held[block].total {
                let mut total = total_of(totals, layout, block);
                total.join(isa, job.log2_scale(), &[Part { out, sum, max }], SIDE, false);
                let Total { out: [out, rest], sum: [sum, lost], .. } = total;
                (finish::State { max, sum, rest: Some(lost) }, out, Some(&*rest))
            } else {
                (finish::State { max, sum, rest: None }, out, None)
            };
            finish::write(isa, job, state, (out, rest), smaller, SIDE, &mut part);
        }
        odd
    }

    /// Packs the queries of a block and clears its state. Returns the rows that parts cannot hold.
    #[inline(always)]
    fn start<I: Isa>(&mut self, isa: I, block: usize, rows: Rows) -> u32 {
        let (layout, buffers, at) = (self.layout, &mut *self.buffers, block * SIDE);
        buffers.out[block * layout.out_floats()..][..layout.out_floats()].fill(0.0);
        buffers.max[at..at + SIDE].fill(f32::NEG_INFINITY);
        buffers.sum[at..at + SIDE].fill(0.0);
        let Rows { batch, head, first, count } = rows;
        pack::along_channels::<I, true>(
            isa,
            &self.job.q,
            pack::Rows { batch, head, first, count },
            self.job.shape.head_dim,
            (layout.method.qk_parts(), self.job.q_sign, pack::Sizes::CHANNELS),
            buffers.stage,
            &mut buffers.q[block * layout.q_operands()..][..layout.q_operands()],
        )
    }

    /// Packs keys and values of some tiles of the super-block that starts at the tile `base`. Returns a word per
    /// tile: a bit for each key that parts cannot hold, or whose value they cannot.
    #[inline(always)]
    fn pack<I: Isa>(&mut self, isa: I, tiles: core::ops::Range<usize>, base: usize) -> [u32; MAX_TILES] {
        let (job, layout, buffers) = (self.job, self.layout, &mut *self.buffers);
        let (batch, head) = (self.claim.rows().batch, job.shape.kv_head(self.claim.rows().head));
        let mut odd = [0; MAX_TILES];
        for tile in tiles {
            let (first, within) = (tile * SIDE, tile - base);
            let rows = pack::Rows { batch, head, first, count: (job.shape.kv_len - first).min(SIDE) };
            let operands = &mut buffers.k[within * layout.k_operands()..][..layout.k_operands()];
            let parts = (layout.method.qk_parts(), 1.0, pack::Sizes::CHANNELS);
            odd[within] =
                pack::along_channels::<I, false>(isa, &job.k, rows, job.shape.head_dim, parts, buffers.stage, operands);
            let place = |square: usize| layout.v_start(within, square);
            odd[within] |= pack::along_rows(
                isa,
                &job.v,
                rows,
                (job.shape.value_dim, layout.method.v_parts()),
                buffers.stage,
                buffers.v,
                place,
            );
        }
        odd
    }

    /// One block over some tiles of a super-block. Returns the rows that see a key which parts cannot hold.
    #[inline(always)]
    fn visit<I: Isa>(
        &mut self,
        isa: I,
        (block, rows): (usize, Rows),
        (ranges, held): (&Ranges<SIDE>, &mut Held),
        tiles: core::ops::Range<usize>,
        base: usize,
        odd_keys: &[u32; MAX_TILES],
    ) -> u32 {
        let (job, layout, unit) = (self.job, self.layout, &mut *self.unit);
        let (at, log2_scale) = (block * SIDE, job.log2_scale());
        let Buffers { q, k, v, p, out, max, sum, totals, factor, s, stage: _, bias } = &mut *self.buffers;
        let q = &q[block * layout.q_operands()..][..layout.q_operands()];
        let out = &mut out[block * layout.out_floats()..][..layout.out_floats()];
        let state = &mut State { max: &mut max[at..at + SIDE], sum: &mut sum[at..at + SIDE], factor };
        let keys_of = |tile: usize| &k[(tile - base) * layout.k_operands()..][..layout.k_operands()];
        let (mut bits, mut kept) = ([0; KV_TILE], [0; KV_TILE]);
        let mut values = Values::new();
        let end = tiles.end.min(ranges.any.end.div_ceil(SIDE));
        let mut coming = tiles.start.max(ranges.any.start / SIDE);
        // The tile whose scores are there, and which of the two arrays of scores they are in.
        let (mut current, mut turn, mut odd): (Option<(TileAt, Cover)>, usize, u32) = (None, 0, 0);
        loop {
            if let Some((tile, cover)) = &mut current {
                let scores = &mut s[turn][..];
                let unfit = odd_keys[tile.key / SIDE - base];
                odd |= finish_scores::<I, NQ>(isa, job, *tile, cover, scores, &mut bits, (bias, unfit));
                if !job.dropout.is_none() {
                    mask::kept(isa, job, *tile, &mut kept);
                }
            }
            // The next tile of which any row sees a key.
            let mut next = None;
            while coming < end && next.is_none() {
                let key = coming * SIDE;
                let keys = (job.shape.kv_len - key).min(SIDE);
                let tile =
                    TileAt { batch: rows.batch, head: rows.head, query: rows.first, rows: rows.count, key, keys };
                let cover = ranges.cover(isa, job, tile, &mut bits);
                next = (cover != Cover::Empty).then_some((tile, cover));
                coming += 1;
            }
            if job.mods.has_score_mod() || job.mods.has_mask_mod() {
                unit.refresh();
            }
            let next_keys = next.map(|(tile, _)| keys_of(tile.key / SIDE));
            let Some((tile, _)) = current else {
                let Some(keys) = next_keys else { break };
                unit.block(layout.method.scores, keys, q, layout.depth, true, square(s[turn], 0));
                current = next;
                continue;
            };
            let group = Some(tile.key / SIDE / GROUP);
            if layout.totals && held.group != group {
                if held.group.is_some() {
                    values.all(unit, layout, v, p, out);
                    let mut total = total_of(totals, layout, block);
                    total.join(isa, log2_scale, &[Part { out, sum: state.sum, max: state.max }], SIDE, !held.total);
                    state.sum.fill(0.0);
                    out.fill(0.0);
                    held.total = true;
                }
                held.group = group;
            }
            let within = tile.key / SIDE - base;
            let [one, other] = &mut *s;
            let (scores, target) = if turn == 0 { (one, other) } else { (other, one) };
            if rescale::<I, NQ>(isa, (log2_scale, threshold(layout.method.p_parts(), tile.key / SIDE)), scores, state) {
                values.all(unit, layout, v, p, out);
                multiply::<I, NQ>(isa, out, state.factor);
            }
            // Products and weights in turn: far enough apart in the program for either to run while the other waits.
            let products = values.open_tile(within, unit, layout, v, p, out) + usize::from(next.is_some());
            let (mut weigher, mut done) = (Weigher::<I, NQ>::new(isa, log2_scale, state), 0);
            for nth in 0..products.max(1) {
                match next_keys {
                    Some(keys) if nth == 0 => {
                        unit.block(layout.method.scores, keys, q, layout.depth, true, square(target, 0));
                    }
                    _ => values.next_square(unit, layout, v, p, out),
                }
                let until = SIDE / 2 * (nth + 1) / products.max(1);
                let operands = values.weights(layout, within, p);
                match (layout.method.p_parts(), layout.method.fast) {
                    (1, _) => weigher.weigh::<1, 3>(isa, scores, done..until, operands),
                    (2, true) => weigher.weigh::<2, 4>(isa, scores, done..until, operands),
                    (2, false) => weigher.weigh::<2, 6>(isa, scores, done..until, operands),
                    _ => weigher.weigh::<3, 6>(isa, scores, done..until, operands),
                }
                if !job.dropout.is_none() {
                    dropout(&kept, done..until, operands);
                }
                done = until;
            }
            weigher.finish(isa, state);
            (current, turn) = (next, 1 - turn);
        }
        values.all(unit, layout, v, p, out);
        odd & u32::MAX >> (SIDE - rows.count)
    }
}

/// What a block's sums hold.
#[derive(Clone, Copy)]
struct Held {
    /// The group of tiles that its outputs are sums over.
    group: Option<usize>,
    /// Whether there is a total of groups before.
    total: bool,
}

/// The total of a block.
fn total_of<'t>(totals: &'t mut [&mut [f32]; 5], layout: &Layout, block: usize) -> Total<'t> {
    let (floats, at) = (layout.out_floats(), block * SIDE);
    let [out, rest, sum, lost, max] = totals;
    Total {
        out: [&mut out[block * floats..][..floats], &mut rest[block * floats..][..floats]],
        sum: [&mut sum[at..at + SIDE], &mut lost[at..at + SIDE]],
        max: &mut max[at..at + SIDE],
    }
}

/// Everything between the product and the softmax: scale, cap, bias, mods, mask. Returns the rows that see one of
/// the keys `unfit`, a bit each.
#[inline(always)]
fn finish_scores<I: Isa, const NQ: usize>(
    isa: I,
    job: &Job<'_>,
    tile: TileAt,
    cover: &mut Cover,
    scores: &mut [f32],
    bits: &mut [u64; KV_TILE],
    (bias, unfit): (&mut [f32], u32),
) -> u32 {
    let (scores, beyond) = scores.split_at_mut(tile.keys * SIDE);
    beyond.fill(f32::NEG_INFINITY);
    let mut bias_hides = false;
    if let Some(scale) = job.score_scale {
        bias_hides = score::finish::<I, NQ>(isa, job, scale, tile, scores, bias);
        if job.mods.has_score_mod() {
            // What a bias hides stays hidden, whatever score_mod makes of −∞.
            if bias_hides {
                mask::hide_by_bias(tile, *cover, SIDE, bias, bits);
                *cover = Cover::Partial;
            }
            let visible = (*cover == Cover::Partial).then_some(&*bits);
            job.mods.score_mod(job.level, tile, SIDE, visible, scores);
        }
        canonical_nan(isa, scores);
    }
    if *cover == Cover::Partial {
        mask::replace_hidden::<I, NQ>(isa, scores, bits, f32::NEG_INFINITY);
    }
    if unfit == 0 {
        return 0;
    }
    if bias_hides {
        mask::hide_by_bias(tile, *cover, SIDE, bias, bits);
    } else if *cover == Cover::Full {
        bits.fill(u64::MAX);
    }
    (0..tile.keys).filter(|key| unfit >> key & 1 == 1).fold(0, |visible, key| visible | bits[key]) as u32
}

/// Gives every NaN the same payload: one whose bits are all set, as a bias may hold, would round to a number.
#[inline(always)]
fn canonical_nan<I: Isa>(isa: I, scores: &mut [f32]) {
    let nan = isa.splat(f32::NAN);
    for s in scores.chunks_exact_mut(I::LANES) {
        let x = isa.load(s);
        isa.store(isa.select(isa.eq(x, x), x, nan), s);
    }
}
