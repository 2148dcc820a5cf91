//! Products of some query rows with the keys of some tiles.

#![allow(unsafe_code, reason = "the hot loop: pointers that `Unchecked::check` has held against their slice")]

use core::ops::Range;
use core::sync::atomic::{Ordering, compiler_fence};

use super::ahead::{Ahead, Requests};
use super::rows::EIGHT;
use super::{Rows, Stored, TILE, Tile, in_line, with_rows};
use crate::isa::Isa;

/// Whether loops over channels are unrolled for keys of 64 or 128 channels, as most models have: the query rows then
/// need no registers for their addresses. Measured on Zen 5, 1.2 to 1.4 times as fast for halves. At other levels it
/// would only be more code to compile.
const fn unrolled<I: Isa>() -> bool {
    I::LANES > 4 && !I::IS_MODEL
}

/// The keys of a group that are read side by side, a line of each in turn; then come the others of the group. The
/// processor's prefetcher follows rows best one after the other; side by side they need fewer loads of queries.
/// Measured on Zen 4, four rows over 262 144 keys of 128 in memory: f32 takes 54 to 66 cycles a key one by one (a C
/// loop 83 to 90 by fours), f16 55 by twos and 48 by fours. One row is bound by memory in any type. Six and eight rows
/// are bound by loads of queries, and f32 is 1.1 times as fast by twos. Steps over bfloat16 with pairs: four rows are
/// 1.07 times as fast by twos as by fours, and 0.8 of it one by one; two rows of 128 and 256 channels 1.03 to 1.07 one
/// by one.
const fn side_by_side<I: Isa, T>(rows: usize, keys: usize, columns: usize) -> usize {
    let best = match rows {
        1 => 1,
        2 if I::WORD == 2 && columns != 64 => 1,
        2..=4 if I::WORD == 2 => 2,
        2..=5 if size_of::<T>() == 4 => 1,
        _ => keys,
    };
    if best < keys { best } else { keys }
}

/// Whether the lines of keys are read in the order of memory: one pass over each, and of two rows only where values are
/// read so, too. (Otherwise keys of two rows are 0.95 times as fast for 96 channels, 1.05 for 256.)
const fn in_order<I: Isa, T, const R: usize>(columns: usize) -> bool {
    let usual = columns == 128 || columns == 64 && I::WORD == 1;
    columns <= I::CHAIN * I::LANES && (R == 1 || usual && size_of::<T>() * I::WORD == 4)
}

/// Whether `some` keys from `first` on are within the keys of a group.
const fn fit(first: usize, some: usize, keys: usize) -> bool {
    first + some <= keys
}

