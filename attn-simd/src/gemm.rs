//! The register-blocked micro-kernel that both products share, and its two safe doors.
//!
//! Lanes are queries. Either product is `C[m][lane] = Σₖ A[m, k]·B[k][lane]`: `A` is read where the caller keeps it and
//! broadcast, `B` is packed with `NQ` vectors to a row, and `M × NQ` accumulators stay in registers.
//!
//! | product | A | m | k | B | C |
//! |---|---|---|---|---|---|
//! | scores `Sᵀ = K·Qᵀ` | keys | key | channel of the head | `q[channel][query]` | `s[key][query]` |
//! | values `Oᵀ = Vᵀ·Pᵀ` | values | channel of the value | key | `p[key][query]` | `o[channel][query]` |
//!
//! Each accumulator is a chain over `k`, in order; a score is a sum of some (see `parts_of`), and so is an output (see
//! [`PART`]). What is added to what follows from the place of `k` alone, so that a score or an output depends on
//! nothing but its own row. A last group of fewer than `M` rows reads its last row again instead of having code of its
//! own; what that computes is stored into padding.

#![allow(unsafe_code, reason = "the hot loop: pointers that the doors have checked against their slices")]

use crate::isa::Isa;

/// Rows of floats inside a slice, a stride apart; the columns of a row lie side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel<'a> {
    /// The slice.
    pub(crate) data: &'a [f32],
    /// Index of the first element of row 0.
    pub(crate) start: usize,
    /// Elements from one row to the next; may be 0 or negative.
    pub(crate) row_stride: isize,
}

impl<'a> Panel<'a> {
    /// Rows packed one after the other.
    pub(crate) fn packed(data: &'a [f32], columns: usize) -> Self {
        Self { data, start: 0, row_stride: columns as isize }
    }

    /// Without the first `rows` rows.
    #[inline(always)]
    pub(crate) fn skip(self, rows: usize) -> Self {
        Self { start: self.start.wrapping_add_signed((rows as isize).wrapping_mul(self.row_stride)), ..self }
    }

    /// The first element of row 0, once all of `rows × columns` elements are known to lie inside the slice.
    #[inline(always)]
    fn checked(self, rows: usize, columns: usize) -> *const f32 {
        assert!(rows > 0 && columns > 0, "an empty panel has no first element");
        let last = (rows as isize - 1).checked_mul(self.row_stride).and_then(|s| (self.start as isize).checked_add(s));
        let Some(last) = last else { panic!("panel overflows") };
        let (low, high) = (last.min(self.start as isize), last.max(self.start as isize));
        assert!(low >= 0 && high as usize + columns <= self.data.len(), "panel reaches outside of its slice");
        // SAFETY: `start` lies inside the slice, as was just asserted.
        unsafe { self.data.as_ptr().add(self.start) }
    }
}

/// Rows of `C` rounded up to whole groups of `M`.
pub(crate) const fn padded(rows: usize, m: usize) -> usize {
    rows.div_ceil(m) * m
}

/// Which keys of a tile each vector of queries needs: vector `n` those in `start[n]..end[n]`, neither of which ever
/// decreases.
///
/// Under a causal mask the keys of a diagonal tile end earlier for the first queries of a block, under a window they
/// start later for the last ones. What lies outside of a vector's reach is not computed; nothing changes by that, not
/// even in the last bit, because a hidden key's weight is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach<const NQ: usize> {
    pub(crate) start: [usize; NQ],
    pub(crate) end: [usize; NQ],
}

impl<const NQ: usize> Reach<NQ> {
    /// All vectors need all keys.
    pub(crate) fn all(keys: usize) -> Self {
        Self { start: [0; NQ], end: [keys; NQ] }
    }

    /// Whether all vectors need all keys.
    #[inline(always)]
    fn is_all(&self, keys: usize) -> bool {
        self.start[NQ - 1] == 0 && self.end[0] == keys
    }

    /// Calls `f` with runs of keys in order, and how many vectors to leave out at the front and at the back.
    #[inline(always)]
    pub(crate) fn runs(&self, mut f: impl FnMut(core::ops::Range<usize>, usize, usize)) {
        if self.start[NQ - 1] > self.end[0] {
            // Ranges so narrow that no key is needed by all: the left edge is not worth a run of its own.
            f(self.start[0]..self.end[0].max(self.start[0]), 0, 0);
        } else {
            for n in 1..NQ {
                f(self.start[n - 1]..self.start[n], 0, NQ - n);
            }
            f(self.start[NQ - 1]..self.end[0], 0, 0);
        }
        for n in 1..NQ {
            f(self.end[n - 1].max(self.start[0])..self.end[n], n, 0);
        }
    }

