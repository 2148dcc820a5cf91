//! The options of an attention call: one type for all engines.

use crate::bias::Bias;
use crate::dropout::Dropout;
use crate::error::{AttnError, Result};
use crate::mask::Mask;
use crate::position::alibi::Alibi;
use crate::score_mod::{MaskMod, Mods, ScoreMod};
use crate::shape::{At, AttnShape};

/// What to compute: `softmax(scale·q·kᵀ → soft-cap → bias → mask)·v`. Starts as the textbook formula: scale
/// `1/√head_dim`, nothing masked.
///
/// The order is fixed: `s = scale·(q·k)`, soft-cap `c·tanh(s/c)`, additive bias, ALiBi, the caller's mods,
/// temperature, mask, softmax (with a sink in its denominator if given), dropout on the weights.
///
/// ```
/// use attn_core::{Align, Attention, Mask};
/// let attn = Attention::new()
///     .mask(Mask::causal(Align::BottomRight).and(Mask::window(128, 0, Align::BottomRight)))
///     .softcap(30.0);
/// # let _ = attn;
/// const GPT: Attention = Attention::new().mask(Mask::causal(Align::BottomRight)); // options may be constants
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Attention<'a, M = ()> {
    pub(crate) precision: Precision,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) temperature: Option<f64>,
    pub(crate) mask: Mask<'a>,
    pub(crate) bias: Option<Bias<'a>>,
    pub(crate) alibi: Option<Alibi<'a>>,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) dropout: Dropout<'a>,
    pub(crate) reproducible: bool,
    pub(crate) mods: M,
}

/// How exact an engine has to be where the hardware offers something faster.
///
/// # The measure
/// `eta = |o − exact| / Σ p|v|` for each element of the output, where the sum is over the keys and `exact` is the
/// formula of the inputs as they are. `u = 2⁻²⁴`. `S` says how large the scores of a row are: the largest, over its
/// visible keys `j`, of `(|scale|·Σ_d |q_d·k_jd| + |bias_j| + |slope·distance_j|) / temperature`, and no less than the
/// size of its sink. What a `score_mod` adds counts like a bias. A score of size `S` is known to some `u·S` in f32, and
/// its weight no better: a bias of 30 000, or an ALiBi slope times a distance of as much, costs that much of every
/// engine's exactness, here as elsewhere. Only differences matter for the result; keep what is common to a row out of
/// its scores.
///
/// # What each costs
/// [`Exact`](Self::Exact) is the default. Only kernels that multiply bf16 (by AMX or AVX512_BF16) know a difference;
/// every other level computes in f32 and is `Exact` either way. Of the engines, [`streaming`](crate::streaming) adds
/// keys in one chain: its error grows with their number, as it says.
///
/// The table counts products of bf16: for the scores + for the values. AVX512_BF16 runs the calls that take three
/// products or fewer, if padding channels to multiples of 32 costs less than they gain: three products not for 1 to 24,
/// 33 to 48 and 65 to 72 channels, two not for 1 to 16. Vectors of f32 are faster for the others, and run them. "Wider"
/// is an output of f32, or of f16 from bf16; "same" of the inputs' type.
///
/// | inputs | `Exact`, same | `Exact`, wider or other | `Fast`, same | `Fast`, wider or other |
/// |---|---|---|---|---|
/// | bf16 | 1 + 2 | 1 + 3 | 1 + 1 | 1 + 2 |
/// | f16 | 4 + 3 | 4 + 5 | 3 + 3 | 3 + 3 |
/// | f32 | 6 + 6 | 6 + 6 | 3 + 3 | 3 + 3 |
///
/// Packing, softmax and the splitting of weights come on top, so that the rates differ by less than these numbers.
///
/// # What is too small
/// A weight below 2⁻¹⁰⁰ of its row's largest may count as 0 in the engines that compute in f32, for outputs and for
/// gradients, however large its value is: below 2⁻¹²⁶ f32 has no normal numbers, and many processors take long for
/// a product that gets there. So the whole bound is `eta` as stated below, and 2⁻¹⁰⁰·Σ|v| over the visible keys,
/// times dropout's 1/(1 − p), and 2⁻¹⁴⁹ for each of them: below 2⁻¹²⁶ numbers are multiples of that, to which
/// products of weights and tiny values are rounded. Tiny inputs (subnormal ones included) cost nothing else, on AMX
/// either.
///
/// ```
/// use attn_core::{Attention, Precision};
/// let fast = Attention::new().precision(Precision::Fast);
/// assert_eq!(fast.get_precision(), Precision::Fast);
/// assert_eq!(Attention::new().get_precision(), Precision::Exact);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Precision {
    /// f32 to the accuracy of f32, whatever the number of keys. `eta ≤ 2u(2 + S)` for constants, numbers of one sign
    /// and of both, 32 to 131 072 keys; `eta ≤ 6u(2 + S)` for random magnitudes. Inputs that we chose to err stay
    /// within 12u(2 + S): a value beside hundreds that each are half a unit of its last place. A half output is the
    /// exact result rounded once, but for about one element in a hundred that lies beside the middle of two: its root
    /// mean square error is within 1.05 of correct rounding. The lse is within `4u(2 + S + |lse|)`. Over int8 and q8_0
    /// keys some kernels round queries: [`QuantizedView`](crate::int8::QuantizedView) says what `S` is there.
    ///
    /// Gradients are within `6u(2 + S)` before they are rounded to their type, and within `n·u/32` more if they are
    /// sums over `n` queries or keys. The kernels add these up one by one, so that equal terms drift; random ones do
    /// not. Of bf16 into bf16 on AMX, `eta` may be 2⁻¹⁶ more.
    #[default]
    Exact,
    /// Fewer products where a stated error is enough, whatever the number of keys. An f32 output, of inputs of any
    /// type, has `eta ≤ 2⁻¹⁶(1 + S)`. The root mean square error of a half output is within 1.4 of correct rounding
    /// (over many numbers; a small call may exceed it, and bf16 reaches 1.7 where a key without value, a sink, takes
    /// much of the weight), where peers' flash kernels are. The lse is as coarse as the weights it sums: from bf16 into
    /// bf16 it is off by up to 2⁻⁷, else by 2⁻¹⁶(1 + S). Decoding over int8 and q8_0 rounds queries and weights to 16
    /// bits on AVX-512, AVX2 and Arm with SDOT, if heads share keys: [`QuantizedView`](crate::int8::QuantizedView) says
    /// what outputs and lse may be off by.
    ///
    /// Gradients of bf16 may round each weight and each gradient of a score to bf16 before they add it up: `eta ≤ 2⁻⁸`
    /// besides the bound of `Exact`. An lse from a call under `Fast` adds its own error, a share of every weight.
    Fast,
}

