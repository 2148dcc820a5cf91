//! The one table of tolerances. Every test that compares numbers that are not equal bit for bit takes its bound from
//! here.
//!
//! The measure of an output is `eta = |o − o64| / Σⱼ pⱼ|vⱼ|` per element: well conditioned whatever the values are.
//! What an engine can lose is set by the scores: `S = maxⱼ (scale·Σ_d |q_d·k_jd| + |bias_j|)` of the row, because a
//! score is known to some units of `u·S` and its exponential no better. The bounds are linear in `S` and in the unit
//! roundoff `u` of the type that the engine computes in.

#[path = "tolerance/torch_gradients.rs"] // attn-mpi takes this file by its path
mod torch_gradients;

use attn_core::{Dtype, Element};

pub use torch_gradients::{Eta, TORCH_LARGEST, TORCH_RMS, TORCH_RMS_FAST, TorchGradients, torch_gradients};

/// Unit roundoff of `f32`.
pub const U32: f64 = 1.0 / (1u64 << 24) as f64;
/// Unit roundoff of `f64`.
pub const U64: f64 = 1.0 / (1u64 << 53) as f64;

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// What is compared.
    pub quantity: &'static str,
    /// Multiple of `u·(2 + S)` that is allowed.
    pub factor: f64,
    /// Why so much.
    pub reason: &'static str,
}

/// `eta` of an output before it is rounded to its type.
pub const ETA: Entry = Entry {
    quantity: "eta of an output",
    factor: 2.0,
    reason: "the gate of the design: 2u(2 + S). A dot product in a few chains, its exponential, the weighted sum and \
             the division each cost about u, times S for what stands in the exponent",
};

/// `eta` of an output of inputs of random magnitudes, hostile ones included.
pub const ETA_ANY: Entry = Entry {
    quantity: "eta of an output of hostile inputs",
    factor: 3.0 * ETA.factor,
    reason: "sums of a tile are chains of eight or twelve: where many like terms meet one that outweighs them, each \
             addition rounds the same way, some times in a row; caps, biases and temperatures round a score once more \
             each, and a single weight takes all of it. 100 000 random calls of such kinds over tensors reach 0.77 of \
             this (`cargo xtask random --level avx512`)",
};

/// `eta` of an output of inputs that are chosen to err.
pub const ETA_CHOSEN: Entry = Entry {
    quantity: "eta of an output of inputs chosen to err",
    factor: 6.0 * ETA.factor,
    reason: "a value beside hundreds that each are about half a unit of its last place: each addition of a chain loses \
             all of its term, and so do the sums of parts and tiles. Those of `long_sums` reach 0.58 of this on \
             vectors and 0.85 in the amx kernel, whose instructions add 32 terms one by one",
};

/// `eta` of a gradient in f32: its error divided by the sum of the sizes of the terms that it adds up, with
/// `Σ_d |dy·v| + Σ_d |dy·y|` in the place of `dy·v − δ`.
pub const GRADIENT_ETA: Entry = Entry {
    quantity: "eta of a gradient",
    factor: 3.0 * ETA.factor,
    reason: "a weight comes from an lse that is rounded to f32, δ from an output that is, and both stand in each \
             gradient of a score. 10 000 random calls reach 0.78 of this (`ATTN_RANDOM_CALLS=10000 cargo test -p \
             attn-simd --test it backward_random`)",
};

/// `eta` of a gradient for each row, or key, that it is a sum over, besides [`GRADIENT_ETA`]. Equal terms round the
/// same way at each addition, and a level adds up a block of eight rows or more at a time: 16 384 rows reach 0.86 of
/// both (`cargo test -p attn-simd --test it backward_long`).
pub const GRADIENT_DRIFT: f64 = U32 / 32.0;

/// `eta` of a gradient of bf16 under `Precision::Fast`, besides [`GRADIENT_ETA`]: half a unit of the 8 bits of each
/// weight and of each gradient of a score.
pub const FAST_GRADIENT: f64 = 1.0 / 256.0;

/// `eta` of a gradient of bf16 into bf16 on AMX, besides [`GRADIENT_ETA`]: weights and gradients of scores have 16
/// bits.
pub const TWO_PARTS_GRADIENT: f64 = 1.0 / 65_536.0;

/// Two results that are equal in exact arithmetic, each from the engine.
pub const TWICE: Entry = Entry {
    quantity: "two runs that agree in exact arithmetic",
    factor: 2.0 * ETA.factor,
    reason: "each is off by eta, in either direction",
};

/// The lse, absolutely.
pub const LSE: Entry = Entry {
    quantity: "lse",
    factor: 4.0,
    reason: "it takes the error of a score undiminished, where an output takes a mean of many: one chain of additions \
             over a head of 128 is off by up to 4u·S. Rounding it costs u times its own size, which S bounds but for \
             the logarithm of the number of keys",
};

/// One weight, as a share of itself.
pub const WEIGHT: Entry = Entry {
    quantity: "a weight, relatively",
    factor: 4.0,
    reason: "the error of its score, and that of the lse it is divided by",
};