    /// How many vectors to leave out, at the front and at the back, for a few keys from `first` on; `None` where none
    /// needs them.
    #[inline(always)]
    fn for_keys(&self, first: usize, count: usize) -> Option<(usize, usize)> {
        let front = self.end.iter().filter(|&&end| end <= first).count();
        let back = self.start.iter().filter(|&&start| start >= first + count).count();
        match (front, back) {
            _ if front == NQ || back == NQ => None,
            (0, back) => Some((0, back)),
            (front, _) => Some((front, 0)),
        }
    }
}

/// Calls a function with the constants FRONT and BACK that equal the two counts, of which at most one is above 0.
macro_rules! with_vectors {
    ($front:expr, $back:expr, $NQ:ident, $FRONT:ident, $BACK:ident => $body:expr) => {
        with_vectors!(@arms $front, $back, $NQ, $FRONT, $BACK, $body, [0 0] [1 0] [2 0] [3 0] [0 1] [0 2] [0 3])
    };
    (@arms $front:expr, $back:expr, $NQ:ident, $FRONT:ident, $BACK:ident, $body:expr, $([$f:literal $b:literal])*) => {
        match ($front, $back) {
            $(($f, $b) if $f + $b < $NQ => {
                const $FRONT: usize = $f;
                const $BACK: usize = $b;
                $body
            })*
            _ => {}
        }
    };
}
pub(crate) use with_vectors;

/// `s[key][query] = Σ_c keys[key][c]·q[c][query]` for `rows` keys. `q`: `[depth][NQ·LANES]`; `s`: at least `rows`
/// rounded up to `M`, times `NQ·LANES`. Scores beyond a vector's reach are left as they were. `between` is called
/// before each group of `M`.
///
/// A function of its own, as [`values`] is: what the kernel around it keeps in registers is not in the way of its
/// loops.
#[inline(never)]
pub(crate) fn scores<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    keys: Panel<'_>,
    sizes: (usize, usize),
    reach: &Reach<NQ>,
    q: &[f32],
    s: &mut [f32],
    between: impl FnMut(),
) {
    isa.vectorize(
        #[inline(always)]
        || scores_inlined::<I, NQ, M>(isa, keys, sizes, reach, q, s, between),
    );
}

#[inline(always)]
fn scores_inlined<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    keys: Panel<'_>,
    (rows, depth): (usize, usize),
    reach: &Reach<NQ>,
    q: &[f32],
    s: &mut [f32],
    mut between: impl FnMut(),
) {
    let width = NQ * I::LANES;
    if depth == 0 {
        s[..rows * width].fill(0.0);
        return;
    }
    let a = keys.checked(rows, depth);
    assert!(q.len() >= depth * width && s.len() >= padded(rows, M) * width);
    let (b, c) = (q.as_ptr(), s.as_mut_ptr());
    let part = depth.div_ceil(parts_of::<I>(depth)).next_multiple_of(UNROLL);
    // SAFETY: every row index is below `rows` or clamped to `rows − 1`, so each pointer is the start of a row that
    // `checked` has bounded, with `depth` elements behind it. `q` holds `depth` rows of `NQ` vectors and `s` has room
    // for M rows from `first` on; both were asserted above.
    unsafe {
        let all = reach.is_all(rows);
        let mut first = 0;
        // What nearly all groups are: whole, and needed by all vectors.
        while all && first + M <= rows {
            between();
            let start = a.offset(first as isize * keys.row_stride);
            let starts: [*const f32; M] = core::array::from_fn(|m| start.offset(m as isize * keys.row_stride));
            score_group::<I, NQ, M, 0, 0>(isa, &starts, b, (depth, part), c.add(first * width));
            first += M;
        }
        while first < rows {
            between();
            if let Some((front, back)) = reach.for_keys(first, M) {
                let starts: [*const f32; M] =
                    core::array::from_fn(|m| a.offset((first + m).min(rows - 1) as isize * keys.row_stride));
                with_vectors!(front, back, NQ, FRONT, BACK => {
                    score_group::<I, NQ, M, FRONT, BACK>(isa, &starts, b, (depth, part), c.add(first * width));
                });
            }
            first += M;
        }
    }
}