impl<'a> Attention<'a> {
    /// The textbook formula (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).
    pub const fn new() -> Self {
        Self {
            precision: Precision::Exact,
            scale: None,
            softcap: None,
            temperature: None,
            mask: Mask::none(),
            bias: None,
            alibi: None,
            sinks: None,
            dropout: Dropout::None,
            reproducible: false,
            mods: (),
        }
    }
}

impl<'a, M: Mods> Attention<'a, M> {
    /// Multiplies `q·k`; a finite number of at most 2⁶⁴ in size, also once it is divided by the temperature. Default
    /// `1/√head_dim`.
    ///
    /// Every engine refuses the same factors, although some could go further: engines that compute in `f32` reach 2¹²⁸,
    /// so that no score overflows for it as long as `q·k` is below 2⁶³ in size (of f16 it always is). At the limit the
    /// largest score has the whole weight.
    pub const fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps scores smoothly: `c·tanh(s/c)`, `c` finite and above 0 (Gemma 2, arXiv 2408.00118).
    pub const fn softcap(mut self, cap: f64) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Divides the finished scores by `t`, finite and at least 2⁻⁶⁴: above 1 flattens the weights, near 0 the largest
    /// score takes all. With a scale, `|scale|/t` is at most 2⁶⁴ (see [`scale`](Self::scale)). A sink is not divided.
    pub const fn temperature(mut self, t: f64) -> Self {
        self.temperature = Some(t);
        self
    }

    /// Which keys a query sees. Replaces an earlier mask; combine with [`Mask::and`].
    pub const fn mask(mut self, mask: Mask<'a>) -> Self {
        self.mask = mask;
        self
    }

