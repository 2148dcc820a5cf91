//! Rotary position embedding: each pair of dims of a query or key is rotated by an angle that grows with the position.
//!
//! `(x₁, x₂) → (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ)` with `θ = position · base^(−2i/d)` for pair `i` of `d`
//! rotary dims (Su et al. 2021, RoFormer, arXiv 2104.09864). The dot product of a rotated query and key depends
//! on the distance of their positions only. Dims from `d` on pass through (partial rotary).
//!
//! Two conventions pair the dims, and a checkpoint is useless under the wrong one:
//!
//! ```text
//! Pairing::Half         (0, d/2) (1, d/2+1) …    GPT-NeoX, Llama in Hugging Face form, most models
//! Pairing::Interleaved  (0, 1) (2, 3) …          the paper, GPT-J, Llama as Meta published it, DeepSeek
//! ```
//!
//! [`Rope`] computes everything in `f64` from positions, needs no table and rounds once. [`RopeTables`] takes cos and
//! sin from the caller, made by [`Rope::tables`] once per model or given by a file (ONNX `RotaryEmbedding`).

mod tables;

use crate::element::{Element, Real};
use crate::error::{AttnError, Result};
use crate::position::Positions;
use crate::position::scaling::Scaling;
use crate::shape::check_same;
use crate::view::{View, ViewMut};

pub use tables::RopeTables;

/// Which dims form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Dim `i` with dim `i + d/2`.
    Half,
    /// Dim `2i` with dim `2i + 1`.
    Interleaved,
}

impl Pairing {
    /// The two dims of a pair, for `pairs` pairs.
    #[inline]
    pub const fn dims(self, pair: usize, pairs: usize) -> (usize, usize) {
        match self {
            Self::Half => (pair, pair + pairs),
            Self::Interleaved => (2 * pair, 2 * pair + 1),
        }
    }
}

/// Rotary embedding, computed from positions.
///
/// ```
/// use attn_core::position::Positions;
/// use attn_core::position::rope::{Pairing, Rope};
/// use attn_core::ViewMut;
/// let rope = Rope::new(Pairing::Interleaved);
/// let mut x = [1.0f32, 0.0, 1.0, 0.0]; // two tokens of dim 2, at positions 0 and 1
/// rope.apply_in_place(&mut ViewMut::matrix(&mut x, 2, 2)?, Positions::Offset(0))?;
/// assert_eq!(x, [1.0, 0.0, 1f64.cos() as f32, 1f64.sin() as f32]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope<'a> {
    pairing: Pairing,
    base: f64,
    rotary_dim: Option<usize>,
    scaling: Scaling<'a>,
    seq_len: Option<usize>,
}

impl<'a> Rope<'a> {
    /// Base 10 000, all dims, no scaling.
    pub const fn new(pairing: Pairing) -> Self {
        Self { pairing, base: 10_000.0, rotary_dim: None, scaling: Scaling::None, seq_len: None }
    }

    /// The base of the frequencies ("theta"), finite and above 0.
    pub const fn base(mut self, base: f64) -> Self {
        self.base = base;
        self
    }

    /// Applies rope to the first `dim` dims only, an even number.
    pub const fn rotary_dim(mut self, dim: usize) -> Self {
        self.rotary_dim = Some(dim);
        self
    }

    /// Changes the frequencies for long contexts.
    pub const fn scaling(mut self, scaling: Scaling<'a>) -> Self {
        self.scaling = scaling;
        self
    }

    /// The length of the sequence, which the dynamic and LongRoPE scalings look at. By default the largest position of
    /// a call plus 1. Keys that were cached under another length keep the frequencies of that time.
    pub const fn seq_len(mut self, len: usize) -> Self {
        self.seq_len = Some(len);
        self
    }

    /// The length of the sequence, where none was set.
    #[doc(hidden)]
    pub fn seq_len_or(mut self, len: usize) -> Self {
        self.seq_len = self.seq_len.or(Some(len));
        self
    }

    /// How the dims are paired.
    pub const fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// The factor on cos and sin: 1 but for YaRN and LongRoPE.
    pub fn attention_factor(&self) -> f64 {
        self.scaling.attention_factor()
    }

