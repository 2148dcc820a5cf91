//! `score_mod` and `mask_mod`, FlexAttention's two functions of the caller, compiled into the engines; together: mods.
//!
//! `Attention<'_, M>` carries them as a type, so that a reference loop inlines them and a tiled kernel calls one
//! monomorphised function per tile. Without mods `M` is `()` and costs nothing.

use crate::shape::At;

/// The caller's `score_mod` and `mask_mod`. Implemented by `()` and by what
/// [`Attention::score_mod`](crate::Attention::score_mod) and [`mask_mod`](crate::Attention::mask_mod) build;
/// implement it yourself for mods with a name.
pub trait Mods {
    /// Whether [`score_mod`](Self::score_mod) does anything.
    const SCORE_MOD: bool;
    /// Whether [`mask_mod`](Self::mask_mod) hides anything.
    const MASK_MOD: bool;
    /// Whether these do anything to a score, where only a value knows: mods in a box. False makes a kernel skip the
    /// calls.
    fn has_score_mod(&self) -> bool {
        Self::SCORE_MOD
    }
    /// The same for [`mask_mod`](Self::mask_mod).
    fn has_mask_mod(&self) -> bool {
        Self::MASK_MOD
    }
    /// The new score.
    fn score_mod(&self, score: f64, at: At) -> f64;
    /// Whether a key that the mask shows stays visible.
    fn mask_mod(&self, at: At) -> bool;
    /// The derivative of [`score_mod`](Self::score_mod) by its first argument; `None` if it is not known, which
    /// makes `backward` refuse.
    fn derivative(&self, score: f64, at: At) -> Option<f64>;
}

impl Mods for () {
    const SCORE_MOD: bool = false;
    const MASK_MOD: bool = false;
    fn score_mod(&self, score: f64, _: At) -> f64 {
        score
    }
    fn mask_mod(&self, _: At) -> bool {
        true
    }
    fn derivative(&self, _: f64, _: At) -> Option<f64> {
        Some(1.0)
    }
}

/// Borrowed, so that mods need not be `Copy` to be used under other options.
impl<M: Mods> Mods for &M {
    const SCORE_MOD: bool = M::SCORE_MOD;
    const MASK_MOD: bool = M::MASK_MOD;
    fn has_score_mod(&self) -> bool {
        (**self).has_score_mod()
    }
    fn has_mask_mod(&self) -> bool {
        (**self).has_mask_mod()
    }
    #[inline]
    fn score_mod(&self, score: f64, at: At) -> f64 {
        (**self).score_mod(score, at)
    }
    #[inline]
    fn mask_mod(&self, at: At) -> bool {
        (**self).mask_mod(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        (**self).derivative(score, at)
    }
}

/// The derivative of a `score_mod`: a function, or `()` for not known.
pub trait Derivative {
    /// The derivative, if known.
    fn at(&self, score: f64, at: At) -> Option<f64>;
}

impl Derivative for () {
    fn at(&self, _: f64, _: At) -> Option<f64> {
        None
    }
}

impl<F: Fn(f64, At) -> f64> Derivative for F {
    fn at(&self, score: f64, at: At) -> Option<f64> {
        Some(self(score, at))
    }
}

/// A `score_mod` after the mods `M`.
#[derive(Clone, Copy, Debug)]
pub struct ScoreMod<F, D, M> {
    f: F,
    derivative: D,
    inner: M,
}

impl<F, D, M> ScoreMod<F, D, M> {
    pub(crate) const fn new(f: F, derivative: D, inner: M) -> Self {
        Self { f, derivative, inner }
    }
}

impl<F: Fn(f64, At) -> f64, D: Derivative, M: Mods> Mods for ScoreMod<F, D, M> {
    const SCORE_MOD: bool = true;
    const MASK_MOD: bool = M::MASK_MOD;
    fn has_mask_mod(&self) -> bool {
        self.inner.has_mask_mod()
    }
    #[inline]
    fn score_mod(&self, score: f64, at: At) -> f64 {
        (self.f)(self.inner.score_mod(score, at), at)
    }
    #[inline]
    fn mask_mod(&self, at: At) -> bool {
        self.inner.mask_mod(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        let outer = self.derivative.at(self.inner.score_mod(score, at), at)?;
        Some(outer * self.inner.derivative(score, at)?)
    }
}

/// A `mask_mod` after the mods `M`.
#[derive(Clone, Copy, Debug)]
pub struct MaskMod<F, M> {
    f: F,
    inner: M,
}

impl<F, M> MaskMod<F, M> {
    pub(crate) const fn new(f: F, inner: M) -> Self {
        Self { f, inner }
    }
}

impl<F: Fn(At) -> bool, M: Mods> Mods for MaskMod<F, M> {
    const SCORE_MOD: bool = M::SCORE_MOD;
    const MASK_MOD: bool = true;
    fn has_score_mod(&self) -> bool {
        self.inner.has_score_mod()
    }
    #[inline]
    fn score_mod(&self, score: f64, at: At) -> f64 {
        self.inner.score_mod(score, at)
    }
    #[inline]
    fn mask_mod(&self, at: At) -> bool {
        self.inner.mask_mod(at) && (self.f)(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        self.inner.derivative(score, at)
    }
}
