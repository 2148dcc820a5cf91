//! From a dot product to a finished score; and the checked facts of a call.
//!
//! Every engine starts from a [`Problem`]: shape and options checked against each other once, before anything is
//! written. It holds the only implementation of the order of a score, which reference, streaming and backward share.

use core::ops::Range;

use crate::element::Real;
use crate::error::Result;
use crate::options::Attention;
use crate::score_mod::Mods;
use crate::shape::AttnShape;

pub use crate::shape::At;

/// One attention call whose shape and options have been checked against each other.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'p, 'a, M = ()> {
    shape: AttnShape,
    attn: &'p Attention<'a, M>,
    scale: f64,
}

impl<'p, 'a, M: Mods> Problem<'p, 'a, M> {
    /// Checks the sizes of q, k and v (each `[batch, heads, seq, dim]`) and every option.
    ///
    /// # Errors
    /// Whatever does not fit; see [`AttnError`](crate::AttnError).
    pub fn new(attn: &'p Attention<'a, M>, q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self> {
        Self::of_shape(attn, AttnShape::new(q, k, v)?)
    }

    /// Checks every option against a shape.
    ///
    /// # Errors
    /// Whatever does not fit; see [`AttnError`](crate::AttnError).
    pub fn of_shape(attn: &'p Attention<'a, M>, shape: AttnShape) -> Result<Self> {
        attn.check(&shape)?;
        let scale = attn.scale.unwrap_or_else(|| default_scale(shape.head_dim));
        Ok(Self { shape, attn, scale })
    }

    /// As [`of_shape`](Self::of_shape), for options and a shape that have been checked against each other before: a
    /// batch of sequences of different lengths is checked once and read many times. With others, keys are hidden
    /// where a table is too short.
    pub fn of_checked(attn: &'p Attention<'a, M>, shape: AttnShape) -> Self {
        Self { shape, attn, scale: attn.scale.unwrap_or_else(|| default_scale(shape.head_dim)) }
    }

    /// The sizes.
    pub fn shape(&self) -> &AttnShape {
        &self.shape
    }

    /// The options.
    pub fn attn(&self) -> &'p Attention<'a, M> {
        self.attn
    }

    /// The scale in force: the option's, or `1/√head_dim`.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The finished score of a dot product `q·k`.
    #[inline]
    pub fn score<R: Real>(&self, dot: R, at: At) -> R {
        self.score_by(&self.factors(), dot, at)
    }

    /// The factors from a dot product to a score, in the type that an engine computes in. A row computes them once,
    /// because small processors emulate double precision.
    #[inline]
    pub(crate) fn factors<R: Real>(&self) -> Factors<R> {
        Factors {
            scale: rounded(self.scale),
            cap: self.attn.softcap.map(R::saturating),
            per_temperature: self.attn.temperature.map(|t| rounded(1.0 / t)),
        }
    }

    /// As [`score`](Self::score).
    #[inline]
    pub(crate) fn score_by<R: Real>(&self, factors: &Factors<R>, dot: R, at: At) -> R {
        let mut s = self.before_mods(factors, dot, at);
        if M::SCORE_MOD {
            s = R::saturating(self.attn.mods.score_mod(s.to_f64(), at));
        }
        if let Some(factor) = factors.per_temperature {
            s = tempered(s, factor);
        }
        s
    }

    /// The score that the caller's mods are given: scaled, capped, biased.
    #[inline]
    pub(crate) fn before_mods<R: Real>(&self, factors: &Factors<R>, dot: R, at: At) -> R {
        let mut s = factors.capped(dot);
        if let Some(bias) = &self.attn.bias {
            s += bias.at_in::<R>(at);
        }
        if let Some(alibi) = &self.attn.alibi {
            s += alibi.at_in::<R>(&self.shape, at);
        }
        s
    }

    /// Whether one key is visible to one query: by the mask, a bias that is not −∞, and `mask_mod`.
    #[inline]
    pub fn visible(&self, at: At) -> bool {
        self.attn.mask.visible(&self.shape, at) && self.kept_by_bias(at) && self.kept_by_mask_mod(at)
    }

    #[inline]
    fn kept_by_bias(&self, at: At) -> bool {
        // Only −∞ is −∞ in f32: what is finite saturates.
        self.attn.bias.as_ref().is_none_or(|bias| bias.at_in::<f32>(at) != f32::NEG_INFINITY)
    }

    #[inline]
    fn kept_by_mask_mod(&self, at: At) -> bool {
        !M::MASK_MOD || self.attn.mods.mask_mod(at)
    }

    /// A range of keys outside of which the row sees nothing.
    pub fn row_range(&self, batch: usize, head: usize, query: usize) -> Range<usize> {
        self.attn.mask.row_range(&self.shape, batch, head, query)
    }

    /// Calls `f` with each key that a row sees, in order.
    #[inline]
    pub fn for_each_visible(&self, batch: usize, head: usize, query: usize, f: impl FnMut(At)) {
        self.for_each_visible_in(self.row_range(batch, head, query), [batch, head, query], f);
    }

    /// Calls `f` with each key that a row sees of a part of its [`row_range`](Self::row_range), in order.
    #[inline]
    pub(crate) fn for_each_visible_in(
        &self,
        keys: Range<usize>,
        [batch, head, query]: [usize; 3],
        mut f: impl FnMut(At),
    ) {
        self.attn.mask.for_each_in(&self.shape, [batch, head, query], keys, |key| {
            let at = At { batch, head, query, key };
            if self.kept_by_bias(at) && self.kept_by_mask_mod(at) {
                f(at);
            }
        });
    }

    /// The sink logit of a head, if there are sinks.
    pub fn sink(&self, head: usize) -> Option<f32> {
        self.attn.sinks.and_then(|sinks| sinks.get(head).copied())
    }

    /// What the weight of one visible key is multiplied by after the softmax: 1 without dropout, else 0 or `1/(1 − p)`.
    #[inline]
    pub fn dropout_factor(&self, at: At) -> f64 {
        if self.attn.dropout.keeps(at) { self.attn.dropout.factor() } else { 0.0 }
    }
}

/// The factors from a dot product to a score before biases, rounded to the type that is computed in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factors<R> {
    scale: R,
    cap: Option<R>,
    per_temperature: Option<R>,
}

