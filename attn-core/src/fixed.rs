//! Attention whose sizes are known when compiling: arrays in, arrays out, and the few options that firmware uses.
//!
//! The run-time API checks sizes and strides, and its image contains every option. Here heads and dims are constants,
//! which the compiler checks. Options that are not offered (soft-cap, biases, dropout, mods, tables of lengths) take no
//! flash. The bits are those of [`streaming`](crate::streaming); docs/embedded.md has the cost of each.

use crate::dot::dot_slices;
use crate::error::{AttnError, Result};
use crate::mask::{Align, Window};
use crate::options::LARGEST_FACTOR;
use crate::score::default_scale;
use crate::softmax::RowState;
use crate::streaming::{add_slice, rescale};

/// Attention in `f32` of `HEADS` query heads over `KV_HEADS` key/value heads of `DIM`, over arrays `[seq][heads][dim]`.
///
/// `KV_HEADS` must divide `HEADS`, or the program does not compile. The output rows are the accumulators, so that
/// [`SCRATCH`](Self::SCRATCH) is 0.
///
/// ```
/// use attn_core::Align;
/// use attn_core::fixed::FixedAttention;
/// const ATTN: FixedAttention<2, 1, 4> = FixedAttention::new().causal(Align::BottomRight);
/// let q = [[[0.1f32, 0.2, 0.3, 0.4], [1.0, 0.0, -1.0, 0.0]]; 3]; // three tokens of two heads
/// let kv = [[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 0.0]]]; // which share one key/value head
/// let mut out = [[[0.0; 4]; 2]; 3];
/// ATTN.forward(&q, &kv, &kv, &mut out); // nothing can fail: every size is part of a type
/// assert_eq!(out[0][0], [1.0, 0.0, 0.0, 0.0]);
///
/// // The last token again, as a decoder does: the number of cached tokens is known at run time only.
/// let mut last = [[[0.0; 4]; 2]];
/// ATTN.decode(&q[2..], &kv[..], &kv[..], &mut last)?;
/// assert_eq!(last[0], out[2]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// ```compile_fail
/// attn_core::fixed::FixedAttention::<3, 2, 4>::new(); // three heads over two
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FixedAttention<const HEADS: usize, const KV_HEADS: usize, const DIM: usize> {
    scale: f32,
    window: Window,
}

impl<const HEADS: usize, const KV_HEADS: usize, const DIM: usize> FixedAttention<HEADS, KV_HEADS, DIM> {
    /// Elements of `f32` needed beside the tensors: none.
    pub const SCRATCH: usize = 0;
    /// Elements of a token's query, and of its output.
    pub const QUERY: usize = HEADS * DIM;
    /// Elements of a token's key, and of its value: twice as many for each token of a cache.
    pub const KEY: usize = KV_HEADS * DIM;

    /// Query heads that share a key/value head.
    const GROUP: usize = {
        assert!(KV_HEADS > 0 && HEADS.is_multiple_of(KV_HEADS), "KV_HEADS must divide HEADS");
        HEADS / KV_HEADS
    };

    /// The textbook formula: scale `1/√DIM`, nothing masked.
    pub const fn new() -> Self {
        const { assert!(Self::GROUP <= HEADS) }; // evaluates it
        Self { scale: default_scale(DIM) as f32, window: Window { left: None, right: None, align: Align::TopLeft } }
    }

    /// Multiplies `q·k`; a finite number. One beyond what [`Attention::scale`](crate::Attention::scale) accepts, 2⁶⁴ in
    /// size, counts as 2⁶⁴, at which the largest score has the whole weight already: nothing here can fail, and nothing
    /// overflows.
    pub const fn scale(mut self, scale: f32) -> Self {
        let largest = LARGEST_FACTOR as f32;
        self.scale = if scale > largest {
            largest
        } else if scale < -largest {
            -largest
        } else {
            scale
        };
        self
    }

    /// Query `i` sees keys `j ≤ i + offset`, the offset being the alignment's. Replaces an earlier window.
    pub const fn causal(self, align: Align) -> Self {
        self.window(Window { left: None, right: Some(0), align })
    }

    /// A sliding window; `right: Some(0)` makes it causal. Replaces an earlier one.
    pub const fn window(mut self, window: Window) -> Self {
        self.window = window;
        self
    }

    /// Attention of `Q` queries to `K` keys.
    pub fn forward<const Q: usize, const K: usize>(
        &self,
        q: &[[[f32; DIM]; HEADS]; Q],
        k: &[[[f32; DIM]; KV_HEADS]; K],
        v: &[[[f32; DIM]; KV_HEADS]; K],
        out: &mut [[[f32; DIM]; HEADS]; Q],
    ) {
        self.rows(q, k, v, out);
    }

    /// The same where the numbers of queries and keys are known at run time only: the last tokens of a cache, for
    /// example.
    ///
    /// # Errors
    /// [`AttnError::Size`] if there are not as many values as keys or as many outputs as queries; nothing is written
    /// then.
    pub fn decode(
        &self,
        q: &[[[f32; DIM]; HEADS]],
        k: &[[[f32; DIM]; KV_HEADS]],
        v: &[[[f32; DIM]; KV_HEADS]],
        out: &mut [[[f32; DIM]; HEADS]],
    ) -> Result<()> {
        AttnError::check_size("values against keys", k.len(), v.len())?;
        AttnError::check_size("outputs against queries", q.len(), out.len())?;
        self.rows(q, k, v, out);
        Ok(())
    }

