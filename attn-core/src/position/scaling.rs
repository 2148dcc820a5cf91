//! Changes of RoPE's frequencies, so that a model reads further than it was trained to.
//!
//! A rotary pair `i` of `d` dims rotates by `fᵢ = base^(−2i/d)` a position. Each method lowers the frequencies in its
//! own way. `L` is the length of the present sequence, `M` the one of training.
//!
//! | method | frequencies | source |
//! |---|---|---|
//! | [`Linear`](Scaling::Linear) | `f/factor` | Chen et al. 2023, arXiv 2306.15595 |
//! | [`Ntk`](Scaling::Ntk) | base times `factor^(d/(d−2))` | bloc97 2023; arXiv 2309.00071, §3.1 |
//! | [`Dynamic`](Scaling::Dynamic) | base times `(factor·L/M − (factor−1))^(d/(d−2))` once `L > M` | emozilla 2023; ibid. |
//! | [`Yarn`] | low ones as linear, high ones kept, a ramp between; cos and sin scaled | Peng et al. 2023, arXiv 2309.00071 |
//! | [`Llama3`] | the same idea by wavelength | Llama 3, arXiv 2407.21783 |
//! | [`LongRope`] | a searched factor per pair, one list for short, one for long sequences | Ding et al. 2024, arXiv 2402.13753 |
//!
//! The formulas follow the Hugging Face rope utilities, for which the published checkpoints were made.

use crate::error::{AttnError, Result};

/// A change of RoPE's frequencies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Scaling<'a> {
    /// As trained.
    #[default]
    None,
    /// Position interpolation: every frequency divided by `factor`.
    Linear {
        /// How much longer.
        factor: f64,
    },
    /// "NTK-aware": a larger base, so that fast hands hardly change and the slowest slows by `factor`.
    Ntk {
        /// How much longer.
        factor: f64,
    },
    /// NTK by the length of the sequence: nothing changes up to `max_position`.
    Dynamic {
        /// How much longer at `max_position·2`.
        factor: f64,
        /// Length of training.
        max_position: usize,
    },
    /// YaRN.
    Yarn(Yarn),
    /// Llama 3.1 and later.
    Llama3(Llama3),
    /// LongRoPE (Phi-3).
    LongRope(LongRope<'a>),
}

/// YaRN's parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// How much longer.
    pub factor: f64,
    /// Length of training.
    pub original_max_position: usize,
    /// Pairs with more rotations than this over the length of training are kept. 32 by default.
    pub beta_fast: f64,
    /// Pairs with fewer rotations than this are slowed in full. 1 by default.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs. True by default.
    pub truncate: bool,
    /// Factor on cos and sin. By default it follows from the two below, or from `factor`.
    pub attention_factor: Option<f64>,
    /// DeepSeek's `mscale`.
    pub mscale: Option<f64>,
    /// DeepSeek's `mscale_all_dim`.
    pub mscale_all_dim: Option<f64>,
}

impl Yarn {
    /// The paper's choices: `beta_fast` 32, `beta_slow` 1, rounded ramp, attention factor `0.1·ln(factor) + 1`.
    pub const fn new(factor: f64, original_max_position: usize) -> Self {
        Self {
            factor,
            original_max_position,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
        }
    }

    /// The first and last pair of the ramp, in pairs.
    fn ramp(&self, dim: usize, base: f64) -> (f64, f64) {
        let dim = dim as f64;
        // The pair with `r` rotations over the length of training.
        let pair = |r: f64| {
            dim * libm::log(self.original_max_position as f64 / (core::f64::consts::TAU * r)) / (2.0 * libm::log(base))
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (libm::floor(low), libm::ceil(high));
        }
        (low, high) = (libm::fmax(low, 0.0), libm::fmin(high, dim - 1.0));
        if low == high {
            high += 0.001; // a step rather than a division by zero
        }
        (low, high)
    }

    fn attention_factor(&self) -> f64 {
        let g = |m: f64| if self.factor <= 1.0 { 1.0 } else { 0.1 * m * libm::log(self.factor) + 1.0 };
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(given), ..) => given,
            (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => g(m) / g(all),
            _ => g(1.0),
        }
    }
}

