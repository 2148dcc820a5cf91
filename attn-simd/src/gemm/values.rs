//! The product of values and weights: chains of some keys, whose sums are added up. Levels do that in three ways:
//! 32 long registers by halves of a tile, AVX2 with channels that take turns, short registers part by part.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use core::sync::atomic::{Ordering, compiler_fence};

use super::reach::{Reach, with_vectors};
use super::{Panel, UNROLL, add_all, adds_pairs, padded, steps, steps_from};
use crate::isa::Isa;
use crate::scoring::KV_TILE;

/// `o[c][query] = o[c][query]·factor[query] + Σ_key values[key][c]·p[key][query]` for `columns` channels and `depth`
/// keys; without factors as if `o` held zeros. `p`: `[depth][NQ·LANES]`, of which each vector's reach is read;
/// `factor`: `[NQ·LANES]`; `o`: at least `columns` rounded up to `M`, times `NQ·LANES`. The first key is the `phase`-th
/// of its tile. `between` is called once for each group of channels.
#[inline(never)]
pub(crate) fn values<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    values: Panel<'_>,
    sizes: (usize, usize),
    (phase, reach): (usize, &Reach<NQ>),
    weights: (&[f32], Option<&[f32]>),
    o: &mut [f32],
    between: impl FnMut(),
) {
    isa.vectorize(
        #[inline(always)]
        || values_inlined::<I, NQ, M>(isa, values, sizes, (phase, reach), weights, o, between),
    );
}

#[inline(always)]
fn values_inlined<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    values: Panel<'_>,
    (depth, columns): (usize, usize),
    (phase, reach): (usize, &Reach<NQ>),
    (p, factor): (&[f32], Option<&[f32]>),
    o: &mut [f32],
    mut between: impl FnMut(),
) {
    let width = NQ * I::LANES;
    if columns == 0 {
        return;
    }
    let a = values.checked(depth, columns);
    assert!(
        p.len() >= depth * width && factor.is_none_or(|f| f.len() >= width) && o.len() >= padded(columns, M) * width
    );
    assert!(reach.end.iter().all(|&end| end <= depth));
    let (b, c) = (p.as_ptr(), o.as_mut_ptr());
    let factors = factor.map(<[f32]>::as_ptr);
    let (stride, reach) = (values.row_stride, (!reach.is_all(depth)).then_some(reach));
    let tile = Tile { a, stride, p: b, depth, phase, reach };
    let mut first = 0;
    while first < columns {
        let left = columns - first;
        // SAFETY: every column is below `columns` or clamped to the last, so each pointer lies in row 0 of the panel
        // and reaches, in steps of the row stride, only elements that `checked` has bounded. `p` holds `depth` rows of
        // `NQ` vectors and `o` has room for whole groups of M rows; both were asserted above, and that no reach is
        // beyond `depth`, and that the keys are those of one tile.
        unsafe {
            let (a, o) = (a.add(first), c.add(first * width));
            if I::LANES < 8 {
                let end = columns.min(first + Waiting::CHANNELS);
                part_by_part::<I, NQ, M>(isa, &tile, first..end, factors, o, &mut between);
                first = end;
                continue;
            }
            between();
            // A call of its own for each: with one for all kinds of places, each costs a register or a load. Eight
            // channels at the end are two groups of four, so that no group reads a row twice.
            first += if M > 4 && (left == 4 || left == 8) {
                value_group::<I, NQ, 4, true>(isa, &core::array::from_fn(|m| a.add(m)), &tile, factors, o)
            } else if left >= M {
                value_group::<I, NQ, M, true>(isa, &core::array::from_fn(|m| a.add(m)), &tile, factors, o)
            } else {
                let starts = core::array::from_fn(|m| a.add(m.min(left - 1)));
                value_group::<I, NQ, M, false>(isa, &starts, &tile, factors, o)
            };
        }
    }
}

/// The values of a tile, and its weights.
struct Tile<'a, const NQ: usize> {
    /// The first row of values.
    a: *const f32,
    /// Elements from one row to the next.
    stride: isize,
    /// `[depth][NQ·LANES]`.
    p: *const f32,
    /// Keys.
    depth: usize,
    /// Place of the first key in its tile.
    phase: usize,
    /// `None` where all vectors need all keys.
    reach: Option<&'a Reach<NQ>>,
}