    /// One instance for every length, so that a second one costs no flash.
    fn rows(
        &self,
        q: &[[[f32; DIM]; HEADS]],
        k: &[[[f32; DIM]; KV_HEADS]],
        v: &[[[f32; DIM]; KV_HEADS]],
        out: &mut [[[f32; DIM]; HEADS]],
    ) {
        let (q_len, kv_len) = (q.len(), k.len());
        for (query, (q, out)) in q.iter().zip(out.iter_mut()).enumerate() {
            let keys = self.window.range_at(self.window.align.position(query, q_len, kv_len), kv_len);
            // A range that ends before it starts sees nothing.
            let (k, v) = (k.get(keys.clone()).unwrap_or_default(), v.get(keys).unwrap_or_default());
            for (head, (q, out)) in q.iter().zip(out.iter_mut()).enumerate() {
                let kv_head = head.checked_div(Self::GROUP).unwrap_or(0);
                *out = [0.0; DIM];
                let mut state = RowState::new();
                for (k, v) in k.iter().zip(v) {
                    let (Some(k), Some(v)) = (k.get(kv_head), v.get(kv_head)) else { continue };
                    let step = state.push(dot_slices(q, k) * self.scale);
                    rescale(out, step.rescale);
                    add_slice(out, step.weight, v);
                }
                let factor = state.finish();
                for x in out {
                    *x *= factor;
                }
            }
        }
    }
}

impl<const HEADS: usize, const KV_HEADS: usize, const DIM: usize> Default for FixedAttention<HEADS, KV_HEADS, DIM> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, Layout, Mask, View, ViewMut, streaming};
    use std::vec;

    #[test]
    fn a_scale_beyond_f32_gives_the_largest_score_all() {
        for (scale, want) in [(1e38, 3.0), (f32::INFINITY, 3.0), (-1e38, 1.0), (0.0, 2.0)] {
            let mut out = [[[0.0; 4]]];
            let [k, v] = [[1.0, 2.0, 3.0].map(|x| [[x; 4]]); 2];
            FixedAttention::<1, 1, 4>::new().scale(scale).forward(&[[[1.0, 2.0, 3.0, 4.0]]], &k, &v, &mut out);
            assert_eq!(out, [[[want; 4]]], "{scale}");
        }
    }

    fn numbers<const D: usize, const H: usize, const N: usize>(seed: f32) -> [[[f32; D]; H]; N] {
        let mut i = 0.0f32;
        [(); N].map(|()| {
            [(); H].map(|()| {
                [(); D].map(|()| {
                    i += 1.0;
                    (i * 0.7 + seed).sin() * 2.0
                })
            })
        })
    }

    /// Every window over several lengths gives the bits of the streaming engine.
    fn same_bits<const H: usize, const G: usize, const D: usize, const Q: usize, const K: usize>() {
        let (q, k, v) = (numbers::<D, H, Q>(0.1), numbers::<D, G, K>(0.2), numbers::<D, G, K>(0.3));
        let flat = |x: &[[[f32; D]; G]; K]| x.as_flattened().as_flattened().to_vec();
        let (kf, vf) = (flat(&k), flat(&v));
        for align in [Align::TopLeft, Align::BottomRight, Align::Offset(-2)] {
            for (left, right) in
                [(None, None), (None, Some(0)), (Some(2), Some(0)), (Some(1), Some(3)), (Some(0), None)]
            {
                let window = Window { left, right, align };
                let mut out = [[[9.0; D]; H]; Q];
                FixedAttention::<H, G, D>::new().window(window).forward(&q, &k, &v, &mut out);
                let attn = Attention::new().mask(Mask::term(crate::mask::Term::Window(window)));
                let mut want = vec![0.0f32; Q * H * D];
                streaming::forward(
                    &attn,
                    View::new(q.as_flattened().as_flattened(), Layout::Bshd, [1, H, Q, D]).unwrap(),
                    View::new(&kf, Layout::Bshd, [1, G, K, D]).unwrap(),
                    View::new(&vf, Layout::Bshd, [1, G, K, D]).unwrap(),
                    ViewMut::new(&mut want, Layout::Bshd, [1, H, Q, D]).unwrap(),
                    &mut [0.0; D],
                )
                .unwrap();
                assert_eq!(out.as_flattened().as_flattened(), want, "{window:?}");
                let mut last = [[[9.0; D]; H]; Q];
                FixedAttention::<H, G, D>::new().window(window).decode(&q, &k, &v, &mut last).unwrap();
                assert_eq!(last, out);
            }
        }
    }

    #[test]
    fn bits_are_those_of_the_streaming_engine() {
        if cfg!(miri) {
            return same_bits::<2, 1, 3, 2, 3>(); // Miri takes hundreds of times as long, and looks for something else.
        }
        same_bits::<4, 2, 8, 5, 7>();
        same_bits::<3, 1, 6, 4, 4>();
        same_bits::<2, 2, 1, 6, 3>();
        same_bits::<1, 1, 3, 3, 0>();
        same_bits::<2, 1, 0, 2, 2>();
    }

    #[test]
    fn lengths_that_disagree_are_refused_before_anything_is_written() {
        let x = [[[1.0f32; 2]; 1]; 3];
        let mut out = [[[9.0; 2]; 1]; 3];
        let attn = FixedAttention::<1, 1, 2>::new();
        let error = attn.decode(&x, &x, &x[1..], &mut out).unwrap_err();
        assert_eq!(error, AttnError::Size { what: "values against keys", expected: 3, found: 2 });
        assert!(attn.decode(&x[2..], &x, &x, &mut out).is_err());
        assert_eq!(out, [[[9.0; 2]; 1]; 3]);
    }
}