/// Llama 3's parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    /// How much longer.
    pub factor: f64,
    /// Wavelengths above `original_max_position/low_freq_factor` are slowed in full.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position/high_freq_factor` are kept.
    pub high_freq_factor: f64,
    /// Length of training.
    pub original_max_position: usize,
}

/// LongRoPE's parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongRope<'a> {
    /// How much longer; gives the attention factor where none is given.
    pub factor: f64,
    /// Length of training.
    pub original_max_position: usize,
    /// Divisor of each frequency in sequences up to that length. `[rotary_dim/2]`.
    pub short_factor: &'a [f64],
    /// Divisor of each frequency in longer sequences. `[rotary_dim/2]`.
    pub long_factor: &'a [f64],
    /// Factor on cos and sin; by default `√(1 + ln(factor)/ln(original_max_position))`, in both regimes.
    pub attention_factor: Option<f64>,
}

impl Scaling<'_> {
    /// The factor on cos and sin: 1 for all methods but YaRN and LongRoPE.
    pub fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn(yarn) => yarn.attention_factor(),
            Self::LongRope(long) => long.attention_factor.unwrap_or_else(|| {
                if long.factor <= 1.0 {
                    return 1.0;
                }
                libm::sqrt(1.0 + libm::log(long.factor) / libm::log(long.original_max_position as f64))
            }),
            _ => 1.0,
        }
    }

    /// Whether the frequencies depend on the length of the sequence.
    pub fn depends_on_length(&self) -> bool {
        matches!(self, Self::Dynamic { .. } | Self::LongRope(_))
    }

    /// Checks every parameter for `dim` rotary dims.
    pub(crate) fn check(&self, dim: usize, base: f64) -> Result<()> {
        let positive = |name, x: f64| {
            let fine = x.is_finite() && x > 0.0;
            if fine { Ok(()) } else { Err(AttnError::Option { name, must: "finite and above 0" }) }
        };
        let length = |name, n: usize| if n > 0 { Ok(()) } else { Err(AttnError::Option { name, must: "above 0" }) };
        let finite = |name, x: Option<f64>| match x {
            Some(x) if !x.is_finite() => Err(AttnError::Option { name, must: "finite" }),
            _ => Ok(()),
        };
        match *self {
            Self::None => Ok(()),
            Self::Linear { factor } | Self::Ntk { factor } => positive("rope factor", factor),
            Self::Dynamic { factor, max_position } => {
                positive("rope factor", factor)?;
                length("rope max_position", max_position)
            }
            Self::Yarn(yarn) => {
                positive("rope factor", yarn.factor)?;
                positive("yarn beta_fast", yarn.beta_fast)?;
                positive("yarn beta_slow", yarn.beta_slow)?;
                length("rope original_max_position", yarn.original_max_position)?;
                finite("rope attention_factor", yarn.attention_factor)?;
                finite("yarn mscale", yarn.mscale)?;
                finite("yarn mscale_all_dim", yarn.mscale_all_dim)?;
                // The ramp divides by ln(base), and the hands of a smaller base speed up with i.
                if base > 1.0 {
                    Ok(())
                } else {
                    Err(AttnError::Option { name: "rope base with yarn", must: "above 1" })
                }
            }
            Self::Llama3(llama) => {
                positive("rope factor", llama.factor)?;
                positive("rope low_freq_factor", llama.low_freq_factor)?;
                positive("rope high_freq_factor", llama.high_freq_factor)?;
                length("rope original_max_position", llama.original_max_position)?;
                if llama.high_freq_factor > llama.low_freq_factor {
                    return Ok(());
                }
                Err(AttnError::Option { name: "rope high_freq_factor", must: "above low_freq_factor" })
            }
            Self::LongRope(long) => {
                positive("rope factor", long.factor)?;
                finite("rope attention_factor", long.attention_factor)?;
                AttnError::check_size("longrope short_factor against pairs", dim / 2, long.short_factor.len())?;
                AttnError::check_size("longrope long_factor against pairs", dim / 2, long.long_factor.len())?;
                for &factor in long.short_factor.iter().chain(long.long_factor) {
                    positive("longrope short_factor and long_factor", factor)?;
                }
                // ln(1) = 0 is divided by only where a factor must be derived.
                let derived = long.attention_factor.is_none() && long.factor > 1.0;
                if long.original_max_position > usize::from(derived) {
                    return Ok(());
                }
                Err(AttnError::Option { name: "rope original_max_position", must: "above 1" })
            }
        }
    }

    /// The frequency of every pair for `dim` rotary dims, a given base and a sequence of `seq_len` positions, as a
    /// function of the pair.
    pub(crate) fn frequencies(&self, dim: usize, base: f64, seq_len: usize) -> impl Fn(usize) -> f64 + '_ {
        let d = dim as f64;
        let ntk = |stretch: f64| base * libm::pow(stretch, d / (d - 2.0));
        let base = match *self {
            Self::Ntk { factor } => ntk(factor),
            Self::Dynamic { factor, max_position } => {
                let length = seq_len.max(max_position) as f64;
                ntk(factor * length / max_position as f64 - (factor - 1.0))
            }
            _ => base,
        };
        let ramp = match self {
            Self::Yarn(yarn) => yarn.ramp(dim, base),
            _ => (0.0, 1.0),
        };
        move |pair| {
            // With two dims the NTK forms have an infinite base; its power 0, the only one asked for, is 1 all the
            // same.
            let f = 1.0 / libm::pow(base, 2.0 * pair as f64 / d);
            match self {
                Self::None | Self::Ntk { .. } | Self::Dynamic { .. } => f,
                Self::Linear { factor } => f / factor,
                Self::Yarn(yarn) => {
                    let (low, high) = ramp;
                    let slowed = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / yarn.factor * slowed + f * (1.0 - slowed)
                }
                Self::Llama3(llama) => llama3(llama, f),
                Self::LongRope(long) => {
                    let is_long = seq_len > long.original_max_position;
                    let factors = if is_long { long.long_factor } else { long.short_factor };
                    f / factors.get(pair).copied().unwrap_or(1.0)
                }
            }
        }
    }
}