/// `s[r][j] = Σ_c q[r][c]·key_j[c]` for `rows` query rows of each head and each of some tiles. `q`: `[rows][columns]`,
/// or words of pairs, `[rows][columns / 2]`, if the [word](Isa::WORD) of a product is a pair; `s`: `[rows][TILE]` for
/// each tile, `stride` floats apart. The rows of the next head come [`Heads::rows`](super::Heads) later. Whole groups
/// of keys are written. `columns` is a multiple of `LANES·WORD`.
///
/// If there are several heads, each reads some keys, and then each the next ones.
#[inline(always)]
pub(crate) fn dots<I: Isa, T: Stored>(
    isa: I,
    rows: usize,
    (keys, tiles): (&Rows<'_, T>, Range<usize>),
    q: &[f32],
    (s, stride): (&mut [f32], usize),
) {
    let columns = keys.columns();
    // Not in a constant: those of functions that are never called are evaluated, too.
    assert!((I::WORD == 1 || T::PAIRS) && I::CHAIN.is_multiple_of(I::WORD), "words of other types");
    assert!(columns.is_multiple_of(I::LANES * I::WORD));
    with_rows!(I, T, rows, [R, K, S, _C] => {
        let (keys, s) = ((keys, tiles.clone()), (&mut *s, stride));
        // SAFETY: both assertions above.
        unsafe {
            // A constant condition, so that only one of the two is compiled.
            if const { T::EVERY && unrolled::<I>() } {
                match columns {
                    64 => dots_of_rows::<I, T, R, K, S, 64>(isa, keys, q, s),
                    128 => dots_of_rows::<I, T, R, K, S, 128>(isa, keys, q, s),
                    _ => dots_of_rows::<I, T, R, K, S, 0>(isa, keys, q, s),
                }
            } else {
                dots_of_rows::<I, T, R, K, S, 0>(isa, keys, q, s);
            }
        }
    });
}

/// [`dots`] of R rows, compiled by itself. D is the number of columns or 0.
///
/// # Safety
/// The number of columns is a multiple of LANES·WORD. The word of a product is a number, or a pair of T.
#[inline(always)]
unsafe fn dots_of_rows<I: Isa, T: Stored, const R: usize, const K: usize, const S: usize, const D: usize>(
    isa: I,
    (keys, tiles): (&Rows<'_, T>, Range<usize>),
    q: &[f32],
    (s, stride): (&mut [f32], usize),
) {
    isa.apart(
        #[inline(always)]
        || {
            let (columns, heads) = (keys.columns(), keys.heads());
            assert!(D == 0 || D == columns);
            let ahead = Ahead::of::<I, T, R>(keys, in_order::<I, T, R>(columns));
            let turn = ahead.turn().next_multiple_of(K * S);
            for (n, tile) in tiles.enumerate() {
                let len = keys.tile(tile, 0).len();
                for first in (0..len).step_by(turn) {
                    let some = first..if first + turn < len { first + turn } else { len };
                    for head in 0..heads.count {
                        let q = &q[head * heads.rows * columns / I::WORD..][..R * columns / I::WORD];
                        let s = &mut s[n * stride + head * heads.rows * TILE..][..R * TILE];
                        let keys = (keys.tile(tile, head), ahead, head);
                        // SAFETY: these slices: R rows of queries and of scores, and rows of keys, which `Rows` has
                        // checked; the caller vouches for whole vectors; D is the number of columns or 0.
                        unsafe {
                            dots_of::<I, T, R, K, S, D>(isa, keys, some.clone(), q.as_ptr(), s.as_mut_ptr());
                        }
                    }
                }
            }
        },
    );
}

/// The largest number of vectors of queries that stay in registers: a fence would make each key load them again.
const HELD: usize = 8;

/// Whether all queries are held: only if the level has registers for them beside the sums.
const fn held(lanes: usize, vectors: usize) -> bool {
    vectors > 0 && vectors <= HELD && lanes == 16
}

/// Query rows: their addresses, and their vectors if they are held.
type Queries<F> = (*const f32, Option<[F; HELD]>);

/// Of some keys of a tile of one head, the first a multiple of K·S and of eight.
///
/// # Safety
/// `q` is readable for R rows of `columns / WORD` floats, and `columns` a multiple of LANES·WORD; `s` writable for R
/// rows of TILE. D is `columns` or 0. The word of a product is a number, or a pair of T.
#[inline(always)]
unsafe fn dots_of<I: Isa, T: Stored, const R: usize, const K: usize, const S: usize, const D: usize>(
    isa: I,
    (keys, ahead, head): (Tile<'_, T>, Ahead, usize),
    some: Range<usize>,
    q: *const f32,
    s: *mut f32,
) {
    const { assert!(TILE.is_multiple_of(K * S) && (R * K).is_multiple_of(4) && S * R * K <= 16) }
    const { assert!(K.is_power_of_two() && K <= 4 && S <= 4, "what is written out below") }
    const { assert!(EIGHT.is_multiple_of(K), "the keys of a step have one distance") }
    let columns = if D > 0 { D } else { keys.columns() };
    let mut q: Queries<I::F> = (q, None);
    if const { held(I::LANES, R * D / I::WORD / I::LANES) } {
        let mut vectors = [isa.splat(0.0); HELD];
        for n in 0..R * D / I::WORD / I::LANES {
            // SAFETY: the caller vouches for R rows.
            vectors[n] = unsafe { isa.load_ptr(q.0.add(n * I::LANES)) };
        }
        q.1 = Some(vectors);
    }
    let step = keys.step();
    let head = (head, const { side_by_side::<I, T>(R, K, D) });
    let (mut next, mut requests) = (keys.row(some.start), Requests::NONE);
    for first in some.step_by(K * S) {
        if first.is_multiple_of(EIGHT) {
            ahead.page(isa, &keys, first);
            next = keys.row(first);
            let rows = const { if K * S > EIGHT { K * S } else { EIGHT } };
            requests = ahead.from(&keys, (first, rows, next.cast()), head);
        }
        let whole = first + K * S <= keys.len();
        for chain in (0..columns).step_by(I::CHAIN * I::LANES) {
            let end = columns.min(chain + I::CHAIN * I::LANES);
            let (mut row, mut lines, mut fours) = (next, requests, [isa.splat(0.0); 4]);
            // Written out by a macro: a loop would keep the sums in memory.
            macro_rules! steps {
                ($($n:literal)*) => {$(
                    if const { $n < S } {
                        let at = first + $n * K;
                        if const { $n > 0 && ($n * K).is_multiple_of(EIGHT) } && first.is_multiple_of(EIGHT) {
                            row = keys.row(at);
                        }
                        let key: [*const T; K] = core::array::from_fn(
                            #[inline(always)]
                            |k| if whole { row.wrapping_byte_offset(step * k as isize) } else { keys.row(at + k) },
                        );
                        row = row.wrapping_byte_offset(step * K as isize);
                        // SAFETY: whole vectors below `columns` of rows that `Rows` has checked, and of the queries the
                        // caller vouches for.
                        let sums = unsafe { sums_of::<I, T, R, K, D>(isa, key, q, columns, chain..end, lines) };
                        lines = lines.after(K / head.1);
                        for i in 0..R * K / 4 {
                            fours[($n * R * K / 4 + i) % 4] = sums[i];
                        }
                    }
                )*};
            }
            steps!(0 1 2 3);
            if end == columns {
                (next, requests) = (row, lines);
            }
            let mut sums = [0.0f32; 32];
            let joined = I::LANES / 4;
            for n in 0..(S * R * K / 4).div_ceil(joined) {
                let of = |i: usize| fours[(n * joined + i) % 4];
                isa.store(isa.join_fours([of(0), of(1), of(2), of(3)]), &mut sums[n * I::LANES..]);
            }
            for r in 0..R {
                for step in 0..S {
                    let sums = &sums[step * R * K + r * K..][..K];
                    // SAFETY: TILE is a multiple of K·S, so that groups end inside a row of scores.
                    let slots = unsafe { core::slice::from_raw_parts_mut(s.add(r * TILE + first + step * K), K) };
                    match chain {
                        0 => slots.copy_from_slice(sums),
                        _ => slots.iter_mut().zip(sums).for_each(
                            #[inline(always)]
                            |(slot, sum)| *slot += sum,
                        ),
                    }
                }
            }
        }
    }
}

/// The sums over lanes of the products of R rows with K keys over some columns, four in a vector: `[r][k]`.
///
/// # Safety
/// As [`keys_of`].
#[inline(always)]
unsafe fn sums_of<I: Isa, T: Stored, const R: usize, const K: usize, const D: usize>(
    isa: I,
    key: [*const T; K],
    q: Queries<I::F>,
    columns: usize,
    some: Range<usize>,
    requests: Requests,
) -> [I::F; 4] {
    // R·K accumulators, in an order of constant indices, so that they stay in registers.
    let mut flat = [isa.splat(0.0); 16];
    const { assert!(K.is_multiple_of(side_by_side::<I, T>(R, K, D)), "all keys of a group are read") }
    // Written out by a macro, so that accumulators are registers.
    macro_rules! some_keys {
        ($side:literal: $($k:literal)*) => {$(
            if const { side_by_side::<I, T>(R, K, D) == $side && fit($k, $side, K) } {
                let key: [*const T; $side] = core::array::from_fn(
                    #[inline(always)]
                    |n| key[$k + n],
                );
                let lines = requests.after($k / $side);
                // SAFETY: the caller vouches for the columns.
                let some = unsafe { keys_of::<I, T, R, $side>(isa, key, q, columns, some.clone(), lines) };
                for r in 0..R {
                    for n in 0..$side {
                        flat[r * K + $k + n] = some[r][n];
                    }
                }
            }
        )*};
    }
    some_keys!(1: 0 1 2 3);
    some_keys!(2: 0 2);
    some_keys!(4: 0);
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = flat;
    let sums = [[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p]];
    let mut fours = [isa.splat(0.0); 4];
    for n in 0..4 {
        if n < R * K / 4 {
            fours[n] = isa.sum_fours(sums[n]);
        }
    }
    fours
}

/// `acc[r][k][lane] = Σ_c q[r][c]·key_k[c]` over some columns, where lanes are columns.
///
/// # Safety
/// The columns are whole vectors of words of readable rows: K of keys, and R of queries, `columns / WORD` floats apart.
/// The word of a product is a number, or a pair of T.
#[inline(always)]
unsafe fn keys_of<I: Isa, T: Stored, const R: usize, const K: usize>(
    isa: I,
    key: [*const T; K],
    (q, held): Queries<I::F>,
    columns: usize,
    some: Range<usize>,
    requests: Requests,
) -> [[I::F; K]; R] {
    let mut acc = [[isa.splat(0.0); K]; R];
    let (lanes, vectors) = const { (I::LANES * I::WORD, in_line::<T>(I::LANES * I::WORD)) };
    let at_once = const { if T::TOGETHER { 2 } else { 1 } };
    let whole = some.end - some.len() % (at_once * lanes);
    for from in (some.start..whole).step_by(vectors * lanes) {
        for k in 0..K {
            requests.prefetch::<I, T, R>(isa, key[k].wrapping_add(T::elements(from)).cast::<u8>());
        }
        // The fence keeps the prefetches here: in a burst they would fill the buffers, and the processor would drop the
        // rest.
        compiler_fence(Ordering::SeqCst);
        for v in (0..vectors).step_by(at_once) {
            let c = from + v * lanes;
            if c >= whole {
                break;
            }
            // SAFETY: the caller vouches for the columns.
            unsafe {
                // A loop: the closure of `from_fn` may be compiled by itself, without the level's instructions.
                let mut words = [[isa.splat(0.0); K]; 2];
                for k in 0..K {
                    if const { T::TOGETHER } {
                        [words[0][k], words[1][k]] = T::load_two(isa, key[k], c);
                    } else {
                        words[0][k] = T::load_words(isa, key[k], c);
                    }
                }
                for n in 0..at_once {
                    add_vector::<I, R, K>(isa, (q, held), (columns, c + n * lanes), words[n], &mut acc);
                }
            }
        }
    }
    // What is left over of two vectors; blocks have none.
    if const { T::TOGETHER } && whole < some.end {
        let mut words = [isa.splat(0.0); K];
        // SAFETY: the caller vouches for the columns.
        unsafe {
            for k in 0..K {
                words[k] = T::load(isa, key[k], whole);
            }
            add_vector::<I, R, K>(isa, (q, held), (columns, whole), words, &mut acc);
        }
    }
    acc
}

/// `acc[r][k] += q[r][c…]·words[k]`, a vector from column `c` on.
///
/// # Safety
/// The vector is one of R readable rows of queries, `columns / WORD` floats apart.
#[inline(always)]
unsafe fn add_vector<I: Isa, const R: usize, const K: usize>(
    isa: I,
    (q, held): Queries<I::F>,
    (columns, c): (usize, usize),
    words: [I::F; K],
    acc: &mut [[I::F; K]; R],
) {
    for r in 0..R {
        let x = match held {
            Some(held) => held[(r * columns + c) / (I::LANES * I::WORD) % HELD],
            // SAFETY: the caller vouches for the vector.
            None => unsafe { isa.load_ptr(q.add((r * columns + c) / I::WORD)) },
        };
        for k in 0..K {
            acc[r][k] = isa.step(x, words[k], acc[r][k]);
        }
    }
}