    /// Rotary dims of a head of `head_dim`.
    ///
    /// # Errors
    /// The option that does not fit: an odd or too large number of rotary dims, a base or scaling without meaning.
    pub fn dims(&self, head_dim: usize) -> Result<usize> {
        let dim = self.rotary_dim.unwrap_or(head_dim);
        if dim > head_dim {
            return Err(AttnError::Index {
                what: "rotary_dim against head_dim",
                at: 0,
                value: dim,
                limit: head_dim.saturating_add(1),
            });
        }
        if !dim.is_multiple_of(2) {
            return Err(AttnError::Option { name: "rotary_dim", must: "even" });
        }
        if !(self.base.is_finite() && self.base > 0.0) {
            return Err(AttnError::Option { name: "rope base", must: "finite and above 0" });
        }
        self.scaling.check(dim, self.base)?;
        Ok(dim)
    }

    /// Writes the frequency of each pair, `out`: `[rotary_dim/2]`, for a sequence of `seq_len` positions (unless
    /// [`seq_len`](Self::seq_len) was set).
    ///
    /// # Errors
    /// As [`dims`](Self::dims); [`AttnError::Size`].
    pub fn inv_freq<T: Element>(&self, head_dim: usize, seq_len: usize, out: &mut [T]) -> Result<()> {
        let dim = self.dims(head_dim)?;
        AttnError::check_size("inv_freq (rotary_dim/2)", dim / 2, out.len())?;
        let frequency = self.scaling.frequencies(dim, self.base, self.seq_len.unwrap_or(seq_len));
        for (pair, out) in out.iter_mut().enumerate() {
            *out = T::from_f64(frequency(pair));
        }
        Ok(())
    }

    /// Writes cos and sin of every token and pair, times the attention factor: `[batch, heads, seq, rotary_dim/2]`,
    /// every head alike (a table has one). A table for [`RopeTables`] has batch 1 and one row per position.
    ///
    /// # Errors
    /// As [`dims`](Self::dims); [`AttnError::Size`].
    pub fn tables<T: Element>(
        &self,
        head_dim: usize,
        positions: Positions<'_>,
        cos: &mut ViewMut<'_, T>,
        sin: &mut ViewMut<'_, T>,
    ) -> Result<()> {
        let dim = self.dims(head_dim)?;
        let [batch, heads, seq, pairs] = cos.sizes();
        check_same("sin table against cos table", cos.sizes(), sin.sizes())?;
        AttnError::check_size("cos table (rotary_dim/2)", dim / 2, pairs)?;
        positions.check(batch, seq)?;
        self.each_angle(dim, batch, seq, positions, |b, s, pair, c, n| {
            for h in 0..heads {
                cos.set(b, h, s, pair, T::from_f64(c));
                sin.set(b, h, s, pair, T::from_f64(n));
            }
        });
        Ok(())
    }

    /// Applies rope to queries or keys in place, `x`: `[batch, heads, seq, head_dim]`, any strides.
    ///
    /// # Errors
    /// As [`dims`](Self::dims); [`AttnError::Size`] if the positions do not fit. Nothing has been written then.
    pub fn apply_in_place<T: Element>(&self, x: &mut ViewMut<'_, T>, positions: Positions<'_>) -> Result<()> {
        self.apply_to_pairs(x.sizes(), positions, &mut InPlace(x))
    }

    /// As [`apply_in_place`](Self::apply_in_place), from one tensor into another of the same sizes.
    ///
    /// # Errors
    /// As [`apply_in_place`](Self::apply_in_place).
    pub fn apply<T: Element, O: Element>(
        &self,
        x: View<'_, T>,
        out: &mut ViewMut<'_, O>,
        positions: Positions<'_>,
    ) -> Result<()> {
        check_same("rope output against x", x.sizes(), out.sizes())?;
        self.apply_to_pairs(x.sizes(), positions, &mut Between { x, out })
    }

