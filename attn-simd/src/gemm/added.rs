//! The product whose lanes are channels: rows of gradients that a block of queries adds to.

#![allow(unsafe_code, reason = "the hot loop: pointers that its door has checked against their slices")]

use super::{Panel, UNROLL};
use crate::isa::Isa;

/// `c[row][channel] += Σₖ a[row][k]·b[k][channel]` for `rows` rows and `depth` k. `b` and `c` have rows of `columns`
/// floats, a multiple of `LANES`. Blocks of `M` rows and `NQ` vectors stay in registers.
///
/// A sum is one chain over k, in order, which is added to `c` at its end: it depends on its row and channel alone.
#[inline(never)]
pub(crate) fn added<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: Panel<'_>,
    (rows, depth): (usize, usize),
    b: &[f32],
    columns: usize,
    c: &mut [f32],
) {
    if rows == 0 || depth == 0 || columns == 0 {
        return;
    }
    let start = a.checked(rows, depth);
    assert!(columns.is_multiple_of(I::LANES) && b.len() / columns >= depth && c.len() / columns >= rows);
    isa.vectorize(
        #[inline(always)]
        || {
            let mut column = 0;
            while column < columns {
                let left = (columns - column) / I::LANES;
                // SAFETY: `checked` has bounded the rows of `a`, and the assertion above those of `b` and `c`; each
                // call reads and writes as many vectors from `column` on as there are left at least.
                unsafe {
                    let at = (start, a.row_stride, depth);
                    let (b, c) = (b.as_ptr().add(column), c.as_mut_ptr().add(column));
                    match left.min(NQ) {
                        1 => vectors::<I, 1, M>(isa, at, rows, b, columns, c),
                        2 => vectors::<I, 2, M>(isa, at, rows, b, columns, c),
                        3 => vectors::<I, 3, M>(isa, at, rows, b, columns, c),
                        _ => vectors::<I, NQ, M>(isa, at, rows, b, columns, c),
                    }
                }
                column += left.min(NQ) * I::LANES;
            }
        },
    );
}

/// All rows, for `N` vectors of channels.
///
/// # Safety
/// `rows` rows of `depth` floats are readable from `a` on, `depth` rows of `N` vectors from `b` on; `rows` rows of `N`
/// vectors are readable and writable from `c` on. Rows of `b` and `c` are `columns` apart.
#[inline(always)]
unsafe fn vectors<I: Isa, const N: usize, const M: usize>(
    isa: I,
    (a, stride, depth): (*const f32, isize, usize),
    rows: usize,
    b: *const f32,
    columns: usize,
    c: *mut f32,
) {
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        // SAFETY: as many rows are left as each call takes.
        unsafe {
            let (a, c) = ((a.offset(row as isize * stride), stride, depth), c.add(row * columns));
            if left >= M {
                group::<I, N, M>(isa, a, b, columns, c);
                row += M;
            } else if left >= 4 {
                group::<I, N, 4>(isa, a, b, columns, c);
                row += 4;
            } else {
                group::<I, N, 1>(isa, a, b, columns, c);
                row += 1;
            }
        }
    }
}

/// `M` rows.
///
/// # Safety
/// As [`vectors`], for `M` rows.
#[inline(always)]
unsafe fn group<I: Isa, const N: usize, const M: usize>(
    isa: I,
    (a, stride, depth): (*const f32, isize, usize),
    b: *const f32,
    columns: usize,
    c: *mut f32,
) {
    let mut acc = [[isa.splat(0.0); N]; M];
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let starts: [*const f32; M] = core::array::from_fn(|m| a.offset(m as isize * stride));
        let mut k = 0;
        while k + UNROLL <= depth {
            for step in 0..UNROLL {
                once(isa, &starts, k + step, b.add((k + step) * columns), &mut acc);
            }
            k += UNROLL;
        }
        while k < depth {
            once(isa, &starts, k, b.add(k * columns), &mut acc);
            k += 1;
        }
        for (m, row) in acc.iter().enumerate() {
            for (n, x) in row.iter().enumerate() {
                let slot = c.add(m * columns + n * I::LANES);
                isa.store_ptr(isa.add(isa.load_ptr(slot), *x), slot);
            }
        }
    }
}

/// `acc[m][n] += a[m][k]·b[n]`.
///
/// # Safety
/// `a[m] + k` is readable for every `m < M`, and `b` for `N` vectors.
#[inline(always)]
unsafe fn once<I: Isa, const N: usize, const M: usize>(
    isa: I,
    a: &[*const f32; M],
    k: usize,
    b: *const f32,
    acc: &mut [[I::F; N]; M],
) {
    // SAFETY: the caller vouches for these addresses.
    unsafe {
        let row: [I::F; N] = core::array::from_fn(
            #[inline(always)]
            |n| isa.load_ptr(b.add(n * I::LANES)),
        );
        for m in 0..M {
            let x = isa.splat(*a[m].add(k));
            for n in 0..N {
                acc[m][n] = isa.step(x, row[n], acc[m][n]);
            }
        }
    }
}
