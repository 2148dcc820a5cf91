//! The one door to the `gemm` crate, which multiplies matrices at addresses: lengths are checked here.
#![allow(unsafe_code, reason = "gemm takes pointers")]

use gemm::Parallelism;

/// Where a matrix lies in a slice: element `(r, c)` at `offset + r·strides[0] + c·strides[1]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) offset: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) strides: [usize; 2],
}

impl Place {
    /// Whether every element lies in a slice of this length.
    fn is_in(&self, len: usize) -> bool {
        let Some((r, c)) = self.rows.checked_sub(1).zip(self.cols.checked_sub(1)) else { return true };
        let reach = |n: usize, stride: usize| n.checked_mul(stride).filter(|&far| isize::try_from(far).is_ok());
        let last = reach(r, self.strides[0])
            .zip(reach(c, self.strides[1]))
            .and_then(|(r, c)| r.checked_add(c)?.checked_add(self.offset));
        last.is_some_and(|last| last < len)
    }

    /// Whether no two elements share memory: one stride passes over all that the other one reaches.
    fn is_disjoint(&self) -> bool {
        let over =
            |small: usize, n: usize, large: usize| small > 0 && small.checked_mul(n).is_some_and(|all| large >= all);
        let [r, c] = self.strides;
        match (self.rows, self.cols) {
            (0 | 1, 0 | 1) => true,
            (0 | 1, _) => c > 0,
            (_, 0 | 1) => r > 0,
            _ => over(c, self.cols, r) || over(r, self.rows, c),
        }
    }

    /// Rows as columns.
    pub(super) fn transposed(self) -> Self {
        let [r, c] = self.strides;
        Self { rows: self.cols, cols: self.rows, strides: [c, r], ..self }
    }
}

/// `y += x·w` for matrices in slices, on the threads of rayon's pool.
///
/// # Panics
/// Where sizes disagree, a matrix does not lie in its slice, or elements of `y` share memory.
pub(super) fn add_product((y, to): (&mut [f32], Place), (x, left): (&[f32], Place), (w, right): (&[f32], Place)) {
    assert_eq!((to.rows, to.cols, left.cols), (left.rows, right.cols, right.rows), "sizes of a product");
    assert!(to.is_in(y.len()) && left.is_in(x.len()) && right.is_in(w.len()), "a matrix reaches out of its slice");
    assert!(to.is_disjoint(), "elements of a product share memory");
    if to.rows == 0 || to.cols == 0 || left.cols == 0 {
        return; // nothing to add; an empty matrix may have an offset beyond its slice
    }
    let signed = |stride: usize| stride as isize; // what matters of it has been multiplied and fits
    // SAFETY: all elements of the three matrices lie in their slices, which are borrowed for the call, `y` exclusively;
    // elements of `y` do not share memory (all asserted above). A stride along a side of length 1 is never multiplied by more
    // than 0.
    unsafe {
        gemm::gemm(
            to.rows,
            to.cols,
            left.cols,
            y.as_mut_ptr().add(to.offset),
            signed(to.strides[1]),
            signed(to.strides[0]),
            true,
            x.as_ptr().add(left.offset),
            signed(left.strides[1]),
            signed(left.strides[0]),
            w.as_ptr().add(right.offset),
            signed(right.strides[1]),
            signed(right.strides[0]),
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(rows: usize, cols: usize) -> Place {
        Place { offset: 0, rows, cols, strides: [cols, 1] }
    }

    /// Small whole numbers, whose products are exact in any order.
    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7 + 3) % 11) as f32 - 5.0).collect()
    }

    #[test]
    fn products_are_added_wherever_the_matrices_lie() {
        for (m, n, k) in [(1, 1, 1), (1, 40, 33), (5, 3, 7), (33, 17, 64), (3, 5, 0), (0, 4, 4)] {
            let (x, w) = (numbers(m * k), numbers(k * n));
            let mut want = vec![2.0f32; m * n];
            for (i, sum) in want.iter_mut().enumerate() {
                *sum += (0..k).map(|d| x[i / n * k + d] * w[d * n + i % n]).sum::<f32>();
            }
            let mut got = vec![2.0f32; m * n];
            add_product((&mut got, place(m, n)), (&x, place(m, k)), (&w, place(k, n)));
            assert_eq!(got, want, "{m} {n} {k}");

            // The transposed product, and a result with gaps.
            let mut gaps = vec![2.0f32; 3 + m * (n + 2)];
            let to = Place { offset: 3, strides: [n + 2, 1], ..place(m, n) };
            add_product((&mut gaps, to.transposed()), (&w, place(k, n).transposed()), (&x, place(m, k).transposed()));
            for i in 0..m {
                assert_eq!(gaps[3 + i * (n + 2)..][..n], want[i * n..][..n]);
                assert_eq!(gaps[3 + i * (n + 2) + n..][..2], [2.0; 2]);
            }
        }
    }

    #[test]
    fn places_know_how_far_they_reach() {
        assert!(place(3, 4).is_in(12) && !place(3, 4).is_in(11));
        assert!(Place { offset: 1, ..place(3, 4) }.is_in(13) && !Place { offset: 1, ..place(3, 4) }.is_in(12));
        assert!(place(0, 4).is_in(0));
        assert!(!Place { strides: [usize::MAX, 1], ..place(3, 4) }.is_in(12));
        assert!(!Place { strides: [3, 1], ..place(3, 4) }.is_disjoint());
        assert!(!Place { strides: [0, 1], ..place(3, 4) }.is_disjoint());
        assert!(place(3, 4).is_disjoint() && place(3, 4).transposed().is_disjoint());
    }

    #[test]
    #[should_panic = "reaches out"]
    fn a_slice_that_is_too_short_is_refused() {
        add_product((&mut [0.0; 3], place(2, 2)), (&[0.0; 4], place(2, 2)), (&[0.0; 4], place(2, 2)));
    }

    #[test]
    #[should_panic = "share memory"]
    fn a_result_that_overlaps_itself_is_refused() {
        let to = Place { strides: [1, 1], ..place(2, 2) };
        add_product((&mut [0.0; 4], to), (&[0.0; 4], place(2, 2)), (&[0.0; 4], place(2, 2)));
    }
}