impl<R: Real> Factors<R> {
    /// `scale·dot`, and the soft-cap.
    #[inline]
    pub(crate) fn capped(&self, dot: R) -> R {
        let s = dot * self.scale;
        match self.cap {
            // A cap too small for the type: every score is as good as 0.
            Some(cap) if cap == R::ZERO => R::ZERO,
            Some(cap) => cap * (s / cap).tanh(),
            None => s,
        }
    }
}

/// A factor of scores in the type that is computed in. One above 0 stays so: −∞ times it is −∞, not NaN. (The options
/// hold none that is too large.)
fn rounded<R: Real>(x: f64) -> R {
    let (factor, least) = (R::of(x), R::of(f64::from(f32::MIN_POSITIVE)));
    match factor == R::ZERO {
        true if x > 0.0 => least,
        true if x < 0.0 => -least,
        _ => factor,
    }
}

/// A score divided by the temperature; a finite one stays finite. A bias of `f32::MIN` hides nothing, at whatever
/// temperature.
#[inline]
fn tempered<R: Real>(score: R, per_temperature: R) -> R {
    let s = score * per_temperature;
    if s > R::MAX && score <= R::MAX {
        R::MAX
    } else if s < -R::MAX && score >= -R::MAX {
        -R::MAX
    } else {
        s
    }
}

/// `1/√head_dim`; 1 for an empty head. Scores of unit-variance vectors then have unit variance (arXiv 1706.03762,
/// §3.2.1).
///
/// ```
/// const SCALE: f64 = attn_core::score::default_scale(64);
/// assert_eq!(SCALE, 0.125);
/// ```
pub const fn default_scale(head_dim: usize) -> f64 {
    if head_dim == 0 { 1.0 } else { 1.0 / sqrt_of(head_dim as u64) }
}

/// The square root of an integer above 0, correctly rounded: digit by digit, 54 of them, in integers. It is `const`,
/// and saves firmware the addition and multiplication in emulated double precision that `libm`'s would need.
const fn sqrt_of(n: u64) -> f64 {
    // Digits before the point; the first pair of bits that is not 0 gives the first digit, which is 1.
    let whole = (64 - n.leading_zeros()).div_ceil(2);
    let (mut root, mut rest, mut digit) = (0u64, 0u64, 0);
    while digit < 54 {
        let pair = if digit < whole { n >> (2 * (whole - 1 - digit)) & 3 } else { 0 };
        rest = rest << 2 | pair;
        let next = root << 2 | 1;
        root <<= 1;
        if rest >= next {
            rest -= next;
            root |= 1;
        }
        digit += 1;
    }
    // 53 bits, to nearest: no root of a 64-bit integer is in the middle of two. Adding, not joining, lets it carry.
    let rounded = (root + 1) >> 1;
    f64::from_bits(((whole as u64 + 1022) << 52) + (rounded - (1 << 52)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_of_integers_are_correctly_rounded() {
        let near = |n: u64| [n.saturating_sub(1), n, n.saturating_add(1)];
        let powers = (0..64).flat_map(|bit| near(1 << bit));
        // Miri takes hundreds of times as long, and looks for something else.
        let squares =
            (1..1 << 32).step_by(if cfg!(miri) { 99_999_989 } else { 999_983 }).flat_map(|n: u64| near(n * n));
        // Above 2^53 the argument itself is rounded, and the comparison says nothing.
        for n in
            (1..if cfg!(miri) { 100 } else { 5000 }).chain(powers).chain(squares).filter(|n| (1..1 << 53).contains(n))
        {
            assert_eq!(sqrt_of(n), libm::sqrt(n as f64), "{n}");
        }
        assert_eq!(sqrt_of(u64::MAX), 4_294_967_296.0);
        assert_eq!(default_scale(0), 1.0);
    }
}