fn llama3(llama: &Llama3, f: f64) -> f64 {
    let (wavelength, trained) = (core::f64::consts::TAU / f, llama.original_max_position as f64);
    let (low, high) = (llama.low_freq_factor, llama.high_freq_factor);
    if wavelength < trained / high {
        f
    } else if wavelength > trained / low {
        f / llama.factor
    } else {
        let kept = (trained / wavelength - low) / (high - low);
        (1.0 - kept) * f / llama.factor + kept * f
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(scaling: &Scaling<'_>, dim: usize, base: f64, seq_len: usize, pair: usize) -> f64 {
        scaling.check(dim, base).unwrap();
        scaling.frequencies(dim, base, seq_len)(pair)
    }

    #[test]
    fn ntk_keeps_the_fastest_hand_and_slows_the_slowest_by_the_factor() {
        let ntk = Scaling::Ntk { factor: 4.0 };
        assert_eq!(of(&ntk, 64, 10_000.0, 0, 0), 1.0);
        let (plain, slowed) = (of(&Scaling::None, 64, 10_000.0, 0, 31), of(&ntk, 64, 10_000.0, 0, 31));
        assert!((plain / slowed - 4.0).abs() < 1e-12);
        assert_eq!(of(&ntk, 2, 10_000.0, 0, 0), 1.0); // the exponent d/(d−2) is infinite here
    }

    #[test]
    fn dynamic_is_plain_up_to_the_length_of_training_and_ntk_beyond() {
        let dynamic = Scaling::Dynamic { factor: 2.0, max_position: 256 };
        let plain = of(&Scaling::None, 32, 10_000.0, 0, 9);
        assert_eq!(of(&dynamic, 32, 10_000.0, 256, 9), plain);
        assert_eq!(of(&dynamic, 32, 10_000.0, 9, 9), plain);
        assert!(of(&dynamic, 32, 10_000.0, 257, 9) < plain);
        // At twice the length: 2·2 − 1 = 3.
        let ntk = of(&Scaling::Ntk { factor: 3.0 }, 32, 10_000.0, 0, 9);
        assert!((of(&dynamic, 32, 10_000.0, 512, 9) / ntk - 1.0).abs() < 1e-14);
    }

    #[test]
    fn yarn_keeps_fast_hands_and_slows_slow_ones() {
        let yarn = Scaling::Yarn(Yarn::new(4.0, 2048));
        let plain = |pair| of(&Scaling::None, 64, 10_000.0, 0, pair);
        assert_eq!(of(&yarn, 64, 10_000.0, 0, 0), plain(0));
        assert_eq!(of(&yarn, 64, 10_000.0, 0, 31), plain(31) / 4.0);
        // The ramp runs from ⌊64·ln(2048/64π)/2ln(10⁴)⌋ = ⌊8.06⌋ to ⌈20.1⌉.
        assert_eq!(of(&yarn, 64, 10_000.0, 0, 8), plain(8));
        assert!((of(&yarn, 64, 10_000.0, 0, 9) / plain(9) - (1.0 - 0.75 / 13.0)).abs() < 1e-14);
        let exact_ends = Scaling::Yarn(Yarn { truncate: false, ..Yarn::new(4.0, 2048) });
        assert_eq!(of(&exact_ends, 64, 10_000.0, 0, 21), plain(21) / 4.0);
        assert!(of(&exact_ends, 64, 10_000.0, 0, 9) < of(&yarn, 64, 10_000.0, 0, 9));
        assert!(of(&yarn, 64, 10_000.0, 0, 20) > plain(20) / 4.0);
        assert_eq!(of(&yarn, 64, 10_000.0, 0, 21), plain(21) / 4.0);
        assert!((yarn.attention_factor() - (0.1 * libm::log(4.0) + 1.0)).abs() < 1e-15);
        let deepseek = Yarn { mscale: Some(1.0), mscale_all_dim: Some(1.0), ..Yarn::new(40.0, 4096) };
        assert_eq!(Scaling::Yarn(deepseek).attention_factor(), 1.0);
        let zero = Yarn { mscale: Some(0.0), mscale_all_dim: Some(0.5), ..Yarn::new(40.0, 4096) };
        assert_eq!(Scaling::Yarn(zero).attention_factor(), 0.1 * libm::log(40.0) + 1.0);
        assert_eq!(Scaling::Yarn(Yarn::new(0.5, 4096)).attention_factor(), 1.0);
    }

    #[test]
    fn llama3_joins_its_three_regimes_without_a_step() {
        let llama = Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192 };
        let at = |wavelength: f64| llama3(&llama, core::f64::consts::TAU / wavelength) * wavelength;
        let tau = core::f64::consts::TAU;
        assert!((at(2000.0) - tau).abs() < 1e-12 && (at(9000.0) - tau / 8.0).abs() < 1e-12);
        assert!((at(2048.001) - tau).abs() < 1e-4 && (at(8191.99) - tau / 8.0).abs() < 1e-4);
        assert!(at(4096.0) > tau / 8.0 && at(4096.0) < tau);
    }

    #[test]
    fn longrope_changes_lists_beyond_the_length_of_training() {
        let long = LongRope {
            factor: 8.0,
            original_max_position: 64,
            short_factor: &[1.0, 2.0],
            long_factor: &[4.0, 8.0],
            attention_factor: None,
        };
        let scaling = Scaling::LongRope(long);
        let plain = of(&Scaling::None, 4, 10_000.0, 0, 1);
        assert_eq!(of(&scaling, 4, 10_000.0, 64, 1), plain / 2.0);
        assert_eq!(of(&scaling, 4, 10_000.0, 65, 1), plain / 8.0);
        assert!((scaling.attention_factor() - libm::sqrt(1.5)).abs() < 1e-15); // ln 8/ln 64 = 1/2
        assert!(scaling.check(6, 10_000.0).is_err());
        assert!(Scaling::LongRope(LongRope { original_max_position: 1, ..long }).check(4, 10_000.0).is_err());
    }

    #[test]
    fn parameters_without_meaning_are_refused() {
        for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Scaling::Linear { factor }.check(8, 10_000.0).is_err());
            assert!(Scaling::Ntk { factor }.check(8, 10_000.0).is_err());
            assert!(Scaling::Yarn(Yarn::new(factor, 64)).check(8, 10_000.0).is_err());
        }
        assert!(Scaling::Dynamic { factor: 2.0, max_position: 0 }.check(8, 10_000.0).is_err());
        assert!(Scaling::Yarn(Yarn::new(2.0, 64)).check(8, 1.0).is_err());
        let llama = Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_max_position: 8192 };
        assert!(Scaling::Llama3(llama).check(8, 10_000.0).is_err());
    }
}
