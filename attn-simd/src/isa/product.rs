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
//! Each accumulator is one chain over `k`, in order, so that a score or an output depends on nothing but its own row. A last
//! group of fewer than `M` rows reads its last row again instead of having code of its own; what that computes is stored
//! into padding.

#![allow(unsafe_code, reason = "the hot loop: pointers that the doors have checked against their slices")]

use super::Isa;

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

/// `s[key][query] = Σ_c keys[key][c]·q[c][query]` for `rows` keys. `q`: `[depth][NQ·LANES]`; `s`: at least `rows` rounded up to
/// `M`, times `NQ·LANES`.
#[inline(always)]
pub(crate) fn scores<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    keys: Panel<'_>,
    rows: usize,
    depth: usize,
    q: &[f32],
    s: &mut [f32],
) {
    let width = NQ * I::LANES;
    if depth == 0 {
        s[..rows * width].fill(0.0);
        return;
    }
    let a = keys.checked(rows, depth);
    assert!(q.len() >= depth * width && s.len() >= padded(rows, M) * width);
    let (b, c) = (q.as_ptr(), s.as_mut_ptr());
    for first in (0..rows).step_by(M) {
        // SAFETY: every row index is clamped to `rows − 1`, so each pointer is the start of a row that `checked` has bounded,
        // with `depth` elements behind it. `q` holds `depth` rows of `NQ` vectors and `s` has room for M rows from `first`
        // on; both were asserted above.
        unsafe {
            let starts: [*const f32; M] =
                core::array::from_fn(|m| a.offset((first + m).min(rows - 1) as isize * keys.row_stride));
            let acc = multiply::<I, NQ, M>(isa, starts, 1, b, depth);
            for (m, row) in acc.iter().enumerate() {
                for (n, x) in row.iter().enumerate() {
                    isa.store_ptr(*x, c.add((first + m) * width + n * I::LANES));
                }
            }
        }
    }
}

/// `o[c][query] = o[c][query]·factor[query] + Σ_key values[key][c]·p[key][query]` for `columns` channels and `depth` keys. `p`:
/// `[depth][NQ·LANES]`; `factor`: `[NQ·LANES]`; `o`: at least `columns` rounded up to `M`, times `NQ·LANES`.
#[inline(always)]
pub(crate) fn values<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    values: Panel<'_>,
    depth: usize,
    columns: usize,
    p: &[f32],
    factor: &[f32],
    o: &mut [f32],
) {
    let width = NQ * I::LANES;
    if columns == 0 {
        return;
    }
    let a = values.checked(depth, columns);
    assert!(p.len() >= depth * width && factor.len() >= width && o.len() >= padded(columns, M) * width);
    let (b, c) = (p.as_ptr(), o.as_mut_ptr());
    let factors: [I::F; NQ] = core::array::from_fn(|n| isa.load(&factor[n * I::LANES..]));
    for first in (0..columns).step_by(M) {
        // SAFETY: every column is clamped to `columns − 1`, so each pointer lies in row 0 of the panel and reaches, in steps of
        // the row stride, only elements that `checked` has bounded. `p` holds `depth` rows of `NQ` vectors and `o` has room
        // for M rows from `first` on; both were asserted above.
        unsafe {
            let starts: [*const f32; M] = core::array::from_fn(|m| a.add((first + m).min(columns - 1)));
            let acc = multiply::<I, NQ, M>(isa, starts, values.row_stride, b, depth);
            for (m, row) in acc.iter().enumerate() {
                for (n, x) in row.iter().enumerate() {
                    let slot = c.add((first + m) * width + n * I::LANES);
                    let scaled = isa.mul_add(isa.load_ptr(slot), factors[n], *x);
                    isa.store_ptr(scaled, slot);
                }
            }
        }
    }
}

/// `acc[m][n] = Σₖ a[m][k·step]·b[k][n]`.
///
/// # Safety
/// `a[m] + k·step` is readable for every `m < M` and `k < depth`, and `b` for `depth·NQ` vectors.
#[inline(always)]
unsafe fn multiply<I: Isa, const NQ: usize, const M: usize>(
    isa: I,
    a: [*const f32; M],
    step: isize,
    b: *const f32,
    depth: usize,
) -> [[I::F; NQ]; M] {
    let mut acc = [[isa.splat(0.0); NQ]; M];
    for k in 0..depth {
        // SAFETY: k < depth, and the caller vouches for these addresses.
        unsafe {
            let row: [I::F; NQ] = core::array::from_fn(|n| isa.load_ptr(b.add((k * NQ + n) * I::LANES)));
            for m in 0..M {
                let x = isa.splat(*a[m].offset(k as isize * step));
                for n in 0..NQ {
                    acc[m][n] = isa.mul_add(x, row[n], acc[m][n]);
                }
            }
        }
    }
    acc
}