    fn apply_to_pairs(&self, sizes: [usize; 4], positions: Positions<'_>, x: &mut impl Pairs<f64>) -> Result<()> {
        let [batch, heads, seq, head_dim] = sizes;
        let dim = self.dims(head_dim)?;
        positions.check(batch, seq)?;
        self.each_angle(dim, batch, seq, positions, |b, s, pair, cos, sin| {
            let dims = self.pairing.dims(pair, dim / 2);
            for h in 0..heads {
                x.apply([b, h, s], dims, cos, sin);
            }
        });
        for (b, h, s) in each_row(batch, heads, seq) {
            for d in dim..head_dim {
                x.pass([b, h, s, d]);
            }
        }
        Ok(())
    }

    /// Calls `f(batch, seq, pair, cos, sin)`, both times the attention factor. Pairs are outermost, so that a frequency
    /// is raised to its power once.
    fn each_angle(
        &self,
        dim: usize,
        batch: usize,
        seq: usize,
        positions: Positions<'_>,
        mut f: impl FnMut(usize, usize, usize, f64, f64),
    ) {
        let seq_len = self.seq_len.unwrap_or_else(|| positions.largest(batch, seq).unsigned_abs().saturating_add(1));
        let frequency = self.scaling.frequencies(dim, self.base, seq_len);
        let factor = self.attention_factor();
        for pair in 0..dim / 2 {
            let frequency = frequency(pair);
            for b in 0..batch {
                for s in 0..seq {
                    let (sin, cos) = libm::sincos(positions.of(b, s, seq) as f64 * frequency);
                    f(b, s, pair, cos * factor, sin * factor);
                }
            }
        }
    }
}

/// A tensor to whose pairs RoPE is applied: in place, or on the way into another tensor.
trait Pairs<R: Real> {
    fn get(&self, at: [usize; 4]) -> R;
    fn set(&mut self, at: [usize; 4], value: R);
    /// Takes an element that RoPE does not change.
    fn pass(&mut self, at: [usize; 4]);

    #[inline]
    fn apply(&mut self, [b, h, s]: [usize; 3], (first, second): (usize, usize), cos: R, sin: R) {
        let (x1, x2) = (self.get([b, h, s, first]), self.get([b, h, s, second]));
        self.set([b, h, s, first], x1 * cos - x2 * sin);
        self.set([b, h, s, second], x2 * cos + x1 * sin);
    }
}

struct InPlace<'v, 'a, T>(&'v mut ViewMut<'a, T>);

impl<R: Real, T: Element> Pairs<R> for InPlace<'_, '_, T> {
    #[inline]
    fn get(&self, [b, h, s, d]: [usize; 4]) -> R {
        R::of(self.0.as_view().at(b, h, s, d).to_f64())
    }
    #[inline]
    fn set(&mut self, [b, h, s, d]: [usize; 4], value: R) {
        self.0.set(b, h, s, d, T::from_f64(value.to_f64()));
    }
    fn pass(&mut self, _: [usize; 4]) {}
}

struct Between<'v, 'x, 'o, T, O> {
    x: View<'x, T>,
    out: &'v mut ViewMut<'o, O>,
}

impl<R: Real, T: Element, O: Element> Pairs<R> for Between<'_, '_, '_, T, O> {
    #[inline]
    fn get(&self, [b, h, s, d]: [usize; 4]) -> R {
        R::of(self.x.at(b, h, s, d).to_f64())
    }
    #[inline]
    fn set(&mut self, [b, h, s, d]: [usize; 4], value: R) {
        self.out.set(b, h, s, d, O::from_f64(value.to_f64()));
    }
    fn pass(&mut self, [b, h, s, d]: [usize; 4]) {
        self.out.set(b, h, s, d, O::from_f64(self.x.at(b, h, s, d).to_f64()));
    }
}