/// Keys of a chain of multiply-adds of an output. Equal products err most, because every addition rounds the same way:
/// a chain of 12 is off by 3.3u at most, one of 64 by 16.5u. (16: 4.5u, more than is allowed.)
const PART: usize = 12;
/// The same in pairs: ten additions.
const PART_OF_PAIRS: usize = 20;
/// Keys of half a tile.
const HALF: usize = KV_TILE / 2;
const _: () = assert!(PART.is_multiple_of(UNROLL) && HALF.is_multiple_of(UNROLL) && PART_OF_PAIRS.is_multiple_of(2));

/// Keys of a part at a level.
const fn part_len<I: Isa>() -> usize {
    if adds_pairs::<I>() { PART_OF_PAIRS } else { PART }
}

/// `M` columns of the output from all keys. Returns `M`. Only what is OFTEN called has a loop for whole tiles.
///
/// # Safety
/// Each of `a` is readable, and so are the `depth − 1` places `stride` further each; `p` for `depth` rows of `NQ`
/// vectors, and no reach goes beyond; `factors` for `NQ` vectors; `o` is readable and writable for `M` of them.
#[inline(always)]
unsafe fn value_group<I: Isa, const NQ: usize, const M: usize, const OFTEN: bool>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
    factors: Option<*const f32>,
    o: *mut f32,
) -> usize {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let sum = if I::LANES == 16 { halves(isa, a, tile) } else { in_turn::<I, NQ, M, OFTEN>(isa, a, tile) };
        add_to(isa, &sum, factors, o);
    }
    M
}

/// Some columns of the output from all keys, for levels of short registers: all columns of a part of the keys before
/// the next part; sums of the parts before wait in memory.
///
/// So the rows of a part are read from one end to the other. Measured on Zen 3, portable, on a host with busy
/// neighbours: with groups that go through all keys, whole calls take 3 to 11 % longer; on a quiet one as long.
///
/// # Safety
/// The rows of the tile are readable at these channels, its weights for `depth` rows of `NQ` vectors, and no reach goes
/// beyond; `factors` for `NQ` vectors; `o` is readable and writable for `NQ` vectors of each channel, rounded up to
/// whole groups of `M`.
#[inline(always)]
unsafe fn part_by_part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    tile: &Tile<'_, NQ>,
    channels: core::ops::Range<usize>,
    factors: Option<*const f32>,
    o: *mut f32,
    between: &mut impl FnMut(),
) {
    const { assert!(I::LANES >= 8 || (Waiting::CHANNELS.is_multiple_of(M) && NQ * I::LANES <= Waiting::WIDTH)) };
    let mut waiting = Waiting([core::mem::MaybeUninit::uninit(); _]);
    let waiting: *mut f32 = waiting.0.as_mut_ptr().cast();
    let mut from = 0;
    while from < tile.depth {
        let keys = from..tile.depth.min(from + part_len::<I>() - (tile.phase + from) % part_len::<I>());
        from = keys.end;
        let mut first = 0;
        while first < channels.len() {
            if keys.end == tile.depth {
                between();
            }
            let left = channels.len() - first;
            // SAFETY: the caller vouches for these addresses, and `Waiting` has room for whole groups of M.
            unsafe {
                let a = tile.a.add(channels.start + first);
                let (waiting, o) = (waiting.add(first * NQ * I::LANES), o.add(first * NQ * I::LANES));
                // A call of its own for each, as above.
                if left >= M {
                    let starts: [*const f32; M] = core::array::from_fn(|m| a.add(m));
                    value_part::<I, NQ, M>(isa, &starts, tile, keys.clone(), factors, (waiting, o));
                } else {
                    let starts: [*const f32; M] = core::array::from_fn(|m| a.add(m.min(left - 1)));
                    value_part::<I, NQ, M>(isa, &starts, tile, keys.clone(), factors, (waiting, o));
                }
            }
            first += M;
        }
    }
}