/// Chains that a score is made of: of equal length, at most `Isa::CHAIN`, and three at least of all but the smallest
/// dims.
///
/// Where two weights compete, an output takes the whole error of a score. One chain of 64 or 128 exceeded `2u(2 + S)`
/// in one output of some thousands (1.4 times; a chain of 32 and another of 1 by 1.5); equal parts stay below, for 1 %
/// of the time.
const fn parts_of<I: Isa>(depth: usize) -> usize {
    match (depth.div_ceil(I::CHAIN), depth) {
        (1, ..5) => 1,
        (1, ..17) => 2,
        (1 | 2, _) => 3,
        (parts, _) => parts,
    }
}

/// The scores of `M` keys, for all vectors but FRONT at the front and BACK at the back, in chains of `part`.
///
/// # Safety
/// Each of `starts` is readable for `depth` elements, `q` for `depth` rows of `NQ` vectors, and `s` is readable and
/// writable for `M` of them.
#[inline(always)]
unsafe fn score_group<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    starts: &[*const f32; M],
    q: *const f32,
    (depth, part): (usize, usize),
    s: *mut f32,
) {
    let mut chain = 0;
    while chain < depth {
        let end = depth.min(chain + part);
        let mut acc = [[isa.splat(0.0); NQ]; M];
        // SAFETY: the caller vouches for these addresses.
        unsafe {
            steps::<I, NQ, M, FRONT, BACK>(isa, starts, 1, q, chain..end, &mut acc);
            for (m, row) in acc.iter().enumerate() {
                for (n, x) in row.iter().enumerate().take(NQ - BACK).skip(FRONT) {
                    let slot = s.add((m * NQ + n) * I::LANES);
                    let sum = if chain == 0 { *x } else { isa.add(isa.load_ptr(slot), *x) };
                    isa.store_ptr(sum, slot);
                }
            }
        }
        chain = end;
    }
}

/// `o[c][query] = o[c][query]·factor[query] + Σ_key values[key][c]·p[key][query]` for `columns` channels and `depth`
/// keys; without factors as if `o` held zeros, whatever it does. `p`: `[depth][NQ·LANES]`, of which each vector's reach
/// is read; `factor`: `[NQ·LANES]`; `o`: at least `columns` rounded up to `M`, times `NQ·LANES`. The first key is the
/// `phase`-th of its tile. `between` is called before each group of `M`.
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
    let factors: Option<[I::F; NQ]> = factor.map(|factor| core::array::from_fn(|n| isa.load(&factor[n * I::LANES..])));
    let all = reach.is_all(depth);
    let mut first = 0;
    while first < columns {
        between();
        // SAFETY: every column is below `columns` or clamped to `columns − 1`, so each pointer lies in row 0 of the
        // panel and reaches, in steps of the row stride, only elements that `checked` has bounded. `p` holds `depth`
        // rows of `NQ` vectors and `o` has room for M rows from `first` on; both were asserted above, and that no reach
        // is beyond `depth`, and that the keys are those of one tile.
        unsafe {
            let o = c.add(first * width);
            // Several ways to the same bits: where no vector stops short, and no row is read twice, the loops are
            // simpler.
            let sizes = (b, depth);
            if all && first + M <= columns {
                let starts: [*const f32; M] = core::array::from_fn(|m| a.add(first + m));
                value_group::<I, NQ, M>(isa, &starts, values.row_stride, sizes, (phase, None), &factors, o);
            } else if all && M > 4 && first + 4 == columns {
                let starts: [*const f32; 4] = core::array::from_fn(|m| a.add(first + m));
                value_group::<I, NQ, 4>(isa, &starts, values.row_stride, sizes, (phase, None), &factors, o);
            } else {
                let starts: [*const f32; M] = core::array::from_fn(|m| a.add((first + m).min(columns - 1)));
                let reach = (!all).then_some(reach);
                value_group::<I, NQ, M>(isa, &starts, values.row_stride, sizes, (phase, reach), &factors, o);
            }
        }
        first += M;
    }
}

/// Keys of a chain of multiply-adds of an output. Equal products are what errs most, because every addition rounds the
/// same way: a chain of 8 is off by 2.5u at most, one of 12 by 3.3u, one of 64 by 16.5u. (16: 4.5u, more than may be.)
pub(crate) const PART: usize = 8;
/// The same where there are 16 registers, or short ones.
const LONG_PART: usize = 12;
/// Parts of half a tile.
const HALF: usize = 4;
const _: () = assert!(PART.is_multiple_of(UNROLL) && LONG_PART.is_multiple_of(UNROLL));