fn each_row(batch: usize, heads: usize, seq: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..seq).map(move |s| (b, h, s))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;
    use crate::position::scaling::Yarn;
    use half::bf16;
    use std::vec;
    use std::vec::Vec;

    fn numbers(n: usize) -> Vec<f64> {
        (0..n).map(|i| libm::sin(0.3 + i as f64 * 1.9)).collect()
    }

    fn dot(x: &[f64], y: &[f64]) -> f64 {
        x.iter().zip(y).map(|(x, y)| x * y).sum()
    }

    #[test]
    fn scores_depend_on_the_distance_only() {
        let (q, k) = (numbers(8), numbers(16)[8..].to_vec());
        for pairing in [Pairing::Half, Pairing::Interleaved] {
            let rope = Rope::new(pairing).rotary_dim(6);
            let at = |x: &[f64], position| {
                let mut x = x.to_vec();
                rope.apply_in_place(&mut ViewMut::matrix(&mut x, 1, 8).unwrap(), Positions::Offset(position)).unwrap();
                x
            };
            let near = dot(&at(&q, 3), &at(&k, 1));
            assert!((near - dot(&at(&q, 1002), &at(&k, 1000))).abs() < 1e-12);
            assert!((near - dot(&at(&q, 3), &at(&k, 2))).abs() > 1e-3);
            assert_eq!(at(&q, 9)[6..], q[6..]); // the last two dims pass
            // Rope by the negative position restores the vector.
            let mut back = at(&q, 77);
            rope.apply_in_place(&mut ViewMut::matrix(&mut back, 1, 8).unwrap(), Positions::Offset(-77)).unwrap();
            assert!(back.iter().zip(&q).all(|(a, b)| (a - b).abs() < 1e-14));
        }
    }

    #[test]
    fn the_two_pairings_are_one_rotation_of_permuted_dims() {
        let x = numbers(8);
        let permuted: Vec<f64> = (0..8).map(|d| x[d / 2 + d % 2 * 4]).collect(); // 0 4 1 5 2 6 3 7
        let with_rope = |x: &[f64], pairing| {
            let mut x = x.to_vec();
            let rope = Rope::new(pairing);
            rope.apply_in_place(&mut ViewMut::matrix(&mut x, 1, 8).unwrap(), Positions::Offset(5)).unwrap();
            x
        };
        let (half, interleaved) = (with_rope(&x, Pairing::Half), with_rope(&permuted, Pairing::Interleaved));
        for d in 0..8 {
            assert_eq!(interleaved[d], half[d / 2 + d % 2 * 4]);
        }
    }

    #[test]
    fn layouts_and_destinations_agree_bit_for_bit() {
        let sizes = [2, 3, 4, 6];
        let x = numbers(144);
        let rope = Rope::new(Pairing::Half).rotary_dim(4).scaling(Scaling::Yarn(Yarn::new(4.0, 16)));
        let positions = Positions::Each(&[0, 1, 2, 3, 9, 8, 7, 6]);
        let mut want = vec![0.0; 144];
        let view = View::new(&x, Layout::Bhsd, sizes).unwrap();
        rope.apply(view, &mut ViewMut::new(&mut want, Layout::Bhsd, sizes).unwrap(), positions).unwrap();
        let want = View::new(&want, Layout::Bhsd, sizes).unwrap();

        let mut other = vec![0.0; 144];
        let mut other = ViewMut::new(&mut other, Layout::Sbhd, sizes).unwrap();
        for (b, h, s) in each_row(2, 3, 4) {
            for d in 0..6 {
                other.set(b, h, s, d, view.at(b, h, s, d));
            }
        }
        rope.apply_in_place(&mut other, positions).unwrap();
        // Tables in f64, one row per token, hold the same numbers.
        let (mut cos, mut sin) = (vec![0.0; 16], vec![0.0; 16]);
        let (mut c, mut n) = (
            ViewMut::new(&mut cos, Layout::Bhsd, [2, 1, 4, 2]).unwrap(),
            ViewMut::new(&mut sin, Layout::Bhsd, [2, 1, 4, 2]).unwrap(),
        );
        rope.tables(6, positions, &mut c, &mut n).unwrap();
        let tables = RopeTables::new(Pairing::Half, c.as_view(), n.as_view()).unwrap();
        let mut third = vec![0.0; 144];
        let mut third = ViewMut::new(&mut third, Layout::Bshd, sizes).unwrap();
        tables.apply(view, &mut third, Positions::Offset(0)).unwrap();
        for (b, h, s) in each_row(2, 3, 4) {
            for d in 0..6 {
                let w = want.at(b, h, s, d);
                assert_eq!((other.as_view().at(b, h, s, d), third.as_view().at(b, h, s, d)), (w, w));
            }
        }
        // YaRN scales cos and sin: vectors grow by the attention factor.
        let norm = |v: View<'_, f64>| (0..4).map(|d| v.at(0, 0, 3, d) * v.at(0, 0, 3, d)).sum::<f64>();
        assert!((norm(want) / norm(view) - rope.attention_factor() * rope.attention_factor()).abs() < 1e-12);
    }

    #[test]
    fn angles_stay_exact_at_large_positions() {
        // In f32 the angle 100 003 · 1 would be right, but 100 003 · f for the next pair is off by up to 0.004.
        let mut x = [0.0f32, 1.0, 0.0, 0.0];
        let rope = Rope::new(Pairing::Half);
        rope.apply_in_place(&mut ViewMut::matrix(&mut x, 1, 4).unwrap(), Positions::Offset(100_003)).unwrap();
        assert_eq!(x[1], libm::cos(1000.03) as f32);
        let mut x = [bf16::ONE, bf16::ZERO];
        rope.apply_in_place(&mut ViewMut::matrix(&mut x, 1, 2).unwrap(), Positions::Offset(2)).unwrap();
        assert_eq!(x, [bf16::from_f64(libm::cos(2.0)), bf16::from_f64(libm::sin(2.0))]);
    }

    #[test]
    fn the_length_of_a_call_is_its_largest_position() {
        let dynamic = Rope::new(Pairing::Half).scaling(Scaling::Dynamic { factor: 2.0, max_position: 4 });
        let (mut a, mut b) = ([1.0f64; 8], [1.0f64; 8]);
        dynamic.apply_in_place(&mut ViewMut::matrix(&mut a, 2, 4).unwrap(), Positions::Offset(6)).unwrap();
        let fixed = dynamic.seq_len(8);
        fixed.apply_in_place(&mut ViewMut::matrix(&mut b, 2, 4).unwrap(), Positions::Offset(6)).unwrap();
        assert_eq!(a, b);
        let (mut f, mut g) = ([0.0f64; 2], [0.0f64; 2]);
        fixed.inv_freq(4, 1, &mut f).unwrap();
        dynamic.inv_freq(4, 8, &mut g).unwrap();
        assert_eq!(f, g);
    }

    #[test]
    fn what_does_not_fit_is_refused_before_writing() {
        let mut x = [7.0f32; 6];
        let mut rope = |rope: Rope<'_>, positions| {
            rope.apply_in_place(&mut ViewMut::matrix(&mut x, 2, 3).unwrap(), positions).unwrap_err()
        };
        let half = Rope::new(Pairing::Half);
        assert_eq!(rope(half, Positions::Offset(0)), AttnError::Option { name: "rotary_dim", must: "even" });
        assert!(matches!(rope(half.rotary_dim(4), Positions::Offset(0)), AttnError::Index { .. }));
        assert!(matches!(rope(half.rotary_dim(2), Positions::Shared(&[1])), AttnError::Size { .. }));
        assert!(matches!(rope(half.rotary_dim(2).base(f64::NAN), Positions::Offset(0)), AttnError::Option { .. }));
        let table = [0.5f32; 4];
        let tables = |rows, pairs| {
            let t = View::matrix(&table, rows, pairs).unwrap();
            RopeTables::new(Pairing::Half, t, t).unwrap()
        };
        let mut apply = |t: RopeTables<'_, f32>, positions| {
            t.apply_in_place(&mut ViewMut::matrix(&mut x, 2, 3).unwrap(), positions).unwrap_err()
        };
        assert!(matches!(apply(tables(2, 2), Positions::Offset(0)), AttnError::Index { .. }));
        assert!(matches!(apply(tables(2, 1), Positions::Offset(1)), AttnError::Index { .. }));
        assert_eq!(x, [7.0; 6]);
    }
}