/// `eta` of a half output, besides that of f32, where weights are the sum of two bf16: 16 bits and a sign. Far below
/// the rounding of an output of the size of its values; if they cancel, it is what is left.
pub const WEIGHTS_OF_TWO_PARTS: f64 = 1.0 / 131_072.0;
/// Root mean square error of a half output under `Precision::Exact`, as a multiple of that of correct rounding.
pub const RMS_EXACT: f64 = 1.05;
/// The same under `Precision::Fast`: as peers' flash kernels (1.34 to 1.37).
pub const RMS_FAST: f64 = 1.4;
/// The same where a key without value, a sink, has a weight a little above that of the others: the rounding of their
/// weights to bf16 goes one way. From bf16 into bf16.
pub const RMS_FAST_SINK: f64 = 1.7;
/// `eta` of f32 under `Precision::Fast`, as a multiple of `1 + S`: two bf16 parts of each number hold 16 to 17 bits.
pub const FAST_F32: f64 = 1.0 / 65536.0;
/// The lse under `Precision::Fast`, absolutely, where bf16 goes into bf16: weights of one bf16, whose 8 bits are off by
/// up to 2⁻⁸ and a little. Elsewhere it is off by as much as an output in f32.
pub const FAST_LSE_BF16: f64 = 1.0 / 128.0;

/// What a weight may be, as a share of its row's largest, to count as 0 in the engines that compute in f32:
/// `2⁻¹⁰⁰`. Times `Σ|v|` it is part of an output's bound, as [`attn_core::Precision`] says.
pub const TOO_SMALL: f64 = 1.0 / (1u128 << 100) as f64;

/// The smallest f32 above 0. Below `2⁻¹²⁶` numbers are its multiples, so that a product of a weight and a tiny value
/// may lose half of it: for each visible key, another part of an output's bound.
pub const LEAST: f64 = f32::MIN_POSITIVE as f64 / (1u64 << 23) as f64;

/// All rows of the table, for reports.
pub const TABLE: [Entry; 7] = [ETA, ETA_ANY, ETA_CHOSEN, GRADIENT_ETA, TWICE, LSE, WEIGHT];

impl Entry {
    /// The bound for inputs of a type, in a row whose score bound is `s`.
    pub fn bound(&self, dtype: Dtype, s: f64) -> f64 {
        let u = if dtype == Dtype::F64 { U64 } else { U32 };
        self.factor * u * (2.0 + s)
    }
}

/// What one rounding of `x` to the type `O` may cost, on top of the engine's own error.
///
/// Half types lose a relative `2⁻¹¹` (f16) or `2⁻⁸` (bf16), and near zero half the spacing of subnormal numbers; a
/// value just beside a middle may round to the other side, which is within the same bound plus the engine's error.
pub fn rounding<O: Element>(x: f64) -> f64 {
    let (relative, least) = match O::DTYPE {
        Dtype::F64 => (U64, f64::from_bits(1)),
        Dtype::F32 => (U32, f64::from(f32::from_bits(1))),
        Dtype::F16 => (1.0 / 2048.0, 1.0 / (1u64 << 25) as f64),
        Dtype::Bf16 => (1.0 / 256.0, f64::from(f32::MIN_POSITIVE) / 256.0),
    };
    (x.abs() * relative).max(least)
}

/// int8 attention against the formula on the dequantised inputs, before the output is rounded to its type: absolute, in
/// units of `255·s_v`, for a row that sees `n` keys and whose largest score has magnitude `s`.
///
/// Scores are rounded to `2⁻¹⁷` in log2 units (`5.3·10⁻⁶` of a weight), the exponential is off by `6·10⁻⁷`: together
/// below `2⁻¹⁷`. The factor of a score is known to `2⁻³¹` of itself. Each weight is rounded to half a unit of a sum
/// that is at least `2²¹` units; shifts of sum and accumulators lose one unit each, and an output in f32 some units of
/// its own.
pub fn int8(n: usize, s: f64) -> f64 {
    let power = |bits: u32| 1.0 / f64::from(1u32 << bits);
    power(16) + s * power(30) + n as f64 * power(22)
}

/// Attention over int8 under `Precision::Fast` where kernels round queries and weights to integers of 16 bits: a
/// score's error as a share of its row's largest `|q|·Σ|k|`: half a unit of which the largest has 16319.5 at least.
pub const FAST_INT8_SCORE: f64 = 1.0 / 32_639.0;
/// The same of an output, as a share of `Σⱼ pⱼ·128·sⱼ`: a weight is off by 2⁻¹⁷ of the largest of its 64 keys.
pub const FAST_INT8: f64 = 0.0005;
/// The same where no key has much more weight than all.
pub const FAST_INT8_EVEN: f64 = 1.0 / 65_536.0;

/// Two `f64` computations of the same thing with sums of at most a few hundred terms, relative to the largest value (or
/// 1).
pub const SUMS_F64: f64 = 1e-12;

/// A gradient in `f64` against central differences with step `1e-5`, relative to the largest value (or 1): the step's
/// square times a third derivative, and the rounding of the function divided by the step, are some `1e-9` each.
pub const DIFFERENCE: f64 = 1e-7;

/// The same where the argument is `f32`, so that the step must be as large as `2⁻⁹`: its square times a third
/// derivative.
pub const DIFFERENCE_F32: f64 = 2e-6;

/// A gradient of the kernels in `f32` against the one in `f64`, relative to the largest (or 1): sums of some hundred
/// products in chains, each off by some units of `2⁻²⁴`, and weights that are off by those of their scores.
pub const GRADIENT_F32: f64 = 4e-6;
/// The same rounded to `f16` (`2⁻¹¹`), from an output that was: `δ` takes its rounding, which `dq` and `dk` show.
pub const GRADIENT_F16: f64 = 1e-3;
/// The same in `bf16` (`2⁻⁸`).
pub const GRADIENT_BF16: f64 = 8e-3;