/// Sums of the parts before, of some channels.
#[repr(C, align(64))]
struct Waiting([core::mem::MaybeUninit<f32>; Self::CHANNELS * Self::WIDTH]);

impl Waiting {
    /// Channels: whole groups, and all of most models. Rows and sums of a part stay in the first cache.
    const CHANNELS: usize = 192;
    /// Floats of two vectors of four.
    const WIDTH: usize = 8;
}

/// A part of the keys for `M` columns: added to the sums that wait, and the last part to the output.
///
/// # Safety
/// As [`value_group`]; the sums that wait are readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn value_part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
    keys: core::ops::Range<usize>,
    factors: Option<*const f32>,
    (waiting, o): (*mut f32, *mut f32),
) {
    let (is_first, is_last) = (keys.start == 0, keys.end == tile.depth);
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let mut sum = part::<I, NQ, M>(isa, a, tile, keys);
        if !is_first {
            add_stored(isa, &mut sum, waiting);
        }
        if is_last {
            add_to(isa, &sum, factors, o);
        } else {
            store_all(isa, &sum, waiting);
        }
    }
}

/// The sums of all keys, for levels of few registers: sums of parts wait in memory, and the channels take turns. The
/// parts of two end at a place of the tile, those of the next two four keys later.
///
/// Measured on Zen 3 at AVX2, this product alone: 12 stores side by side after every twelfth key take 20 % of its time,
/// four after every fourth key 5 %. Which keys are a part depends on a channel's place, never on a query's. Turns of
/// two keys are no faster and err more: constants by 4.7u instead of 4.1u at most.
///
/// # Safety
/// As [`value_group`].
#[inline(always)]
unsafe fn in_turn<I: Isa, const NQ: usize, const M: usize, const OFTEN: bool>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
) -> [[I::F; NQ]; M] {
    const { assert!(M <= CHANNELS && M * NQ * I::LANES <= Turns::FLOATS || I::LANES != 8) };
    let mut waiting = Turns([0.0; _]);
    // Opaque: else sums that wait would be kept in some of the few registers as well.
    let waiting: *mut f32 = core::hint::black_box(waiting.0.as_mut_ptr());
    let mut acc = [[isa.splat(0.0); NQ]; M];
    // SAFETY: the caller vouches for the addresses of the tile, and `Turns` has room for `M·NQ` vectors.
    unsafe {
        match tile.reach {
            None if OFTEN && tile.phase == 0 => rounds(isa, a, tile, waiting, &mut acc),
            None => chains::<I, NQ, M, 0, 0>(isa, a, tile, 0..tile.depth, waiting, &mut acc),
            Some(reach) => reach.runs(
                #[inline(always)]
                |keys, front, back| {
                    with_vectors!(front, back, NQ, FRONT, BACK => {
                        chains::<I, NQ, M, FRONT, BACK>(isa, a, tile, keys.start..keys.end, waiting, &mut acc);
                    });
                },
            ),
        }
        add_stored(isa, &mut acc, waiting);
    }
    acc
}

/// The chains of [`in_turn`], over all keys from the first of a tile on.
///
/// # Safety
/// As [`chains`], for all keys.
#[inline(always)]
unsafe fn rounds<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, depth, .. }: &Tile<'_, NQ>,
    waiting: *mut f32,
    acc: &mut [[I::F; NQ]; M],
) {
    let (mut at, mut row, mut left) = (0, p, depth);
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        macro_rules! turns {
            ($($turn:literal)*) => { loop { $(
                    if left < EVERY {
                        break $turn;
                    }
                    end_part(isa, $turn, acc, waiting);
                    for _ in 0..2 {
                        // Nothing crosses this line: else the compiler would mix so many keys that registers do not
                        // suffice.
                        compiler_fence(Ordering::SeqCst);
                        let keys = EVERY / 2;
                        steps_from::<I, NQ, M, 0, 0>(isa, a, stride, (at, row), keys, acc);
                        at = at.wrapping_add(keys as isize * stride);
                        row = row.wrapping_add(keys * NQ * I::LANES);
                    }
                    left -= EVERY;
            )* } };
        }
        let turn = turns!(0 1 2);
        if left > 0 {
            end_part(isa, turn, acc, waiting);
            steps_from::<I, NQ, M, 0, 0>(isa, a, stride, (at, row), left, acc);
        }
    }
}