    /// Adds a tensor that broadcasts to `[batch, q_heads, q_len, kv_len]` to the scores; an entry of −∞ hides the key.
    pub fn bias(mut self, bias: impl Into<Bias<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// Adds `−slope·|distance|` per head.
    pub const fn alibi(mut self, alibi: Alibi<'a>) -> Self {
        self.alibi = Some(alibi);
        self
    }

    /// One extra logit per query head, `[q_heads]`, that takes part in the softmax's denominator only: not scaled, not
    /// masked (Xiao et al., arXiv 2309.17453; gpt-oss). A row without visible keys is 0, and its lse the sink.
    pub const fn sinks(mut self, sinks: &'a [f32]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// How exact the result has to be where the hardware offers something faster; [`Precision::Exact`] unless said.
    pub const fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Drops weights after the softmax.
    pub const fn dropout(mut self, dropout: Dropout<'a>) -> Self {
        self.dropout = dropout;
        self
    }

    /// Pins one order of accumulation for every number of queries: a token that is decoded gets the bits that it gets
    /// when it is prefilled, at the same instruction-set level. Kernels that are faster for many queries at once are
    /// then not used.
    ///
    /// Without it, which kernel runs may depend on the number of queries, and results differ by rounding. Of gradients
    /// it promises nothing: their bits never depend on threads or strides, but on the number of queries.
    pub const fn reproducible(mut self) -> Self {
        self.reproducible = true;
        self
    }

    /// Changes each score by a function (compiled in, not called through a pointer), after bias and ALiBi. Functions
    /// that are given one after the other run in that order. The gradient needs
    /// [`score_mod_with`](Self::score_mod_with).
    ///
    /// ```
    /// use attn_core::Attention;
    /// use attn_core::score::At;
    /// let relative = Attention::new().score_mod(|s, at: At| s - 0.1 * at.query.abs_diff(at.key) as f64);
    /// # let _ = relative;
    /// ```
    pub fn score_mod<F: Fn(f64, At) -> f64>(self, f: F) -> Attention<'a, ScoreMod<F, (), M>> {
        self.with_mods(|inner| ScoreMod::new(f, (), inner))
    }

    /// As [`score_mod`](Self::score_mod), with the function's derivative by the score, which `backward` uses.
    pub fn score_mod_with<F, D>(self, f: F, derivative: D) -> Attention<'a, ScoreMod<F, D, M>>
    where
        F: Fn(f64, At) -> f64,
        D: Fn(f64, At) -> f64,
    {
        self.with_mods(|inner| ScoreMod::new(f, derivative, inner))
    }

    /// Hides the keys for which a function says `false`. It is called once per position that the mask leaves visible.
    pub fn mask_mod<F: Fn(At) -> bool>(self, f: F) -> Attention<'a, MaskMod<F, M>> {
        self.with_mods(|inner| MaskMod::new(f, inner))
    }

