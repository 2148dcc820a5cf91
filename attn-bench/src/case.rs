//! A measured call: its sizes, its FLOPs, and inputs that are the same on every machine.

use attn_core::half::{bf16, f16};
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Result, View, ViewMut};
use attn_simd::KernelElement;
use serde::{Deserialize, Serialize};

/// The sizes of one measured call, and whether it is causal.
///
/// ```
/// use attn_bench::case::Case;
/// let case = Case { q_heads: 8, kv_heads: 8, ..Case::square(2048, 64) };
/// assert_eq!(case.flops(), 4.0 * 8.0 * 2048.0 * 2048.0 * 64.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Queries per head.
    pub q_len: usize,
    /// Keys per head.
    pub kv_len: usize,
    /// Size of a query, key and value.
    pub head_dim: usize,
    /// Whether a query sees only the keys up to its own position (bottom-right aligned).
    pub causal: bool,
}

impl Case {
    /// One head with as many queries as keys, not causal.
    pub const fn square(n: usize, head_dim: usize) -> Self {
        Self { batch: 1, q_heads: 1, kv_heads: 1, q_len: n, kv_len: n, head_dim, causal: false }
    }

    /// `4·B·H·Sq·Skv·D` (two products, a multiplication and an addition each), halved for causal square shapes. The
    /// softmax is not counted, as is usual in the field.
    pub fn flops(&self) -> f64 {
        let full = 4.0
            * [self.batch, self.q_heads, self.q_len, self.kv_len, self.head_dim]
                .map(|n| n as f64)
                .iter()
                .product::<f64>();
        if self.causal && self.q_len == self.kv_len { full / 2.0 } else { full }
    }

    /// Sizes of q and of the output.
    pub const fn q_sizes(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.head_dim]
    }

    /// Sizes of k and of v.
    pub const fn kv_sizes(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.head_dim]
    }

    /// The checked shape.
    ///
    /// # Errors
    /// Where the sizes do not fit together.
    pub const fn shape(&self) -> Result<AttnShape> {
        AttnShape::new(self.q_sizes(), self.kv_sizes(), self.kv_sizes())
    }

    /// The options: the textbook formula, causal if the case is.
    pub fn attention(&self) -> Attention<'static> {
        Attention::new().mask(self.mask())
    }

    /// The mask of the case.
    pub const fn mask(&self) -> Mask<'static> {
        if self.causal { Mask::causal(Align::BottomRight) } else { Mask::none() }
    }
}

/// `batch × heads (key/value heads) × queries (keys) × head_dim`; sizes in brackets only if they differ.
impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pair = |a: usize, b: usize| if a == b { a.to_string() } else { format!("{a} ({b})") };
        let (heads, lengths) = (pair(self.q_heads, self.kv_heads), pair(self.q_len, self.kv_len));
        write!(f, "{} × {heads} × {lengths} × {}", self.batch, self.head_dim)?;
        if self.causal { f.write_str(", causal") } else { Ok(()) }
    }
}

/// How the numbers of the tensors are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Number {
    /// Single precision.
    #[default]
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Number {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// The name in tables, arguments and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        self.dtype().bytes()
    }

    /// The type as the engines name it.
    pub const fn dtype(self) -> attn_core::Dtype {
        match self {
            Self::F32 => attn_core::Dtype::F32,
            Self::F16 => attn_core::Dtype::F16,
            Self::Bf16 => attn_core::Dtype::Bf16,
        }
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Inputs and output of a case, contiguous `[batch, heads, seq, dim]`.
#[derive(Clone, Debug)]
pub struct Tensors<T = f32> {
    /// The sizes.
    pub case: Case,
    /// Queries.
    pub q: Vec<T>,
    /// Keys.
    pub k: Vec<T>,
    /// Values.
    pub v: Vec<T>,
    /// The output, zero at first.
    pub out: Vec<T>,
}

impl Tensors {
    /// The same numbers rounded to another type; and these become what was rounded.
    pub fn rounded<T: Stored>(&mut self) -> Tensors<T> {
        let round = |x: &mut Vec<f32>| {
            let stored = T::stored(core::mem::take(x));
            *x = stored.iter().map(|x| x.to_f64() as f32).collect();
            stored
        };
        let (q, k, v) = (round(&mut self.q), round(&mut self.k), round(&mut self.v));
        Tensors { case: self.case, q, k, v, out: vec![T::ZERO; self.out.len()] }
    }
}

impl<T: Stored> Tensors<T> {
    /// Standard normal inputs, the same for the same seed.
    pub fn new(case: Case, seed: u64) -> Self {
        let q_len = case.q_sizes().iter().product();
        let kv_len = case.kv_sizes().iter().product();
        Self {
            case,
            q: T::stored(normal(seed, q_len)),
            k: T::stored(normal(seed.wrapping_add(1), kv_len)),
            v: T::stored(normal(seed.wrapping_add(2), kv_len)),
            out: vec![T::ZERO; q_len],
        }
    }

    /// Views of q, k, v and the output.
    ///
    /// # Errors
    /// Never for tensors made by [`Tensors::new`].
    pub fn views(&mut self) -> Result<Views<'_, T>> {
        let (q, kv) = (self.case.q_sizes(), self.case.kv_sizes());
        Ok((
            View::new(&self.q, Layout::Bhsd, q)?,
            View::new(&self.k, Layout::Bhsd, kv)?,
            View::new(&self.v, Layout::Bhsd, kv)?,
            ViewMut::new(&mut self.out, Layout::Bhsd, q)?,
        ))
    }
}