/// Some keys of the chains of [`in_turn`].
///
/// # Safety
/// As [`value_group`], for these keys; `waiting` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn chains<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, phase, .. }: &Tile<'_, NQ>,
    keys: core::ops::Range<usize>,
    waiting: *mut f32,
    acc: &mut [[I::F; NQ]; M],
) {
    let mut key = keys.start;
    while key < keys.end {
        let (turn, past) = ((phase + key) / EVERY % TURNS, (phase + key) % EVERY);
        let next = keys.end.min(key + EVERY - past);
        // SAFETY: the caller vouches for these addresses.
        unsafe {
            if past == 0 {
                end_part(isa, turn, acc, waiting);
            }
            steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, key..next, acc);
        }
        key = next;
    }
}

/// Channels of the largest group.
const CHANNELS: usize = 6;

/// Turns of a part: in each end the parts of two channels.
const TURNS: usize = 3;
/// Keys of a turn.
const EVERY: usize = PART / TURNS;
const _: () = assert!(CHANNELS == 2 * TURNS && PART == TURNS * EVERY && EVERY.is_multiple_of(2));

/// The parts whose turn it is end: their sums wait, and the next parts begin.
///
/// # Safety
/// `waiting` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn end_part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    turn: usize,
    acc: &mut [[I::F; NQ]; M],
    waiting: *mut f32,
) {
    // No closure: it would not get the level's features, unless it were always inlined.
    macro_rules! end {
        ($($m:literal)*) => {{ $(
            if $m < M {
                // SAFETY: the channel is one of M, and the caller vouches for these vectors.
                unsafe { end_channel(isa, $m, acc, waiting) }
            }
        )* }};
    }
    // A jump, after which each channel has registers of its own.
    match turn {
        0 => end!(0 3),
        1 => end!(1 4),
        _ => end!(2 5),
    }
}

/// The part of one channel ends.
///
/// # Safety
/// `waiting` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn end_channel<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    m: usize,
    acc: &mut [[I::F; NQ]; M],
    waiting: *mut f32,
) {
    for n in 0..NQ {
        // SAFETY: a channel of `acc` is one of M, n < NQ, and the caller vouches for these vectors.
        unsafe {
            let slot = waiting.add((m * NQ + n) * I::LANES);
            isa.store_ptr(isa.add(isa.load_ptr(slot), acc[m][n]), slot);
        }
        acc[m][n] = isa.splat(0.0);
    }
}

/// Sums of the parts before, of a group.
#[repr(C, align(64))]
struct Turns([f32; Self::FLOATS]);

impl Turns {
    /// Two vectors of eight for each channel.
    const FLOATS: usize = CHANNELS * 16;
}

/// The end of the part that starts at `from`, the `phase + from`-th key of its tile: a half has parts of 12, 12 and 8.
#[inline(always)]
fn part_end(phase: usize, from: usize, depth: usize) -> usize {
    let place = (phase + from) % HALF;
    let end = if place < PART {
        PART
    } else if place < 2 * PART {
        2 * PART
    } else {
        HALF
    };
    depth.min(from + end - place)
}

/// The sums of all keys, for levels of 32 long registers, which hold accumulators of a part and of half a tile at once.
///
/// An addition takes the place of a multiply-add on Intel, and none on AMD: parts of 12 instead of 8 make a whole call
/// 3 to 4 % faster on Granite Rapids.
///
/// # Safety
/// As [`value_group`].
#[inline(always)]
unsafe fn halves<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
) -> [[I::F; NQ]; M] {
    let (depth, middle) = (tile.depth, tile.depth.min(HALF.saturating_sub(tile.phase)));
    // SAFETY: the caller vouches for these addresses; both halves are below `depth`.
    unsafe {
        let mut sum = half::<I, NQ, M>(isa, a, tile, 0..middle);
        if middle < depth {
            let second = half::<I, NQ, M>(isa, a, tile, middle..depth);
            add_all(isa, &mut sum, &second);
        }
        sum
    }
}