/// `M` columns of the output from all keys, a part of them at a time. `phase` is the place of the first in its tile.
///
/// Where there are 32 long registers, accumulators of a part and of half a tile are in them at once; elsewhere sums of
/// parts wait in memory, and parts are longer. Measured on Zen 4, shares of the rate of one chain: AVX-512 in registers
/// (2 × 4 × 3) 0.99, in memory (8 × 3) 0.9; AVX2 in memory (6 × 2) 0.95 to 0.97, and with parts of 8 0.88 to 0.91.
///
/// # Safety
/// Each of `a` is readable, and so are the `depth − 1` places `stride` further each; `p` for `depth` rows of `NQ`
/// vectors, and no reach goes beyond; `o` is readable and writable for `M` of them.
#[inline(always)]
unsafe fn value_group<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    (p, depth): (*const f32, usize),
    (phase, reach): (usize, Option<&Reach<NQ>>),
    factors: &Option<[I::F; NQ]>,
    o: *mut f32,
) {
    // SAFETY: the caller vouches for these addresses; parts and halves are below `depth`, and `Waiting` holds what is
    // stored there.
    unsafe {
        if I::LANES < 16 {
            const { assert!(I::LANES == 16 || NQ * M * I::LANES <= Waiting::LEN) };
            let mut waiting = Waiting([core::mem::MaybeUninit::uninit(); Waiting::LEN]);
            let waiting: *mut f32 = waiting.0.as_mut_ptr().cast();
            let slot = |m: usize, n: usize| waiting.add((m * NQ + n) * I::LANES);
            let mut from = 0;
            loop {
                let to = depth.min(from + LONG_PART - (phase + from) % LONG_PART);
                let mut acc = part::<I, NQ, M, LONG_PART>(isa, a, stride, p, from..to, reach);
                if from != 0 {
                    for m in 0..M {
                        for n in 0..NQ {
                            acc[m][n] = isa.add(isa.load_ptr(slot(m, n)), acc[m][n]);
                        }
                    }
                }
                if to == depth {
                    return add_to(isa, &acc, factors, o);
                }
                for m in 0..M {
                    for n in 0..NQ {
                        isa.store_ptr(acc[m][n], slot(m, n));
                    }
                }
                from = to;
            }
        }
        let middle = depth.min((HALF * PART).saturating_sub(phase));
        let mut sum = half::<I, NQ, M>(isa, a, stride, p, 0..middle, (phase, reach));
        if middle < depth {
            let second = half::<I, NQ, M>(isa, a, stride, p, middle..depth, (phase, reach));
            add_all(isa, &mut sum, &second);
        }
        add_to(isa, &sum, factors, o);
    }
}

/// Sums of the parts before, an accumulator after the other.
#[repr(C, align(64))]
struct Waiting([core::mem::MaybeUninit<f32>; Self::LEN]);

impl Waiting {
    /// Floats of the most accumulators of a level with short vectors: 6 × 2 of 8.
    const LEN: usize = 96;
}

/// Half a tile: parts, added up in order.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn half<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    p: *const f32,
    keys: core::ops::Range<usize>,
    (phase, reach): (usize, Option<&Reach<NQ>>),
) -> [[I::F; NQ]; M] {
    let mut sum = [[isa.splat(0.0); NQ]; M];
    let mut from = keys.start;
    while from < keys.end {
        let to = keys.end.min(from + PART - (phase + from) % PART);
        // SAFETY: the caller vouches for these addresses.
        let acc = unsafe { part::<I, NQ, M, PART>(isa, a, stride, p, from..to, reach) };
        add_all(isa, &mut sum, &acc);
        from = to;
    }
    sum
}

/// A chain over some keys, of which nearly all parts have `LEN`.
///
/// # Safety
/// As [`value_group`], for these keys.
#[inline(always)]
unsafe fn part<I: Isa, const NQ: usize, const M: usize, const LEN: usize>(
    isa: I,
    a: &[*const f32; M],
    stride: isize,
    p: *const f32,
    part: core::ops::Range<usize>,
    reach: Option<&Reach<NQ>>,
) -> [[I::F; NQ]; M] {
    let mut acc = [[isa.splat(0.0); NQ]; M];
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        match reach {
            // A loop whose length is known.
            None if part.len() == LEN => {
                steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part.start..part.start + LEN, &mut acc)
            }
            None => steps::<I, NQ, M, 0, 0>(isa, a, stride, p, part, &mut acc),
            Some(reach) => reach.runs(
                #[inline(always)]
                |keys, front, back| {
                    let keys = keys.start.max(part.start)..keys.end.min(part.end);
                    with_vectors!(front, back, NQ, FRONT, BACK => {
                        steps::<I, NQ, M, FRONT, BACK>(isa, a, stride, p, keys, &mut acc);
                    });
                },
            ),
        }
    }
    acc
}