/// Views of q, k, v and the output.
pub type Views<'a, T = f32> = (View<'a, T>, View<'a, T>, View<'a, T>, ViewMut<'a, T>);

/// An element type that inputs are made of.
pub trait Stored: KernelElement {
    /// The zero.
    const ZERO: Self;
    /// Rounds each number.
    fn stored(numbers: Vec<f32>) -> Vec<Self>;
}

impl Stored for f32 {
    const ZERO: Self = 0.0;
    fn stored(numbers: Vec<f32>) -> Vec<Self> {
        numbers
    }
}

impl Stored for f16 {
    const ZERO: Self = Self::ZERO;
    fn stored(numbers: Vec<f32>) -> Vec<Self> {
        numbers.into_iter().map(Self::from_f32).collect()
    }
}

impl Stored for bf16 {
    const ZERO: Self = Self::ZERO;
    fn stored(numbers: Vec<f32>) -> Vec<Self> {
        numbers.into_iter().map(Self::from_f32).collect()
    }
}

/// `len` standard normal numbers: SplitMix64 (Steele et al. 2014) and the polar-free Box–Muller transform.
pub fn normal(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let mut out = Vec::with_capacity(len + 1);
    while out.len() < len {
        let bits = next();
        // 32 bits each: a radius from (0, 1], an angle from [0, 1).
        let radius = (((bits >> 32) as f32 + 1.0) / 4_294_967_296.0).ln();
        let (sin, cos) = ((bits as u32 as f32) / 4_294_967_296.0 * std::f32::consts::TAU).sin_cos();
        let radius = (-2.0 * radius).max(0.0).sqrt();
        out.extend([radius * cos, radius * sin]);
    }
    out.truncate(len);
    out
}

/// The largest difference of two outputs; infinite if they differ in length or one is not a number.
pub(crate) fn difference(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let differences = a.iter().zip(b).map(|(x, y)| f64::from((x - y).abs()));
    differences.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_that_is_no_number_is_infinite() {
        assert_eq!(difference(&[1.0, 2.0], &[1.5, 2.0]), 0.5);
        assert_eq!(difference(&[1.0], &[f32::NAN]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[]), f64::INFINITY);
    }

    #[test]
    fn sizes_are_written_in_the_order_of_the_field() {
        assert_eq!(
            Case { q_heads: 32, kv_heads: 8, causal: true, ..Case::square(1024, 128) }.to_string(),
            "1 × 32 (8) × 1024 × 128, causal"
        );
        assert_eq!(Case { batch: 2, q_len: 5, ..Case::square(7, 64) }.to_string(), "2 × 1 × 5 (7) × 64");
    }

    #[test]
    fn flops_count_both_products_and_half_of_a_causal_square() {
        let case = Case { batch: 2, q_heads: 4, kv_heads: 2, q_len: 8, kv_len: 16, head_dim: 32, causal: false };
        assert_eq!(case.flops(), 4.0 * 2.0 * 4.0 * 8.0 * 16.0 * 32.0);
        assert_eq!(Case { causal: true, ..case }.flops(), case.flops(), "not square: no closed half");
        let square = Case::square(100, 10);
        assert_eq!(Case { causal: true, ..square }.flops(), square.flops() / 2.0);
    }

    #[test]
    fn inputs_are_normal_finite_and_repeatable() {
        let x = normal(7, 100_001);
        assert_eq!(x.len(), 100_001);
        assert!(x.iter().all(|x| x.is_finite()));
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        // Six standard errors of the mean, and of the variance.
        assert!(mean.abs() < 6.0 / (x.len() as f64).sqrt(), "{mean}");
        assert!((var - 1.0).abs() < 6.0 * (2.0 / x.len() as f64).sqrt(), "{var}");
        assert_eq!(x, normal(7, 100_001));
        assert_ne!(x[..8], normal(8, 8)[..]);
    }
}