/// Half a tile: parts, added up in order.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn half<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    tile: &Tile<'_, NQ>,
    keys: core::ops::Range<usize>,
) -> [[I::F; NQ]; M] {
    let mut from = part_end(tile.phase, keys.start, keys.end);
    // SAFETY: the caller vouches for these addresses.
    let mut sum = unsafe { part::<I, NQ, M>(isa, a, tile, keys.start..from) };
    while from < keys.end {
        let to = part_end(tile.phase, from, keys.end);
        // SAFETY: the caller vouches for these addresses.
        let acc = unsafe { part::<I, NQ, M>(isa, a, tile, from..to) };
        add_all(isa, &mut sum, &acc);
        from = to;
    }
    sum
}

/// A chain over some keys.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn part<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    &Tile { stride, p, phase, reach, .. }: &Tile<'_, NQ>,
    part: core::ops::Range<usize>,
) -> [[I::F; NQ]; M] {
    let mut acc = [[isa.splat(0.0); NQ]; M];
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        match reach {
            // Loops whose length is known. A whole part begins a pair.
            None if part.len() == part_len::<I>() => {
                steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + part_len::<I>(), &mut acc)
            }
            None if I::LANES == 16 && part.len() == HALF % PART => {
                steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + HALF % PART, &mut acc)
            }
            None => chain::<I, NQ, M, 0, 0>(isa, a, stride, p, (phase, part), &mut acc),
            Some(reach) => reach.runs(
                #[inline(always)]
                |keys, front, back| {
                    let keys = keys.start.max(part.start)..keys.end.min(part.end);
                    with_vectors!(front, back, NQ, FRONT, BACK => {
                        chain::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, (phase, keys), &mut acc);
                    });
                },
            ),
        }
    }
    acc
}

/// A chain, or some of it. Where chains add pairs, their places in the tile are even and odd: a first key at an odd
/// place stands alone.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn chain<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    p: *const f32,
    (phase, mut keys): (usize, core::ops::Range<usize>),
    acc: &mut [[I::F; NQ]; M],
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        if adds_pairs::<I>() && (phase + keys.start) % 2 == 1 && !keys.is_empty() {
            steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, keys.start..keys.start + 1, acc);
            keys.start += 1;
        }
        steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, keys, acc);
    }
}

/// Writes sums to memory.
///
/// # Safety
/// `to` is writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn store_all<I: Isa, const NQ: usize, const M: usize>(isa: I, sum: &[[I::F; NQ]; M], to: *mut f32) {
    for m in 0..M {
        for n in 0..NQ {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            unsafe { isa.store_ptr(sum[m][n], to.add((m * NQ + n) * I::LANES)) }
        }
    }
}

/// `sum = from + sum`.
///
/// # Safety
/// `from` is readable for `M·NQ` vectors.
#[inline(always)]
unsafe fn add_stored<I: Isa, const NQ: usize, const M: usize>(isa: I, sum: &mut [[I::F; NQ]; M], from: *const f32) {
    for m in 0..M {
        for n in 0..NQ {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            let before = unsafe { isa.load_ptr(from.add((m * NQ + n) * I::LANES)) };
            sum[m][n] = isa.add(before, sum[m][n]);
        }
    }
}

/// `o[m][n] = o[m][n]·factor[n] + acc[m][n]`; without factors as if `o` held zeros.
///
/// # Safety
/// `factors` are readable for `NQ` vectors; `o` is readable and writable for `M·NQ`.
#[inline(always)]
unsafe fn add_to<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    acc: &[[I::F; NQ]; M],
    factors: Option<*const f32>,
    o: *mut f32,
) {
    for (m, row) in acc.iter().enumerate() {
        for (n, x) in row.iter().enumerate() {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            unsafe {
                let slot = o.add((m * NQ + n) * I::LANES);
                let sum = match factors {
                    Some(factors) => isa.mul_add(isa.load_ptr(slot), isa.load_ptr(factors.add(n * I::LANES)), *x),
                    // What a row of zeros would give: never −0.
                    None => isa.add(*x, isa.splat(0.0)),
                };
                isa.store_ptr(sum, slot);
            }
        }
    }
}
