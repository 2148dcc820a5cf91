//! The one door to the `gemm` crate, which multiplies matrices at addresses: lengths are checked here.
#![allow(unsafe_code, reason = "gemm takes pointers")]

use attn_bench::product::Place;
use gemm::Parallelism;

/// Whether every element lies in a slice of this length.
fn is_in(place: Place, len: usize) -> bool {
    let Place { offset, rows, cols, strides } = place;
    let Some((r, c)) = rows.checked_sub(1).zip(cols.checked_sub(1)) else { return true };
    let reach = |n: usize, stride: usize| n.checked_mul(stride).filter(|&far| isize::try_from(far).is_ok());
    let last = reach(r, strides[0]).zip(reach(c, strides[1])).and_then(|(r, c)| r.checked_add(c)?.checked_add(offset));
    last.is_some_and(|last| last < len)
}

/// Whether no two elements share memory: one stride passes over all that the other one reaches.
fn is_disjoint(place: Place) -> bool {
    let over = |small: usize, n: usize, large: usize| small > 0 && small.checked_mul(n).is_some_and(|all| large >= all);
    let Place { rows, cols, strides: [r, c], .. } = place;
    match (rows, cols) {
        (0 | 1, 0 | 1) => true,
        (0 | 1, _) => c > 0,
        (_, 0 | 1) => r > 0,
        _ => over(c, cols, r) || over(r, rows, c),
    }
}

/// `y += x·w` for matrices in slices, on the threads of rayon's pool.
///
/// # Panics
/// Where sizes disagree, a matrix does not lie in its slice, or elements of `y` share memory.
pub(crate) fn add_product(to: (&mut [f32], Place), left: (&[f32], Place), right: (&[f32], Place)) {
    multiply(to, left, right, true, Parallelism::Rayon(0));
}

/// `y = x·w`, or added to what `y` holds.
fn multiply(
    (y, to): (&mut [f32], Place),
    (x, left): (&[f32], Place),
    (w, right): (&[f32], Place),
    add: bool,
    threads: Parallelism,
) {
    assert_eq!((to.rows, to.cols, left.cols), (left.rows, right.cols, right.rows), "sizes of a product");
    assert!(is_in(to, y.len()) && is_in(left, x.len()) && is_in(right, w.len()), "a matrix reaches out of its slice");
    assert!(is_disjoint(to), "elements of a product share memory");
    if to.rows == 0 || to.cols == 0 || (add && left.cols == 0) {
        return; // nothing to write; an empty matrix may have an offset beyond its slice
    }
    assert!(left.cols > 0, "a product of nothing is nobody's");
    let signed = |stride: usize| stride as isize; // what matters of it has been multiplied and fits
    // SAFETY: all elements of the three matrices lie in their slices, which are borrowed for the call, `y` exclusively;
    // elements of `y` do not share memory (all asserted above). A stride along a side of length 1 is never multiplied
    // by more than 0.
    unsafe {
        gemm::gemm(
            to.rows,
            to.cols,
            left.cols,
            y.as_mut_ptr().add(to.offset),
            signed(to.strides[1]),
            signed(to.strides[0]),
            add,
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
            threads,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn place(rows: usize, cols: usize) -> Place {
        Place::whole(rows, cols)
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
        assert!(is_in(place(3, 4), 12) && !is_in(place(3, 4), 11));
        assert!(is_in(Place { offset: 1, ..place(3, 4) }, 13) && !is_in(Place { offset: 1, ..place(3, 4) }, 12));
        assert!(is_in(place(0, 4), 0));
        assert!(!is_in(Place { strides: [usize::MAX, 1], ..place(3, 4) }, 12));
        assert!(!is_disjoint(Place { strides: [3, 1], ..place(3, 4) }));
        assert!(!is_disjoint(Place { strides: [0, 1], ..place(3, 4) }));
        assert!(is_disjoint(place(3, 4)) && is_disjoint(place(3, 4).transposed()));
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
