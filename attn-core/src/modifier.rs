//! Closures of the caller, compiled into the engines.
//!
//! `Attention<'_, M>` carries them as a type, so that a reference loop inlines them and a tiled kernel calls one
//! monomorphised function per tile. Without closures `M` is `()` and costs nothing.

use crate::shape::At;

/// What the caller's closures do to scores and visibility. Implemented by `()` and by what
/// [`Attention::map_score`](crate::Attention::map_score) and [`visible_if`](crate::Attention::visible_if) build;
/// implement it yourself for a modifier with a name.
pub trait Modifier {
    /// Whether [`score`](Self::score) does anything.
    const SCORE: bool;
    /// Whether [`visible`](Self::visible) hides anything.
    const VISIBLE: bool;
    /// The new score.
    fn score(&self, score: f64, at: At) -> f64;
    /// Whether a key that the mask shows stays visible.
    fn visible(&self, at: At) -> bool;
    /// The derivative of [`score`](Self::score) by its first argument; `None` where it is not known, which makes
    /// `backward` refuse.
    fn derivative(&self, score: f64, at: At) -> Option<f64>;
}

impl Modifier for () {
    const SCORE: bool = false;
    const VISIBLE: bool = false;
    fn score(&self, score: f64, _: At) -> f64 {
        score
    }
    fn visible(&self, _: At) -> bool {
        true
    }
    fn derivative(&self, _: f64, _: At) -> Option<f64> {
        Some(1.0)
    }
}

/// Borrowed, so that closures need not be `Copy` to be used under other options.
impl<M: Modifier> Modifier for &M {
    const SCORE: bool = M::SCORE;
    const VISIBLE: bool = M::VISIBLE;
    #[inline]
    fn score(&self, score: f64, at: At) -> f64 {
        (**self).score(score, at)
    }
    #[inline]
    fn visible(&self, at: At) -> bool {
        (**self).visible(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        (**self).derivative(score, at)
    }
}

/// The derivative of a score closure: a closure, or `()` for not known.
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

/// A closure on the score, after the modifier `M`.
#[derive(Clone, Copy, Debug)]
pub struct MapScore<F, D, M> {
    f: F,
    derivative: D,
    inner: M,
}

impl<F, D, M> MapScore<F, D, M> {
    pub(crate) const fn new(f: F, derivative: D, inner: M) -> Self {
        Self { f, derivative, inner }
    }
}

impl<F: Fn(f64, At) -> f64, D: Derivative, M: Modifier> Modifier for MapScore<F, D, M> {
    const SCORE: bool = true;
    const VISIBLE: bool = M::VISIBLE;
    #[inline]
    fn score(&self, score: f64, at: At) -> f64 {
        (self.f)(self.inner.score(score, at), at)
    }
    #[inline]
    fn visible(&self, at: At) -> bool {
        self.inner.visible(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        let outer = self.derivative.at(self.inner.score(score, at), at)?;
        Some(outer * self.inner.derivative(score, at)?)
    }
}

/// A closure on visibility, after the modifier `M`.
#[derive(Clone, Copy, Debug)]
pub struct VisibleIf<F, M> {
    f: F,
    inner: M,
}

impl<F, M> VisibleIf<F, M> {
    pub(crate) const fn new(f: F, inner: M) -> Self {
        Self { f, inner }
    }
}

impl<F: Fn(At) -> bool, M: Modifier> Modifier for VisibleIf<F, M> {
    const SCORE: bool = M::SCORE;
    const VISIBLE: bool = true;
    #[inline]
    fn score(&self, score: f64, at: At) -> f64 {
        self.inner.score(score, at)
    }
    #[inline]
    fn visible(&self, at: At) -> bool {
        self.inner.visible(at) && (self.f)(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        self.inner.derivative(score, at)
    }
}