/// `sum += acc`.
#[inline(always)]
fn add_all<I: Isa, const NQ: usize, const M: usize>(isa: I, sum: &mut [[I::F; NQ]; M], acc: &[[I::F; NQ]; M]) {
    for (sum, acc) in sum.iter_mut().zip(acc) {
        for (sum, x) in sum.iter_mut().zip(acc) {
            *sum = isa.add(*sum, *x);
        }
    }
}

/// `o[m][n] = o[m][n]·factor[n] + acc[m][n]`; without factors as if `o` held zeros.
///
/// # Safety
/// `o` is readable and writable for `M·NQ` vectors.
#[inline(always)]
unsafe fn add_to<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    acc: &[[I::F; NQ]; M],
    factors: &Option<[I::F; NQ]>,
    o: *mut f32,
) {
    for (m, row) in acc.iter().enumerate() {
        for (n, x) in row.iter().enumerate() {
            // SAFETY: m < M and n < NQ, and the caller vouches for these vectors.
            unsafe {
                let slot = o.add((m * NQ + n) * I::LANES);
                let sum = match factors {
                    Some(factors) => isa.mul_add(isa.load_ptr(slot), factors[n], *x),
                    // What a row of zeros would give: never −0.
                    None => isa.add(*x, isa.splat(0.0)),
                };
                isa.store_ptr(sum, slot);
            }
        }
    }
}

/// Steps of the hot loop between two branches: enough that a branch predictor foresees the end of a short loop.
/// Measured on Zen 5: 4 takes 4 to 5 % off the whole call at head_dim 64.
const UNROLL: usize = 4;

/// `acc[m][n] += Σₖ a[m][k·step]·b[k][n]` over a range of k, for all vectors but FRONT at the front and BACK at the
/// back.
///
/// # Safety
/// `a[m] + k·step` is readable for every `m < M` and k of the range, and `b` for the vectors of those rows.
#[inline(always)]
unsafe fn steps<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    step: isize,
    b: *const f32,
    range: core::ops::Range<usize>,
    acc: &mut [[I::F; NQ]; M],
) {
    let mut left = range.len();
    // SAFETY: every place that is passed on is that of a k of the range, and the caller vouches for those addresses.
    unsafe {
        // Places that move on, not multiples of k: four multiplications less at the start of each short chain.
        let (mut at, mut row) = (range.start as isize * step, b.add(range.start * NQ * I::LANES));
        while left >= UNROLL {
            for _ in 0..UNROLL {
                step_once::<I, NQ, M, FRONT, BACK>(isa, a, at, row, acc);
                (at, row) = (at.wrapping_add(step), row.wrapping_add(NQ * I::LANES));
            }
            left -= UNROLL;
        }
        while left > 0 {
            step_once::<I, NQ, M, FRONT, BACK>(isa, a, at, row, acc);
            (at, row) = (at.wrapping_add(step), row.wrapping_add(NQ * I::LANES));
            left -= 1;
        }
    }
}

/// `acc[m][n] += a[m][at]·b[n]` for all vectors but FRONT at the front and BACK at the back.
///
/// # Safety
/// `a[m] + at` is readable for every `m < M`, and `b` for its vectors.
#[inline(always)]
unsafe fn step_once<I: Isa, const NQ: usize, const M: usize, const FRONT: usize, const BACK: usize>(
    isa: I,
    a: &[*const f32; M],
    at: isize,
    b: *const f32,
    acc: &mut [[I::F; NQ]; M],
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let load = |n: usize| isa.load_ptr(b.add(n * I::LANES));
        let row: [I::F; NQ] = core::array::from_fn(
            #[inline(always)]
            |n| if n < FRONT || n >= NQ - BACK { isa.splat(0.0) } else { load(n) },
        );
        for m in 0..M {
            let x = isa.splat(*a[m].offset(at));
            for n in FRONT..NQ - BACK {
                acc[m][n] = isa.mul_add(x, row[n], acc[m][n]);
            }
        }
    }
}