    /// Replaces the mods by what a function makes of them: your own implementation of [`Mods`], or a box around any
    /// (`attn_simd::BoxedMods::new`), so that the options have a type with a name.
    ///
    /// ```
    /// use attn_core::Attention;
    /// use attn_core::score::At;
    /// use attn_core::score_mod::Mods;
    /// struct Even;
    /// impl Mods for Even {
    ///     const SCORE_MOD: bool = false;
    ///     const MASK_MOD: bool = true;
    ///     fn score_mod(&self, score: f64, _: At) -> f64 {
    ///         score
    ///     }
    ///     fn mask_mod(&self, at: At) -> bool {
    ///         at.key % 2 == 0
    ///     }
    ///     fn derivative(&self, _: f64, _: At) -> Option<f64> {
    ///         Some(1.0)
    ///     }
    /// }
    /// let attn: Attention<'_, Even> = Attention::new().with_mods(|()| Even);
    /// # let _ = attn;
    /// ```
    pub fn with_mods<N>(self, f: impl FnOnce(M) -> N) -> Attention<'a, N> {
        let Self { precision, scale, softcap, temperature, mask, bias, alibi, sinks, dropout, reproducible, mods } =
            self;
        let mods = f(mods);
        Attention { precision, scale, softcap, temperature, mask, bias, alibi, sinks, dropout, reproducible, mods }
    }

    /// The same options with the mods borrowed: to be changed without being consumed.
    pub const fn by_ref(&self) -> Attention<'a, &M> {
        Attention {
            precision: self.precision,
            scale: self.scale,
            softcap: self.softcap,
            temperature: self.temperature,
            mask: self.mask,
            bias: self.bias,
            alibi: self.alibi,
            sinks: self.sinks,
            dropout: self.dropout,
            reproducible: self.reproducible,
            mods: &self.mods,
        }
    }

    /// The mask.
    pub const fn get_mask(&self) -> &Mask<'a> {
        &self.mask
    }

    /// The scale as given.
    pub const fn get_scale(&self) -> Option<f64> {
        self.scale
    }

    /// The soft-cap, if any.
    pub const fn get_softcap(&self) -> Option<f64> {
        self.softcap
    }

    /// The temperature, if any.
    pub const fn get_temperature(&self) -> Option<f64> {
        self.temperature
    }

    /// The additive bias, if any.
    pub const fn get_bias(&self) -> Option<&Bias<'a>> {
        self.bias.as_ref()
    }

    /// ALiBi, if any.
    pub const fn get_alibi(&self) -> Option<&Alibi<'a>> {
        self.alibi.as_ref()
    }

    /// The sinks, if any.
    pub const fn get_sinks(&self) -> Option<&'a [f32]> {
        self.sinks
    }

    /// How exact the result has to be.
    pub const fn get_precision(&self) -> Precision {
        self.precision
    }

    /// The dropout.
    pub const fn get_dropout(&self) -> &Dropout<'a> {
        &self.dropout
    }

    /// Whether one order of accumulation is pinned.
    pub const fn is_reproducible(&self) -> bool {
        self.reproducible
    }

    /// The caller's mods.
    pub const fn get_mods(&self) -> &M {
        &self.mods
    }

    /// Checks every option against the sizes of a call.
    ///
    /// # Errors
    /// The option that has no meaning, or the table that does not fit.
    pub fn check(&self, shape: &AttnShape) -> Result<()> {
        self.check_factors()?;
        self.mask.check(shape)?;
        if let Some(bias) = &self.bias {
            bias.check(shape)?;
        }
        if let Some(alibi) = &self.alibi {
            alibi.check(shape)?;
        }
        if let Some(sinks) = self.sinks {
            AttnError::check_size("sinks against q_heads", shape.q_heads, sinks.len())?;
            if sinks.iter().any(|&s| s.is_nan() || s == f32::INFINITY) {
                return Err(AttnError::Option { name: "sinks", must: "finite, or −∞ for none" });
            }
        }
        self.dropout.check(shape)
    }

    /// Scale, soft-cap and temperature: what has no meaning, and what engines that compute in `f32` cannot follow, so
    /// that none of them makes a NaN of it.
    fn check_factors(&self) -> Result<()> {
        let must = |good: bool, name, must| if good { Ok(()) } else { Err(AttnError::Option { name, must }) };
        if let Some(scale) = self.scale {
            must(is_factor(scale), "scale", "finite and at most 2^64 in size")?;
        }
        if let Some(cap) = self.softcap {
            must(cap.is_finite() && cap > 0.0, "softcap", "finite and above 0")?;
        }
        if let Some(t) = self.temperature {
            must(t.is_finite() && t * LARGEST_FACTOR >= 1.0, "temperature", "finite and at least 2^-64")?;
            // The default scale is at most 1. A product with a power of two is exact, or infinite and large enough.
            let good = self.scale.is_none_or(|scale| scale.abs() <= t * LARGEST_FACTOR);
            must(good, "scale divided by temperature", "at most 2^64 in size")?;
        }
        Ok(())
    }
}

/// 2⁶⁴: what scores may be multiplied by. That leaves as much again of the range of `f32` for `q·k` itself.
pub(crate) const LARGEST_FACTOR: f64 = (1u128 << 64) as f64;

/// Whether scores may be multiplied by it; NaN may not.
pub(crate) const fn is_factor(x: f64) -> bool {
    x.abs() <= LARGEST_FACTOR
}
